"""From commit to client: `python -m benchmarks.gateway [--large]`.

The gateway is `headwater serve` in a process of its own; clients and writers share another, so the
times include what two cores make of three busy processes. A latency is from the writer's COMMIT
returning to the client's code holding the delta.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.measure import ORDERS, Result, percentile, report, scratch_server
from headwater import Live, connect
from headwater.capture.postgres import schema, triggers
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.model import Enter, Leave, Move, Update
from headwater.testing.gateway_process import Served, serving

REGIONS = 500
TOP = 20
CONNECTIONS = 10
LENIENT: dict[str, Any] = {
    "limits_sessions_per_ip": 100,
    "limits_subscriptions_per_user": 10_000,
    "limits_requests_per_second": 100_000,
}


async def idle_latency(gateway: Served, connection: Connection, count: int) -> Result:
    """One live query over SSE, one writer, nothing else."""
    latencies = []
    async with connect(gateway.url, transport="sse") as hw:
        query = {"table": "orders", "where": [["region", "=", 1]], "limit": TOP}
        async with hw.live(query) as live:
            row = live.rows[0]["id"]
            batches = live.deltas()
            for number in range(count):
                await asyncio.sleep(0.005)
                note = str(number)
                await connection.execute(
                    "update orders set note = %s where id = %s", (note, row), prepare=True
                )
                committed = time.perf_counter()
                async for _ in batches:
                    if live.rows[0]["note"] == note:
                        break
                latencies.append((time.perf_counter() - committed) * 1e3)
            await batches.aclose()
    p50, p99 = percentile(latencies, 0.5), percentile(latencies, 0.99)
    return Result(
        "commit → client over SSE, idle",
        f"p50 {p50:.2f} ms, p99 {p99:.2f} ms",
        "p50 under 2.5 ms, p99 under 10 ms",
        p50 < 2.5 and p99 < 10,
        f"{count} transactions",
    )


class Load(msgspec.Struct):
    """What one run of the workload L1 showed."""

    rate: float
    latencies: list[float]
    missed: int
    cpu: float
    memory: int

    def percentiles(self) -> str:
        shares = [percentile(self.latencies, share) * 1e3 for share in (0.5, 0.95, 0.99)]
        return "p50 {:.1f}, p95 {:.1f}, p99 {:.1f} ms".format(*shares)


class Workload:
    """L1: live queries `where region = k order by amount desc limit 20` over 100,000 orders, and
    inserts, updates and deletes in equal parts at a steady rate."""

    def __init__(self, gateway: Served, writers: list[Connection], rows: int) -> None:
        self._gateway = gateway
        self._writers = writers
        self._chance = random.Random(1)
        self._ids = list(range(1, rows + 1))
        self._next = rows
        self._times: dict[str, tuple[float | None, float | None]] = {}
        self._latencies: list[float] = []

    async def run(self, queries: int, rate: float, seconds: float) -> Load:
        self._latencies, self._times = [], {}
        async with AsyncExitStack() as stack:
            lives = await self._open(stack, queries)
            following = [asyncio.create_task(self._follow(live)) for _, live in lives]
            cpu, started = self._gateway.cpu(), time.perf_counter()
            done = await self._write(rate, seconds)
            took = time.perf_counter() - started
            missed = await self._wrong(lives)
            spent = (self._gateway.cpu() - cpu) / done * 1000
            memory = self._gateway.memory()
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
        return Load(done / took, self._latencies or [0.0], missed, spent, memory)

    async def _open(self, stack: AsyncExitStack, queries: int) -> list[tuple[int, Live]]:
        clients = [
            await stack.enter_async_context(connect(self._gateway.url, transport="sse"))
            for _ in range(CONNECTIONS)
        ]
        lives = []
        for region in range(queries):
            query = {
                "table": "orders",
                "where": [["region", "=", region]],
                "order": [["amount", "desc"]],
                "limit": TOP,
            }
            live = clients[region % CONNECTIONS].live(query)
            lives.append((region, await stack.enter_async_context(live)))
        return lives

    async def _follow(self, live: Live) -> None:
        async for batch in live.deltas():
            now = time.perf_counter()
            for delta in batch.deltas:
                match delta:
                    case Leave(key):
                        self._note(f"gone {key[0]}", arrived=now)
                    case Enter(index=index) if index == TOP - 1:
                        pass  # most likely an old row that moved up for one that left
                    case Enter(row=row) | Move(row=row) | Update(row=row):
                        self._note(row["note"], arrived=now)

    def _note(
        self, operation: str, *, arrived: float | None = None, committed: float | None = None
    ) -> None:
        """Record the time of an operation when both times are known; the client may be the
        first."""
        before = self._times.pop(operation, None)
        if before is None:
            self._times[operation] = (arrived, committed)
        elif (one := before[0] or arrived) and (other := before[1] or committed):
            self._latencies.append(max(0.0, one - other))

    async def _write(self, rate: float, seconds: float) -> int:
        """Operations at their times, by whichever writer is free."""
        idle: asyncio.Queue[Connection] = asyncio.Queue()
        for writer in self._writers:
            idle.put_nowait(writer)
        started, count = time.perf_counter(), int(rate * seconds)
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
                tasks.create_task(self._operate(number, idle))
        return count

    async def _operate(self, number: int, idle: asyncio.Queue[Connection]) -> None:
        chance, note = self._chance, f"op {number} {self._next}"
        place = chance.randrange(len(self._ids))
        id, kind = self._ids[place], number % 3
        values: dict[str, Any] = {
            "id": id,
            "note": note,
            "amount": chance.randrange(2_000_000) / 100,
        }
        if kind == 0:
            self._next += 1
            values |= {"id": self._next, "region": chance.randrange(REGIONS)}
            self._ids.append(self._next)
        elif kind == 2:
            self._ids[place] = self._ids[-1]
            self._ids.pop()
        writer = await idle.get()
        try:
            await writer.execute(_OPERATIONS[kind].encode(), values, prepare=True)
            committed = time.perf_counter()
        finally:
            idle.put_nowait(writer)
        self._note(f"gone {id}" if kind == 2 else note, committed=committed)

    async def _wrong(self, lives: list[tuple[int, Live]]) -> int:
        """How many results differ from the database, when no transaction runs."""
        deadline = time.perf_counter() + 30
        while True:
            wrong = [live for region, live in lives if not await self._is_right(region, live)]
            if not wrong or time.perf_counter() > deadline:
                return len(wrong)
            await asyncio.sleep(0.1)

    async def _is_right(self, region: int, live: Live) -> bool:
        cursor = await self._writers[0].execute(
            "select id from orders where region = %s order by amount desc, id limit %s",
            (region, TOP),
        )
        return [row[0] for row in await cursor.fetchall()] == [row["id"] for row in live.rows]


_OPERATIONS = (
    "insert into orders (id, region, status, amount, note)"
    " values (%(id)s, %(region)s, 'new', %(amount)s, %(note)s)",
    "update orders set amount = %(amount)s, note = %(note)s where id = %(id)s",
    "delete from orders where id = %(id)s",
)


async def workload(
    gateway: Served, url: str, *, rows: int, queries: list[int], seconds: float, rates: list[float]
) -> list[Result]:
    """The required rate with few and many queries, then higher rates."""
    writers = [
        await connect_database(url, purpose="benchmark", application_path=True) for _ in range(8)
    ]
    load = Workload(gateway, writers, rows)
    results = []
    for count in queries:
        shown = await load.run(count, rates[0], seconds)
        results.append(
            Result(
                f"L1: {count} live queries, {shown.rate:.0f} operations/s",
                shown.percentiles(),
                "no update missed",
                shown.missed == 0,
                f"{shown.missed} wrong, {shown.cpu:.2f} s CPU per 1,000 changes, "
                f"{shown.memory / 2**20:.0f} MiB, {len(shown.latencies)} timed",
            )
        )
    held, detail = 0.0, ""
    for rate in rates[1:]:
        shown = await load.run(queries[-1], rate, seconds)
        fine = shown.missed == 0 and percentile(shown.latencies, 0.99) < 1
        held, detail = (shown.rate, shown.percentiles()) if fine else (held, detail)
        if not fine or shown.rate < 0.9 * rate:
            break
    if rates[1:]:
        name = f"L1: highest rate with p99 under 1 s, {queries[-1]} live queries"
        results.append(Result(name, f"{held:,.0f} operations/s", "", None, detail))
    for writer in writers:
        await writer.close()
    return results


async def _run(
    rows: int, idle: int, queries: list[int], seconds: float, rates: list[float]
) -> list[Result]:
    with scratch_server() as server, tempfile.TemporaryDirectory() as folder:
        connection = await connect_database(server.url, purpose="benchmark", application_path=True)
        await schema.install(connection)
        await connection.execute(ORDERS)
        await connection.execute(
            "insert into orders (id, region, status, amount, note) select i, i %% 500, 'open',"
            " (i * 7919 %% 2000000) / 100.0, 'start' from generate_series(1, %s) i",
            (rows,),
        )
        await connection.execute("create index on orders (region, amount desc, id); ")
        await connection.execute("vacuum analyze orders")
        await triggers.enable(connection, "orders")
        with serving(server.url, Path(folder), **LENIENT) as gateway:
            results = [await idle_latency(gateway, connection, idle)]
            results += await workload(
                gateway, server.url, rows=rows, queries=queries, seconds=seconds, rates=rates
            )
        await connection.close()
        return results


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    if tiny:
        return asyncio.run(_run(2_000, 20, [10], 0.5, [100.0]))
    seconds = 30.0 if large else 8.0
    rates = [300.0, 1_000.0, 2_000.0, 4_000.0]
    return asyncio.run(_run(100_000, 2_000 if large else 500, [50, 500], seconds, rates))


if __name__ == "__main__":
    report("From commit to client", run(large="--large" in sys.argv))
