"""The metrics of a lake's files, after commits whose files and times are known."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headwater.errors import PipelineError
from headwater.metrics import PipelineMetrics
from headwater.pipeline.compaction import choice, tables
from headwater.pipeline.compaction.job import CompactionJob
from headwater.pipeline.compaction.measure import MEASURED, measure
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.parquet import write_files

SMALL = pa.table({"value": pa.array([b"x"], pa.binary())})


def large(size: int = choice.SMALL_BYTES) -> pa.Table:
    """A row that a file cannot make smaller."""
    return pa.table({"value": pa.array([os.urandom(size)], pa.binary())})


class Measured:
    """A lake, and its metrics."""

    def __init__(self, folder: Path) -> None:
        self.root = str(folder)
        self.metrics = PipelineMetrics()

    def append(self, name: str, rows: pa.Table) -> None:
        delta.create(f"{self.root}/{name}", rows.schema)
        delta.append_files(
            table := DeltaTable(f"{self.root}/{name}"),
            write_files(f"{self.root}/{name}", rows, []),
            after=delta.offset_of(table),
            metadata={},
        )

    def of(self, name: str) -> dict[str, float | None]:
        return {
            metric: self.metrics.registry.get_sample_value(
                f"headwater_pipeline_lake_{metric}", {"table": name}
            )
            for metric in ("files", "small_files", "bytes", "commit_timestamp_seconds")
        }

    def counts(self, name: str) -> tuple[float | None, float | None]:
        found = self.of(name)
        return found["files"], found["small_files"]

    def on_disk(self, name: str) -> list[int]:
        files = delta.file_sizes(DeltaTable(f"{self.root}/{name}"))
        return [next(Path(self.root, name).rglob(each)).stat().st_size for each in files]


@pytest.fixture
def lake(tmp_path: Path) -> Measured:
    return Measured(tmp_path)


def test_what_is_not_there_is_not_measured(lake: Measured) -> None:
    measure(lake.root, lake.metrics)
    assert {value for name in MEASURED for value in lake.of(name).values()} == {None}


def test_a_table_without_files(lake: Measured) -> None:
    """It is created by a commit, too."""
    before = time.time()
    delta.create(f"{lake.root}/gaps", SMALL.schema)
    measure(lake.root, lake.metrics)
    found = lake.of("gaps")
    committed = found.pop("commit_timestamp_seconds")
    assert found == {"files": 0, "small_files": 0, "bytes": 0}
    assert committed is not None
    assert before - 0.001 <= committed <= time.time()


def test_files_are_counted_by_table_and_size(lake: Measured) -> None:
    for rows in (SMALL, SMALL, large()):
        lake.append("events", rows)
    lake.append("snapshots/rows", large())
    lake.append("snapshots/list", SMALL)
    measure(lake.root, lake.metrics)
    assert lake.counts("events") == (3, 2)
    assert lake.counts("snapshots/rows") == (1, 0)
    assert lake.counts("snapshots/list") == (1, 1)
    assert lake.counts("audit") == (None, None)
    for name in ("events", "snapshots/rows", "snapshots/list"):
        assert lake.of(name)["bytes"] == sum(lake.on_disk(name))
    lake.append("events", SMALL)
    assert lake.counts("events") == (3, 2), "until it is measured again"
    measure(lake.root, lake.metrics)
    assert lake.counts("events") == (4, 3)


def test_files_that_were_removed_do_not_count(lake: Measured) -> None:
    for _ in range(5):
        lake.append("audit", SMALL)
    DeltaTable(f"{lake.root}/audit").optimize.compact()
    measure(lake.root, lake.metrics)
    assert lake.counts("audit") == (1, 1)
    DeltaTable(f"{lake.root}/audit").delete()
    measure(lake.root, lake.metrics)
    assert lake.counts("audit") == (0, 0)
    assert lake.of("audit")["bytes"] == 0


def test_the_time_is_that_of_the_last_commit(lake: Measured) -> None:
    times: list[float | None] = []
    moments = [time.time()]
    for _ in range(2):
        lake.append("events", SMALL)
        moments.append(time.time())
        measure(lake.root, lake.metrics)
        measure(lake.root, lake.metrics)  # without a commit in between
        times.append(lake.of("events")["commit_timestamp_seconds"])
    first, second = times
    assert first is not None
    assert second is not None
    # Delta has milliseconds.
    assert moments[0] - 0.001 <= first <= moments[1]
    assert moments[1] - 0.001 <= second <= moments[2]


def no_spark() -> Any:
    raise AssertionError("these files are small")


def test_the_job_measures_after_it_has_joined_files(
    lake: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "FILES_MAX", 4)
    for _ in range(6):
        lake.append("shapes", SMALL)
    job = JobThread("compaction", CompactionJob(lake.root, no_spark, lake.metrics).step)
    job.work()
    assert error_of(job) is None
    assert lake.counts("shapes") == (1, 1)
    lake.append("shapes", SMALL)
    job.work()
    assert lake.counts("shapes") == (1, 1), "not more often than it joins files"


def test_a_job_that_fails_measures_too(lake: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nobody would see that the files become many. It fails until it succeeds."""

    def refuse(*_: object) -> Any:
        raise PipelineError("the disk is full")

    monkeypatch.setattr(tables, "join_due", refuse)
    job = JobThread("compaction", CompactionJob(lake.root, no_spark, lake.metrics).step)
    for count in (1, 2, 3):
        lake.append("shapes", SMALL)
        job.work()
        assert error_of(job) == "the disk is full"
        assert lake.counts("shapes") == (count, count)
    monkeypatch.undo()
    job.work()
    assert error_of(job) is None


def error_of(job: JobThread) -> str | None:
    progress = job.progress()
    assert progress is not None
    return progress.error
