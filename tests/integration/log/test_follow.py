"""Following the log: woken, polling, across lost connections and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import psycopg
import pytest

from headwater.database import Connection, connect
from headwater.embedded import EmbeddedPostgres
from headwater.errors import DatabaseError, ResyncRequired
from headwater.log.reading import reader as reader_module
from headwater.log.reading.follow import follow
from headwater.log.waking import pace
from headwater.log.waking.waker import Waker
from headwater.model import Change, Position
from tests.support.databases import passable_folder
from tests.support.log_probe import enable, rows, run


class Following:
    """Collects what a follower delivers, and waits for it."""

    def __init__(self, url: str, since: Position | None) -> None:
        self.changes: list[Change] = []
        self._arrived = asyncio.Event()
        self.task = asyncio.create_task(self._run(url, since))

    async def _run(self, url: str, since: Position | None) -> None:
        try:
            async with aclosing(follow(url, since=since)) as feed:
                async for transaction in feed:
                    self.changes += transaction.changes
                    self._arrived.set()
        finally:
            self._arrived.set()

    async def until(self, condition: Callable[[list[Change]], bool]) -> list[Change]:
        async with asyncio.timeout(30):
            while not condition(self.changes):
                if self.task.done():
                    self.task.result()
                self._arrived.clear()
                await self._arrived.wait()
        return self.changes


@asynccontextmanager
async def following(url: str, since: Position | None = None) -> AsyncIterator[Following]:
    collected = Following(url, since)
    try:
        yield collected
    finally:
        collected.task.cancel()
        await asyncio.gather(collected.task, return_exceptions=True)


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(connection, "create table orders (id int primary key, amount int)")
    await enable(connection, "orders")
    return connection


def keys(changes: list[Change]) -> list[int]:
    return [change.key[0] for change in changes if change.key]


async def now(connection: Connection) -> Position:
    ((text,),) = await rows(connection, "select headwater.log_id() || '-' || pg_current_snapshot()")
    return Position.parse(text)


async def test_changes_arrive_once_in_order(url: str, orders: Connection) -> None:
    async with following(url, await now(orders)) as feed:
        for i in range(50):
            await run(orders, f"insert into orders values ({i}, 0)")
        assert keys(await feed.until(lambda c: len(c) >= 50)) == list(range(50))


async def test_resumes_from_a_position(url: str, orders: Connection) -> None:
    start = await now(orders)
    await run(orders, "insert into orders values (1, 0)")
    middle = await now(orders)
    await run(orders, "insert into orders values (2, 0)")
    async with following(url, start) as feed:
        assert keys(await feed.until(lambda c: len(c) >= 2)) == [1, 2]
    async with following(url, middle) as feed:
        assert keys(await feed.until(lambda c: len(c) >= 1)) == [2]


async def test_connections_killed(url: str, orders: Connection) -> None:
    async with following(url, await now(orders)) as feed:
        for i in range(30):
            await run(orders, f"insert into orders values ({i}, 0)")
            if i % 10 == 5:
                await feed.until(lambda c, n=i: len(c) > n)  # type: ignore[misc]
                await run(
                    orders,
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where application_name like 'headwater %' and pid <> pg_backend_pid()"
                    " and datname = current_database()",
                )
        assert keys(await feed.until(lambda c: len(c) >= 30)) == list(range(30))


async def test_an_interrupted_backlog_continues_where_it_was(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 10)
    start = await now(orders)
    for i in range(100):
        await run(orders, f"insert into orders values ({i}, 0)")
    found: list[int] = []
    async with aclosing(follow(url, since=start)) as feed:
        async for transaction in feed:
            found += keys(list(transaction.changes))
            if len(found) in (5, 42):
                await run(
                    orders,
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where application_name = 'headwater reader' and datname = current_database()",
                )
            if len(found) >= 100:
                break
    assert found == list(range(100))


async def test_the_log_was_trimmed(url: str, orders: Connection) -> None:
    start = await now(orders)
    await run(orders, "insert into orders values (1, 0)")
    await run(orders, f"select setval('headwater.log_floor', {start.xmax + 5})")
    with pytest.raises(ResyncRequired, match="trimmed"):
        await anext(follow(url, since=start))


async def test_the_first_connection_fails_at_once() -> None:
    with pytest.raises(DatabaseError, match="cannot reach the database"):
        await anext(follow("postgresql://unknown@127.0.0.1:1/none"))


async def test_postgresql_restarted() -> None:
    """On a server of its own. Writes continue as soon as it is back; nothing is lost or doubled."""
    with passable_folder() as folder, EmbeddedPostgres(folder / "data") as server:
        from headwater.capture.postgres import schema

        connection = await connect(server.url, purpose="test", application_path=True)
        await schema.install(connection)
        await run(connection, "create table orders (id int primary key)")
        await enable(connection, "orders")
        async with following(server.url, await now(connection)) as feed:
            for round_ in range(3):
                writer = await connect(server.url, purpose="writer", application_path=True)
                for i in range(10):
                    await run(writer, f"insert into orders values ({round_ * 10 + i})")
                await writer.close()
                await feed.until(lambda c: len(c) > 0)  # it has begun
                if round_ < 2:
                    await asyncio.to_thread(server.restart, "fast" if round_ else "immediate")
            assert keys(await feed.until(lambda c: len(c) >= 30)) == list(range(30))
        await connection.close()


class TestPolling:
    @pytest.fixture(autouse=True)
    def easily_woken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One writer in Python makes too little load, so the thresholds are lower."""
        monkeypatch.setattr(pace, "_WAKES_PER_SECOND_MAX", 40)

    async def test_writers_stop_notifying_under_load_and_begin_again(
        self, url: str, orders: Connection, other: Connection
    ) -> None:
        payloads: list[str] = []
        other.add_notify_handler(lambda notice: payloads.append(notice.payload))
        await run(other, "listen headwater")
        async with following(url, await now(orders)) as feed:
            count = await self._write_until_polling(orders)
            payloads.clear()
            await run(other, "select 1")
            payloads.clear()
            # One statement per round trip, so each would be a NOTIFY of its own.
            for i in range(count, count + 200):
                await run(orders, f"insert into orders values ({i}, 0)")
            await feed.until(lambda c: len(c) >= count + 200)
            await run(other, "select 1")
            assert [payload for payload in payloads if payload != "v1:poll"] == []
            assert "v1:poll" in payloads, "the poller notifies the other readers"
            await self._wait_for_lock(orders, held=False)
            payloads.clear()
            await run(orders, f"insert into orders values ({count + 200}, 0)")
            await run(other, "select 1")
            from_writers = [p.split("#")[0] for p in payloads if p != "v1:poll"]
            assert from_writers == [f"v1:orders:INSERT:{count + 200}"]
            assert keys(await feed.until(lambda c: len(c) >= count + 201)) == list(
                range(count + 201)
            )

    async def test_a_poller_that_dies_leaves_no_lock(self, url: str, orders: Connection) -> None:
        async with following(url, await now(orders)) as feed:
            count = await self._write_until_polling(orders)
            await run(
                orders,
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'headwater poller' and datname = current_database()",
            )
            for i in range(count, count + 50):
                await run(orders, f"insert into orders values ({i}, 0)")
            assert keys(await feed.until(lambda c: len(c) >= count + 50)) == list(range(count + 50))

    async def test_a_transaction_that_skipped_its_notify_is_not_forgotten(
        self, url: str, orders: Connection, other: Connection
    ) -> None:
        """It writes while another session polls, and commits long after the poller has stopped."""
        async with following(url, await now(orders)) as feed:
            count = await self._write_until_polling(orders)
            await run(other, "begin", "insert into orders values (-1, 0)")
            await self._wait_for_lock(orders, held=False)
            await run(other, "commit")
            found = await feed.until(lambda c: len(c) >= count + 1)
            assert found[-1].key == (-1,)

    async def test_two_followers(self, url: str, orders: Connection) -> None:
        """One polls, the other is notified; both get everything."""
        start = await now(orders)
        async with following(url, start) as first, following(url, start) as second:
            count = await self._write_until_polling(orders)
            for i in range(count, count + 300):
                await run(orders, f"insert into orders values ({i}, 0)")
            for feed in (first, second):
                found = await feed.until(lambda c: len(c) >= count + 300)
                assert keys(found) == list(range(count + 300))

    async def _write_until_polling(self, connection: Connection) -> int:
        count = 0
        async with asyncio.timeout(30):
            while not await self._is_polled(connection):
                for _ in range(50):
                    await run(connection, f"insert into orders values ({count}, 0)")
                    count += 1
        return count

    async def _wait_for_lock(self, connection: Connection, *, held: bool) -> None:
        async with asyncio.timeout(30):
            # The database has no event for it.
            while await self._is_polled(connection) != held:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def _is_polled(self, connection: Connection) -> bool:
        found = await rows(
            connection,
            "select 1 from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock'"
            " and granted and classid = headwater.lock_class() and objid = 1 and database ="
            " (select oid from pg_database where datname = current_database())",
        )
        return bool(found)


