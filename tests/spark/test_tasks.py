"""Spark's tasks read the log and write the lake; the driver plans and commits. The same on a
cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headwater.pipeline.lake import parquet, snapshots
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.snapshots import reader
from headwater.pipeline.snapshots.database_snapshot import DatabaseSnapshot
from headwater.pipeline.stream import worker
from headwater.pipeline.stream.planning import _SPARK_PART_CHANGES
from tests.support.databases import passable_folder
from tests.support.lake.tables import execute, files_of, in_lake, logged, make_orders, run_once
from tests.support.spark_cluster import spark_cluster

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def orders(url: str) -> str:
    make_orders(url)
    return url


def insert(url: str, first: int, last: int) -> None:
    execute(url, f"insert into orders select i, i, 'n' from generate_series({first}, {last}) i")


def tasks_of(spark: SparkSession) -> dict[str, int]:
    """The tasks that each executor has completed."""
    java: Any = spark.sparkContext._jsc
    executors = java.sc().statusStore().executorList(True)
    found = (executors.apply(at) for at in range(executors.size()))
    return {each.id(): each.completedTasks() for each in found}


def counted(lake: Lake) -> int:
    lines = DeltaTable(lake.audit_path).to_pyarrow_table(columns=["changes"])
    return sum(lines.column("changes").to_pylist())


def keep_driver_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver fails where it reads rows of the log, of a table or of events, or writes a file of
    rows itself."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the driver carries data")

    def without_events(read: Any) -> Any:
        def checked(*arguments: Any, **named: Any) -> Any:
            if "/events/" in str((arguments, named)):
                refuse()
            return read(*arguments, **named)

        return checked

    monkeypatch.setattr(pq.ParquetFile, "__init__", without_events(pq.ParquetFile.__init__))
    monkeypatch.setattr(pads, "dataset", without_events(pads.dataset))
    monkeypatch.setattr(worker, "_executed", refuse)
    monkeypatch.setattr(reader.ChunkReader, "__init__", refuse)
    monkeypatch.setattr(DatabaseSnapshot, "rows", refuse)
    monkeypatch.setattr(parquet._PartitionFile, "__init__", refuse)


@pytest.fixture
def idle_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_driver_idle(monkeypatch)


@pytest.mark.usefixtures("idle_driver")
@pytest.mark.parametrize("changes", [5, _SPARK_PART_CHANGES + 5])
def test_tasks_carry_batches_of_every_size(
    changes: int, spark: SparkSession, orders: str, lake: Lake
) -> None:
    insert(orders, 1, changes)
    before = tasks_of(spark)["driver"]  # the only executor of a local Spark
    run_once(spark, orders, lake)
    parts = -(-changes // _SPARK_PART_CHANGES)
    assert tasks_of(spark)["driver"] - before >= parts
    assert in_lake(lake) == logged(orders)
    assert len(files_of(lake.events_path)) == len(files_of(lake.audit_path)) == parts
    assert counted(lake) == len(logged(orders))
    assert [each.rows for each in snapshots.load(lake.places)] == [changes]
    # The next start counts the changes since the snapshot.
    insert(orders, changes + 1, 2 * changes)
    run_once(spark, orders, lake, snapshot_events=1)
    assert in_lake(lake) == logged(orders)
    assert [each.rows for each in snapshots.load(lake.places)] == [changes, 2 * changes]


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Lake:
    return Lake(str(tmp_path / "lake"), spark)


PROGRAM = """
import json, sys
import pytest
from headwater import Lake, spark_session
from tests.spark.test_tasks import keep_driver_idle, tasks_of
from tests.support.lake.tables import run_once

url, master, folder = sys.argv[1:]
settings = {
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}
spark = spark_session(folder + "/spark", master=master, name="tests", settings=settings)
java = spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
assert "-XX:+ExitOnOutOfMemoryError" in list(java.getInputArguments())
keep_driver_idle(pytest.MonkeyPatch())
run_once(spark, url, Lake(folder + "/lake", spark))
print(json.dumps(tasks_of(spark)))
spark.stop()
"""


def test_tasks_of_a_cluster(orders: str) -> None:
    insert(orders, 1, _SPARK_PART_CHANGES + 5)
    with passable_folder() as folder, spark_cluster(folder) as master:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, orders, master, str(folder)],
            env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"},
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        lake = Lake(str(folder / "lake"))
        assert in_lake(lake) == logged(orders)
        assert counted(lake) == len(logged(orders))
        assert len(files_of(lake.events_path)) == 2
        (snapshot,) = snapshots.load(lake.places)
        assert snapshot.rows == _SPARK_PART_CHANGES + 5
        images = DeltaTable(lake.places.rows).to_pyarrow_table(columns=["image"])["image"]
        assert sorted(json.loads(each)["id"] for each in images.to_pylist()) == list(
            range(1, snapshot.rows + 1)
        )
    tasks = json.loads(done.stdout.splitlines()[-1])
    assert tasks.pop("driver") == 0
    assert sum(tasks.values()) >= 3  # two for the events, and one for the snapshot
