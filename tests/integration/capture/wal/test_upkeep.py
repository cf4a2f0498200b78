"""Capture from the WAL when others alter what it depends on: the publication, the persistence of a
table, slots, and the end of capture while no process runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from psycopg.errors import ObjectNotInPrerequisiteState

from headwater.capture.postgres import triggers
from headwater.database import Connection, connect
from headwater.errors import DatabaseError, HeadwaterError
from headwater.log import maintenance
from tests.support.databases import fresh_database
from tests.support.log_probe import LogProbe, probing, rows, run
from tests.support.wal_capture import capturing, enable_wal, ends

ORDERS = "create table orders (id int primary key, n int, note text)"
PARTS = (
    "create table parts (id int primary key) partition by range (id)",
    "create table parts_1 partition of parts for values from (0) to (10)",
)
SLOTS = "select slot_name from pg_replication_slots where database = current_database()"
CAPTURES = "select capture from headwater.tables"


async def _publication(connection: Connection) -> str:
    ((name,),) = await rows(connection, "select headwater.wal_publication()")
    return str(name)


async def _until_reset(probe: LogProbe) -> None:
    """Read until the log says that the table must be read again, and nothing after that."""
    async with asyncio.timeout(20):
        while True:
            try:
                story = await probe.story()
            except DatabaseError:  # the slot is replaced
                story = []
            if ("reset",) in story:
                break
            await asyncio.sleep(0.05)


@pytest.fixture(params=["embedded", "system"])
async def database(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, Connection]]:
    """Before PostgreSQL 18, a slot cannot be read when its publication is gone."""
    server = request.getfixturevalue(
        "server_url" if request.param == "embedded" else "system_postgres"
    )
    with fresh_database(server, installed=True) as url:
        connection = await connect(url, purpose="test", application_path=True)
        yield url, connection
        await connection.close()


async def test_a_dropped_publication_is_made_again_with_a_new_slot(
    database: tuple[str, Connection],
) -> None:
    url, connection = database
    await run(connection, ORDERS, *PARTS)
    await enable_wal(connection, "orders", "parts")
    async with capturing(url), probing(url) as probe:
        await run(connection, f"drop publication {await _publication(connection)}")
        await run(connection, "insert into orders values (1)")
        await _until_in_step(connection)
        await _until_reset(probe)
        await run(connection, "insert into orders values (2)", "insert into parts values (1)")
        story = await probe.story()
        assert [change for change in story if change != ("reset",)] == [
            ("insert", 2),
            ("insert", 1),
        ]
        assert len(await rows(connection, SLOTS)) == 1
        for table in ("orders", "parts"):
            await triggers.disable(connection, table)
        assert await ends(connection)


async def _until_in_step(connection: Connection) -> None:
    async with asyncio.timeout(20):
        while await rows(connection, _OUT_OF_STEP):  # noqa: ASYNC110 - a runner changes it
            await asyncio.sleep(0.05)


_OUT_OF_STEP = """
    select from headwater.tables where not headwater.is_in_step(relid)
    union all
    select from headwater.installation where not exists (
      select from pg_replication_slots where slot_name = wal_slot and active)
