"""Every change into the lake, and back out of it: `python -m benchmarks.pipeline [--large]`.

Bulk and trickle run `headwater pipeline run` as users do, in a process of its own. A change counts
as visible when a process that only looks for the next Delta commit has found the one that contains
it; the time is from the return of the writer's COMMIT to that moment.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import msgspec
import psycopg
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import functions as f

from benchmarks import peers
from benchmarks.groups import Crowd
from benchmarks.measure import ORDERS, Result, execute, percentile, report, scratch_server
from headwater import Lake, Position, limits, spark_session
from headwater.capture.postgres import schema
from headwater.database import connect
from headwater.hub.hub import Hub
from headwater.live.query import LiveQuery
from headwater.pipeline.compaction.tables import compact
from headwater.pipeline.jobs.pipeline import run as run_pipeline
from headwater.pipeline.jobs.plan import PipelinePlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEED = 6
RATE = 5.0
"""Changes a second of the trickle."""
LOOK_SECONDS = 0.002
TRANSACTION_ROWS = 100_000
"""Changes of one transaction, where a few large ones are written."""
SETTINGS = {"low latency": "0 seconds", "default": "1 second"}


class Size(NamedTuple):
    """How much work a run does."""

    changes: int
    single: bool
    """Whether the same is done with a transaction for each change, too."""
    seconds: float
    settings: tuple[str, ...]
    rows: int
    histories: tuple[int, ...]


TINY = Size(2_000, False, 1.0, ("low latency",), 100, (200, 400, 1_000))
SMALL = Size(100_000, True, 15.0, tuple(SETTINGS), 10_000, (10_000, 100_000, 500_000))
LARGE = Size(1_000_000, True, 60.0, tuple(SETTINGS), 100_000, (100_000, 1_000_000, 5_000_000))


# ------------------------------------------------------------------------ a database, a pipeline


def database(server_url: str, name: str) -> str:
    """A new database with the table `orders`, captured."""

    async def install() -> None:
        connection = await connect(url, purpose="benchmark", application_path=True)
        await schema.install(connection)
        await connection.close()

    execute(server_url, f"create database {name}")
    url = urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
    asyncio.run(install())
    execute(url, ORDERS, "select headwater.enable_reactivity('orders')")
    return url


@contextmanager
def pipeline(
    url: str, lake: Path, *arguments: str, cache: str | Path | None = None, **settings: str
) -> Iterator[subprocess.Popen[str]]:
    """`headwater pipeline run`, ended with the block, or killed if that takes too long. `cache` is
    the folder for caches, which has the archive of Spark's classes; without it, the user's own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    environment |= {f"HEADWATER_{name.upper()}": value for name, value in settings.items()}
    environment["HEADWATER_URL"] = url
    if cache is not None:
        environment["XDG_CACHE_HOME"] = str(cache)
    command = [sys.executable, "-m", "headwater", "pipeline", "run"]
    command += ["--lake", str(lake), *arguments]
    log = lake.with_name(f"{lake.name}.log").open("w")
    with (
        log,
        subprocess.Popen(
            command, env=environment, text=True, stdout=log, stderr=log, cwd=lake.parent
        ) as run,
    ):
        try:
            yield run
        finally:
            if run.poll() is None:
                _end(run)


