"""Every reader of the log gets exactly the changes between two positions.

Generated transactions overlap, and positions are taken while they run. The writers record which
transactions had committed at each position, so the right answer needs no snapshot: the rows of
transactions that had committed at the later position and not at the earlier one.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from headwater.database import Connection, connect
from headwater.errors import ResyncRequired
from headwater.log import cursors
from headwater.log.reach import check_age
from headwater.log.reading import reader as reader_module
from headwater.log.reading.reader import LogReader
from headwater.model import Position
from headwater.pipeline.stream import worker
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from headwater.pipeline.stream.progress import Reports
from tests.support.generators.sizes import first_seed, size

HISTORIES = size("between", 3, large=200)
FIRST = first_seed(0)
STEPS = 80
PAIRS = 6
TABLES = ("orders", "lines")


@dataclass(frozen=True)
class Row:
    """A row of the log."""

    seq: int
    xid: int
    at: datetime
    table: str


@dataclass(frozen=True)
class Taken:
    """A position, and the transactions that had committed when it was taken."""

    position: Position
    committed: frozenset[int]


@dataclass
class Read:
    """The result of a read that ended at a position of its own."""

    since: Taken
    until: Taken
    found: list[int]


@dataclass
class Frozen:
    """A reader in a repeatable-read transaction: its reads end where the transaction began."""

    connection: Connection
    taken: Taken


@dataclass
class Writers:
    """Sessions whose transactions overlap. They record what they commit."""

    random: random.Random
    sessions: list[psycopg.Connection]
    committed: set[int]
    xids: dict[int, int] = field(default_factory=dict)
    key: int = 0

    def step(self) -> None:
        number = self.random.randrange(len(self.sessions))
        session = self.sessions[number]
        match self.random.randrange(6):
            case 0 if number in self.xids:
                session.commit()
                self.committed.add(self.xids.pop(number))
            case 1 if number in self.xids and self.random.random() < 0.5:
                session.rollback()
                del self.xids[number]
            case 2:
                session.execute("savepoint s")
                self.write(number)
                session.execute("rollback to s" if self.random.random() < 0.5 else "release s")
            case _:
                self.write(number)

    def write(self, number: int) -> None:
        session = self.sessions[number]
        if number not in self.xids:
            row = session.execute("select pg_current_xact_id()::text::bigint").fetchone()
            assert row is not None
            self.xids[number] = row[0]
            if self.random.random() < 0.2:
                return  # ends without a change
        table, count = self.random.choice(TABLES), self.random.randint(1, 3)
        session.execute(
            f"insert into {table} select generate_series(%s::int, %s)".encode(),
            (self.key + 1, self.key + count),
        )
        self.key += count

    def noted(self, position: Position) -> Taken:
        return Taken(position, frozenset(self.committed))


class Log:
    """All rows, and the right answer for any two positions."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def between(self, since: Taken, until: Taken) -> list[Row]:
        return [
            row
            for row in self.rows
            if row.xid in until.committed and row.xid not in since.committed
        ]

    def seqs(self, since: Taken, until: Taken) -> list[int]:
        return [row.seq for row in self.between(since, until)]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("headwater.pipeline.stream.planning._SPARK_PART_CHANGES", 8)
    yield
    for url, owner in list(worker._connections):
        worker.forget(url, owner)


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[tuple[Connection, LogReader]]:
    connection = await connect(url, purpose="test")
    try:
        yield connection, await LogReader.open(connection)
    finally:
        await connection.close()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
async def test_every_reader_gets_the_same_changes(
    url: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    planner, reports = Planner(url), Reports(url)
    async with AsyncExitStack() as stack:
        sessions = stack.enter_context(open_sessions(url, 5))
        stack.callback(planner.close)
        stack.callback(reports.close)
        connection, reader = await stack.enter_async_context(reading(url))
        first = planner.beginning()
        writers = Writers(chance, sessions[1:], {xid for (xid,) in all_xids(sessions[0])})
        taken, reads, frozen = [Taken(first, frozenset())], list[Read](), list[Frozen]()
        for _ in range(STEPS):
            writers.step()
            match chance.randrange(20):
                case 0 | 1:
                    taken.append(writers.noted(await reader.now(connection)))
                case 2:
                    taken.append(writers.noted(planner.now()))
                case 3 | 4 | 5:
                    since = chance.choice(taken)
                    batch = await reader.read(connection, since.position)
                    until = writers.noted(batch.position)
                    found = [c.seq for t in batch.transactions for c in t.changes]
                    reads.append(Read(since, until, found))
                    taken.append(until)
                case 6 if len(frozen) < 3:
                    frozen.append(await freeze(stack, url, writers, reader))
        now = writers.noted(await reader.now(connection))
        taken.append(now)
        log = Log(all_rows(sessions[0]))
        check_positions(log, taken)
        for read in reads:
            assert sorted(read.found) == log.seqs(read.since, read.until), seed
        for each in frozen:
            await check_frozen(log, each, taken)
        monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 10)
        for _ in range(PAIRS):
            start = chance.randrange(len(taken) - 1)
            since, until = taken[start], taken[chance.randrange(start, len(taken))]
            await check_live(log, connection, reader, since, until, now)
            check_pipeline(log, planner, since, until, chance.randint(3, 25))
            check_reports(log, reports, since, until, now)
            await check_cursor(log, connection, since, now)


