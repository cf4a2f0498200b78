"""What reactive queries cost the hub: `python -m benchmarks.groups [--large]`.

First, the cost of a change that concerns no group, by the number of groups: in memory, with only
the index that decides it, and through flushes of a real hub. Then the hub over a scratch server, in
this process: from commit to result with one group, with many subscribers of one and with one change
that concerns every group; the memory of a group; plain calls; mutations beside the same transaction
without us. Every line checks that it did its work: results are counted, not assumed.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import sys
import time
import tracemalloc
from collections.abc import Awaitable
from statistics import median
from typing import Any, NamedTuple

from benchmarks.measure import ORDERS, Result, percentile, report, scratch_server
from headwater import Context, HeadwaterError, Mutation, MutationContext, Query, c
from headwater.capture.postgres import schema, triggers
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.hub.hub import Hub
from headwater.idempotency import Request, new_key
from headwater.identity import ANONYMOUS
from headwater.live.filters.check import check
from headwater.model import Change, Column, Row, Table
from headwater.protocol import Frame
from headwater.queries.analysis.statements import Read
from headwater.queries.analysis.watches import Watches
from headwater.queries.execution.mutations import MutationRunner
from headwater.settings import Settings

ROWS_PER_REGION = 5


class Size(NamedTuple):
    """How much work a run does."""

    watched: tuple[int, ...]
    groups: tuple[int, ...]
    woken: int
    subscribers: tuple[int, ...]
    repeats: int


TINY = Size((10, 100), (2, 10), 10, (5,), 5)
SMALL = Size((10, 1_000, 100_000), (10, 1_000), 1_000, (50, 2_000), 200)
LARGE = Size((10, 1_000, 100_000), (10, 1_000, 10_000), 1_000, (50, 2_000), 1_000)


# ------------------------------------------------------------------------ the index alone

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
INDEXED = Table(
    1,
    "public",
    "orders",
    (
        Column("id", "bigint", "bigint"),
        Column("region", "integer", "integer"),
        Column("status", "text", "text", "C"),
        Column("note", "text", "text", "C"),
    ),
    ("id",),
    oid=1,
)
OTHER = Table(2, "public", "other", INDEXED.columns, ("id",), oid=2)
USED = frozenset({"id", "region", "status"})
MISSES = ("predicate", "unused column", "other table")


def index_misses(size: Size) -> list[Result]:
    """Microseconds of `Watches.touched` for a change that concerns none of them."""
    times: dict[str, list[float]] = {kind: [] for kind in MISSES}
    for count in size.watched:
        watches = watching(count)
        for kind, change in _misses(count).items():
            times[kind].append(_best(watches, change, size))
    return [_flat(f"a miss ({kind}) in the index", size.watched, times[kind]) for kind in MISSES]


def watching(count: int) -> Watches[int]:
    """As many groups `where region = k` as that."""
    watches: Watches[int] = Watches()
    for region in range(count):
        where = check(c.region == region, INDEXED)
        watches.put(region, [Read(INDEXED, USED, where)])
    return watches


def _misses(count: int) -> dict[str, Change]:
    watched: Row = {"id": 1, "region": 1, "status": "open", "note": "a"}
    unwatched: Row = {**watched, "region": count + 1}
    return {
        "predicate": _update(INDEXED, unwatched, {**unwatched, "status": "done"}),
        "unused column": _update(INDEXED, watched, {**watched, "note": "b"}),
        "other table": _update(OTHER, watched, {**watched, "status": "done"}),
    }


def _update(table: Table, before: Row, after: Row) -> Change:
    return Change(0, 0, NOW, table, "update", (before["id"],), before, after)


def _best(watches: Watches[int], change: Change, size: Size) -> float:
    """Microseconds in the best of several rounds; no group may be found."""
    times = []
    for _ in range(7):
        found, started = 0, time.perf_counter()
        for _ in range(size.repeats):
            found += len(watches.touched([change]))
        times.append((time.perf_counter() - started) / size.repeats * 1e6)
        assert found == 0
    return min(times)


def _flat(name: str, counts: tuple[int, ...], times: list[float]) -> Result:
    growth = times[-1] / times[0]
    shown = " / ".join(f"{each:.1f}" for each in times)
    numbers = " / ".join(f"{count:,}" for count in counts)
    return Result(
        name, f"{shown} µs", "flat within 2×", growth < 2, f"{numbers} groups: ×{growth:.2f}"
    )


# ------------------------------------------------------------------------ a hub and subscribers


async def in_region(ctx: Context, region: int) -> Any:
    return await ctx.fetch(
        "select id, status, amount from orders where region = %s order by id", region
    )


async def priced(ctx: Context, region: int) -> Any:
    return await ctx.fetch(
        "select o.id, o.amount * r.rate as price from orders o, rates r"
        " where o.region = %s and r.id = 1 order by o.id",
        region,
    )


async def raise_amount(ctx: MutationContext, id: int) -> int:
    return await ctx.execute(_RAISE, id)


_RAISE = "update orders set amount = amount + 1 where id = %s"

IN_REGION = Query("in_region", in_region)
PRICED = Query("priced", priced)
RAISE_AMOUNT = Mutation("raise_amount", raise_amount)


class Crowd:
    """All subscribers of a measurement: counts results, and reports when there are enough."""

    def __init__(self) -> None:
        self.results = 0
        self.error: HeadwaterError | None = None
        self._enough = 0
        self._there = asyncio.Event()

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None:
        pass

    def deliver(self, frame: Frame) -> None:
        self.results += len(frame.json) > 0
        if self.results >= self._enough:
            self._there.set()

    def failed(self, error: HeadwaterError) -> None:
        self.error = error

    async def room(self) -> None:
        pass

    async def further(self, count: int, work: Awaitable[Any]) -> float:
        """Milliseconds from the end of the work until this many further results are there."""
        self._there.clear()
        self._enough = self.results + count
        await work
        committed = time.perf_counter()
        async with asyncio.timeout(60):
            await self._there.wait()
        return max(0.0, time.perf_counter() - committed) * 1e3


class Bench:
    """A hub, and a connection that writes."""

    def __init__(self, hub: Hub, connection: Connection) -> None:
        self.hub = hub
        self.connection = connection

    async def subscribe(self, query: Query, regions: range, crowd: Crowd) -> list[Any]:
        """A subscription for each region, as many at a time as the hub accepts."""
        joining = [
            self.hub.reactive.subscribe(query, query.bind({"region": region}), ANONYMOUS, crowd)
            for region in regions
        ]
        handles = await asyncio.gather(*joining)
        await self.settle()
        return handles

    async def settle(self) -> None:
        """Wait until no execution is requested or running."""
        await self.hub.flushes.next_flush()
        while any(group.state != "idle" for group in self.hub.reactive):
            await self.hub.flushes.next_flush()

    async def write(self, sql: str, *values: Any) -> None:
        await self.connection.execute(sql.encode(), values, prepare=True)

    def executions(self) -> int:
        (metric,) = self.hub.metrics.query_executions.collect()
        return int(sum(each.value for each in metric.samples if each.name.endswith("_total")))

    def flush_seconds(self) -> tuple[float, float]:
        """Seconds spent in flushes that brought something, and how many those were."""
        (metric,) = self.hub.metrics.flush_seconds.collect()
        found = {each.name.rpartition("_")[2]: each.value for each in metric.samples}
        return found["sum"], found["count"]


# ------------------------------------------------------------------------ misses, for real


async def flush_misses(bench: Bench, size: Size) -> list[Result]:
    """Microseconds of a flush whose one change concerns no group, and of our part of it."""
    shares: dict[str, list[float]] = {kind: [] for kind in MISSES}
    flushes: dict[str, list[float]] = {kind: [] for kind in MISSES}
    handles: list[Any] = []
    for count in size.groups:
        handles += await bench.subscribe(IN_REGION, range(len(handles), count), Crowd())
        for kind, sql in _MISSING.items():
            share, flush = await _flushes(bench, sql, size.repeats)
            shares[kind].append(share)
            flushes[kind].append(flush)
    for handle in handles:
        handle.close()
    return [
        _flat(f"a miss ({kind}) in {part}", size.groups, times[kind])
        for part, times in (("groups.flushed", shares), ("a whole flush", flushes))
        for kind in MISSES
    ]


_MISSING = {
    "predicate": "update orders set amount = amount + 1 where id = 0",
    "unused column": "update orders set note = note || '.' where id = 1",
    "other table": "update other set n = n + 1 where id = 1",
}


async def _flushes(bench: Bench, sql: str, count: int) -> tuple[float, float]:
    """The median of each, in microseconds."""
    hub, shares, wholes = bench.hub, list[float](), list[float]()
    original, before = hub.reactive.flushed, bench.executions()

    def timed(transactions: Any) -> None:
        started = time.perf_counter()
        original(transactions)
        if transactions:
            shares.append((time.perf_counter() - started) * 1e6)

    hub.reactive.flushed = timed  # type: ignore[method-assign]
    try:
        for _ in range(count):
            seconds, _ = bench.flush_seconds()
            await bench.write(sql)
            await hub.flushes.next_flush()
            wholes.append((bench.flush_seconds()[0] - seconds) * 1e6)
    finally:
        hub.reactive.flushed = original  # type: ignore[method-assign]
    assert bench.executions() == before, "a change that concerns no group executed a query"
    return median(shares), median(each for each in wholes if each)


# ------------------------------------------------------------------------ hits


async def one_group(bench: Bench, size: Size) -> Result:
    """One group, one writer, nothing else."""
    crowd = Crowd()
    (handle,) = await bench.subscribe(IN_REGION, range(1), crowd)
    before, times = bench.executions(), list[float]()
    for _ in range(size.repeats):
        await asyncio.sleep(0.005)
        times.append(await crowd.further(1, bench.write(_RAISE, 1)))
    handle.close()
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    each = (bench.executions() - before) / size.repeats
    return Result(
        "commit → result at the hub, idle",
        f"p50 {p50:.2f} ms, p99 {p99:.2f} ms",
        "p50 under 5 ms",
        p50 < 5,
        f"{each:.2f} executions a change",
    )


async def many_subscribers(bench: Bench, count: int, size: Size) -> Result:
    crowd = Crowd()
    handles = await bench.subscribe(IN_REGION, range(1), crowd)
    for _ in range(count - 1):
        handles += await bench.subscribe(IN_REGION, range(1), crowd)
    before, times, rounds = bench.executions(), list[float](), max(5, size.repeats // 10)
    for _ in range(rounds):
        times.append(await crowd.further(count, bench.write(_RAISE, 1)))
    each = (bench.executions() - before) / rounds
    for handle in handles:
        handle.close()
    return Result(
        f"one change, {count:,} subscribers of one query",
        f"all notified in {median(times):.2f} ms",
        "one execution",
        each == 1,
        f"{each:.2f} executions a change",
    )


async def all_woken(bench: Bench, size: Size) -> Result:
    crowd = Crowd()
    handles = await bench.subscribe(PRICED, range(size.woken), crowd)
    before, times, rounds = bench.executions(), list[float](), 5
    for _ in range(rounds):
        work = bench.write("update rates set rate = rate + 1 where id = 1")
        times.append(await crowd.further(size.woken, work))
        await bench.settle()
    each = (bench.executions() - before) / rounds
    cursor = await bench.connection.execute(
        "select count(*) from pg_stat_activity where application_name = 'headwater queries'"
    )
    row = await cursor.fetchone()
    for handle in handles:
        handle.close()
    assert row is not None
    return Result(
        f"one change that concerns all of {size.woken:,} groups",
        f"all notified in {median(times):.0f} ms",
        "one execution each",
        each == size.woken,
        f"{each:.0f} executions over {row[0]} connections; first time {times[0]:.0f} ms",
    )


async def memory(bench: Bench, size: Size) -> Result:
    """Memory of a group with a subscriber and without changes, its result included."""
    count, crowd = size.woken, Crowd()
    first = await bench.subscribe(IN_REGION, range(1), crowd)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    handles = await bench.subscribe(IN_REGION, range(1, count), crowd)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    result = sum(group.size for group in bench.hub.reactive) / count
    for handle in first + handles:
        handle.close()
    each = (after - before) / (count - 1)
    return Result(
        "memory of a group with one subscriber",
        f"{each / 1024:.1f} KiB",
        "under 9 KiB",
        each < 9 * 1024,
        f"{result:.0f} bytes of it are the result",
    )


# ------------------------------------------------------------------------ calls and mutations


async def calls(bench: Bench, size: Size) -> Result:
    """A call that executes the query, and one that is answered from the cache."""
    groups = bench.hub.reactive

    async def called() -> float:
        arguments = IN_REGION.bind({"region": 0})
        started = time.perf_counter()
        await groups.call(IN_REGION, arguments, ANONYMOUS)
        return (time.perf_counter() - started) * 1e6

    cold, cached = list[float](), list[float]()
    await called()
    for _ in range(size.repeats):
        await bench.write(_RAISE, 1)
        await bench.hub.flushes.next_flush()
        cold.append(await called())
        await bench.settle()
        cached.append(await called())
    ratio = median(cold) / median(cached)
    return Result(
        "a plain call: executed, and from the cache",
        f"{median(cold) / 1e3:.2f} ms, {median(cached):.0f} µs",
        "the cache is quicker",
        ratio > 1,
        f"×{ratio:.0f}",
    )


async def mutations(bench: Bench, url: str, size: Size) -> list[Result]:
    """The same update as a transaction of psycopg, as a mutation, and as one with an idempotency
    key, in turns; and the repetition of that."""
    runner = MutationRunner(url, Settings())
    bare, ours, keyed, again = (list[float]() for _ in range(4))
    arguments = RAISE_AMOUNT.bind({"id": 1})
    request: Request | None = None

    async def by_itself() -> None:
        async with bench.connection.transaction():
            await bench.write(_RAISE, 1)

    async def as_mutation() -> None:
        value, _ = await runner.answer(RAISE_AMOUNT, arguments, ANONYMOUS)
        assert bytes(value) == b"1"

    async def with_key() -> None:
        value, _ = await runner.answer(RAISE_AMOUNT, arguments, ANONYMOUS, request=request)
        assert bytes(value) == b"1"

    works = ((by_itself, bare), (as_mutation, ours), (with_key, keyed), (with_key, again))
    for _ in range(size.repeats):
        request = Request.of(ANONYMOUS, new_key(), RAISE_AMOUNT.name, {"id": 1})
        for work, times in works:
            started = time.perf_counter()
            await work()
            times.append((time.perf_counter() - started) * 1e3)
    await runner.close()
    ratio, cost = median(ours) / median(bare), median(keyed) / median(ours)
    return [
        Result(
            "a mutation beside a bare transaction",
            f"×{ratio:.2f}",
            "under 2×",
            ratio < 2,
            f"{median(ours):.2f} ms and {median(bare):.2f} ms, commits wait for the disk",
        ),
        Result(
            "a mutation with an idempotency key beside one without",
            f"×{cost:.2f}",
            "under 1.5×",
            cost < 1.5,
            f"{median(keyed):.2f} ms and {median(ours):.2f} ms; repeated: {median(again):.2f} ms",
        ),
    ]


# ------------------------------------------------------------------------ all of it


async def _prepare(connection: Connection, regions: int) -> None:
    await schema.install(connection)
    await connection.execute(ORDERS)
    await connection.execute(
        "insert into orders (id, region, status, amount) select i, (i - 1) / %s, 'open', i %% 1000"
        " from generate_series(1, %s) i",
        (ROWS_PER_REGION, regions * ROWS_PER_REGION),
    )
    await connection.execute(
        "insert into orders (id, region, status, amount) values (0, -1, 'open', 0)"
    )
    await connection.execute("update orders set note = ''")
    await connection.execute("create table rates (id int primary key, rate int not null)")
    await connection.execute("create table other (id int primary key, n int not null)")
    await connection.execute("insert into rates values (1, 1)")
    await connection.execute("insert into other values (1, 1)")
    await connection.execute("vacuum analyze")
    for table in ("orders", "rates", "other"):
        await triggers.enable(connection, table)


async def _run(size: Size) -> list[Result]:
    with scratch_server() as server:
        connection = await connect_database(server.url, purpose="benchmark", application_path=True)
        await _prepare(connection, max(*size.groups, size.woken))
        async with Hub(server.url) as hub:
            bench = Bench(hub, connection)
            results = [
                await one_group(bench, size),
                *[await many_subscribers(bench, count, size) for count in size.subscribers],
                await all_woken(bench, size),
                await memory(bench, size),
                await calls(bench, size),
                *await mutations(bench, server.url, size),
                *await flush_misses(bench, size),
            ]
        await connection.close()
        return results


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    size = TINY if tiny else LARGE if large else SMALL
    return [*index_misses(size), *asyncio.run(_run(size))]


if __name__ == "__main__":
    report("What reactive queries cost the hub", run(large="--large" in sys.argv))
