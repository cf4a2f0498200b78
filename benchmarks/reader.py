"""How fast a reader is: `python -m benchmarks.reader [--large]`."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import aclosing

from benchmarks.measure import ORDERS, Result, percentile, report, scratch_server
from headwater.capture.postgres import schema, triggers
from headwater.database import Connection, connect
from headwater.log.reading.follow import follow
from headwater.log.reading.reader import LogReader


async def idle_latency(url: str, count: int) -> Result:
    """From the writer's COMMIT returning to the reader holding the transaction. Reader and writer
    share a process, which costs the reader a little."""
    writer = await connect(url, purpose="benchmark", application_path=True)
    arrived: asyncio.Queue[float] = asyncio.Queue()
    ready = asyncio.Event()

    async def caught_up(connection: object, position: object, has_changes: bool) -> None:
        ready.set()

    async def read() -> None:
        async with aclosing(follow(url, caught_up=caught_up)) as feed:
            async for _ in feed:
                arrived.put_nowait(time.perf_counter())

    reader = asyncio.create_task(read())
    await ready.wait()
    latencies = []
    for _ in range(count):
        await asyncio.sleep(0.005)
        await writer.execute("update orders set amount = amount + 1 where id = 1")
        committed = time.perf_counter()
        latencies.append((await arrived.get() - committed) * 1e3)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await writer.close()
    p50, p99 = percentile(latencies, 0.5), percentile(latencies, 0.99)
    return Result(
        "commit → reader has the transaction, idle",
        f"p50 {p50:.2f} ms, p99 {p99:.2f} ms",
        "p50 under 1.5 ms, p99 under 8 ms",
        p50 < 1.5 and p99 < 8,
        f"{count} transactions",
    )


async def catching_up(url: str, changes: int) -> Result:
    """A backlog of transactions of 1,000 changes each, decoded to typed rows."""
    connection = await connect(url, purpose="benchmark", application_path=True)
    reader = await LogReader.open(connection)
    start = await reader.now(connection)
    for _ in range(changes // 1000):
        await connection.execute(
            "insert into orders (region, status, amount, note)"
            " select i % 500, 'open', i * 1.25, 'note number ' || i from generate_series(1, 1000) i"
        )
    rate, checksum = await _catch_up(connection, reader, start)
    await connection.close()
    return Result(
        f"catching up on {changes:,} changes",
        f"{rate:,.0f} changes/s",
        "at least 100,000/s",
        rate >= 100_000,
        f"checksum {checksum}",
    )


async def _catch_up(connection: Connection, reader: LogReader, start: object) -> tuple[float, int]:
    until = await reader.now(connection)
    started = time.perf_counter()
    count = checksum = 0
    async for transaction in reader.catch_up(connection, start, until):  # type: ignore[arg-type]
        count += len(transaction.changes)
        checksum += sum(change.after["region"] for change in transaction.changes if change.after)
    return count / (time.perf_counter() - started), checksum


async def _run(url: str, count: int, changes: int) -> list[Result]:
    connection = await connect(url, purpose="benchmark", application_path=True)
    await schema.install(connection)
    await connection.execute(ORDERS.encode())
    await triggers.enable(connection, "orders")
    await connection.execute("insert into orders (region, status, amount) values (1, 'open', 1)")
    await connection.close()
    return [await idle_latency(url, count), await catching_up(url, changes)]


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    count, changes = (20, 2_000) if tiny else ((5_000, 1_000_000) if large else (500, 300_000))
    with scratch_server() as server:
        return asyncio.run(_run(server.url, count, changes))


if __name__ == "__main__":
    report("How fast a reader is", run(large="--large" in sys.argv))