@contextmanager
def open_sessions(url: str, count: int) -> Iterator[list[psycopg.Connection]]:
    """The first commits by itself, and has the tables captured."""
    with ExitStack() as stack:
        found = [stack.enter_context(psycopg.connect(url)) for _ in range(count)]
        found[0].autocommit = True
        for table in TABLES:
            found[0].execute(f"create table {table} (id int primary key)".encode())
            found[0].execute("select headwater.enable_reactivity(%s)", (table,))
        yield found
        for each in found:
            each.rollback()


def all_xids(session: psycopg.Connection) -> list[tuple[Any, ...]]:
    return session.execute("select distinct xid::text::bigint from headwater.log").fetchall()


def all_rows(session: psycopg.Connection) -> list[Row]:
    found = session.execute(
        "select seq, xid::text::bigint, at,"
        " (select table_name from headwater.shapes s where s.id = shape limit 1)"
        " from headwater.log order by seq"
    ).fetchall()
    return [Row(*each) for each in found]


async def freeze(stack: AsyncExitStack, url: str, writers: Writers, reader: LogReader) -> Frozen:
    connection, _ = await stack.enter_async_context(reading(url))
    await connection.execute("begin isolation level repeatable read")
    return Frozen(connection, writers.noted(await reader.now(connection)))


def check_positions(log: Log, taken: list[Taken]) -> None:
    """A position contains the committed transactions; and many positions differ."""
    for each in taken:
        contained = {row.xid for row in log.rows if each.position.contains(row.xid)}
        assert contained == {row.xid for row in log.rows} & each.committed
    assert any(each.position.xip for each in taken)


async def check_frozen(log: Log, frozen: Frozen, taken: list[Taken]) -> None:
    reader = LogReader(frozen.taken.position.log, *(await installation(frozen.connection)))
    for since in taken:
        if frozen.taken.committed >= since.committed:
            batch = await reader.read(frozen.connection, since.position)
            assert batch.position == frozen.taken.position
            found = [change.seq for each in batch.transactions for change in each.changes]
            assert sorted(found) == log.seqs(since, frozen.taken)


async def installation(connection: Connection) -> tuple[str, Position]:
    """What `LogReader.open` asks, which would begin a transaction's snapshot."""
    cursor = await connection.execute(
        "select id, headwater.log_id(), pg_current_snapshot()::text from headwater.installation"
    )
    row = await cursor.fetchone()
    assert row is not None
    return row[0], Position.of_snapshot(row[1], row[2])


async def check_live(
    log: Log,
    connection: Connection,
    reader: LogReader,
    since: Taken,
    until: Taken,
    now: Taken,
) -> None:
    found = [
        change.seq
        async for each in reader.catch_up(connection, since.position, until.position)
        for change in each.changes
    ]
    assert sorted(found) == log.seqs(since, until)
    expected = log.between(since, now)
    tables = await reader.tables_since(connection, since.position)
    assert {each.name for each in tables or ()} == {row.table for row in expected}
    if expected:
        with pytest.raises(ResyncRequired, match="further back"):
            await check_age(connection, since.position, timedelta(0))
    else:
        await check_age(connection, since.position, timedelta(0))
    await check_age(connection, since.position, timedelta(days=1))


def check_pipeline(log: Log, planner: Planner, since: Taken, until: Taken, rows_max: int) -> None:
    """In one batch, and in batches of some rows."""
    expected = log.seqs(since, until)
    start, end = Offset(since.position), Offset(until.position)
    assert planner.has_changes(since.position, until.position) == bool(expected)
    assert read_parts(planner, start, end) == expected
    found, at = list[int](), start
    while (reached := planner.latest(at, rows_max, until.position)) != at:
        batch = read_parts(planner, at, reached)
        assert len(batch) <= rows_max
        found += batch
        at = reached
    assert sorted(found) == expected
    assert at == end or not expected


def read_parts(planner: Planner, start: Offset, end: Offset) -> list[int]:
    parts = planner.parts(start, end)
    return [
        seq for part in parts for batch in worker.read(part) for seq in batch["seq"].to_pylist()
    ]


def check_reports(log: Log, reports: Reports, since: Taken, until: Taken, now: Taken) -> None:
    """What is left to read at a position, and at a cut between two."""
    lag = reports.behind(Offset(since.position))
    assert lag is not None
    assert lag.changes == len(log.between(since, now))
    seqs = log.seqs(since, until)
    for cut in seqs[:: max(1, len(seqs) // 2)]:
        lag = reports.behind(Offset(since.position, until.position, cut))
        assert lag is not None
        taken = sum(seq <= cut for seq in seqs)
        assert lag.changes == len(log.between(since, now)) - taken


async def check_cursor(log: Log, connection: Connection, since: Taken, now: Taken) -> None:
    """Its lag is the age of the first change of the first transaction since its position."""
    await cursors.save(connection, "mail", since.position)
    before = await clock(connection)
    (cursor,) = await cursors.list_all(connection)
    after = await clock(connection)
    assert not cursor.lost
    first = min(log.between(since, now), key=lambda row: (row.xid, row.seq), default=None)
    if first is None:
        assert cursor.lag is None
    else:
        assert cursor.lag is not None
        assert before <= first.at + cursor.lag <= after


async def clock(connection: Connection) -> datetime:
    cursor = await connection.execute("select clock_timestamp()")
    row = await cursor.fetchone()
    assert row is not None
    found: datetime = row[0]
    return found
