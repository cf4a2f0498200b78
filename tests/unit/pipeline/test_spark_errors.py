"""Errors of Spark in jobs beside the streams: the line that says the cause is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import DatabaseError, PipelineError
from headwater.model import Column, Table
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reconcile import tables as comparisons
from headwater.pipeline.spark import log_file
from headwater.pipeline.spark_errors import explain
from headwater.pipeline.tables.job import _of_table

FRAME = """  File "/opt/python3.11/site-packages/headwater/pipeline/snapshots/reader.py", line 97
    yield from self._read(chunk)
"""
WORKER = f"""An exception was thrown from the Python worker:
Traceback (most recent call last):
{FRAME * 20}ValueError: the file is damaged
  at its end:
'PAR'
"""
JAVA = """An error occurred while calling o193.collectToPython.
: org.apache.spark.SparkException: Encountered error while reading file file:/lake/a.parquet.
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.cannotReadFilesError(Query.scala:920)
Caused by: java.lang.RuntimeException: file:/lake/a.parquet is not a Parquet file
\tat org.apache.parquet.hadoop.ParquetFileReader.readFooter(ParquetFileReader.java:557)
\t... 26 more
"""
CAUSES = [
    (WORKER, "ValueError: the file is damaged"),
    (JAVA, "java.lang.RuntimeException: file:/lake/a.parquet is not a Parquet file"),
]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log file of Spark."""
    monkeypatch.setattr(log_file, "_current", tmp_path / "_spark.log")
    return tmp_path / "_spark.log"


@pytest.mark.parametrize(("text", "cause"), CAUSES)
def test_a_job_reports_the_cause(text: str, cause: str, path: Path) -> None:
    def fail(_: JobThread) -> None:
        raise RuntimeError(text)

    job = JobThread("snapshots", fail)
    job.work()
    progress = job.progress()
    assert progress is not None
    assert progress.error == f"job snapshots failed: {cause}"
    assert job.failure is not None
    assert job.failure.hint == f"The whole error is in {path}."
    assert text in path.read_text()


@pytest.mark.parametrize(("text", "cause"), CAUSES)
def test_typed_tables_report_the_cause(text: str, cause: str, path: Path) -> None:
    table = Table(1, "public", "orders", (Column("id", "integer", "integer"),), ("id",))
    found = _of_table(table, RuntimeError(text))
    assert str(found) == f"the typed tables of orders: their merge failed: {cause}"
    assert found.hint == f"The whole error is in {path}."


@pytest.mark.parametrize(("text", "cause"), CAUSES)
def test_a_comparison_reports_the_cause(
    text: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(comparisons, "database_snapshot", fail)
    found = comparisons._outcome(Lake(str(tmp_path)), "", 1, "orders", False)
    assert (found.outcome, found.error) == ("failed", f"the comparison failed: {cause}")


def test_errors_of_headwater_stay_what_they_are(path: Path) -> None:
    own = PipelineError("no", hint="Wait.")
    assert explain(own, "it") is own
    found = explain(RuntimeError(f"{WORKER}headwater.errors.DatabaseError: gone\n"), "it")
    assert (type(found), str(found)) == (DatabaseError, "gone")
    full = explain(RuntimeError("Caused by: java.io.IOException: No space left on device"), "it")
    assert str(full) == "the disk is full: it cannot write"
    assert not path.exists()
