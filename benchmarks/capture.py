"""What capture costs writers: `python -m benchmarks.capture [--large]`."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import psycopg

from benchmarks.measure import (
    ORDERS,
    Result,
    execute,
    pgbench,
    ratios,
    report,
    scratch_server,
)
from headwater import EmbeddedPostgres
from headwater.capture.postgres import schema
from headwater.database import connect
from headwater.log.reading.follow import follow

BULK_ROWS = 100_000
WRITERS = 32
SINGLE_ROW = r"""
\set region random(1, 500)
\set amount random(1, 100000)
insert into orders (region, status, amount, note) values (:region, 'open', :amount, 'a short note');
"""


def bulk_insert(server: EmbeddedPostgres, rounds: int) -> Result:
    """Time of one INSERT of 100,000 rows, captured and not captured, in turns."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with psycopg.connect(server.url, autocommit=True) as connection:
        for _ in range(rounds):
            for captured in (False, True):
                _set_capture(server.url, captured)
                execute(server.url, "truncate orders", "checkpoint")
                started = time.perf_counter()
                connection.execute(
                    "insert into orders (region, status, amount, note)"
                    " select i %% 500, 'open', i * 1.25, 'note number ' || i"
                    " from generate_series(1, %s) i",
                    (BULK_ROWS,),
                )
                times[captured].append(time.perf_counter() - started)
    ratio = ratios(times[True], times[False])
    return Result(
        "bulk insert of 100,000 rows, captured / not",
        f"{ratio:.2f} times",
        "under 2.5 times",
        ratio < 2.5,
        f"{min(times[False]) * 1e3:.0f} ms without, {min(times[True]) * 1e3:.0f} ms with",
    )


def concurrent_writers(server: EmbeddedPostgres, rounds: int, seconds: float) -> list[Result]:
    """32 pgbench clients inserting one row a transaction, a reader following."""
    rates: dict[str, list[float]] = {"without": [], "captured": [], "always": []}
    for _ in range(rounds):
        for variant, measured in rates.items():
            _set_capture(server.url, variant != "without")
            if variant == "always":
                _always_notify(server.url)
            execute(server.url, "truncate orders", "checkpoint")
            with _reader(server.url):
                measured.append(pgbench(server, SINGLE_ROW, clients=WRITERS, seconds=seconds))
    share = ratios(rates["captured"], rates["without"])
    gain = ratios(rates["captured"], rates["always"])
    best = {variant: f"{max(measured):,.0f}/s" for variant, measured in rates.items()}
    return [
        Result(
            "32 writers, captured / not",
            f"{share:.0%}",
            "at least 70 %",
            share >= 0.7,
            f"{best['without']} without, {best['captured']} with",
        ),
        Result(
            "32 writers, captured / always NOTIFY",
            f"{gain:.2f} times",
            "at least 2 times",
            gain >= 2,
            f"{best['always']} with NOTIFY in every transaction",
        ),
    ]


def _set_capture(url: str, captured: bool) -> None:
    execute(url, "select headwater.disable_reactivity('orders')")
    if captured:
        execute(url, "select headwater.enable_reactivity('orders')")


def _always_notify(url: str) -> None:
    """The variant that we do not ship: the same function, without looking for a poller."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "select pg_get_functiondef(format('headwater.capture_%s_insert()',"
            " 'orders'::regclass::oid)::regprocedure)"
        ).fetchone()
        assert row is not None
        plain: str = row[0]
        changed = plain.replace("headwater.readers_sleep()", "true")
        assert changed != plain
        connection.execute(changed.encode())


@contextmanager
def _reader(url: str) -> Iterator[None]:
    """A follower in a process of its own, ready when the block begins."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_follow, args=(url, ready), daemon=True)
    process.start()
    try:
        if not ready.wait(timeout=30):
            raise RuntimeError("the reader did not start")
        yield
    finally:
        process.terminate()
        process.join()


def _follow(url: str, ready: Event) -> None:
    async def run() -> None:
        async def caught_up(connection: object, position: object, has_changes: bool) -> None:
            ready.set()

        async for _ in follow(url, caught_up=caught_up):
            pass

    asyncio.run(run())


async def _prepare(url: str) -> None:
    connection = await connect(url, purpose="benchmark", application_path=True)
    await schema.install(connection)
    await connection.execute(ORDERS.encode())
    await connection.close()


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    rounds, seconds = (1, 1.0) if tiny else ((7, 10.0) if large else (3, 3.0))
    with scratch_server() as server:
        asyncio.run(_prepare(server.url))
        return [bulk_insert(server, rounds), *concurrent_writers(server, rounds, seconds)]


if __name__ == "__main__":
    report("What capture costs writers", run(large="--large" in sys.argv))
