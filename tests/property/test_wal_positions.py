"""Capture from the WAL is exact at every position: whatever writers do and however often the runner
is killed, the changes up to a snapshot make exactly the rows of that snapshot.

Two tables are captured from the WAL and one by triggers, and transactions write to all of them. A
follower takes a snapshot, reads the log up to it and folds the changes in the order in which they
are delivered: each must fit the row before it, and the result must be the tables' rows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest

from headwater.capture.postgres.wal.append import WalCapture
from headwater.database import Connection, connect
from headwater.log.reading.reader import LogReader
from headwater.model import Change, Position
from tests.support.databases import fresh_database
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, run
from tests.support.wal_capture import capturing, enable_wal

SEED = first_seed(7)
HISTORIES = size("wal_histories", 2, large=200)
TRANSACTIONS = 200
TABLES = {"orders": "wal", "lines": "wal", "accounts": "trigger"}
KEYS = 12


@pytest.mark.timeout(120 * HISTORIES + 60)
@pytest.mark.parametrize(("server", "page"), [("embedded", 50_000), ("embedded", 4), ("system", 9)])
async def test_the_changes_up_to_a_snapshot_make_its_rows(
    request: pytest.FixtureRequest, server: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small pages, most flushes are read page by page."""
    monkeypatch.setattr("headwater.log.reading.reader._LOG_PAGE_CHANGES", page)
    fixture = "postgres" if server == "embedded" else "system_postgres"
    found = request.getfixturevalue(fixture)
    for seed in range(SEED, SEED + HISTORIES):
        with fresh_database(getattr(found, "url", found), installed=True) as url:
            try:
                backlogs = await _history(url, seed)
                assert bool(backlogs) == (page < 50_000)
            except BaseException as error:
                error.add_note(f"SEED={seed}")
                raise


async def _history(url: str, seed: int) -> int:
    chance = random.Random(seed)
    async with await connect(url, purpose="test", application_path=True) as connection:
        for table, capture in TABLES.items():
            await run(
                connection,
                f"create table {table} (id int primary key, n int not null, note text, tags int[])",
            )
            await (enable_wal if capture == "wal" else enable)(connection, table)
        async with _killed_at_random(url, chance), _writers(url, seed) as committed:
            follower = await Follower.begin(url)
            try:
                while sum(committed) < TRANSACTIONS:
                    await follower.flush()
                    await asyncio.sleep(chance.choice((0, 0, 0.002, 0.02)))
            finally:
                await follower.close()
        assert follower.changes > TRANSACTIONS / 2
        return follower.backlogs


class Follower:
    """Folds the changes of the log, and compares them with the tables."""

    def __init__(self, connection: Connection, reader: LogReader, position: Position) -> None:
        self._connection = connection
        self._reader = reader
        self._position = position
        self._rows: dict[str, dict[int, Any]] = {table: {} for table in TABLES}
        self.changes = self.backlogs = 0

    @classmethod
    async def begin(cls, url: str) -> Follower:
        connection = await connect(url, purpose="follower", application_path=True)
        reader = await LogReader.open(connection, url=url)
        follower = cls(connection, reader, Position("", 1, 1))
        await connection.execute("begin isolation level repeatable read, read only")
        follower._position = await reader.now(connection)
        follower._rows = await follower._true()
        await connection.execute("commit")
        return follower

    async def close(self) -> None:
        await self._reader.close()
        await self._connection.close()

    async def flush(self) -> None:
        await self._connection.execute("begin isolation level repeatable read, read only")
        # Before the snapshot: a later TRUNCATE would empty the tables for it, too.
        await self._connection.execute(
            f"lock table {', '.join(TABLES)} in access share mode".encode()
        )
        batch = await self._reader.read(self._connection, self._position)
        true = await self._true()
        await self._connection.execute("commit")
        for transaction in batch.transactions:
            for change in transaction.changes:
                self._fold(change)
        if batch.backlog:
            self.backlogs += 1
            backlog = self._reader.catch_up(self._connection, self._position, batch.position)
            async for transaction in backlog:
                for change in transaction.changes:
                    self._fold(change)
        self._position = batch.position
        assert self._rows == true

    def _fold(self, change: Change) -> None:
        self.changes += 1
        rows = self._rows[change.table.name]
        if change.op == "truncate":
            rows.clear()
            return
        assert change.op != "reset", "nothing has altered a table"
        (key,) = change.key
        assert rows.get(key) == change.before, f"{change.op} of {change.table.name} {key}"
        if change.after is None:
            del rows[key]
        else:
            rows[key] = change.after

    async def _true(self) -> dict[str, dict[int, Any]]:
        found: dict[str, dict[int, Any]] = {}
        for table in TABLES:
            cursor = await self._connection.execute(
                f"select id, n, note, tags from {table}".encode()
            )
            found[table] = {
                id_: {"id": id_, "n": n, "note": note, "tags": tags}
                for id_, n, note, tags in await cursor.fetchall()
            }
        return found


