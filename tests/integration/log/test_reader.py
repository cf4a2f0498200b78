"""Commit-safe order: what overlapping transactions do to a reader."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headwater.capture.postgres import triggers
from headwater.database import Connection, connect
from headwater.errors import ResyncRequired
from headwater.log.reading import reader as reader_module
from headwater.log.reading import transactions
from headwater.log.reading.reader import LogReader
from headwater.model import Position, Transaction
from tests.support.log_probe import LogProbe, enable, probing, rows, run
from tests.support.wal_capture import enable_wal


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(connection, "create table orders (id int primary key, amount int)")
    await enable(connection, "orders")
    return connection


@pytest.fixture
async def probe(url: str, orders: Connection) -> AsyncIterator[LogProbe]:
    async with probing(url) as found:
        yield found


@pytest.fixture
async def third(url: str) -> AsyncIterator[Connection]:
    connection = await connect(url, purpose="test", application_path=True)
    yield connection
    await connection.close()


async def test_a_later_commit_of_earlier_numbers(
    orders: Connection, other: Connection, probe: LogProbe
) -> None:
    """`other` takes its numbers first and commits last."""
    await run(other, "begin", "insert into orders values (1, 1)")
    await run(orders, "insert into orders values (2, 2)")
    assert await probe.story() == [("insert", 2)]
    assert await probe.story() == []
    await run(other, "insert into orders values (3, 3)", "commit")
    assert await probe.story() == [("insert", 1), ("insert", 3)]
    assert await probe.story() == []


async def test_a_long_transaction_delays_only_its_own_changes(
    orders: Connection, other: Connection, probe: LogProbe
) -> None:
    await run(other, "begin", "insert into orders values (1, 1)")
    for i in range(2, 6):
        await run(orders, f"insert into orders values ({i}, 0)")
        assert await probe.story() == [("insert", i)]
    assert len(probe.position.xip) == 1
    await run(other, "commit")
    assert await probe.story() == [("insert", 1)]
    assert not probe.position.xip


async def test_one_row_by_two_transactions_with_swapped_ids(
    orders: Connection, other: Connection, third: Connection, probe: LogProbe
) -> None:
    """The transaction with the higher id changes the row first."""
    await run(orders, "insert into orders values (1, 0)")
    await probe.changes()
    await run(other, "begin", "insert into orders values (2, 0)")  # takes the lower id
    await run(third, "begin", "insert into orders values (3, 0)")
    await run(third, "update orders set amount = 1 where id = 1", "commit")
    await run(other, "update orders set amount = amount + 1 where id = 1", "commit")
    changes = await probe.changes()
    assert changes[0].xid > changes[-1].xid
    assert [c.after["amount"] for c in changes if c.key == (1,) and c.after] == [1, 2]


async def test_the_same_with_a_read_in_between(
    orders: Connection, other: Connection, third: Connection, probe: LogProbe
) -> None:
    await run(orders, "insert into orders values (1, 0)")
    await run(other, "begin", "insert into orders values (2, 0)")
    await run(third, "update orders set amount = 1 where id = 1")
    first = await probe.changes()
    await run(other, "update orders set amount = amount + 1 where id = 1", "commit")
    second = await probe.changes()
    amounts = [c.after["amount"] for c in first + second if c.key == (1,) and c.after]
    assert amounts == [0, 1, 2]


async def test_transactions_come_whole(
    orders: Connection, other: Connection, probe: LogProbe
) -> None:
    """In any interleaving of their statements."""
    await run(orders, "begin", "insert into orders values (1, 1)")
    await run(other, "begin", "insert into orders values (2, 2)")
    await run(orders, "insert into orders values (3, 3)")
    await run(other, "insert into orders values (4, 4)")
    await run(orders, "commit")
    await run(other, "commit")
    found = await probe.transactions()
    assert [[c.key for c in t.changes] for t in found] == [[(1,), (3,)], [(2,), (4,)]]


class TestWhatWasRolledBack:
    async def test_a_transaction(self, orders: Connection, probe: LogProbe) -> None:
        await run(orders, "begin", "insert into orders values (1, 1)", "rollback")
        assert await probe.story() == []

    async def test_a_savepoint(self, orders: Connection, probe: LogProbe) -> None:
        await run(
            orders,
            "begin",
            "insert into orders values (1, 1)",
            "savepoint s",
            "insert into orders values (2, 2)",
            "update orders set amount = 9",
            "rollback to s",
            "insert into orders values (3, 3)",
            "commit",
        )
        assert await probe.story() == [("insert", 1), ("insert", 3)]

    async def test_a_failed_statement(self, orders: Connection, probe: LogProbe) -> None:
        await run(orders, "insert into orders values (1, 1)")
        with pytest.raises(Exception, match="duplicate key"):
            await run(orders, "insert into orders values (2, 2), (1, 1)")
        assert await probe.story() == [("insert", 1)]

    async def test_sends_no_signal(self, orders: Connection, other: Connection) -> None:
        await run(other, "listen headwater")
        await run(orders, "begin", "insert into orders values (1, 1)", "rollback")
        await run(
            orders,
            "begin",
            "savepoint s",
            "insert into orders values (2, 2)",
            "rollback to s",
            "commit",
        )
        await run(orders, "insert into orders values (3, 3)")
        payloads = [notice.payload async for notice in other.notifies(timeout=5, stop_after=1)]
        assert [payload.split("#")[0] for payload in payloads] == ["v1:orders:INSERT:3"]


class TestPositions:
    async def test_resuming_from_any_transaction_skips_nothing(
        self, orders: Connection, other: Connection, probe: LogProbe
    ) -> None:
        await run(other, "begin", "insert into orders values (99, 0)")
        start = probe.position
        for i in range(10):
            await run(orders, f"insert into orders values ({i}, 0)")
        found = await probe.transactions()
        assert [t.position for t in found] == [start] * 9 + [probe.position]
        assert all(probe.position.contains(t.xid) for t in found)
        assert probe.position.covers(start)
        await run(other, "commit")
        for transaction, rest in ((found[4], [*range(10), 99]), (found[9], [99])):
            batch = await probe.reader.read(probe.connection, transaction.position)
            keys = [c.key[0] for t in batch.transactions for c in t.changes]
            assert sorted(keys) == rest

    async def test_reading_again_brings_the_same(
        self, orders: Connection, other: Connection, probe: LogProbe
    ) -> None:
        start = probe.position
        await run(orders, "insert into orders select i, i from generate_series(1, 50) i")
        await run(other, "begin", "update orders set amount = 0 where id = 1")
        until = await probe.reader.now(probe.connection)
        await run(other, "commit")
        again = [
            [t async for t in probe.reader.catch_up(probe.connection, start, until)]
            for _ in range(2)
        ]
        assert again[0] == again[1]
        assert sum(len(t.changes) for t in again[0]) == 50

    async def test_another_log(self, probe: LogProbe) -> None:
        stranger = Position("ffffffff", 3, 3)
        with pytest.raises(ResyncRequired, match="another log") as caught:
            await probe.reader.check(probe.connection, stranger)
        assert caught.value.hint

    async def test_a_new_installation_is_another_log(
        self, url: str, connection: Connection
    ) -> None:
        before = await LogReader.open(connection)
        await run(connection, "update headwater.installation set id = 'another'")
        after = await LogReader.open(connection)
        assert before.log != after.log

    async def test_read_your_writes(self, orders: Connection, probe: LogProbe) -> None:
        await run(orders, "begin", "insert into orders values (1, 1)")
        ((xid,),) = await rows(orders, "select pg_current_xact_id()::text::bigint")
        assert not (await probe.reader.now(probe.connection)).contains(xid)
        await run(orders, "commit")
        assert (await probe.reader.now(probe.connection)).contains(xid)


class TestBacklog:
    """More changes since the position than a page holds."""

    @pytest.fixture(autouse=True)
    def small_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 10)

    @pytest.fixture
    async def backlog(self, orders: Connection, other: Connection, probe: LogProbe) -> list[int]:
        """Transactions of many sizes, some interleaved; one still open."""
        sizes = [1, 25, 10, 3, 40, 1, 1]
        key = iter(range(1, 1000))
        await run(other, "begin", "insert into orders values (1000, 0)")
        for size in sizes:
            values = ", ".join(f"({next(key)}, 0)" for _ in range(size))
            await run(orders, f"insert into orders values {values}")
            await run(other, f"insert into orders values ({next(key)}, 1)")
        return sizes

    async def catch_up(self, probe: LogProbe) -> list[Transaction]:
        batch = await probe.reader.read(probe.connection, probe.position)
        assert batch.backlog
        catching_up = probe.reader.catch_up(probe.connection, probe.position, batch.position)
        found = [transaction async for transaction in catching_up]
        probe.position = batch.position
        return found

    async def test_everything_comes_once_and_whole(
        self, backlog: list[int], other: Connection, probe: LogProbe
    ) -> None:
        found = await self.catch_up(probe)
        assert [len(t.changes) for t in found] == backlog
        assert [t.changes[-1].seq for t in found] == sorted(t.changes[-1].seq for t in found)
        assert found[-1].position == probe.position
        await run(other, "commit")
        (open_one,) = await probe.transactions()
        assert len(open_one.changes) == 1 + len(backlog)

    async def test_a_transaction_across_pages(
        self, backlog: list[int], other: Connection, probe: LogProbe
    ) -> None:
        await run(other, "commit")
        found = await self.catch_up(probe)
        assert [len(t.changes) for t in found] == [*backlog, 1 + len(backlog)]

    async def test_a_huge_transaction_comes_in_parts(
        self,
        backlog: list[int],
        other: Connection,
        probe: LogProbe,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(transactions, "TRANSACTION_PART_CHANGES", 12)
        start = probe.position
        found = await self.catch_up(probe)
        big = [t for t in found if t.xid == max(found, key=lambda t: len(t.changes)).xid]
        assert len(big) > 1
        assert [t.complete for t in big] == [False] * (len(big) - 1) + [True]
        assert sum(len(t.changes) for t in big) == 40
        assert all(t.position == start for t in found[:-1])

    async def test_trimmed_while_reading(self, backlog: list[int], probe: LogProbe) -> None:
        batch = await probe.reader.read(probe.connection, probe.position)
        pages = probe.reader.catch_up(probe.connection, probe.position, batch.position)
        await anext(pages)
        async with await _admin(probe) as admin:
            await run(admin, f"select setval('headwater.log_floor', {batch.position.xmax})")
        with pytest.raises(ResyncRequired, match="trimmed past"):
            async for _ in pages:
                pass


async def _admin(probe: LogProbe) -> Connection:
    return await connect(probe.connection.info.dsn, purpose="test", application_path=True)


async def test_the_retention_changes_under_a_reader(orders: Connection, probe: LogProbe) -> None:
    """Slots are numbered again: the reader must notice before it skips a row."""
    for i, period in enumerate(["90 days", "60 days", "7 days", "31 days", "2 hours", "30 days"]):
        await run(orders, f"insert into orders values ({i}, 0)")
        await run(orders, f"select headwater.set_retention('{period}')")
        await run(orders, f"insert into orders values ({i + 100}, 0)")
        assert await probe.story() == [("insert", i), ("insert", i + 100)]


async def test_an_append_that_began_in_another_slot_is_not_missed(
    url: str,
    connection: Connection,
    other: Connection,
    third: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Capture from the WAL writes the rows of a transaction later, in one of its own: that may run
    for longer than a slot of the log lasts."""
    await run(connection, "create table orders (id int primary key, amount int)")
    await enable_wal(connection, "orders")
    ((shape,),) = await rows(connection, "select max(id) from headwater.shapes")

    async def wait(*_: object, **__: object) -> None:
        await run(other, "commit")

    monkeypatch.setattr("headwater.log.complete.wait", wait)
    reader = await LogReader.open(third)
    since = await reader.now(third)
    await run(other, "begin; select pg_current_xact_id()")
    await run(connection, "create table later (id int primary key)")
    await reader._slots.holding(third, since)
    ((xid,),) = await rows(connection, "select pg_current_xact_id()::text::bigint")
    await run(
        other,
        "insert into headwater.log (xid, shape, slot, op, after) select"
        f" '{xid}'::xid8, {shape}, (headwater.slot_at(clock_timestamp()) + 16) % 32, 'I',"
        """ '{"id":7,"amount":1}'""",
    )
    batch = await reader.read(third, since)
    assert [change.key for each in batch.transactions for change in each.changes] == [(7,)]
    await triggers.disable(connection, "orders")
