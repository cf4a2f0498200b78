"""The Delta table `shapes`: the columns and keys that tables had, so that the past can be read
without the log and without the database.

A shape never changes: its id is a hash of its contents. A table is identified by its relation
(oid), because a name may pass from one table to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

from headwater.database import connect_blocking, translate, translated
from headwater.model import Column, Table
from headwater.pipeline.files import FileLocation
from headwater.pipeline.lake import delta

SHAPES = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("relation", pa.int64(), nullable=False),
        pa.field("schema_name", pa.string(), nullable=False),
        pa.field("table_name", pa.string(), nullable=False),
        pa.field("columns", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("first_seen", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""The shape of a table: `columns` and `key` are JSON, as in `headwater.shapes`."""


class Shape(msgspec.Struct, frozen=True):
    """The shape of a table, and the time of its first change."""

    table: Table
    first_seen: datetime


def record(path: str, url: str) -> int:
    """Save the shapes of the database that the lake lacks; returns how many."""
    return save(path, _of_database(url))


def _of_database(url: str, name: str | None = None) -> list[dict[str, Any]]:
    with (
        translated(url),
        connect_blocking(url, purpose="pipeline") as database,
    ):
        labels = None if name is None else list(_labels(name))
        rows = database.execute(_ALL, {"labels": labels}).fetchall()
    return [dict(zip(SHAPES.names, row, strict=True)) for row in rows]


def with_new(stored: Sequence[Shape], url: str, name: str | None = None) -> list[Shape]:
    """These shapes, and the new ones of the database; with a name, of the tables that had it."""
    ids = {shape.table.id for shape in stored}
    new = (_shape(row) for row in _of_database(url, name) if row["id"] not in ids)
    return sorted([*stored, *new], key=lambda shape: shape.first_seen)


def row_of(table: Table, first_seen: datetime) -> dict[str, Any]:
    """A shape as a row of the Delta table."""
    return {
        "id": table.id,
        "relation": table.oid,
        "schema_name": table.schema,
        "table_name": table.name,
        "columns": msgspec.json.encode(table.columns).decode(),
        "key": msgspec.json.encode(table.key).decode(),
        "first_seen": first_seen,
    }


def save(path: str, rows: Sequence[dict[str, Any]]) -> int:
    """Save the shapes that are new; returns how many."""
    table = delta.create(path, SHAPES)
    known = set(delta.read_arrow(table, SHAPES)["id"].to_pylist())
    new = [row for row in rows if row["id"] not in known]
    if new:
        write_deltalake(path, pa.Table.from_pylist(new, SHAPES), mode="append")
    return len(new)


def load(path: str, table: str | int | None = None) -> list[Shape]:
    """Every shape of the lake once, in the order of first use; or the shapes of one relation, or of
    the tables that ever had a name. The others are not decoded, because there may be many."""
    stored = delta.open_table(path)
    if stored is None:
        return []
    match table:
        case int():
            where = f"relation = {table}"
        case str():
            where = _of_tables(table)
        case _:
            where = "true"
    found: dict[int, Shape] = {}
    for row in delta.rows_of_table(stored, SHAPES, where):
        shape = _shape(row)
        known = found.get(shape.table.id)
        if known is None or shape.first_seen < known.first_seen:
            found[shape.table.id] = shape
    return sorted(found.values(), key=lambda shape: shape.first_seen)


def _of_tables(name: str) -> str:
    """The condition for the rows of every table that has the name in one of them."""
    label = "case schema_name when 'public' then '' else schema_name || '.' end || table_name"
    labels = ", ".join(map(delta.quoted, _labels(name)))
    return f"relation in (select relation from stored where {label} in ({labels}))"


def _labels(name: str) -> tuple[str, ...]:
    """The labels that a table of this name may have. A name may have quotes in it, or around it."""
    plain = name.replace('"', "")
    return plain.removeprefix("public."), plain, name.removeprefix("public."), name


def _shape(row: dict[str, Any]) -> Shape:
    table = Table(
        row["id"],
        row["schema_name"],
        row["table_name"],
        msgspec.json.decode(row["columns"], type=tuple[Column, ...]),
        msgspec.json.decode(row["key"], type=tuple[str, ...]),
        row["relation"],
    )
    return Shape(table, row["first_seen"])


class ShapeRecorder:
    """Saves new shapes for the events stream, over a connection that stays open."""

    def __init__(self, path: str, url: str) -> None:
        self._table = delta.create(path, SHAPES)
        self._place = FileLocation.of(path)
        self._known = self._stored()
        self._url = url
        self._connection: psycopg.Connection | None = None

    def _stored(self) -> list[int]:
        place, known = self._place, list[int]()
        for action in self._table.file_uris():
            name = action.rpartition("/")[2]
            rows = pq.read_table(place.below(name), columns=["id"], filesystem=place.system)
            known += rows["id"].to_pylist()
        return known

    def record_new(self) -> None:
        """Save the shapes that the lake does not have. Every change that can be read has its shape
        in the database."""
        try:
            found = self._connected().execute(_NEW, [self._known]).fetchall()
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


def named(shapes: Iterable[Shape], name: str) -> list[Shape]:
    """The shapes of tables that ever had this name: `orders`, `sales.orders`.

    >>> from datetime import UTC
    >>> table = Table(1, "public", "orders", (), ("id",), 7)
    >>> one = Shape(table, datetime(2026, 1, 1, tzinfo=UTC))
    >>> [s.table.oid for s in named([one], "orders")], named([one], "sales.orders")
    ([7], [])
    """
    wanted = _labels(name)
    return [shape for shape in shapes if shape.table.label in wanted]


_ALL = """
    select distinct on (id) id, relid::bigint, schema_name, table_name,
           columns::text, array_to_json(key)::text, since
    from headwater.shapes
    where schema_name <> 'headwater' and (%(labels)s::text[] is null or relid in (
      select relid from headwater.shapes
      where case schema_name when 'public' then table_name else schema_name || '.' || table_name end
            = any(%(labels)s)))
    order by id, since
"""

_NEW = """
    select distinct on (id) id, relid::bigint, schema_name, table_name, columns::text,
           to_json(key)::text, since
    from headwater.shapes where id <> all(%s) and schema_name <> 'headwater'
    order by id, since
"""
