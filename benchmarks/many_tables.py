"""A database with many tables: `python -m benchmarks.many_tables [--large]`.

How long until the lake has a snapshot of each, what the look at the catalog costs afterwards, and
what the lists of a lake with months of snapshots add to a request. The memory is that of this
process, which is the driver; Spark's own is beside it.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from benchmarks.measure import Result, report, scratch_server
from benchmarks.pipeline import database
from headwater.model import Position
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.jobs.snapshot_job import SnapshotJob
from headwater.pipeline.lake import snapshots
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.snapshots import catalog_marks
from headwater.pipeline.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAYS = 30


def run(spark: SparkSession, url: str, folder: Path, *, large: bool = False) -> list[Result]:
    tables, listed = (1_000, 5_000) if large else (20, 50)
    create_tables(url, tables)
    lake = Lake(str(folder / "lake"), spark)
    job = JobThread("snapshots", SnapshotJob(lake, url, events_max=100_000).step)
    before = _memory()
    seconds = _timed(job.work)
    taken = snapshots.load(lake.places)
    assert len(taken) == tables + 1, job.progress()
    assert sum(each.rows for each in taken) == 10 * tables
    marks = _timed(lambda: catalog_marks.present(url))
    few, many = _lists(folder, listed)
    return [
        Result(
            f"first snapshot of {tables:,} tables",
            f"{seconds:.1f} s",
            detail=f"{seconds / tables * 1e3:.1f} ms a table; {_memory() - before} MB more",
        ),
        Result(f"a look at the catalog of {tables:,} tables", f"{marks * 1e3:.0f} ms"),
        Result(
            f"the snapshots of one table, in a list of {listed:,} tables × {DAYS} days",
            f"{many * 1e3:.0f} ms",
            detail=f"{few * 1e3:.0f} ms in a list of one table",
        ),
    ]


def create_tables(url: str, count: int) -> None:
    """Captured tables of ten small rows each."""
    with psycopg.connect(url, autocommit=True) as connection:
        for number in range(count):
            name = f"t{number}"
            connection.execute(f"create table {name} (id int primary key, note text)".encode())
            connection.execute(
                f"insert into {name} select n, 'x' from generate_series(1, 10) n".encode()
            )
            connection.execute("select headwater.enable_reactivity(%s)", [name])


def _lists(folder: Path, tables: int) -> tuple[float, float]:
    """The time to find the snapshots of one table among those of one, and of many."""
    found = []
    for name, count in (("few", 1), ("many", tables)):
        lake = Lake(str(folder / name))
        snapshots.create(lake.places)
        start = datetime(2026, 1, 1, tzinfo=UTC)
        for day in range(DAYS):
            at = start + timedelta(days=day)
            position = Position("a", day + 1, day + 1)
            number = snapshots.number_of(at)
            made = [
                TableSnapshot(relation, number, position, at, 1, 10, "events")
                for relation in range(count)
            ]
            snapshots.add_to_list(lake.places, made)
        assert len(snapshots.load(lake.places, 0)) == DAYS
        found.append(min(_timed(lambda: snapshots.load(lake.places, 0)) for _ in range(5)))  # noqa: B023
    return found[0], found[1]


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    large = "--large" in sys.argv
    with (
        scratch_server(max_locks_per_transaction="256") as server,
        tempfile.TemporaryDirectory() as name,
    ):
        url = database(server.url, "many")
        spark = spark_session(Path(name, "spark"), master="local[2,4]", name="benchmark")
        spark.range(1).mapInArrow(lambda batches: batches, "id long").collect()
        report("Many tables", run(spark, url, Path(name), large=large))
        spark.stop()


if __name__ == "__main__":
    main()
