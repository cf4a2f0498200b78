"""What tables looked like, kept in the lake, so that the past can be read when the log has been
trimmed or the database is gone.

A shape is never altered: its id is a hash of what it says. A table is known by its relation (oid);
names may pass from one table to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import write_deltalake

from headwater.database import connect_blocking, translated
from headwater.model import Column, Table
from headwater.pipeline import delta

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
"""What a table looked like: `columns` and `key` are JSON, as `headwater.shapes` has them."""


class Shape(msgspec.Struct, frozen=True):
    """A table as it was, and when something was first written under that shape."""

    table: Table
    first_seen: datetime


def record(path: str, url: str) -> int:
    """Keep the shapes that the database knows and the lake does not; returns how many."""
    return save(path, _of_database(url))


def _of_database(url: str) -> list[dict[str, Any]]:
    with (
        translated(url),
        connect_blocking(url, purpose="pipeline") as database,
    ):
        rows = database.execute(_ALL).fetchall()
    return [dict(zip(SHAPES.names, row, strict=True)) for row in rows]


def with_new(kept: Sequence[Shape], url: str) -> list[Shape]:
    """These shapes, and those of the database that are not among them."""
    ids = {shape.table.id for shape in kept}
    new = (_shape(row) for row in _of_database(url) if row["id"] not in ids)
    return sorted([*kept, *new], key=lambda shape: shape.first_seen)


def row_of(table: Table, first_seen: datetime) -> dict[str, Any]:
    """A shape as a row of the lake's."""
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
    """Keep those of the shapes that are new."""
    delta.create(path, SHAPES)
    known = {shape.table.id for shape in load(path)}
    new = [row for row in rows if row["id"] not in known]
    if new:
        write_deltalake(path, pa.Table.from_pylist(new, SHAPES), mode="append")
    return len(new)


def load(path: str) -> list[Shape]:
    """Every shape of the lake, once, in the order of their first use."""
    table = delta.open_table(path)
    if table is None:
        return []
    found: dict[int, Shape] = {}
    for row in table.to_pyarrow_table().to_pylist():
        shape = _shape(row)
        known = found.get(shape.table.id)
        if known is None or shape.first_seen < known.first_seen:
            found[shape.table.id] = shape
    return sorted(found.values(), key=lambda shape: shape.first_seen)


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


def named(shapes: Iterable[Shape], name: str) -> list[Shape]:
    """The shapes of tables that were ever called so: `orders`, `sales.orders`.

    >>> from datetime import UTC
    >>> table = Table(1, "public", "orders", (), ("id",), 7)
    >>> one = Shape(table, datetime(2026, 1, 1, tzinfo=UTC))
    >>> [s.table.oid for s in named([one], "orders")], named([one], "sales.orders")
    ([7], [])
    """
    plain = name.replace('"', "")
    wanted = (plain.removeprefix("public."), plain)
    return [shape for shape in shapes if shape.table.label in wanted]


_ALL = """
    select distinct on (id) id, relid::bigint, schema_name, table_name,
           columns::text, array_to_json(key)::text, since
    from headwater.shapes where schema_name <> 'headwater' order by id, since
"""
