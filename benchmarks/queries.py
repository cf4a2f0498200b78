"""Reactive queries from commit to client, and polling: `python -m benchmarks.queries [--large]`.

A thousand groups `where region = k`, each with one subscriber, and a hundred changes a second that
each concern one in a hundred of them, through `headwater serve` and its client. Before, on the same
server and without any of ours, the same writes alone and with every subscriber polling the same
query once a second. What the database does for either is its own processor time and what it counts,
less what the writes take. A latency is from the writer's COMMIT returning to the client's code
holding a result that contains it.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.measure import ORDERS, Result, percentile, report, scratch_server
from headwater import EmbeddedPostgres, Results, connect
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.testing.gateway_process import Served, serving

PROGRAM = """
from headwater import Headwater

hw = Headwater()
hw.table("orders")


@hw.query
async def in_region(ctx, region: int):
    return await ctx.fetch(
        "select id, status, amount from orders where region = %s order by id", region
    )
"""
POLLED = "select id, status, amount from orders where region = %s order by id"
ROWS_PER_REGION = 5
CONNECTIONS = 10
STATISTICS_SECONDS = 11.0
"""A PostgreSQL session that falls idle tells what it counted within ten seconds."""
LENIENT: dict[str, Any] = {
    "limits_sessions_per_ip": 100,
    "limits_subscriptions_per_user": 10_000,
    "limits_bytes_per_user": 2**40,
    "limits_requests_per_second": 100_000,
}


class Size(NamedTuple):
    """How much work a run does."""

    groups: int
    rate: float
    seconds: float
    idle: int
    settle: float


TINY = Size(20, 40.0, 0.5, 5, 0.0)
SMALL = Size(1_000, 100.0, 10.0, 300, STATISTICS_SECONDS)
LARGE = Size(1_000, 100.0, 60.0, 2_000, STATISTICS_SECONDS)


# ------------------------------------------------------------------------ what the database does


class Load(msgspec.Struct, frozen=True):
    """What the database did: seconds of processor time, transactions, scans for a region."""

    cpu: float
    transactions: int
    scans: int

    def since(self, before: Load) -> Load:
        return Load(
            self.cpu - before.cpu,
            self.transactions - before.transactions,
            self.scans - before.scans,
        )


class Database:
    """The server under test, and a connection that only looks at it."""

    def __init__(self, server: EmbeddedPostgres, connection: Connection, settle: float) -> None:
        self.url = server.url
        self.connection = connection
        self._settle = settle
        (pid_file,) = Path(server.data_dir).rglob("postmaster.pid")
        self._pid = int(pid_file.read_text().split()[0])

    async def load(self) -> Load:
        """What it has done so far, when all of its sessions have reported."""
        cpu = self._cpu()
        await asyncio.sleep(self._settle)
        cursor = await self.connection.execute(
            "select (select xact_commit + xact_rollback from pg_stat_database"
            " where datname = current_database()), (select idx_scan from pg_stat_user_indexes"
            " where indexrelname = 'orders_by_region')"
        )
        row = await cursor.fetchone()
        assert row is not None
        return Load(cpu, row[0], row[1])

    def _cpu(self) -> float:
        """Seconds of processor time of the server, its sessions and those that have ended."""
        ticks = 0
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    if int(folder.name) == self._pid:
                        ticks += sum(map(int, fields[11:15]))
                    elif int(fields[1]) == self._pid:
                        ticks += sum(map(int, fields[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------ writing


class Writing:
    """Numbered changes at a steady rate, by whichever writer is free. A change gives its number to
    the first row of `hits` regions."""

    def __init__(self, writers: list[Connection], groups: int) -> None:
        self._writers = writers
        self._groups = groups
        self._chance = random.Random(5)
        self.number = 0
        self.regions: dict[int, list[int]] = {}
        self.committed: dict[int, float] = {}

    async def run(self, rate: float, seconds: float, hits: int) -> None:
        """Numbers continue from run to run, so that each change alters its rows."""
        self.regions, self.committed = {}, {}
        idle: asyncio.Queue[Connection] = asyncio.Queue()
        for writer in self._writers:
            idle.put_nowait(writer)
        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for place in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, started + place / rate - time.perf_counter()))
                tasks.create_task(self._change(idle, hits))

    async def _change(self, idle: asyncio.Queue[Connection], hits: int) -> None:
        writer = await idle.get()
        self.number += 1
        number, regions = self.number, sorted(self._chance.sample(range(self._groups), hits))
        self.regions[number] = regions
        try:
            await writer.execute(
                "update orders set amount = %s where id = any(%s)",
                (number, [first_row(region) for region in regions]),
                prepare=True,
            )
            self.committed[number] = time.perf_counter()
        finally:
            idle.put_nowait(writer)


def first_row(region: int) -> int:
    return region * ROWS_PER_REGION + 1


# ------------------------------------------------------------------------ polling


async def poll(url: str, groups: int, seconds: float) -> int:
    """Every group's query once a second, spread over it; how many were made."""
    connections = [
        await connect_database(url, purpose="polling", application_path=True)
        for _ in range(CONNECTIONS)
    ]
    started, done = time.perf_counter(), 0

    async def polling(place: int) -> None:
        nonlocal done
        connection, mine = connections[place], range(place, groups, CONNECTIONS)
        for turn in range(int(seconds)) if seconds >= 1 else range(1):
            for region in mine:
                due = started + turn + region / groups
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                cursor = await connection.execute(POLLED.encode(), (region,), prepare=True)
                assert len(await cursor.fetchall()) == ROWS_PER_REGION
                done += 1

    await asyncio.gather(*(polling(place) for place in range(CONNECTIONS)))
    for connection in connections:
        await connection.close()
    return done


