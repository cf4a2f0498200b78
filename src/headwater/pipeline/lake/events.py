"""The Delta table `events`: every change of the captured tables, partitioned by day.

This module knows its schema and turns changes of the log into its rows: with the day, and
without changes of Headwater's own tables. The same rules exist for Arrow (`event_rows`) and for
Spark (`event_frame`).
`headwater.pipeline.jobs.events_sink` writes the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from headwater.errors import PipelineError
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.moments import contained
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.worker import EVENTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OWN_SCHEMA = "headwater"
"""Changes of our own tables (the pipeline's progress is one) are not events."""

STORED_EVENTS = EVENTS.append(pa.field("day", pa.date32(), nullable=False))
"""An event as the lake stores it: `day` is the day of `committed_at`, and the partition."""


def event_rows(changes: pa.RecordBatch) -> pa.RecordBatch:
    """Changes as rows of `events`."""
    import pyarrow.compute as pc

    wanted = pc.not_equal(changes.column("schema_name"), OWN_SCHEMA)
    rows = changes if pc.all(wanted).as_py() else changes.filter(wanted)
    day = rows.column("committed_at").cast(pa.date32())
    return pa.RecordBatch.from_arrays([*rows.columns, day], schema=STORED_EVENTS)


def event_frame(changes: DataFrame) -> DataFrame:
    """Changes as rows of `events`, in Spark."""
    from pyspark.sql import functions as f

    wanted = changes.where(f.col("schema_name") != OWN_SCHEMA)
    return wanted.withColumn("day", f.to_date("committed_at"))


def after_offset(changes: DataFrame, begin: Offset | None) -> DataFrame:
    """The changes after an offset. One that lies inside a read leaves out the first part of that
    read."""
    from pyspark.sql import functions as f

    if begin is None or begin.until is None:
        return changes
    return changes.where(~(contained(begin.until) & (f.col("seq") <= begin.seq)))


def last_offset(path: str) -> Offset | None:
    """The offset up to which the table at the path has every event; None for a table without
    events. PipelineError where the table has events and its commits name no offset."""
    table = delta.open_table(path)
    if table is None:
        return None
    found = delta.offset_of(table)
    if found is None and not table.file_uris():
        return None
    if found is None:
        raise PipelineError(
            f"no commit of {path} says up to which position that table has events",
            hint="Restore the lake from a backup, or start with another one: --lake",
        )
    return Offset.from_dict(msgspec.json.decode(found))