async def test_a_waker_notices_that_its_listener_is_gone(url: str, connection: Connection) -> None:
    async with Waker(url) as waker:
        await run(
            connection,
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'headwater listener' and datname = current_database()",
        )
        with pytest.raises(psycopg.OperationalError):
            await _wait_some_times(waker)


async def _wait_some_times(waker: Waker) -> None:
    for _ in range(5):
        await waker.wait()


NOTICES = [
    ("insert into orders values (1, 0)", "v1:orders:INSERT:1"),
    ("update orders set amount = 5", "v1:orders:UPDATE:1:amount"),
    ("delete from orders", "v1:orders:DELETE:1"),
    ("insert into orders select i, 0 from generate_series(1, 9) i", "v1:orders:INSERT:*"),
    ("truncate orders", "v1:orders:TRUNCATE:"),
    ("insert into \"a:b,c#%\" values ('x:y', '#')", "v1:a%3Ab%2Cc%23%25:INSERT:x%3Ay,%23"),
    ("insert into wide (id) values (1)", "v1:wide:INSERT:1"),
    ("update wide set ({columns}) = row({ones})", "v1:wide:UPDATE:"),  # too long to name them all
]


async def test_notices(orders: Connection, other: Connection) -> None:
    columns = [f"column_with_a_long_name_{i:030}" for i in range(150)]
    await run(
        orders,
        'create table "a:b,c#%" ("k 1" text, "k 2" text, primary key ("k 1", "k 2"))',
        f"create table wide (id int primary key, {', '.join(f'{c} int' for c in columns)})",
    )
    await enable(orders, '"a:b,c#%"', "wide")
    await run(other, "listen headwater")
    for statement, expected in NOTICES:
        ones = ", ".join("1" for _ in columns)
        await run(orders, statement.format(columns=", ".join(columns), ones=ones))
        (notice,) = [n async for n in other.notifies(timeout=5, stop_after=1)]
        head, _, number = notice.payload.partition("#")
        assert head == expected
        first, _, last = number.partition("-")
        ((seq,),) = await rows(orders, "select max(seq) from headwater.log")
        assert int(last or first) == seq
        assert int(first) == seq - (8 if last else 0)
