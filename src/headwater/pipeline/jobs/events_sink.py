"""Writes every change to the Delta table `events`, exactly once.

A batch of the log becomes one commit of `events`, together with the offset it reaches. Spark's
tasks read and write it, whatever its size: see `ingest`. Before the commit, the shapes of the
changed tables are saved, so that the lake can be read without the database. After it, the audit
roll-up of the batch is committed with the same offset.

The offset in `events` is the only truth about the progress. A start of the stream begins there, and
Spark's checkpoint lasts no longer than the stream. A batch that was read and not committed is
planned again, perhaps with another end. A batch must start where the table ends, so every batch is
committed, also one without events. After a crash between the two commits, the files whose offsets
`audit` lacks are counted at the next start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema

from headwater import limits
from headwater.errors import PipelineError
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.jobs.ingest import Target, write_parts
from headwater.pipeline.lake import audit, delta, maintenance
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.shapes import ShapeRecorder
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.checkpoints import Checkpoint
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.sink import StreamSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class EventsSink(StreamSink):
    """Writes batches to `events`, and their counts to `audit`. One for each start of the stream."""

    def __init__(self, lake: Lake, url: str, checkpoint: Checkpoint) -> None:
        self._lake = lake
        self._checkpoint = checkpoint
        self._table = delta.create(lake.events_path, STORED_EVENTS, ["day"])
        self._stored = delta.offset_of(self._table)
        self._audit = audit.AuditTable(lake.audit_path)
        self._shapes = ShapeRecorder(lake.shapes_path, url)
        self._contents: list[pa.Table] = []
        maintenance.clean_stage(lake.events_path)
        self._repair_audit()

    def write(self, parts: DataFrame, batch_id: int) -> int:
        self._check_start(batch_id)
        self._shapes.record_new()
        written = write_parts(parts, Target(self._lake.events_path, self._lake.audit_path))
        reached = _text(self._checkpoint.offset(batch_id))
        delta.append_files(
            self._table, written.events, after=self._stored, metadata={delta.OFFSET: reached}
        )
        self._stored = reached
        # The jobs must see it, also where the roll-up cannot be written now.
        if written.audit:
            self._contents.append(written.contents)
        failpoint("uncounted")
        if written.audit:
            self._audit.add(written.audit, reached)
        return int(pc.sum(written.contents.column("changes")).as_py() or 0)

    def contents(self) -> list[pa.Table]:
        found, self._contents = self._contents, []
        return found

    def _repair_audit(self) -> None:
        """Count what the roll-ups lack. Usually these are the files of one commit. All events are
        counted again in a lake from before there were roll-ups, and in one of which a part was
        restored."""
        counted = delta.offset_of(self._audit.table)
        if self._stored == counted:
            return
        files = None if counted is None else delta.files_after(self._table, counted)
        if files is None:
            self._audit.rebuild(self._lake.events(), self._stored)
        elif files:
            assert self._stored is not None
            schema = from_arrow_schema(STORED_EVENTS)
            found = delta.read_files(self._lake.spark, self._lake.events_path, schema, files)
            self._audit.add_events(found, self._stored)

    def close(self, seconds: float = limits.PIPELINE_STOP_SECONDS) -> None:
        self._shapes.close()

    def _check_start(self, batch_id: int) -> None:
        """To write a batch that starts elsewhere would lose changes or double them."""
        start = self._checkpoint.start(batch_id)
        is_first = self._stored is None and batch_id == 0
        if not is_first and (start is None or _text(start) != self._stored):
            raise PipelineError(
                f"batch {batch_id} of the checkpoint {self._checkpoint.path} does not start where"
                f" the lake ends: {self._stored or 'it has no events'}",
                hint="Let only one pipeline write to the lake. The next start continues from the "
                "lake.",
                retryable=True,
            )


def _text(offset: Offset) -> str:
    return msgspec.json.encode(offset.to_dict()).decode()
