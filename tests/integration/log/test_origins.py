"""Changes of mirrors carry the transaction of the source that they came from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from headwater.admin.search import Search, search
from headwater.database import Connection
from headwater.log.reading import reader as reader_module
from headwater.log.reading import transactions
from headwater.model import Change, Origin
from tests.support.log_probe import LogProbe, enable, probing, rows, run
from tests.support.mirrors import declare_mirror, source_transaction

AT = datetime(2026, 11, 18, 9, 30, tzinfo=UTC)


@pytest.fixture
async def shop(connection: Connection) -> Connection:
    """`orders` is a mirror, `notes` is not."""
    await run(
        connection,
        "create table orders (id int primary key, amount int)",
        "create table notes (id int primary key)",
    )
    await declare_mirror(connection, "orders")
    await enable(connection, "orders", "notes")
    return connection


@pytest.fixture
async def probe(url: str, shop: Connection) -> AsyncIterator[LogProbe]:
    async with probing(url) as found:
        yield found


async def write(connection: Connection) -> None:
    """Two transactions of the source, one of an application, and one of both."""
    async with source_transaction(connection, "mysql-bin.000003:771", AT.isoformat()):
        await run(connection, "insert into orders values (1, 1), (2, 2)")
        await run(connection, "update orders set amount = 7 where id = 1")
    await run(connection, "insert into notes values (1)")
    async with source_transaction(connection, "mysql-bin.000003:990"):
        await run(connection, "insert into orders values (3, 3)", "insert into notes values (2)")


FIRST = Origin("shop", "mysql-bin.000003:771", AT, "mysql")
SECOND = Origin("shop", "mysql-bin.000003:990", None, "mysql")
EXPECTED = [
    ("orders", 1, FIRST),
    ("orders", 2, FIRST),
    ("orders", 1, FIRST),
    ("notes", 1, None),
    ("orders", 3, SECOND),
    ("notes", 2, None),
]


def traced(changes: list[Change]) -> list[tuple[str, Any, Origin | None]]:
    return [(change.table.label, change.key[0], change.origin) for change in changes]


async def test_changes_of_a_mirror_have_an_origin(shop: Connection, probe: LogProbe) -> None:
    await write(shop)
    assert traced(await probe.changes()) == EXPECTED


async def test_the_same_page_by_page(
    shop: Connection, probe: LogProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transactions whose rows are in several pages, and one that comes in parts."""
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 2)
    monkeypatch.setattr(transactions, "TRANSACTION_PART_CHANGES", 1)
    since = probe.position
    await write(shop)
    until = (await probe.reader.read(probe.connection, since)).position
    read = probe.reader.catch_up(probe.connection, since, until)
    assert traced([change async for each in read for change in each.changes]) == EXPECTED


async def test_a_change_of_a_mirror_without_a_source_transaction(
    shop: Connection, probe: LogProbe
) -> None:
    await run(shop, "insert into orders values (1, 1)")
    assert traced(await probe.changes()) == [("orders", 1, None)]


async def test_other_tables_cost_no_lookup(
    shop: Connection, probe: LogProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(shop, "insert into notes values (1)")
    await probe.changes()
    statements: list[str] = []
    execute = type(probe.connection).execute

    async def counted(self: Connection, statement: Any, *values: Any, **options: Any) -> Any:
        statements.append(str(statement))
        return await execute(self, statement, *values, **options)

    monkeypatch.setattr(type(probe.connection), "execute", counted)
    await run(shop, "insert into notes values (2)")
    del statements[:]
    assert len(await probe.changes()) == 1
    assert len(statements) == 1


async def test_the_view_of_the_log(shop: Connection) -> None:
    await write(shop)
    found = await rows(
        shop,
        "select table_name, (key ->> 'id')::int, source, source_position, source_committed_at"
        " from headwater.changes where op <> 'reset' order by seq",
    )
    second = ("shop", "mysql-bin.000003:990", None)
    assert found == [
        *(("orders", id_, "shop", "mysql-bin.000003:771", AT) for id_ in (1, 2, 1)),
        ("notes", 1, None, None, None),
        ("orders", 3, *second),
        ("notes", 2, *second),
    ]


async def test_the_search_of_the_console(shop: Connection) -> None:
    await write(shop)
    found = await search(shop, Search(table="orders", op="insert"))
    origins = [change.origin for change in found.changes]
    assert origins == [Origin(*each) for each in (SEARCHED[1], SEARCHED[0], SEARCHED[0])]
    assert [change.origin for change in (await search(shop, Search(key="1"))).changes] == [
        None, Origin(*SEARCHED[0]), Origin(*SEARCHED[0]),
    ]  # fmt: skip


SEARCHED = (("shop", "mysql-bin.000003:771", AT), ("shop", "mysql-bin.000003:990", None))


async def test_the_view_reads_origins_by_index(shop: Connection) -> None:
    """Where the view is read by transaction, or its newest changes, neither the log nor the origins
    are scanned."""
    await run(
        shop,
        "insert into notes select generate_series(1, 5000)",
        "insert into headwater.source_transactions (xid, source)"
        " select n::text::xid8, 'shop' from generate_series(1, 20000) n",
        "analyze headwater.source_transactions",
        "analyze headwater.log",
    )
    (xid,) = (await rows(shop, "select max(xid) from headwater.log"))[0]
    plan = await rows(shop, f"explain select * from headwater.changes where xid = '{xid}'::xid8")
    text = "\n".join(line for (line,) in plan)
    assert "Seq Scan on source_transactions" not in text
    assert "source_transactions_pkey" in text