# ------------------------------------------------------------------------ subscribing


class Following:
    """A subscriber for each group: when which change had arrived."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self.arrivals: dict[tuple[int, int], float] = {}
        self.results = 0
        self.newest: dict[int, int] = {}
        self._news = asyncio.Event()

    @asynccontextmanager
    async def open(self, gateway: Served, groups: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(connect(gateway.url, transport="sse"))
                for _ in range(CONNECTIONS)
            ]
            tasks = []
            for region in range(groups):
                results = clients[region % CONNECTIONS].subscribe("in_region", region=region)
                await stack.enter_async_context(results)
                tasks.append(asyncio.create_task(self._follow(region, results)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, region: int, results: Results) -> None:
        async for rows in results:
            now, number = time.perf_counter(), int(float(rows[0]["amount"]))
            self.results += 1
            self.arrivals[region, number] = now
            self.newest[region] = number
            self._news.set()

    async def until_received(self) -> None:
        """Wait until every region has its newest change."""
        expected: dict[int, int] = {}
        for number, regions in self._writing.regions.items():
            for region in regions:
                expected[region] = max(number, expected.get(region, 0))
        async with asyncio.timeout(60):
            while any(self.newest.get(region) != number for region, number in expected.items()):
                self._news.clear()
                await self._news.wait()

    def latencies(self) -> list[float]:
        """In milliseconds, of every change and region. A change that arrived together with a later
        one has the time of that."""
        times = []
        arrived: dict[int, float] = {}
        for number in sorted(self._writing.regions, reverse=True):
            for region in self._writing.regions[number]:
                arrived[region] = self.arrivals.get((region, number), arrived.get(region, 0.0))
                times.append(max(0.0, arrived[region] - self._writing.committed[number]) * 1e3)
        return times


async def idle_latency(gateway: Served, connection: Connection, count: int) -> Result:
    """One group, one subscriber over SSE, one writer, nothing else."""
    times = []
    async with connect(gateway.url, transport="sse") as hw:
        results = hw.subscribe("in_region", region=0)
        async with results:
            values = aiter(results)
            for number in range(count):
                await asyncio.sleep(0.005)
                await connection.execute(
                    "update orders set amount = %s where id = %s", (number + 0.5, 1), prepare=True
                )
                committed = time.perf_counter()
                async for rows in values:
                    if float(rows[0]["amount"]) == number + 0.5:
                        break
                times.append((time.perf_counter() - committed) * 1e3)
            await values.aclose()
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    return Result(
        "commit → client has the result, idle",
        f"p50 {p50:.2f} ms, p99 {p99:.2f} ms",
        "p50 under 5 ms",
        p50 < 5,
        f"{count} transactions over SSE",
    )


# ------------------------------------------------------------------------ all of it


class Polled(NamedTuple):
    """The same writes without us: what they take, and what polling takes on top."""

    writes: Load
    polling: Load
    polls: int


async def polled(database: Database, writing: Writing, size: Size, hits: int) -> Polled:
    before = await database.load()
    await writing.run(size.rate, size.seconds, hits)
    between = await database.load()
    polling = asyncio.create_task(poll(database.url, size.groups, size.seconds))
    await writing.run(size.rate, size.seconds, hits)
    polls = await polling
    after = await database.load()
    writes = between.since(before)
    return Polled(writes, after.since(between).since(writes), polls)


async def followed(
    database: Database,
    gateway: Served,
    writing: Writing,
    size: Size,
    hits: int,
    beside: Polled,
) -> list[Result]:
    following = Following(writing)
    async with following.open(gateway, size.groups):
        before, cpu = await database.load(), gateway.cpu()
        executions = gateway.metric("headwater_query_executions_total", reason="change")
        await writing.run(size.rate, size.seconds, hits)
        await following.until_received()
        cpu = gateway.cpu() - cpu
        executed = gateway.metric("headwater_query_executions_total", reason="change") - executions
        load = (await database.load()).since(before).since(beside.writes)
    changes, times = len(writing.regions), following.latencies()
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    each = executed / changes
    ratio = load.cpu / max(beside.polling.cpu, 0.01)
    what = f"{size.groups:,} groups, {size.rate:.0f} changes/s, each concerns {hits}"
    return [
        Result(
            f"{what}: commit → client",
            f"p50 {p50:.1f} ms, p99 {p99:.1f} ms",
            "no update missed",
            len(times) == changes * hits,
            f"{following.results} results; {cpu / size.seconds:.0%} of a core in the gateway",
        ),
        Result(
            f"{what}: executions a change",
            f"{each:.2f}",
            f"at most {hits}",
            each <= hits,
            "less where changes of one group were coalesced",
        ),
        Result(
            f"{what}: database, beside polling every second",
            f"CPU ×{ratio:.2f}, queries ×{executed / beside.polls:.2f}",
            "no more queries than polling",
            executed <= beside.polls * 1.05,
            f"{load.cpu:.2f} and {beside.polling.cpu:.2f} s of CPU beyond the writes'"
            f" {beside.writes.cpu:.2f}; scans {load.scans:,} and {beside.polling.scans:,},"
            f" transactions {load.transactions:,} and {beside.polling.transactions:,}",
        ),
    ]


async def _prepare(connection: Connection, groups: int) -> None:
    await connection.execute(ORDERS)
    await connection.execute(
        "insert into orders (id, region, status, amount) select i, (i - 1) / %s, 'open', 0"
        " from generate_series(1, %s) i",
        (ROWS_PER_REGION, groups * ROWS_PER_REGION),
    )
    await connection.execute("vacuum analyze orders")


@contextmanager
def _gateway(url: str, folder: Path) -> Iterator[Served]:
    (folder / "shop.py").write_text(PROGRAM)
    with serving(url, folder, program="shop:hw", **LENIENT) as gateway:
        yield gateway


async def _run(size: Size) -> list[Result]:
    with scratch_server() as server, tempfile.TemporaryDirectory() as folder:
        connection = await connect_database(server.url, purpose="benchmark", application_path=True)
        await _prepare(connection, size.groups)
        writers = [
            await connect_database(server.url, purpose="benchmark", application_path=True)
            for _ in range(4)
        ]
        database = Database(server, connection, size.settle)
        writing = Writing(writers, size.groups)
        wide = max(2, size.groups // 100)
        beside = {hits: await polled(database, writing, size, hits) for hits in (wide, 1)}
        with _gateway(server.url, Path(folder)) as gateway:
            results = [await idle_latency(gateway, connection, size.idle)]
            for hits, without in beside.items():
                results += await followed(database, gateway, writing, size, hits, without)
        for each in (connection, *writers):
            await each.close()
        return results


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    return asyncio.run(_run(TINY if tiny else LARGE if large else SMALL))


if __name__ == "__main__":
    report("Reactive queries, from commit to client", run(large="--large" in sys.argv))
