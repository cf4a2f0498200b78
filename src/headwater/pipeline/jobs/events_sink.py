"""Writes every change to the Delta table `events`, exactly once.

A batch of the log becomes one commit of `events`, together with the offset it reaches. The driver
reads and writes a batch that is one part of the log, which takes milliseconds; Spark's tasks do it
for a larger one. Only the offsets of Spark's batch are used: see `ingest`. Before the commit, the
shapes of the changed tables are saved, so that the lake can be read without the database. After it,
the audit roll-up of the batch is committed under the same batch number.

The offset in `events` is the truth. A batch must start where the table ends, so every batch is
committed, also one without events. Where the checkpoint says otherwise, because one of the two was
copied or restored, it is removed: the stream continues from the table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater.errors import PipelineError
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.files import FileLocation
from headwater.pipeline.jobs.ingest import EventReader
from headwater.pipeline.lake import audit, delta, maintenance
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.parquet import write_files
from headwater.pipeline.lake.shapes import ShapeRecorder
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.checkpoints import Checkpoint
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.sink import StreamSink
from headwater.pipeline.stream.worker import LogSlice

if TYPE_CHECKING:
    from deltalake.transaction import AddAction
    from pyspark.sql import DataFrame, SparkSession


log = logging.getLogger(__name__)


class EventsSink(StreamSink):
    """Writes batches to `events`, and their counts to `audit`. One for each start of the stream."""

    def __init__(self, lake: Lake, url: str, checkpoint: Checkpoint) -> None:
        self._lake = lake
        self._checkpoint = checkpoint
        self._table = delta.create(lake.events_path, STORED_EVENTS, ["day"])
        self._stored = delta.offset_of(self._table)
        self._is_obsolete = checkpoint.exists and not self._continues()
        self._audit = audit.AuditTable(lake.audit_path)
        self._shapes = ShapeRecorder(lake.shapes_path, url)
        self._reader = EventReader(url, checkpoint)
        self._contents: list[pa.Table] = []
        maintenance.clean_stage(lake.events_path)
        self._repair_audit()

    @property
    def is_new_stream(self) -> bool:
        return self._is_obsolete

    def _continues(self) -> bool:
        """Whether the checkpoint's next batch starts where the table ends, or is its last one."""
        batch = self._checkpoint.next_batch
        if self._starts_at_end(batch) or self._is_last(batch):
            return True
        log.warning(
            "The checkpoint %s does not fit the lake, whose events end elsewhere: %s. The stream"
            " continues from there.",
            self._checkpoint.path,
            self._stored or "there are none",
        )
        return False

    def _starts_at_end(self, batch_id: int) -> bool:
        """Whether a batch starts where the table ends."""
        if self._stored is None:
            return batch_id == 0
        start = self._checkpoint.start(batch_id)
        return start is not None and _text(start) == self._stored

    def _is_last(self, batch_id: int) -> bool:
        """Whether the table ends with this batch."""
        if not self._checkpoint.has(batch_id):
            return False
        last = self._table.transaction_version(self._app_id)
        return last == batch_id and _text(self._checkpoint.offset(batch_id)) == self._stored

    @property
    def _app_id(self) -> str:
        return f"events/{self._checkpoint.query_id}"

    def write(self, batch: DataFrame, batch_id: int) -> int | None:
        app_id, reached = self._app_id, _text(self._checkpoint.offset(batch_id))
        if self._is_last(batch_id):
            if self._audit.holds(app_id, batch_id):
                return 0
            contents = audit.counted(self._reader.rows([part]) for part in self._parts(batch_id))
        else:
            self._check_start(batch_id)
            self._shapes.record_new()
            contents = self._append(batch.sparkSession, app_id, batch_id, reached)
        failpoint("uncounted")
        if contents.num_rows:
            self._audit.add(contents, app_id=app_id, batch_id=batch_id, offset=reached)
            self._contents.append(contents)
            maintenance.fold_when_due(self._audit.table, self._lake.audit_path)
        return int(pc.sum(contents.column("changes")).as_py() or 0)

    def contents(self) -> list[pa.Table]:
        found, self._contents = self._contents, []
        return found

    def _append(self, spark: SparkSession, app_id: str, batch_id: int, reached: str) -> pa.Table:
        """Append the events; returns their counts."""
        before = self._table.version()
        contents = self._append_parts(spark, app_id, batch_id, {delta.OFFSET: reached})
        maintenance.compact_when_due(self._table, before)
        return contents

    def _append_parts(
        self, spark: SparkSession, app_id: str, batch_id: int, metadata: dict[str, str]
    ) -> pa.Table:
        parts, path = self._parts(batch_id), self._lake.events_path
        if len(parts) > 1:
            rows, files = None, self._reader.write(spark, parts, path)
        else:
            rows = self._reader.rows(parts)
            files = write_files(path, rows, ["day"])
        delta.append_files(
            self._table,
            files,
            app_id=app_id,
            batch_id=batch_id,
            after=self._stored,
            metadata=metadata,
        )
        self._stored = metadata[delta.OFFSET]
        return audit.counted(self._read(files) if rows is None else [rows])

    def _parts(self, batch_id: int) -> list[LogSlice]:
        """The log between the end of the batch before and the end of this one."""
        start = self._checkpoint.offset(batch_id - 1) if batch_id else None
        return self._reader.parts(start, self._checkpoint.offset(batch_id))

    def _read(self, files: list[AddAction]) -> Iterator[pa.Table]:
        """The counted columns of the Parquet files: the batch is not executed again for them."""
        place = FileLocation.of(self._lake.events_path)
        for file in files:
            source = pq.ParquetFile(place.below(file.path), filesystem=place.system)
            with source:
                yield source.read(list(audit.NEEDED))

    def _repair_audit(self) -> None:
        """Count all events again where the roll-ups lack some and no batch will be repeated: in a
        lake from before there were roll-ups, and in one whose checkpoint was lost after a crash
        between the two commits."""
        stored, counted = self._stored, delta.offset_of(self._audit.table)
        exists = self._checkpoint.exists and not self._is_obsolete
        if stored == counted or (counted and exists):
            return
        app = None
        if exists:
            last = self._table.transaction_version(self._app_id)
            app = None if last is None else (self._app_id, last)
        self._audit.rebuild(self._lake.events(), app=app, offset=stored)

    def close(self) -> None:
        self._shapes.close()
        self._reader.close()

    def _check_start(self, batch_id: int) -> None:
        """To write a batch that starts elsewhere would lose changes or double them."""
        if not self._starts_at_end(batch_id):
            raise PipelineError(
                f"batch {batch_id} of the checkpoint {self._checkpoint.path} does not start where"
                f" the lake ends: {self._stored or 'it has no events'}",
                hint="Let only one pipeline write to the lake. The next start continues from the "
                "lake.",
                retryable=True,
            )


def _text(offset: Offset) -> str:
    return msgspec.json.encode(offset.to_dict()).decode()
