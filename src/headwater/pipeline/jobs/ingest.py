"""Reads a batch from the log and writes it as files of the lake, without Spark's rows.

The rows between two offsets are the same for every reader. So a batch need not pass through the
JVM: the driver reads a small batch, and Spark's tasks read the parts of a large one, directly from
the server as Arrow, and write Parquet. The files are visible only after the batch is committed.
Files of a task that failed stay behind until vacuum removes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING

import pyarrow as pa

from headwater.pipeline.lake.events import STORED_EVENTS, event_rows
from headwater.pipeline.stream.checkpoints import Checkpoint
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from headwater.pipeline.stream.worker import LogSlice, read

if TYPE_CHECKING:
    from deltalake.transaction import AddAction
    from pyspark.sql import SparkSession


class EventReader:
    """Reads the batches of a stream."""

    def __init__(self, url: str, checkpoint: Checkpoint) -> None:
        self._planner = Planner(url)
        self._checkpoint = checkpoint

    @cached_property
    def _begin(self) -> Offset | None:
        """Where the stream began; set before its first batch."""
        return self._checkpoint.begin

    def parts(self, start: Offset | None, end: Offset) -> list[LogSlice]:
        """The parts of the log that a batch consists of. The first batch has no `start`."""
        if start is None:
            begin = self._begin
            start = Offset(self._planner.beginning() if begin is None else begin.position)
        return self._planner.parts(start, end)

    def rows(self, parts: list[LogSlice]) -> pa.Table:
        """All events of the parts, in this process."""
        found = (event_rows(batch, self._begin) for part in parts for batch in read(part))
        return pa.Table.from_batches(found, STORED_EVENTS)

    def write(self, spark: SparkSession, parts: list[LogSlice], path: str) -> list[AddAction]:
        """Write the events as files of the table at the path, with Spark's tasks."""
        written = partial(_write, path=path, begin=self._begin)
        tasks = spark.sparkContext.parallelize(parts, len(parts))
        return [file for files in tasks.map(written).collect() for file in files]

    def close(self) -> None:
        self._planner.close()


def _write(part: LogSlice, *, path: str, begin: Offset | None) -> list[AddAction]:
    """Runs in a task."""
    from headwater.pipeline.lake.parquet import write_files

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in read(part):
            yield event_rows(batch, begin)

    return write_files(path, pa.Table.from_batches(batches(), STORED_EVENTS), ["day"])
