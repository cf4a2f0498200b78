"""Takes a batch from the log to files of the lake, past Spark's rows.

What lies between two offsets is the same rows whoever reads it. So a batch need not come through
the JVM: the driver reads a small one, and Spark's tasks the parts of a large one, straight from the
server as Arrow, and write it as Parquet. Nobody sees those files until the batch is committed; what
a task wrote in vain, vacuum removes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headwater.pipeline.checkpoints import Checkpoint
from headwater.pipeline.offsets import Offset
from headwater.pipeline.planning import Planner
from headwater.pipeline.reading import EVENTS, Part, read

if TYPE_CHECKING:
    from deltalake.transaction import AddAction
    from pyspark.sql import SparkSession

OWN_SCHEMA = "headwater"
"""Changes of our own tables (the pipeline's progress is one) are not events."""

STORED = EVENTS.append(pa.field("day", pa.date32(), nullable=False))
"""An event as the lake holds it: `day` is that of `committed_at`, and the partition."""


class Taker:
    """Reads the batches of a stream."""

    def __init__(self, url: str, checkpoint: Checkpoint) -> None:
        self._planner = Planner(url)
        self._checkpoint = checkpoint

    @cached_property
    def _begin(self) -> Offset | None:
        """Where the stream began; known from its first batch on."""
        return self._checkpoint.begin

    def parts(self, start: Offset | None, end: Offset) -> list[Part]:
        """What a batch is made of. The first one of a stream has no `start`."""
        if start is None:
            begin = self._begin
            start = Offset(self._planner.beginning() if begin is None else begin.position)
        return self._planner.parts(start, end)

    def rows(self, parts: list[Part]) -> pa.Table:
        """The events, all of them here."""
        found = (stored(batch, self._begin) for part in parts for batch in read(part))
        return pa.Table.from_batches(found, STORED)

    def write(self, spark: SparkSession, parts: list[Part], path: str) -> list[AddAction]:
        """The events as files of the table at the path, written by Spark's tasks."""
        written = partial(_write, path=path, begin=self._begin)
        tasks = spark.sparkContext.parallelize(parts, len(parts))
        return [file for files in tasks.map(written).collect() for file in files]

    def close(self) -> None:
        self._planner.close()


def stored(changes: pa.RecordBatch, begin: Offset | None) -> pa.RecordBatch:
    """Changes as the lake holds them: with the day, without those of our own tables, and without
    what had been taken where the stream began inside a read."""
    wanted = pc.not_equal(changes.column("schema_name"), OWN_SCHEMA)
    if begin is not None and begin.until is not None:
        wanted = pc.and_(wanted, pc.invert(_taken(changes, begin)))
    kept = changes if pc.all(wanted).as_py() else changes.filter(wanted)
    day = kept.column("committed_at").cast(pa.date32())
    return pa.RecordBatch.from_arrays([*kept.columns, day], schema=STORED)


def _taken(changes: pa.RecordBatch, begin: Offset) -> Any:
    """Which of the changes lie before the cut that the stream began at."""
    assert begin.until is not None
    xid = changes.column("xid")
    running = pc.is_in(xid, pa.array(begin.until.xip, pa.int64()))
    seen = pc.and_(pc.less(xid, begin.until.xmax), pc.invert(running))
    return pc.and_(seen, pc.less_equal(changes.column("seq"), begin.seq))


def _write(part: Part, *, path: str, begin: Offset | None) -> list[AddAction]:
    """What a task does."""
    from headwater.pipeline import delta

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in read(part):
            yield stored(batch, begin)

    return delta.write_files(path, pa.Table.from_batches(batches(), STORED), ["day"])
