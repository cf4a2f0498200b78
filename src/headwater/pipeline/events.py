"""Every change into the lake, exactly once.

A batch of the log becomes one commit of the Delta table `events`, with the position it reaches. One
that fits a single part of the log is read and written by the driver, which takes milliseconds; a
larger one by Spark's tasks. Of Spark's batch only the offsets are used: see `taking`. Before it,
the shapes that its changes have are kept in the lake, too: so the past can be read when the
database is gone. After it comes the roll-up of what it contained, in a commit of its own under the
same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC
from typing import TYPE_CHECKING

import msgspec
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import write_deltalake
from pyspark.sql import functions as f

from headwater.database import connect_blocking, translate
from headwater.errors import PipelineError
from headwater.pipeline import audit, delta, maintenance
from headwater.pipeline.checkpoints import Checkpoint
from headwater.pipeline.crashes import crash_point
from headwater.pipeline.files import Place
from headwater.pipeline.lake import Lake
from headwater.pipeline.offsets import Offset
from headwater.pipeline.reading import Part
from headwater.pipeline.shapes import SHAPES
from headwater.pipeline.sink import Sink
from headwater.pipeline.taking import OWN_SCHEMA, STORED, Taker

if TYPE_CHECKING:
    from deltalake.transaction import AddAction
    from pyspark.sql import DataFrame, SparkSession


def stored(changes: DataFrame) -> DataFrame:
    """Changes as the lake holds them: with the day, and without those of our own tables."""
    wanted = changes.where(f.col("schema_name") != OWN_SCHEMA)
    return wanted.withColumn("day", f.to_date("committed_at"))


def beyond(changes: DataFrame, begin: Offset | None) -> DataFrame:
    """Without what had been taken where the stream began inside a read: the rest of that read, and
    everything after it."""
    if begin is None or begin.until is None:
        return changes
    until = begin.until
    seen = (f.col("xid") < until.xmax) & ~f.col("xid").isin(list(until.xip))
    return changes.where(~(seen & (f.col("seq") <= begin.seq)))


class EventsSink(Sink):
    """Writes batches to `events`, and what they contained to `audit`. One for each start of the
    stream."""

    def __init__(self, lake: Lake, url: str, checkpoint: Checkpoint) -> None:
        self._lake = lake
        self._checkpoint = checkpoint
        self._table = delta.create(lake.events_path, STORED, ["day"])
        self._audit = audit.RollUps(lake.audit_path)
        self._shapes = Shapes(lake, url)
        self._taker = Taker(url, checkpoint)
        self._seen: list[pa.Table] = []
        maintenance.clean_stage(lake.events_path)
        self._count_anew()

    def write(self, batch: DataFrame, batch_id: int) -> int | None:
        app_id = f"events/{self._checkpoint.query_id}"
        reached = msgspec.json.encode(self._checkpoint.offset(batch_id).to_dict()).decode()
        if delta.knows(self._table, app_id, batch_id):
            self._check_same(app_id, batch_id, reached)
            if self._audit.holds(app_id, batch_id):
                return 0
            contents = audit.counted(self._taker.rows([part]) for part in self._parts(batch_id))
        else:
            self._shapes.keep_new()
            contents = self._append(batch.sparkSession, app_id, batch_id, reached)
        crash_point("uncounted")
        if contents.num_rows:
            self._audit.add(contents, app_id=app_id, batch_id=batch_id, offset=reached)
            self._seen.append(contents)
            maintenance.fold_when_due(self._audit.table, self._lake.audit_path)
        return int(pc.sum(contents.column("changes")).as_py() or 0)

    def seen(self) -> list[pa.Table]:
        found, self._seen = self._seen, []
        return found

    def _append(self, spark: SparkSession, app_id: str, batch_id: int, reached: str) -> pa.Table:
        """Append the events; returns what they are."""
        before = self._table.version()
        contents = self._append_parts(spark, app_id, batch_id, {delta.OFFSET: reached})
        maintenance.compact_when_due(self._table, before)
        return contents

    def _append_parts(
        self, spark: SparkSession, app_id: str, batch_id: int, metadata: dict[str, str]
    ) -> pa.Table:
        parts, path = self._parts(batch_id), self._lake.events_path
        if len(parts) > 1:
            rows, files = None, self._taker.write(spark, parts, path)
        else:
            rows = self._taker.rows(parts)
            files = delta.write_files(path, rows, ["day"])
        if files:
            delta.append_files(
                self._table, files, app_id=app_id, batch_id=batch_id, metadata=metadata
            )
        return audit.counted(self._read(files) if rows is None else [rows])

    def _parts(self, batch_id: int) -> list[Part]:
        """What lies between the end of the batch before and that of this one."""
        start = self._checkpoint.offset(batch_id - 1) if batch_id else None
        return self._taker.parts(start, self._checkpoint.offset(batch_id))

    def _read(self, files: list[AddAction]) -> Iterator[pa.Table]:
        """What of the Parquet is counted: the batch itself is not executed again for that."""
        place = Place.of(self._lake.events_path)
        for file in files:
            source = pq.ParquetFile(place.below(file.path), filesystem=place.system)
            with source:
                yield source.read(list(audit.NEEDED))

    def _count_anew(self) -> None:
        """A lake from before there were roll-ups, or one whose checkpoint is gone since a crash
        between the two commits: no batch will come again to be counted."""
        held, counted = delta.offset_of(self._table), delta.offset_of(self._audit.table)
        if held is None or held == counted or (counted and self._checkpoint.exists):
            return
        app = None
        if self._checkpoint.exists:
            app_id = f"events/{self._checkpoint.query_id}"
            last = self._table.transaction_version(app_id)
            app = None if last is None else (app_id, last)
        self._audit.rebuild(self._lake.events(), app=app, offset=held)

    def close(self) -> None:
        self._shapes.close()
        self._taker.close()

    def _check_same(self, app_id: str, batch_id: int, reached: str) -> None:
        """A batch that is in must be the last one, and end where that one ended. Otherwise the
        checkpoint has been put back, its batches are others, and leaving them out would lose
        changes."""
        last = self._table.transaction_version(app_id)
        if last != batch_id or delta.offset_of(self._table) != reached:
            raise PipelineError(
                f"the checkpoint {self._checkpoint.path} is older than the lake: it is at batch"
                f" {batch_id}, the lake at {last}",
                hint="Move the folder away: the stream then goes on after the last position that "
                "the lake itself has.",
            )


def last_offset(lake: Lake) -> Offset | None:
    """How far the events in the lake go; None for a lake without events. PipelineError where the
    lake has events and no longer says."""
    table = delta.open_table(lake.events_path)
    if table is None or table.version() == 0:
        return None
    found = delta.offset_of(table)
    if found is None:
        raise PipelineError(
            f"the checkpoint of {lake.events_path} is gone, and its commits do not say how far it"
            " goes",
            hint="Restore the checkpoint from a backup, or begin with another lake.",
        )
    return Offset.from_dict(msgspec.json.decode(found))


class Shapes:
    """The Delta table `shapes`, which has every shape that occurs in events once."""

    def __init__(self, lake: Lake, url: str) -> None:
        self._table = delta.create(lake.shapes_path, SHAPES)
        self._place = Place.of(lake.shapes_path)
        self._known = self._held()
        self._url = url
        self._connection: psycopg.Connection | None = None

    def _held(self) -> list[int]:
        place, known = self._place, list[int]()
        for action in self._table.file_uris():
            name = action.rpartition("/")[2]
            rows = pq.read_table(place.below(name), columns=["id"], filesystem=place.system)
            known += rows["id"].to_pylist()
        return known

    def keep_new(self) -> None:
        """Keep what is new. A change that can be read has its shape in the database."""
        try:
            found = self._connected().execute(_NEW_SHAPES, [self._known]).fetchall()
        except psycopg.Error as error:
            self.close()
            raise translate(error, self._url) from error
        if not found:
            return
        values = [(*each[:-1], each[-1].astimezone(UTC)) for each in found]
        columns = dict(zip(SHAPES.names, map(list, zip(*values, strict=True)), strict=True))
        write_deltalake(self._table, pa.table(columns, schema=SHAPES), mode="append")
        self._table.update_incremental()
        self._known += (each[0] for each in found)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> psycopg.Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect_blocking(self._url, purpose="pipeline")
        return self._connection


_NEW_SHAPES = """
    select distinct on (id) id, relid::bigint, schema_name, table_name, columns::text,
           to_json(key)::text, since
    from headwater.shapes where id <> all(%s) and schema_name <> 'headwater'
    order by id, since
"""