def _end(run: subprocess.Popen[str]) -> None:
    run.send_signal(signal.SIGTERM)
    try:
        run.wait(limits.PIPELINE_PROCESS_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        run.kill()
        raise


class Commit(NamedTuple):
    """A commit of `events`: when it was there, how many rows and which files it added."""

    at: float
    rows: int
    files: tuple[Path, ...]


def commits(lake: Path) -> list[Commit]:
    """The commits that added events, in their order."""
    found = []
    for path in sorted((lake / "events/_delta_log").glob("*.json")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if any("remove" in line for line in lines):
            continue
        added = [line["add"] for line in lines if "add" in line]
        rows = sum(json.loads(each["stats"])["numRecords"] for each in added)
        files = tuple(lake / "events" / each["path"] for each in added)
        if rows:
            found.append(Commit(path.stat().st_mtime, rows, files))
    return found


# ------------------------------------------------------------------------ bulk


def write_large(url: str, changes: int) -> None:
    """Transactions of many changes each."""
    with psycopg.connect(url, autocommit=True) as connection:
        for first in range(0, changes, TRANSACTION_ROWS):
            last = min(first + TRANSACTION_ROWS, changes)
            connection.execute(
                "insert into orders (region, status, amount, note)"
                " select i %% 500, 'open', i * 1.25, 'note number ' || i"
                " from generate_series(%s::int, %s::int) i",
                (first + 1, last),
            )


def write_single(url: str, changes: int) -> None:
    """A transaction for each change."""
    insert = (
        "insert into orders (region, status, amount, note)"
        " values (i % 500, 'open', i * 1.25, 'note number ' || i)"
    )
    # Not a usual way to write, but the quickest way to this many transactions.
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set synchronous_commit = off")
        connection.execute(
            f"do $$ begin for i in 1 .. {changes} loop {insert}; commit; end loop; end $$".encode()
        )


def bulk(url: str, lake: Path, changes: int, name: str, target: float | None) -> Result:
    """From the start of a cold process to the last commit; and by batch, without the first."""
    execute(url, "vacuum analyze headwater.log", "checkpoint")
    started = time.time()
    with pipeline(url, lake, "--once") as run:
        run.wait(600)
    made = commits(lake)
    rows = sum(commit.rows for commit in made)
    # Enabling a table is a change, too.
    assert rows == changes + 1, f"{rows} of {changes + 1} changes are in the lake"
    wall = rows / (made[-1].at - started)
    first = made[0].at - started
    detail = f"the first of {len(made)} batches after {first:.1f} s"
    if len(made) > 1:
        steady = (rows - made[0].rows) / (made[-1].at - made[0].at)
        detail = f"{steady:,.0f}/s steady; {detail}"
    return Result(
        f"{changes:,} changes → Delta, {name}",
        f"{wall:,.0f} changes/s",
        "at least 100,000/s for a million",
        None if target is None else wall >= target,
        detail,
    )


def size_of_events(spark: SparkSession, lake: Path) -> Result:
    """Bytes of an event in the lake when its files are joined, and as a line of JSON."""
    list(compact(str(lake), lambda: spark))
    table = DeltaTable(str(lake / "events"))
    files = [Path(each.removeprefix("file://")) for each in table.file_uris()]
    rows = sum(pq.read_metadata(each).num_rows for each in files)
    stored = sum(each.stat().st_size for each in files) / rows
    sample = table.to_pyarrow_dataset().head(10_000).to_pylist()
    lines = sum(len(msgspec.json.encode(row)) + 1 for row in sample) / len(sample)
    return Result(
        "an event in the lake",
        f"{stored:.1f} bytes",
        "less than its JSON",
        stored < lines,
        f"{lines:.0f} bytes as a line of JSON: {lines / stored:.0f} times as much",
    )


# ------------------------------------------------------------------------ trickle


def _look(folder: str, pipe: Pipe) -> None:
    """Report when each commit was first there, until stopped."""
    version, seen = 0, []
    while not pipe.poll(LOOK_SECONDS):
        while os.path.exists(f"{folder}/{version:020}.json"):
            seen.append((version, time.time()))
            version += 1
    pipe.send(seen)


@contextmanager
def looking(lake: Path) -> Iterator[dict[str, float]]:
    """When commits were there, by the names of their files, once the block has ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    folder = lake / "events/_delta_log"
    process = context.Process(target=_look, args=(str(folder), theirs), daemon=True)
    process.start()
    seen: dict[str, float] = {}
    try:
        yield seen
        ours.send(None)
        seen |= {f"{version:020}.json": at for version, at in ours.recv()}
    finally:
        process.terminate()
        process.join()


def trickle(url: str, lake: Path, seconds: float, setting: str) -> Result:
    """A change now and then."""
    with looking(lake) as seen, pipeline(url, lake, lake_interval=SETTINGS[setting]) as run:
        with psycopg.connect(url, autocommit=True) as connection:
            _await_first(connection, lake, run)
            time.sleep(min(seconds, 5.0))
            written = _write_slowly(connection, seconds)
        _await_rows(lake, len(written) + 2, run)
    visible = _visible(lake, seen)
    latencies = [(visible[row] - at) * 1e3 for row, at in written.items()]
    p50, p95 = percentile(latencies, 0.5), percentile(latencies, 0.95)
    low = setting == "low latency"
    return Result(
        f"commit → visible in Delta, {RATE:g} changes/s, {setting}",
        f"p50 {p50:.0f} ms, p95 {p95:.0f} ms",
        "p50 under 120 ms" if low else "p50 under 1,000 ms",
        p50 < (120 if low else 1_000),
        f"{len(latencies)} changes, [lake] interval {SETTINGS[setting]}",
    )


def _await_first(connection: psycopg.Connection, lake: Path, run: subprocess.Popen[str]) -> None:
    """Wait until the pipeline runs and has written: its one-time work is done."""
    connection.execute("insert into orders (id, region, status, amount) values (0, 1, 'open', 1)")
    _await_rows(lake, 2, run)


def _await_rows(lake: Path, rows: int, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while sum(commit.rows for commit in commits(lake)) < rows:
        if run.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(lake.with_name(f"{lake.name}.log").read_text())
        time.sleep(0.2)


def _write_slowly(connection: psycopg.Connection, seconds: float) -> dict[int, float]:
    """The times at which the COMMIT of each row returned."""
    written, rng = {}, random.Random(SEED)
    due = time.time()
    for row in range(1, max(2, round(seconds * RATE)) + 1):
        # Not in step with anything.
        due += rng.uniform(0.5, 1.5) / RATE
        time.sleep(max(0.0, due - time.time()))
        connection.execute(
            "insert into orders (id, region, status, amount, note)"
            " values (%s, 1, 'open', 1.25, 'a short note')",
            (row,),
        )
        written[row] = time.time()
    return written


def _visible(lake: Path, seen: dict[str, float]) -> dict[int, float]:
    """When each row was first there."""
    visible: dict[int, float] = {}
    for path in sorted((lake / "events/_delta_log").glob("*.json")):
        for line in map(json.loads, path.read_text().splitlines()):
            if "add" not in line:
                continue
            file = lake / "events" / line["add"]["path"]
            for key in pq.read_table(file, columns=["key"])["key"].to_pylist():
                if key is not None:
                    visible.setdefault(json.loads(key)["id"], seen[path.name])
    return visible


# ------------------------------------------------------------------------ as of


def as_of(spark: SparkSession, url: str, folder: Path, size: Size) -> Result:
    """A table of this many rows after histories of several lengths. Between its last snapshot and
    the moment lies the same number of events each time."""
    lake, tail = Lake(str(folder), spark), size.rows // 10
    rng = random.Random(SEED)
    write_large(url, size.rows)
    run_once(spark, url, lake)
    lake.snapshot(url, "orders")
    done, times = size.rows, []
    for events in size.histories:
        if events - done > tail:
            _update(url, rng, events - done - tail, size.rows)
            run_once(spark, url, lake)
            lake.fold_snapshot("orders", _reached(lake))
        _update(url, rng, tail, size.rows)
        run_once(spark, url, lake)
        done = max(done, events - tail) + tail
        times.append(_time_as_of(lake, url, size.rows))
    ratio = max(times) / min(times)
    text = ", ".join(f"{seconds * 1e3:.0f}" for seconds in times)
    return Result(
        f"as of: {size.rows:,} rows after {', '.join(f'{n:,}' for n in size.histories)} events",
        f"{text} ms",
        "flat within 2 times",
        ratio <= 2,
        f"{ratio:.2f} times; {tail:,} events after the snapshot",
    )


def run_once(spark: SparkSession, url: str, lake: Lake) -> None:
    run_pipeline(spark, PipelinePlan(url, lake, once=True), Event())


def _update(url: str, rng: random.Random, changes: int, rows: int) -> None:
    """Random rows, in transactions of as many changes as there are rows at most."""
    with psycopg.connect(url, autocommit=True) as connection:
        while changes > 0:
            count = min(changes, rows)
            first = rng.randrange(rows)
            connection.execute(
                "update orders set amount = amount + 1, updated_at = clock_timestamp()"
                " where (id + %s) %% %s < %s",
                (first, rows, count),
            )
            changes -= count


def _reached(lake: Lake) -> Position:
    reached = lake.reached()
    assert reached is not None
    return reached


def _time_as_of(lake: Lake, url: str, rows: int) -> float:
    """The best of a few."""
    times = []
    with psycopg.connect(url) as connection:
        truth = connection.execute("select count(*), sum(amount) from orders").fetchone()
    moment = _reached(lake)
    for _ in range(4):
        started = time.perf_counter()
        frame = lake.as_of("orders", moment)
        (found,) = frame.agg(f.count("*"), f.sum("amount")).collect()
        times.append(time.perf_counter() - started)
        assert tuple(found) == truth, f"{found} is not {truth}"
    return min(times[1:])


# ------------------------------------------------------------------------ a view

SHOP = """
from headwater import Headwater, views

hw = Headwater()


@hw.view(key=["region"])
def revenue(orders):
    total = views.sum("amount").alias("revenue")
    return orders.groupBy("region").agg(total, views.count().alias("orders"))
"""


def view(url: str, lake: Path, seconds: float) -> Result:
    """A change now and then, until a live query over an aggregate of them has received it."""
    lake.with_name("shop.py").write_text(SHOP)
    with pipeline(url, lake, "--app", "shop:hw") as run:
        latencies = asyncio.run(_received(url, round(seconds * RATE), run))
    p50, p95 = percentile(latencies, 0.5), percentile(latencies, 0.95)
    return Result(
        f"commit → live query over a view, {RATE:g} changes/s",
        f"p50 {p50:.0f} ms, p95 {p95:.0f} ms",
        "p50 under 150 ms",
        p50 < 150,
        f"{len(latencies)} changes, a sum and a count",
    )


async def _received(url: str, count: int, run: subprocess.Popen[str]) -> list[float]:
    crowd, rng = Crowd(), random.Random(SEED)
    connection = await connect(url, purpose="benchmark", application_path=True)
    while run.poll() is None:
        cursor = await connection.execute("select from headwater.views where state = 'live'")
        if cursor.rowcount:
            break
        await asyncio.sleep(0.2)

    async def write(row: int) -> None:
        await connection.execute(
            "insert into orders (id, region, status, amount) values (%s, 1, 'open', 1.25)", (row,)
        )

    async with Hub(url) as hub:
        await hub.live(LiveQuery.from_json({"table": "revenue"}), crowd)
        times = []
        for row in range(count + 10):
            times.append(await crowd.further(1, write(row)))
            await asyncio.sleep(rng.uniform(0.5, 1.5) / RATE)
    await connection.close()
    # The first ones wait for Java to compile.
    return times[10:]


# ------------------------------------------------------------------------ all of it


def run(
    *, large: bool = False, tiny: bool = False, spark: SparkSession | None = None
) -> list[Result]:
    size = TINY if tiny else (LARGE if large else SMALL)
    results: list[Result] = []
    with scratch_server() as server, tempfile.TemporaryDirectory(prefix="headwater-") as name:
        folder = Path(name)
        url = database(server.url, "bulk")
        write_large(url, size.changes)
        target = 100_000 if large else None
        results.append(bulk(url, folder / "bulk", size.changes, "large transactions", target))
        results.append(peers.dlt(url, folder / "dlt", size.changes))
        if size.single:
            url = database(server.url, "single")
            write_single(url, size.changes)
            results.append(bulk(url, folder / "single", size.changes, "one a transaction", target))
        for number, setting in enumerate(size.settings):
            url = database(server.url, f"trickle_{number}")
            results.append(trickle(url, folder / f"trickle_{number}", size.seconds, setting))
        url = database(server.url, "view")
        results.append(view(url, folder / "view", size.seconds))
        url = database(server.url, "history")
        with session(spark, folder) as chosen:
            results.append(size_of_events(chosen, folder / "bulk"))
            results.append(as_of(chosen, url, folder / "history", size))
    return results


@contextmanager
def session(spark: SparkSession | None, folder: Path) -> Iterator[SparkSession]:
    """The one given, or one for the block, whose Python processes have begun."""
    if spark is not None:
        yield spark
        return
    own = spark_session(folder / "spark", name="benchmark")
    try:
        own.range(1).mapInArrow(lambda batches: batches, "id long").collect()
        yield own
    finally:
        own.stop()


if __name__ == "__main__":
    report("The pipeline", run(large="--large" in sys.argv))
