"""Reads captured tables as they are now, all in one snapshot of the database.

Snapshots of the lake and streaming views are built from it: it also has what the log lacks (rows
from before capture, a reset, a rewritten column).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from headwater.database import connect_blocking, translated
from headwater.errors import CaptureError
from headwater.model import Column, Position, Table
from headwater.pipeline.lake.keys import key_expression


class SnapshotTable(msgspec.Struct, frozen=True):
    """A captured table: its shape, and the SQL expression for the image of a row."""

    table: Table
    image: str
    label: str


class DatabaseSnapshot:
    """One snapshot of the database: its position, its time, and its captured tables."""

    def __init__(self, database: psycopg.Connection[Any], position: Position, at: datetime) -> None:
        self._database = database
        self.position = position
        self.at = at
        self.tables: dict[str | int, SnapshotTable] = {}

    def rows(self, name: str | int, at_once: int) -> Iterator[tuple[list[str], list[str]]]:
        """Keys and images of a table's rows, at most `at_once` at a time."""
        found = self.tables[name]
        statement = sql.SQL(
            "select {key}, i.image::text from (select {image} as image from {table} o) i"
        ).format(
            key=key_expression("i.image", found.table.key),
            image=sql.SQL(found.image),
            table=sql.SQL(found.label),
        )
        with self._database.cursor("headwater_rows") as cursor:
            cursor.execute(statement)
            while rows := cursor.fetchmany(at_once):
                keys, images = zip(*rows, strict=True)
                yield list(keys), list(images)


@contextmanager
def database_snapshot(
    url: str, names: Iterable[str | int], *, purpose: str = ""
) -> Iterator[DatabaseSnapshot]:
    """Open a snapshot of tables, each given by its name or relation. CaptureError for a table that
    is not captured."""
    with (
        translated(url),
        connect_blocking(url, purpose="pipeline", autocommit=False) as database,
    ):
        labels = {name: _captured(database, name, purpose) for name in dict.fromkeys(names)}
        database.commit()
        database.execute("set transaction isolation level repeatable read, read only")
        # Before the snapshot is taken, so that no table is altered in between.
        for _, label in labels.values():
            database.execute(sql.SQL("lock table {} in access share mode").format(sql.SQL(label)))
        for setting in FORMATS:
            database.execute(setting)
        row = database.execute(_HERE).fetchone()
        assert row is not None
        log, snapshot, at = row
        found = DatabaseSnapshot(database, Position.of_snapshot(log, snapshot), at.astimezone(UTC))
        for name, (relation, label) in labels.items():
            found.tables[name] = _described(database, relation, label)
        yield found


def _captured(database: psycopg.Connection[Any], name: str | int, purpose: str) -> tuple[int, str]:
    find = _FIND if isinstance(name, str) else _FIND_RELATION
    row = database.execute(find, {"name": name}).fetchone()
    if row is None or not row[2]:
        raise CaptureError(
            f"{purpose}{': ' if purpose else ''}table {name} is not captured",
            hint=f"Enable it first: headwater enable {name}",
        )
    return row[0], row[1]


def _described(database: psycopg.Connection[Any], relation: int, label: str) -> SnapshotTable:
    row = database.execute(_DESCRIBE, {"relation": relation}).fetchone()
    assert row is not None
    image, shape, found = row
    columns = msgspec.convert(found["columns"], tuple[Column, ...])
    key = tuple(found["key"])
    return SnapshotTable(
        Table(shape, found["schema"], found["name"], columns, key, relation), image, label
    )


_FIND = """
    select t.relid::bigint, t.relid::regclass::text, t.enabled
    from headwater.tables t join pg_class c on c.oid = t.relid
    where t.relid = headwater.find_table(%(name)s)
"""

_FIND_RELATION = """
    select t.relid::bigint, t.relid::regclass::text, t.enabled
    from headwater.tables t join pg_class c on c.oid = t.relid where t.relid = %(name)s::oid
"""

# The settings of capture, so that images are the same as those that triggers write. With row
# security off, a role that may not see every row gets an error instead of a part of the rows.
FORMATS = (
    "set local timezone = 'UTC'",
    "set local datestyle = 'ISO'",
    "set local intervalstyle = 'iso_8601'",
    "set local bytea_output = 'hex'",
    "set local extra_float_digits = 1",
    "set local lc_monetary = 'C'",
    "set local row_security = off",
)

_HERE = "select headwater.log_id(), pg_current_snapshot()::text, clock_timestamp()"

_DESCRIBE = """
    select headwater.image('o', %(relation)s::oid, %(relation)s::oid),
           headwater.shape_id(%(relation)s::oid), headwater.describe(%(relation)s::oid)
"""