@asynccontextmanager
async def _killed_at_random(url: str, chance: random.Random) -> AsyncIterator[None]:
    """A runner whose connections are cut in the middle of what it does, and that is replaced."""

    async def work() -> None:
        while True:
            capture = asyncio.create_task(WalCapture(url).run())
            try:
                await asyncio.sleep(chance.uniform(0.05, 1.0))
            finally:
                capture.cancel()
                with suppress(asyncio.CancelledError):
                    await capture

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _writers(url: str, seed: int) -> AsyncIterator[list[int]]:
    committed = [0, 0, 0]

    async def work(number: int) -> None:
        chance = random.Random(seed * 10 + number)
        async with await connect(url, purpose="writer", application_path=True) as connection:
            while True:
                committed[number] += await _transaction(connection, chance)
                await asyncio.sleep(chance.choice((0, 0.001, 0.01)))

    tasks = [asyncio.create_task(work(number)) for number in range(len(committed))]
    try:
        yield committed
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
                raise error


async def _transaction(connection: Connection, chance: random.Random) -> bool:
    """Some statements on any of the tables; some are rolled back, some transactions are, too."""
    try:
        async with connection.transaction():
            for _ in range(chance.randint(1, 4)):
                with suppress(psycopg.errors.UniqueViolation):
                    async with connection.transaction(force_rollback=chance.random() < 0.1):
                        await connection.execute(_statement(chance).encode())
                await asyncio.sleep(chance.choice((0, 0, 0.003)))
            if chance.random() < 0.1:
                raise psycopg.Rollback
        return True
    except psycopg.errors.DeadlockDetected:
        return False


def _statement(chance: random.Random) -> str:
    table, key, n = chance.choice(list(TABLES)), chance.randrange(KEYS), chance.randrange(5)
    long = "repeat(md5(random()::text), 200)" if chance.random() < 0.1 else f"'note {n}'"
    return chance.choices(
        (
            f"insert into {table} values ({key}, {n}, {long}, array[{n}, null])"
            f" on conflict (id) do update set n = excluded.n, note = excluded.note",
            f"update {table} set n = n + {n} where id = {key}",
            f"update {table} set n = n where id < {key}",
            f"update {table} set id = {key} where id = {(key + n) % KEYS}",
            f"delete from {table} where id = {key}",
            f"update {table} set tags = array_append(tags, {n}) where id % 3 = {n % 3}",
            f"truncate {table}",
        ),
        (6, 5, 1, 2, 3, 1, 0.1),
    )[0]


async def test_a_transaction_that_mixes_both_ways_is_delivered_before_a_later_one(
    url: str, connection: Connection, other: Connection
) -> None:
    """The second transaction is in the log at once, and the first one's rest comes later."""
    for table in ("orders", "accounts"):
        await run(connection, f"create table {table} (id int primary key, n int)")
    await enable(connection, "accounts")
    await enable_wal(connection, "orders")
    async with await connect(url, purpose="reader", application_path=True) as reading:
        async with capturing(url):
            reader = await LogReader.open(reading)
            position = await reader.now(reading)
        await run(
            connection,
            "begin; insert into accounts values (1, 1); insert into orders values (1, 1); commit",
        )
        await run(other, "update accounts set n = 2")
        async with capturing(url):
            batch = await reader.read(reading, position)
    first, second = batch.transactions
    assert [change.op for change in first.changes] == ["insert", "insert"]
    assert [change.op for change in second.changes] == ["update"]
