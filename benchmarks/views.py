"""Streaming views: how long a build takes, what views cost at rest, and how fast they follow.

    python -m benchmarks.views [--large]
    python -m benchmarks.views build 1500000
    python -m benchmarks.views idle 30

At rest means that no row changes: memory (shared pages divided by those who share them), processes,
connections and processor time of the pipeline with all that it started, once every view is built.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from benchmarks.measure import Result, execute, percentile, report, scratch_server
from benchmarks.pipeline import database, pipeline
from benchmarks.processes import Usage, at_rest

BUILD = """
from headwater import Headwater, views

hw = Headwater({url!r})


@hw.view(key=["region", "status"])
def totals(orders):
    return orders.groupBy("region", "status").agg(
        views.count().alias("n"), views.sum("amount").alias("total"),
        views.max("amount").alias("largest"),
    )


@hw.view(key=["id"])
def open_orders(orders):
    return orders.where("status = 'open'").select("id", "region", "amount")
"""

IDLE = """
from headwater import Headwater, views

hw = Headwater({url!r})


def define(number):
    def totals(table):
        return table.groupBy("region").agg(
            views.count().alias("n"), views.sum("amount").alias("total")
        )

    hw.view(key=["region"], name=f"view_{{number}}", tables={{"table": f"t{{number}}"}})(totals)


for number in range({count}):
    define(number)
"""


CONNECTIONS = """
    select count(*) from pg_stat_activity
    where datname = current_database() and backend_type = 'client backend'
      and pid <> pg_backend_pid()
"""
"""Those of others to the database: of the pipeline, while nothing else uses it."""


class Size(NamedTuple):
    """How much is measured."""

    rows: int
    views: int
    changes: int


SMALL, LARGE = Size(20_000, 2, 3), Size(1_500_000, 30, 40)


def build(url: str, folder: Path, rows: int) -> Iterator[Result]:
    """The time that the pipeline itself logs, from the first read to the swap."""
    execute(
        url,
        "insert into orders (region, status, amount) select i % 1000,"
        " case when i % 3 = 0 then 'open' else 'done' end, (i % 10000) / 10.0"
        f" from generate_series(1, {rows}) i",
        "vacuum analyze orders",
    )
    (folder / "shop.py").write_text(BUILD.format(url=url))
    began, lake = time.monotonic(), folder / "lake"
    with pipeline(url, lake, "--once", "--app", "shop:hw") as run, Usage(run.pid) as usage:
        live = "select count(*) from headwater.views where state = 'live'"
        _await(run, lambda: one(url, live) == 2)
        seconds, cpu = time.monotonic() - began, usage.seconds()
    yield Result(
        f"Two views over {rows:,} rows, from the start of the command",
        f"{seconds:.1f} s",
        detail=f"{cpu:.0f} s of processor time; groups: {one(url, 'select count(*) from totals')}, "
        f"rows: {one(url, 'select count(*) from open_orders')}",
    )


def idle(url: str, folder: Path, count: int, changes: int) -> Iterator[Result]:
    """What views cost at rest, and the time from a commit to the row of a view."""
    for number in range(count):
        execute(
            url,
            f"create table t{number} (id int primary key, region text, amount numeric)",
            f"insert into t{number} select i, 'r' || i % 5, i from generate_series(1, 100) i",
            f"select headwater.enable_reactivity('t{number}')",
        )
    (folder / "shop.py").write_text(IDLE.format(url=url, count=count))
    with pipeline(url, folder / "idle", "--app", "shop:hw") as run:
        live = "select count(*) from headwater.views where state = 'live'"
        _await(run, lambda: one(url, live) == count)
        latencies = [_latency(url, number % count, 1000 + number) for number in range(changes)]
        time.sleep(5)
        rest, connections = at_rest(run.pid, 10), one(url, CONNECTIONS)
    yield Result(
        f"{count} views at rest",
        rest.memory_text,
        detail=f"{rest.processes} processes, {connections} connections, {rest.cpu_text}",
    )
    if latencies:
        yield Result(
            "From commit to the row of a view, p50",
            f"{1000 * percentile(latencies, 0.5):.0f} ms",
            detail=f"p90 {1000 * percentile(latencies, 0.9):.0f} ms",
        )


def _latency(url: str, view: int, id: int) -> float:
    with psycopg.connect(url, autocommit=True) as connection:
        query = f"select sum(n) from view_{view}".encode()
        (before,) = connection.execute(query).fetchone() or (0,)
        connection.execute(f"insert into t{view} values ({id}, 'r1', 1)".encode())
        began = time.monotonic()
        while connection.execute(query).fetchone() == (before,):
            if time.monotonic() > began + 60:
                raise RuntimeError(f"view_{view} does not follow its table")
            time.sleep(0.002)
        return time.monotonic() - began


def _await(run: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 900
    while not condition():
        if run.poll() not in (None, 0) or time.monotonic() > deadline:
            raise RuntimeError("the views were not built: see the log beside the lake")
        time.sleep(0.05)


def one(url: str, query: str) -> Any:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
        return None if row is None else row[0]


def run(*, large: bool = False) -> list[Result]:
    size = LARGE if large else SMALL
    with scratch_server() as server, tempfile.TemporaryDirectory(prefix="headwater-") as name:
        return [
            *build(database(server.url, "build"), Path(name), size.rows),
            *idle(database(server.url, "idle"), Path(name), size.views, size.changes),
        ]


def main() -> None:
    match sys.argv[1:]:
        case [("build" | "idle") as kind, number]:
            with (
                scratch_server() as server,
                tempfile.TemporaryDirectory(prefix="headwater-") as name,
            ):
                url, folder = database(server.url, kind), Path(name)
                try:
                    found = (
                        build(url, folder, int(number))
                        if kind == "build"
                        else idle(url, folder, int(number), 30)
                    )
                    report("Streaming views", list(found))
                except RuntimeError:
                    for log in folder.glob("*.log"):
                        print(log.read_text()[-4000:])
                    raise
        case rest:
            report("Streaming views", run(large="--large" in rest))


if __name__ == "__main__":
    main()
