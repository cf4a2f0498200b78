"""How fast sources are: `python -m benchmarks.sources [--large] [postgresql|mysql|sqlite …]`.

For each source: the rate of a first copy, the rate of catching up with a backlog, the time from a
commit at the source until the change is read from the log here, and the memory of the runner while
one large transaction passes. Commits of both databases wait for the disk.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psycopg

from benchmarks.measure import Result, execute, percentile, report, scratch_server
from headwater.capture.mirror import registry
from headwater.capture.postgres import schema
from headwater.capture.source import SourceDefinition, TableSpec
from headwater.database import Connection, connect
from headwater.log.reading.follow import follow
from tests.support.mariadb import running_mariadb

TARGETS = {"postgresql": 50_000, "mysql": 30_000}
"""Changes a second of a catch-up."""

TRANSACTION_ROWS = 500
"""Rows of one transaction of the backlog: half of them are inserted, half updated."""


class Size(NamedTuple):
    """Rows of the first copy and changes of the backlog, and single inserts."""

    rows: int
    singles: int


TINY, SMALL, LARGE = Size(1_000, 3), Size(50_000, 50), Size(1_000_000, 200)


class SourceDatabase(Protocol):
    """A database with the table `orders` (id, region, status, amount, note)."""

    kind: str
    url: str

    def fill(self, rows: int) -> None:
        """Insert rows 1 … `rows` in one transaction."""

    def backlog(self, first: int, transactions: int) -> int:
        """Write the backlog from this id on. Returns the number of changes."""

    def insert(self, id: int) -> None:
        """One row, committed."""


class PostgresDatabase:
    kind = "postgresql"

    def __init__(self, url: str) -> None:
        self.url = url
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(
            "create table orders (id bigint primary key, region int not null, status text not null,"
            " amount numeric(12, 2) not null, note text)"
        )

    def fill(self, rows: int) -> None:
        self._connection.execute(
            "insert into orders select i, i %% 500, 'open', i * 0.25, 'note number ' || i"
            " from generate_series(1, %s) i",
            (rows,),
        )

    def backlog(self, first: int, transactions: int) -> int:
        for _ in range(transactions):
            with self._connection.transaction():
                half = TRANSACTION_ROWS // 2
                self._connection.execute(
                    "insert into orders select i, i %% 500, 'open', i * 0.25, 'note ' || i"
                    " from generate_series(%s::bigint, %s) i",
                    (first, first + half - 1),
                )
                self._connection.execute(
                    "update orders set status = 'paid', note = note || '!'"
                    " where id between %s and %s",
                    (first, first + half - 1),
                )
                first += half
        return transactions * TRANSACTION_ROWS

    def insert(self, id: int) -> None:
        self._connection.execute(
            "insert into orders values (%s, 1, 'open', 0.25, 'a short note')", (id,)
        )


class MysqlDatabase:
    kind = "mysql"

    def __init__(self, server: Any) -> None:
        server.run("create database shop")
        self.url = server.url("shop")
        self._connection = server.connect("shop")
        self._run(
            "create table orders (id bigint primary key, region int not null,"
            " status varchar(20) not null, amount decimal(12, 2) not null, note text)"
        )

    def _run(self, statement: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)

    def fill(self, rows: int) -> None:
        self._insert(1, rows)

    def _insert(self, first: int, last: int) -> None:
        self._run(
            "insert into orders select seq, seq % 500, 'open', seq * 0.25,"
            f" concat('note number ', seq) from seq_{first}_to_{last}"
        )

    def backlog(self, first: int, transactions: int) -> int:
        half = TRANSACTION_ROWS // 2
        for _ in range(transactions):
            self._run("begin")
            self._insert(first, first + half - 1)
            self._run(
                "update orders set status = 'paid', note = concat(note, '!')"
                f" where id between {first} and {first + half - 1}"
            )
            self._run("commit")
            first += half
        return transactions * TRANSACTION_ROWS

    def insert(self, id: int) -> None:
        self._run(f"insert into orders values ({id}, 1, 'open', 0.25, 'a short note')")


class SqliteDatabase:
    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}"
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("pragma journal_mode = wal")
        self._connection.execute(
            "create table orders (id integer primary key, region integer not null,"
            " status text not null, amount decimal(12, 2) not null, note text)"
        )

    def _insert(self, first: int, last: int) -> None:
        self._connection.executemany(
            "insert into orders values (?, ?, 'open', ?, ?)",
            ((i, i % 500, i / 4, f"note number {i}") for i in range(first, last + 1)),
        )

    def fill(self, rows: int) -> None:
        self._connection.execute("begin")
        self._insert(1, rows)
        self._connection.execute("commit")

    def backlog(self, first: int, transactions: int) -> int:
        half = TRANSACTION_ROWS // 2
        for _ in range(transactions):
            self._connection.execute("begin immediate")
            self._insert(first, first + half - 1)
            self._connection.execute(
                "update orders set status = 'paid', note = note || '!' where id between ? and ?",
                (first, first + half - 1),
            )
            self._connection.execute("commit")
            first += half
        return transactions * TRANSACTION_ROWS

    def insert(self, id: int) -> None:
        self._connection.execute("insert into orders values (?, 1, 'open', 0.25, 'a note')", (id,))


class Runner:
    """`headwater source run` in a process of its own."""

    def __init__(self, url: str) -> None:
        self._environment = os.environ | {"HEADWATER_URL": url}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater", "source", "run"],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(60)
            self._process = None

    def megabytes(self, field: str = "VmRSS") -> float:
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith(f"{field}:")]
        return int(line.split()[1]) / 1024


async def measure(database: SourceDatabase, url: str, size: Size) -> list[Result]:
    """All figures of one source."""
    rows = size.rows
    database.fill(rows)
    runner = Runner(url)
    async with await connect(url, purpose="benchmark") as connection:
        definition = SourceDefinition(
            database.kind, database.url, database.kind, tables=(TableSpec("orders"),)
        )
        await registry.declare(connection, definition, "command")
        started = time.perf_counter()
        runner.start()
        try:
            await _until(connection, database.kind, rows)
            results = [_rate(f"{database.kind}: first copy of {rows:,} rows", rows, started)]
            results.append(await _latency(database, url, rows, size.singles))
            runner.stop()
            changes = database.backlog(rows + 10_000, rows // TRANSACTION_ROWS)
            results.append(await _catch_up(database, connection, runner, rows, changes))
            results.append(await _memory(database, connection, runner, rows))
        finally:
            runner.stop()
    return results


async def _until(connection: Connection, schema_name: str, rows: int) -> None:
    """Wait until the mirror is live and has this many rows."""
    while True:
        (source,) = [s for s in await registry.sources(connection) if s.name == schema_name]
        if source.state in ("refused", "lost", "diverged"):
            raise RuntimeError(f"{source.error}: {source.hint}")
        is_live = [table.state for table in source.tables] == ["live"]
        if is_live and await _count(connection, schema_name) >= rows:
            return
        await asyncio.sleep(0.05)


async def _count(connection: Connection, schema_name: str) -> int:
    cursor = await connection.execute(f'select count(*) from "{schema_name}".orders'.encode())
    return int((await cursor.fetchall())[0][0])


def _rate(name: str, count: int, started: float, target: int | None = None) -> Result:
    seconds = time.perf_counter() - started
    rate = count / seconds
    return Result(
        name,
        f"{rate:,.0f}/s",
        f"{target:,}/s" if target else "",
        rate >= target if target else None,
        f"{seconds:.1f} s",
    )


async def _catch_up(
    database: SourceDatabase, connection: Connection, runner: Runner, rows: int, changes: int
) -> Result:
    """From the moment at which the first change of the backlog is here until the last one is; from
    the start of the runner if all of them arrive at once, as one transaction."""
    before = await _count(connection, database.kind)
    began = time.perf_counter()
    runner.start()
    await _until(connection, database.kind, before + 1)
    begun = await _count(connection, database.kind)
    if begun == before + changes // 2:
        begun, started = before, began
    else:
        started = time.perf_counter()
    await _until(connection, database.kind, before + changes // 2)
    return _rate(
        f"{database.kind}: catch-up, {changes:,} changes in transactions of {TRANSACTION_ROWS}",
        changes - 2 * (begun - before),
        started,
        TARGETS.get(database.kind),
    )


async def _latency(database: SourceDatabase, url: str, rows: int, count: int) -> Result:
    """Single inserts, each after the one before has arrived."""
    times: list[float] = []
    arrived = asyncio.Queue[int]()
    async with _following(url, arrived):
        for id in range(rows + 1, rows + count + 10):
            await asyncio.to_thread(database.insert, id)
            committed = time.perf_counter()
            while await arrived.get() != id:
                pass
            times.append(time.perf_counter() - committed)
    times = times[9:]
    milliseconds = [1e3 * percentile(times, share) for share in (0.5, 0.99)]
    return Result(
        f"{database.kind}: commit → log reader, p50 / p99",
        f"{milliseconds[0]:.1f} / {milliseconds[1]:.1f} ms",
        detail=f"{count} single inserts",
    )


@asynccontextmanager
async def _following(url: str, arrived: asyncio.Queue[int]) -> AsyncIterator[None]:
    """Puts the ids of inserted orders into the queue."""
    ready = asyncio.Event()

    async def read() -> None:
        ready.set()
        async for transaction in follow(url):
            for change in transaction.changes:
                if change.table.name == "orders" and change.after is not None:
                    arrived.put_nowait(change.after["id"])

    task = asyncio.create_task(read())
    await ready.wait()
    await asyncio.sleep(1)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _memory(
    database: SourceDatabase, connection: Connection, runner: Runner, rows: int
) -> Result:
    """The runner's highest memory while one transaction of all rows passes, beside what it has
    before."""
    before = runner.megabytes()
    present = await _count(connection, database.kind)
    first = 10_000_000
    if isinstance(database, PostgresDatabase):
        execute(
            database.url,
            "insert into orders select i, i % 500, 'open', i * 0.25, 'note number ' || i"
            f" from generate_series({first}, {first + rows - 1}) i",
        )
    elif isinstance(database, MysqlDatabase):
        database._insert(first, first + rows - 1)
    elif isinstance(database, SqliteDatabase):
        database._connection.execute("begin")
        database._insert(first, first + rows - 1)
        database._connection.execute("commit")
    started = time.perf_counter()
    await _until(connection, database.kind, present + rows)
    seconds = time.perf_counter() - started
    return Result(
        f"{database.kind}: memory while a transaction of {rows:,} rows passes",
        f"{runner.megabytes('VmHWM'):,.0f} MB",
        "bounded",
        detail=f"{before:,.0f} MB before, {seconds:.1f} s",
    )


@contextmanager
def _databases(kinds: list[str]) -> Iterator[Iterator[SourceDatabase]]:
    with tempfile.TemporaryDirectory(prefix="headwater-") as folder:

        def each() -> Iterator[SourceDatabase]:
            if "postgresql" in kinds:
                with scratch_server(wal_level="logical") as server:
                    yield PostgresDatabase(server.url)
            if "mysql" in kinds:
                with running_mariadb() as server:
                    yield MysqlDatabase(server)
            if "sqlite" in kinds:
                yield SqliteDatabase(Path(folder, "shop.db"))

        yield each()


def run(*, large: bool = False, tiny: bool = False, kinds: list[str] | None = None) -> list[Result]:
    size = TINY if tiny else LARGE if large else SMALL
    return asyncio.run(_run(size, kinds or ["postgresql", "mysql", "sqlite"]))


async def _run(size: Size, kinds: list[str]) -> list[Result]:
    results: list[Result] = []
    with scratch_server() as target, _databases(kinds) as databases:
        async with await connect(target.url, purpose="benchmark", application_path=True) as made:
            await schema.install(made)
        for database in databases:
            results += await measure(database, target.url, size)
    return results


def main() -> None:
    kinds = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    report("Sources", run(large="--large" in sys.argv, kinds=kinds))


if __name__ == "__main__":
    main()
