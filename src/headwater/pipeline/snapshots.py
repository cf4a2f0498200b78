"""Snapshots: the rows of a table at a position, from which its state at other moments is worked
out.

The first one is read from the table itself, in one snapshot of the database, because the log does
not tell of rows that were there before capture began. Later ones are folded from the one before
and the events since, without asking the database. The rows are images, as the events have them;
each knows the shape it was written under. A snapshot counts once it is in the list, which is
written last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import psycopg
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from psycopg import sql

from headwater.database import translated
from headwater.errors import CaptureError
from headwater.limits import CONNECT_TIMEOUT_SECONDS, SNAPSHOT_CHUNK_ROWS
from headwater.model import Position
from headwater.pipeline import delta, shapes
from headwater.pipeline.keys import key_expression
from headwater.pipeline.planning import Planner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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


class Snapshot(msgspec.Struct, frozen=True):
    """One of a table's snapshots: what it contains is what `position` contains."""

    relation: int
    snapshot: int
    position: Position
    taken_at: datetime
    shape: int
    rows: int
    origin: Literal["table", "events"]


class Places(msgspec.Struct, frozen=True):
    """Where the lake keeps what snapshots need."""

    rows: str
    list: str
    shapes: str


def load(places: Places) -> list[Snapshot]:
    """Every snapshot of the lake, the oldest first."""
    table = delta.open_table(places.list)
    if table is None:
        return []
    rows = table.to_pyarrow_table().to_pylist()
    found = [Snapshot(**(row | {"position": Position.parse(row["position"])})) for row in rows]
    return sorted(found, key=lambda snapshot: (snapshot.taken_at, snapshot.snapshot))


def write(places: Places, snapshot: Snapshot, rows: Iterator[pa.RecordBatch]) -> Snapshot:
    """Keep a snapshot; its rows are counted here. The batches have the columns `key`, `image` and
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
    properties = delta.writer_properties(ROWS.names)
    write_deltalake(places.rows, reader, mode="append", writer_properties=properties)
    return _listed(places, msgspec.structs.replace(snapshot, rows=counted[0]))


def write_frame(places: Places, snapshot: Snapshot, rows: DataFrame) -> Snapshot:
    """The same for rows that Spark has: they do not pass through the driver."""
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


def _listed(places: Places, snapshot: Snapshot) -> Snapshot:
    row = msgspec.structs.asdict(snapshot) | {"position": str(snapshot.position)}
    write_deltalake(places.list, pa.Table.from_pylist([row], LIST), mode="append")
    return snapshot


def number_of(at: datetime) -> int:
    """The number of a snapshot taken at that time: microseconds since 1970."""
    return int(at.timestamp() * 1_000_000)


def remove(places: Places, gone: Collection[Snapshot]) -> None:
    """Forget snapshots: first the list does. Rows that no list has, of a snapshot that was never
    finished, go too, once they are old."""
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


def take(places: Places, url: str, table: str | int) -> Snapshot:
    """Read the table itself, in one snapshot of the database. It is given by its name or relation.
    CaptureError unless it is captured: what came after could not be known."""
    with translated(url), psycopg.connect(url, connect_timeout=CONNECT_TIMEOUT_SECONDS) as database:
        relation, label = _captured(database, table)
        database.commit()
        database.execute("set transaction isolation level repeatable read, read only")
        # Before the snapshot is taken, so that nobody alters the table in between.
        database.execute(sql.SQL("lock table {} in access share mode").format(sql.SQL(label)))
        for setting in FORMATS:
            database.execute(setting)
        found = database.execute(_HERE, {"relation": relation}).fetchone()
        assert found is not None
        log, snapshot, taken_at, image, *shape = found
        position = Position.of_snapshot(log, snapshot)
        _wait_for_disk(url)
        shapes.save(places.shapes, [_shape_row(relation, taken_at, shape)])
        taken_at = taken_at.astimezone(UTC)
        number = number_of(taken_at)
        snapshot = Snapshot(relation, number, position, taken_at, shape[0], 0, "table")
        return write(places, snapshot, _rows(database, label, image, shape))


def _captured(database: psycopg.Connection[Any], table: str | int) -> tuple[int, str]:
    find = _FIND if isinstance(table, str) else _FIND_RELATION
    row = database.execute(find, {"name": table}).fetchone()
    if row is None or not row[2]:
        raise CaptureError(
            f"table {table} is not captured", hint=f"Enable it first: headwater enable {table}"
        )
    return row[0], row[1]


def _wait_for_disk(url: str) -> None:
    """The server must not forget in a crash what the lake remembers."""
    planner = Planner(url)
    try:
        planner.now()
    finally:
        planner.close()


def _shape_row(relation: int, first_seen: datetime, shape: list[Any]) -> dict[str, Any]:
    id_, schema_name, table_name, columns, key = shape
    return {
        "id": id_,
        "relation": relation,
        "schema_name": schema_name,
        "table_name": table_name,
        "columns": columns,
        "key": key,
        "first_seen": first_seen,
    }


def _rows(
    database: psycopg.Connection[Any], label: str, image: str, shape: list[Any]
) -> Iterator[pa.RecordBatch]:
    key = msgspec.json.decode(shape[4])
    statement = sql.SQL(
        "select {key}, i.image::text from (select {image} as image from {table} o) i"
    ).format(key=key_expression("i.image", key), image=sql.SQL(image), table=sql.SQL(label))
    with database.cursor("headwater_snapshot") as cursor:
        cursor.execute(statement)
        while rows := cursor.fetchmany(SNAPSHOT_CHUNK_ROWS):
            keys, images = zip(*rows, strict=True)
            arrays = [
                pa.array(keys, pa.string()),
                pa.array(images, pa.string()),
                pa.array([shape[0]] * len(rows), pa.int64()),
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=["key", "image", "shape"])


_FIND = """
    select t.relid::bigint, t.relid::regclass::text, t.enabled
    from headwater.tables t where t.relid = headwater.find_table(%(name)s)
"""

_FIND_RELATION = """
    select t.relid::bigint, t.relid::regclass::text, t.enabled
    from headwater.tables t join pg_class c on c.oid = t.relid where t.relid = %(name)s::oid
"""

# As capture pins them, so that the images are those that triggers would have written. With row
# security off, a role that may not see every row gets an error instead of some of them.
FORMATS = (
    "set local timezone = 'UTC'",
    "set local datestyle = 'ISO'",
    "set local intervalstyle = 'iso_8601'",
    "set local bytea_output = 'hex'",
    "set local extra_float_digits = 1",
    "set local lc_monetary = 'C'",
    "set local row_security = off",
)

_HERE = """
    select headwater.log_id(), pg_current_snapshot()::text, clock_timestamp(),
           headwater.image('o', %(relation)s::oid, %(relation)s::oid),
           headwater.shape_id(%(relation)s::oid), d ->> 'schema', d ->> 'name',
           (d -> 'columns')::text, (d -> 'key')::text
    from headwater.describe(%(relation)s::oid) d
"""
