"""Snapshots: the rows of a table at a position, from which its state at other moments is computed.

The first snapshot is read from the database, because the log lacks rows from before capture. Later
ones are computed from the snapshot before and the events since. Rows are images, as in the events,
each with the shape it was written under. A snapshot exists once it is in the list, which is written
last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

import msgspec
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from headwater.model import Position
from headwater.pipeline.lake import delta, shapes
from headwater.pipeline.lake.database_snapshot import DatabaseSnapshot, database_snapshot
from headwater.pipeline.lake.parquet import writer_properties
from headwater.pipeline.stream.planning import Planner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SNAPSHOT_CHUNK_ROWS = 20_000
"""Rows that are taken from a table at a time when a snapshot of it is made."""


ROWS = pa.schema(
    [
        pa.field("relation", pa.int64(), nullable=False),
        pa.field("snapshot", pa.int64(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.string(), nullable=False),
        pa.field("shape", pa.int64(), nullable=False),
    ]
)

LIST = pa.schema(
    [
        pa.field("relation", pa.int64(), nullable=False),
        pa.field("snapshot", pa.int64(), nullable=False),
        pa.field("position", pa.string(), nullable=False),
        pa.field("taken_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("shape", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
    ]
)


class TableSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of a table: it has exactly the transactions of `position`."""

    relation: int
    snapshot: int
    position: Position
    taken_at: datetime
    shape: int
    rows: int
    origin: Literal["table", "events"]


class Places(msgspec.Struct, frozen=True):
    """The paths of the Delta tables that snapshots use."""

    rows: str
    list: str
    shapes: str


def load(places: Places) -> list[TableSnapshot]:
    """Every snapshot of the lake, the oldest first."""
    table = delta.open_table(places.list)
    if table is None:
        return []
    rows = table.to_pyarrow_table().to_pylist()
    found = [TableSnapshot(**(row | {"position": Position.parse(row["position"])})) for row in rows]
    return sorted(found, key=lambda snapshot: (snapshot.taken_at, snapshot.snapshot))


def write(places: Places, snapshot: TableSnapshot, rows: Iterator[pa.RecordBatch]) -> TableSnapshot:
    """Write a snapshot and count its rows. The batches have the columns `key`, `image` and
    `shape`."""
    relation, number = snapshot.relation, snapshot.snapshot
    counted = [0]

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in rows:
            counted[0] += batch.num_rows
            size = batch.num_rows
            ids = [pa.repeat(pa.scalar(each, pa.int64()), size) for each in (relation, number)]
            columns = [batch.column(name) for name in ("key", "image", "shape")]
            yield pa.RecordBatch.from_arrays([*ids, *columns], schema=ROWS)

    create(places)
    reader = pa.RecordBatchReader.from_batches(ROWS, batches())
    properties = writer_properties(ROWS.names)
    write_deltalake(places.rows, reader, mode="append", writer_properties=properties)
    return _listed(places, msgspec.structs.replace(snapshot, rows=counted[0]))


def write_frame(places: Places, snapshot: TableSnapshot, rows: DataFrame) -> TableSnapshot:
    """The same for rows in Spark: they do not pass through the driver."""
    from pyspark.sql import functions as f

    create(places)
    ids = {"relation": snapshot.relation, "snapshot": snapshot.snapshot}
    marks = [f.lit(value).cast("long").alias(name) for name, value in ids.items()]
    files = delta.append_frame(
        places.rows, rows.select(*marks, "key", "image", "shape"), blooms=True
    )
    counted = sum(msgspec.json.decode(file.stats)["numRecords"] for file in files or ())
    return _listed(places, msgspec.structs.replace(snapshot, rows=counted))


def create(places: Places) -> None:
    delta.create(places.rows, ROWS, ["relation", "snapshot"])
    delta.create(places.list, LIST)


def _listed(places: Places, snapshot: TableSnapshot) -> TableSnapshot:
    row = msgspec.structs.asdict(snapshot) | {"position": str(snapshot.position)}
    write_deltalake(places.list, pa.Table.from_pylist([row], LIST), mode="append")
    return snapshot


def number_of(at: datetime) -> int:
    """The number of a snapshot of that time: microseconds since 1970."""
    return int(at.timestamp() * 1_000_000)


def remove(places: Places, gone: Collection[TableSnapshot]) -> None:
    """Delete snapshots: first from the list, then their rows. Old rows of snapshots that were never
    finished are deleted, too."""
    table = delta.open_table(places.list)
    if table is None:
        return
    for each in gone:
        table.delete(f"relation = {each.relation} and snapshot = {each.snapshot}")
    listed = {(each.relation, each.snapshot) for each in load(places)}
    young = number_of(datetime.now(UTC) - timedelta(days=1))
    wanted = {(each.relation, each.snapshot) for each in gone}
    rows = DeltaTable(places.rows)
    for values in rows.partitions():
        pair = int(values["relation"]), int(values["snapshot"])
        if pair not in listed and (pair in wanted or pair[1] < young):
            rows.delete(f"relation = {pair[0]} and snapshot = {pair[1]}")


def take(places: Places, url: str, table: str | int) -> TableSnapshot:
    """Make a snapshot from the database of a table that is given by its name or relation.
    CaptureError unless it is captured: later changes would be unknown."""
    with database_snapshot(url, (table,)) as now:
        found = now.tables[table].table
        # Makes the position durable: a crash of the server must not lose what the lake has.
        with closing(Planner(url)) as planner:
            planner.now()
        shapes.save(places.shapes, [shapes.row_of(found, now.at)])
        number = number_of(now.at)
        snapshot = TableSnapshot(found.oid, number, now.position, now.at, found.id, 0, "table")
        return write(places, snapshot, _batches(now, table))


def _batches(now: DatabaseSnapshot, table: str | int) -> Iterator[pa.RecordBatch]:
    shape = pa.scalar(now.tables[table].table.id, pa.int64())
    for keys, images in now.rows(table, _SNAPSHOT_CHUNK_ROWS):
        arrays = [pa.array(keys, pa.string()), pa.array(images, pa.string())]
        names = ["key", "image", "shape"]
        yield pa.RecordBatch.from_arrays([*arrays, pa.repeat(shape, len(keys))], names=names)