"""


ALTERED = (
    "alter publication {0} drop table orders",
    "alter publication {0} set table orders where (id > 5)",
    "alter publication {0} set table orders (id, n, note)",
    "alter publication {0} set (publish = 'insert')",
)


@pytest.mark.parametrize("statement", ALTERED)
async def test_a_publication_that_does_not_send_everything_is_corrected_with_a_reset(
    url: str, connection: Connection, statement: str
) -> None:
    await run(connection, ORDERS)
    await enable_wal(connection, "orders")
    async with capturing(url), probing(url) as probe:
        await run(connection, statement.format(await _publication(connection)))
        await run(connection, "insert into orders values (1)")
        await _until_in_step(connection)
        await _until_reset(probe)
        await run(connection, "insert into orders values (2)", "delete from orders where id = 2")
        assert await probe.story() == [("insert", 2), ("delete", 2)]


async def test_maintenance_corrects_the_publication_while_no_process_runs(
    url: str, connection: Connection
) -> None:
    await run(connection, ORDERS)
    await enable_wal(connection, "orders")
    async with capturing(url), probing(url):
        pass
    await run(connection, f"alter publication {await _publication(connection)} drop table orders")
    assert (await maintenance.once(connection)).tables_synced == 1
    assert (await maintenance.once(connection)).tables_synced == 0
    async with capturing(url), probing(url) as probe:
        await run(connection, "insert into orders values (2)")
        assert await probe.story() == [("insert", 2)]


@pytest.mark.parametrize(
    "statement",
    [
        "create unlogged table parts_2 partition of parts for values from (10) to (20)",
        "alter table parts_1 set unlogged",
    ],
)
async def test_a_table_that_becomes_unlogged_is_captured_by_triggers(
    url: str, connection: Connection, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    await run(connection, *PARTS)
    await enable_wal(connection, "parts")
    async with capturing(url), probing(url) as probe:
        await run(connection, "insert into parts values (1)")
        assert await probe.story() == [("insert", 1)]
        await run(connection, statement)
        await _until_reset(probe)
        assert await rows(connection, CAPTURES) == [("trigger",)]
        await run(connection, "insert into parts values (2)")
        assert await probe.story() == [("insert", 2)]
        assert await ends(connection)
    assert "parts is captured by triggers now" in caplog.text


@pytest.mark.parametrize("way", ["trigger", "disable"])
async def test_what_is_unread_is_appended_before_capture_ends(
    url: str, connection: Connection, way: str
) -> None:
    await run(connection, ORDERS)
    await enable_wal(connection, "orders")
    await run(connection, "insert into orders values (1)")
    if way == "trigger":
        await triggers.enable(connection, "orders", "trigger")
    else:
        await triggers.disable(connection, "orders")
    await run(connection, "insert into orders values (2)")
    found = await rows(connection, "select after->>'id' from headwater.log where op = 'I'")
    assert sorted(found) == ([("1",), ("2",)] if way == "trigger" else [("1",)])
    assert await rows(connection, SLOTS) == []
    assert await rows(connection, "select from pg_publication") == []


# ---------------------------------------------------------------------- slots


async def test_one_slot_is_made_also_when_the_table_is_in_use(
    url: str, connection: Connection, other: Connection
) -> None:
    await run(connection, ORDERS)
    await run(other, "begin; lock table orders in row exclusive mode")
    enabling = asyncio.create_task(triggers.enable(connection, "orders", "wal"))
    async with asyncio.timeout(10), probing(url) as probe:
        waits = set[object]()
        while len(waits) < 2:  # until it tries again
            waits.update(await rows(probe.connection, _WAITING))
            await asyncio.sleep(0.02)
    await run(other, "commit")
    await enabling
    assert await rows(connection, SLOTS) == await rows(
        connection, "select wal_slot from headwater.installation"
    )


_WAITING = """
    select l.waitstart from pg_locks l
    where l.relation = 'orders'::regclass and not l.granted and l.waitstart is not null
"""


async def test_two_tables_that_are_enabled_at_once_share_a_slot(
    connection: Connection, other: Connection
) -> None:
    await run(connection, ORDERS, *PARTS)
    await asyncio.gather(
        triggers.enable(connection, "orders", "wal"), triggers.enable(other, "parts", "wal")
    )
    assert await rows(connection, SLOTS) == await rows(
        connection, "select wal_slot from headwater.installation"
    )


async def test_a_slot_that_a_table_is_being_enabled_with_is_not_dropped(
    connection: Connection, other: Connection
) -> None:
    await run(connection, ORDERS)
    ((slot,),) = await rows(connection, "select headwater.make_wal_slot()")
    await run(connection, "begin")
    await run(connection, f"select headwater.enable_reactivity('orders', 'wal', '{slot}')")
    dropping = asyncio.create_task(rows(other, "select headwater.drop_wal_slots(interval '0')"))
    async with asyncio.timeout(10):
        while not await rows(connection, _QUEUED):  # noqa: ASYNC110 - another session changes it
            await asyncio.sleep(0.02)
    await run(connection, "commit")
    assert await dropping == [(0,)]
    assert await rows(connection, SLOTS) == [(slot,)]


_QUEUED = """
    select from pg_locks
    where locktype = 'advisory' and not granted
      and database = (select oid from pg_database where datname = current_database())
"""


async def test_a_slot_that_was_dropped_before_it_was_used_is_refused(
    connection: Connection,
) -> None:
    await run(connection, ORDERS)
    ((slot,),) = await rows(connection, "select headwater.make_wal_slot()")
    assert await rows(connection, "select headwater.drop_wal_slots(interval '0')") == [(1,)]
    with pytest.raises(ObjectNotInPrerequisiteState, match="was dropped before it was used"):
        await run(connection, f"select headwater.enable_reactivity('orders', 'wal', '{slot}')")
    assert await rows(connection, CAPTURES) == []


async def test_no_slot_stays_when_enabling_fails(
    connection: Connection, other: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "ENABLE_ATTEMPTS_MAX", 2)
    await run(connection, ORDERS)
    await run(other, "begin; lock table orders in row exclusive mode")
    with pytest.raises(HeadwaterError, match="is in use"):
        await triggers.enable(connection, "orders", "wal")
    await run(other, "commit")
    assert await rows(connection, SLOTS) == []
