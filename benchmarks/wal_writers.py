"""What capture costs 32 writers, by triggers and from the WAL, in one run:
`python -m benchmarks.wal_writers [--large]`.

A reader follows the log in each variant. For the WAL, its runner works in a process of its own, as
beside a gateway, and the time until the log has everything is reported beside the rate: a rate that
capture cannot keep up with would otherwise look free.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.capture import SINGLE_ROW, WRITERS, _reader
from benchmarks.measure import ORDERS, Result, execute, pgbench, ratios, report, scratch_server
from headwater import EmbeddedPostgres
from headwater.capture.postgres import schema
from headwater.capture.postgres.wal.append import WalCapture
from headwater.database import connect

UPDATE = r"""
\set id random(1, 20000)
\set amount random(1, 100000)
update orders set amount = :amount where id = :id;
"""

VARIANTS = ("without", "trigger", "wal")


def writers(
    server: EmbeddedPostgres, name: str, script: str, rounds: int, seconds: float
) -> Result:
    """32 pgbench clients with one row a transaction, in turns for each variant."""
    rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    behind: list[float] = []
    for _ in range(rounds):
        for variant, measured in rates.items():
            _capture_by(server.url, variant)
            execute(server.url, "truncate orders", FILL, "checkpoint")
            with _runner(server.url, variant), _reader(server.url):
                measured.append(pgbench(server, script, clients=WRITERS, seconds=seconds))
                if variant == "wal":
                    behind.append(_until_complete(server.url))
    share = ratios(rates["wal"], rates["without"])
    by_triggers = ratios(rates["trigger"], rates["without"])
    best = {variant: f"{max(measured):,.0f}/s" for variant, measured in rates.items()}
    return Result(
        f"32 writers, {name}, WAL / not captured",
        f"{share:.0%}",
        "at least 90 %",
        share >= 0.9,
        f"{best['without']} without, {best['wal']} from the WAL ({max(behind):.1f} s behind after"
        f" {seconds:.0f} s), {best['trigger']} by triggers ({by_triggers:.0%})",
    )


FILL = (
    "insert into orders (region, status, amount, note)"
    " select i % 500, 'open', i, 'a short note' from generate_series(1, 20000) i"
)


def _capture_by(url: str, variant: str) -> None:
    execute(url, "select headwater.disable_reactivity('orders')")
    execute(url, "alter sequence orders_id_seq restart")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("select headwater.end_wal_capture()")
        connection.execute("select headwater.drop_wal_slots(interval '0')")
        if variant != "without":
            connection.execute("select headwater.enable_reactivity('orders', %s)", (variant,))


@contextmanager
def _runner(url: str, variant: str) -> Iterator[None]:
    if variant != "wal":
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=_capture, args=(url,))
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _capture(url: str) -> None:
    asyncio.run(WalCapture(url).run())


def _until_complete(url: str) -> float:
    """Seconds until the log has everything that was committed."""
    started = time.perf_counter()
    with psycopg.connect(url, autocommit=True) as connection:
        upto = connection.execute("select pg_current_wal_insert_lsn()").fetchone()
        assert upto is not None
        while True:
            done = connection.execute(
                "select s.confirmed_flush_lsn >= %s from pg_replication_slots s"
                " join headwater.installation i on i.wal_slot = s.slot_name",
                upto,
            ).fetchone()
            if done == (True,):
                return time.perf_counter() - started
            time.sleep(0.01)


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    rounds, seconds = (1, 1.0) if tiny else ((7, 10.0) if large else (3, 3.0))
    with scratch_server() as server:
        asyncio.run(_install(server.url))
        return [
            writers(server, "inserts", SINGLE_ROW, rounds, seconds),
            writers(server, "updates", UPDATE, rounds, seconds),
        ]


async def _install(url: str) -> None:
    connection = await connect(url, purpose="benchmark", application_path=True)
    await schema.install(connection)
    await connection.execute(ORDERS.encode())
    await connection.close()


if __name__ == "__main__":
    report("What capture costs writers", run(large="--large" in sys.argv))
