"""What of a source is mirrored: columns, rows that match a predicate, changes without a mirror; and
the trace of a change to its source, also in Debezium's shape."""

from __future__ import annotations

from contextlib import aclosing
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from headwater import Headwater
from headwater.capture.mirror import registry
from headwater.capture.source import TableSpec
from headwater.live.filters.filter import c, to_json
from headwater.log.debezium import from_debezium, to_debezium
from headwater.log.reading.follow import follow
from headwater.model import Change, Position
from tests.contract.sources.capture import MirrorCapture
from tests.contract.sources.driver import SourceDriver
from tests.contract.sources.test_contract import need, row, write


async def test_a_column_that_is_left_out(driver: SourceDriver, mirror: MirrorCapture) -> None:
    """It never arrives, neither with the copy nor with a change."""
    await driver.create_table("orders")
    await write(driver, ("insert", "orders", row(1, note="secret 1")))
    if driver.kind == "mongodb":
        specs = driver.definition("orders").tables
        tables = tuple(msgspec.structs.replace(s, exclude=("note",)) for s in specs)
    else:
        tables = (TableSpec("orders", exclude=("note",)),)
    await mirror.begin("orders", tables=tables)
    await write(driver, ("insert", "orders", row(2, note="secret 2")))
    await write(driver, ("update", "orders", 1, {"note": "secret 3", "name": "changed"}))
    await mirror.eventually(lambda: names(mirror), ["changed", "row 2"])
    cursor = await mirror.connection.execute(
        "select (select string_agg(t::text, '') from shop.orders t)"
        " || (select string_agg(concat(before, after), '') from headwater.changes)"
    )
    ((everything,),) = await cursor.fetchall()
    assert "secret" not in everything


async def names(mirror: MirrorCapture) -> list[str]:
    cursor = await mirror.connection.execute("select name from shop.orders order by id")
    return [name for (name,) in await cursor.fetchall()]


async def test_rows_that_match(driver: SourceDriver, mirror: MirrorCapture) -> None:
    """Rows come and go as they begin and cease to match."""
    await driver.create_table("orders")
    await write(driver, ("insert_many", "orders", [row(id) for id in range(1, 9)]))
    where = to_json(c.amount >= Decimal("1.50"))
    specs = driver.definition("orders").tables
    tables = tuple(msgspec.structs.replace(s, where=where) for s in specs)
    await driver.allow_filter("orders", "amount")
    await mirror.begin("orders", tables=tables)
    ids = [5, 6, 7, 8]
    await mirror.eventually(lambda: keys(mirror), ids)
    await write(driver, ("update", "orders", 1, {"amount": Decimal(10)}))
    await write(driver, ("update", "orders", 8, {"amount": Decimal(0)}))
    await write(driver, ("update", "orders", 2, {"amount": Decimal("0.5")}))
    await write(driver, ("update", "orders", 7, {"name": "stays"}))
    await write(driver, ("delete", "orders", 6), ("delete", "orders", 3))
    await write(driver, ("insert", "orders", row(20)), ("insert", "orders", row(21, amount=0)))
    await mirror.eventually(lambda: keys(mirror), [1, 5, 7, 20])
    here = {found[0]: found for found in await mirror.rows("orders")}
    assert [here[r[0]] for r in await driver.rows("orders") if r[0] in here] == list(here.values())
    if "rekey" in driver.can:
        await write(driver, ("rekey", "orders", 5, 50))
        await mirror.eventually(lambda: keys(mirror), [1, 7, 20, 50])


async def keys(mirror: MirrorCapture) -> list[int]:
    return [int(found[0]) for found in await mirror.rows("orders")]


async def test_feed_only(driver: SourceDriver, mirror: MirrorCapture) -> None:
    """Changes from now on, in the log and without a mirror."""
    await driver.create_table("orders")
    await write(driver, ("insert", "orders", row(1)))
    await mirror.begin("orders", feed_only=True)
    await write(driver, ("insert", "orders", row(2)))
    await write(driver, ("update", "orders", 2, {"name": "changed"}))
    await write(driver, ("delete", "orders", 1))

    async def count() -> int:
        return len(await mirror.changes("orders"))

    await mirror.eventually(count, 3)
    changes = await mirror.changes("orders")
    assert [(change.op, change.key) for change in changes] == [
        ("insert", 2), ("update", 2), ("delete", 1),
    ]  # fmt: skip
    assert changes[1].after is not None
    assert changes[1].after["name"] == "changed"
    assert await mirror.rows("orders") == []


async def test_a_change_is_traced_to_its_source(
    driver: SourceDriver, mirror: MirrorCapture, url: str
) -> None:
    """And makes the round trip through Debezium's shape."""
    await driver.create_table("orders")
    await mirror.begin("orders")
    async with Headwater(url) as hw:
        since = await hw.position()
    await write(driver, ("insert", "orders", row(1)))
    await write(driver, ("update", "orders", 1, {"note": "changed"}))
    await write(driver, ("delete", "orders", 1))
    changes = await logged(url, since, 3)
    positions = [change.origin.position for change in changes if change.origin]
    assert len(set(positions)) == 3
    assert all(change.origin and change.origin.source == "shop" for change in changes)
    for change, op in zip(changes, "cud", strict=True):
        envelope: dict[str, Any] = msgspec.json.decode(
            msgspec.json.encode(to_debezium(change), enc_hook=str)
        )
        assert envelope["op"] == op
        assert envelope["source"]["name"] == "shop"
        again = from_debezium(envelope, change.table)
        assert (again.op, again.key, again.before, again.after) == (
            change.op, change.key, change.before, change.after,
        )  # fmt: skip


async def test_what_a_copy_changes_is_traced(
    driver: SourceDriver, mirror: MirrorCapture, url: str
) -> None:
    """It has the position that the copy was made at, and no time of a commit."""
    await driver.create_table("orders")
    await write(driver, ("insert", "orders", row(1)))
    await mirror.begin("orders")
    async with Headwater(url) as hw:
        since = await hw.position()
    async with mirror.connection.transaction():
        await mirror.connection.execute("set local headwater.applies = 'shop'")
        await mirror.connection.execute("delete from shop.orders")
    await registry.request_resnapshot(mirror.connection, "shop", ())
    lost, again = await logged(url, since, 2)
    assert (lost.op, lost.origin) == ("delete", None)
    assert (again.op, again.before) == ("insert", None)
    assert (again.after or {})["id"] == 1
    assert again.origin is not None
    assert (again.origin.source, again.origin.committed_at) == ("shop", None)
    assert again.origin.position


async def logged(url: str, since: Position, count: int) -> list[Change]:
    """The first changes of the orders after a position."""
    found: list[Change] = []
    async with aclosing(follow(url, since=since)) as transactions:
        async for transaction in transactions:
            found += [change for change in transaction.changes if change.table.name == "orders"]
            if len(found) >= count:
                break
    return found


@pytest.mark.parametrize("table", ["missing", "keyless"])
async def test_tables_that_cannot_be_mirrored(
    driver: SourceDriver, mirror: MirrorCapture, table: str
) -> None:
    """One clear error that names the table, and nothing half done."""
    need(driver, table)
    if table == "keyless":
        await driver.create_keyless_table("keyless")
    await driver.create_table("orders")
    await mirror.declare("orders", table)
    await mirror.start()
    await mirror.eventually(mirror.state, "refused")
    report = await mirror.report()
    assert table in report
    cursor = await mirror.connection.execute("select to_regclass('shop.orders')")
    assert (await cursor.fetchall()) == [(None,)]
