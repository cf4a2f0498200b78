"""Retention under load, consumers that are too slow for it, and cursors about to be lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import timedelta

import msgspec
import pytest

from headwater.database import Connection, connect
from headwater.errors import ResyncRequired
from headwater.log import cursors, maintenance
from headwater.log.reading.follow import follow
from headwater.log.reading.reader import LogReader
from tests.support.log_probe import LogProbe, enable, probing, rows, run


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(connection, "create table orders (id bigserial primary key, note text)")
    await enable(connection, "orders")
    return connection


@pytest.fixture
async def probe(url: str, orders: Connection) -> AsyncIterator[LogProbe]:
    async with probing(url) as found:
        yield found


async def age(connection: Connection, period: str) -> None:
    """Make everything in the log older, as if time had passed: rows move to the slots they would
    be in, with the clock where it is."""
    await run(
        connection,
        f"update headwater.log set at = at - interval '{period}',"
        f" slot = headwater.slot_at(at - interval '{period}')",
    )


async def test_retention_under_load(url: str, orders: Connection, probe: LogProbe) -> None:
    """Slots of 1/30 of a second are emptied while writers write; none of them fails or waits long,
    a reader that keeps up misses nothing, and one that does not gets an error."""
    await run(orders, "select headwater.set_retention('1 second')")
    behind = probe.position
    stop = asyncio.Event()
    written: list[int] = []

    async def write() -> None:
        async with await connect(url, purpose="writer", application_path=True) as writer:
            while not stop.is_set():
                found = await rows(writer, "insert into orders (note) values ('x') returning id")
                written.append(found[0][0])

    async def follow_along() -> list[int]:
        seen: list[int] = []
        async for transaction in follow(url, since=behind):
            seen += [change.key[0] for change in transaction.changes]
            if any((change.after or {}).get("note") == "last" for change in transaction.changes):
                break
        return seen

    writers = [asyncio.create_task(write()) for _ in range(3)]
    follower = asyncio.create_task(follow_along())
    emptied = 0
    async with asyncio.timeout(60):
        while emptied < 20:
            emptied += (await maintenance.once(orders)).slots_emptied
            await asyncio.sleep(0.01)
    stop.set()
    await asyncio.gather(*writers)
    await run(orders, "insert into orders (note) values ('last')")
    seen = await follower
    assert sorted(seen)[: len(written)] == sorted(written)
    with pytest.raises(ResyncRequired, match="trimmed past position") as caught:
        await probe.transactions()
    assert "retention" in (caught.value.hint or "")


async def test_only_old_changes_are_removed(orders: Connection, probe: LogProbe) -> None:
    await run(orders, "insert into orders (note) values ('old')")
    await age(orders, "31 days")
    await run(orders, "insert into orders (note) values ('young')")
    assert await rows(orders, "select headwater.trim_log()") == [(1,)]
    found = await rows(orders, "select after ->> 'note' from headwater.changes")
    assert found == [("young",)]


async def test_a_slot_in_use_is_left_for_later(
    orders: Connection, other: Connection, probe: LogProbe
) -> None:
    await run(orders, "insert into orders (note) values ('old')")
    await age(orders, "31 days")
    await run(other, "begin", "select count(*) from headwater.log")
    assert await rows(orders, "select headwater.trim_log()") == [(0,)]
    await run(other, "commit")
    assert await rows(orders, "select headwater.trim_log()") == [(1,)]


async def test_a_slot_emptied_behind_a_snapshot_is_noticed(
    orders: Connection, other: Connection, probe: LogProbe
) -> None:
    """TRUNCATE ignores snapshots: the reader's transaction is older and sees no rows."""
    await run(orders, "insert into orders (note) values ('old')")
    await age(orders, "31 days")
    await run(probe.connection, "begin isolation level repeatable read", "select 1")
    await run(orders, "select headwater.trim_log()")
    with pytest.raises(ResyncRequired):
        await probe.reader.read(probe.connection, probe.position)


async def test_a_write_never_lacks_a_partition(orders: Connection) -> None:
    """Whatever the clock says, there is a slot."""
    found = await rows(
        orders,
        "select count(*), min(s), max(s) from (select headwater.slot_at(t) as s from"
        " generate_series(timestamptz '1970-01-01', '2970-01-01', '1 month') t) x",
    )
    assert found == [(12001, 0, 31)]


async def test_maintenance_does_nothing_while_another_process_runs_it(
    orders: Connection, other: Connection
) -> None:
    await other.execute("select pg_advisory_lock(%s, %s)", maintenance.MAINTENANCE_LOCK)
    await run(orders, "alter table orders add column x int")
    assert await maintenance.once(orders) == maintenance.MaintenanceRound()
    await run(other, "select pg_advisory_unlock_all()")
    assert await maintenance.once(orders) == maintenance.MaintenanceRound(tables_synced=1)


async def test_a_table_in_use_is_left_for_later(
    orders: Connection, other: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "_MAINTENANCE_LOCK_TIMEOUT", "100ms")
    await run(orders, "alter table orders disable trigger headwater_delete")
    await run(other, "begin", "insert into orders (note) values ('x')")
    assert await maintenance.once(orders) == maintenance.MaintenanceRound()
    await run(other, "commit")
    assert await maintenance.once(orders) == maintenance.MaintenanceRound(tables_synced=1)


class TestCursors:
    async def test_save_and_load(self, orders: Connection, probe: LogProbe) -> None:
        assert await cursors.load(orders, "billing") is None
        await cursors.save(orders, "billing", probe.position)
        assert await cursors.load(orders, "billing") == probe.position
        assert await cursors.delete(orders, "billing")
        assert not await cursors.delete(orders, "billing")

    async def test_the_status_of_a_cursor(self, orders: Connection, probe: LogProbe) -> None:
        reader = await LogReader.open(probe.connection)
        await cursors.save(orders, "billing", await reader.now(probe.connection))
        (cursor,) = await cursors.list_all(orders)
        assert (cursor.lag, cursor.left, cursor.lost) == (None, None, False)
        await run(orders, "insert into orders (note) values ('x')")
        await age(orders, "20 days")
        (cursor,) = await cursors.list_all(orders)
        assert cursor.lag is not None
        assert cursor.left is not None
        assert timedelta(days=20) <= cursor.lag < timedelta(days=21)
        assert timedelta(days=9) <= cursor.left <= timedelta(days=10)

    async def test_a_warning_before_a_cursor_is_lost(
        self, orders: Connection, probe: LogProbe, caplog: pytest.LogCaptureFixture
    ) -> None:
        # Older rows are another history, which a mark would detect.
        await cursors.save(orders, "billing", msgspec.structs.replace(probe.position, mark=None))
        await run(orders, "insert into orders (note) values ('x')")
        await age(orders, "25 days")
        with caplog.at_level(logging.WARNING):
            await maintenance.once(orders)
        assert "cursor billing will be lost in 4 days" in caplog.text
        await age(orders, "10 days")
        await maintenance.once(orders)
        with caplog.at_level(logging.ERROR):
            await maintenance.once(orders)
        assert "cursor billing is lost: the log was trimmed past it" in caplog.text
        (cursor,) = await cursors.list_all(orders)
        assert cursor.lost
