"""Reads captured tables as they are now, all of them at one position.

A view is built from this, in one snapshot of the database: so it needs neither the lake nor to wait
for it, and whatever the log does not tell (rows from before capture, a reset, a rewritten column)
is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from headwater.database import translated
from headwater.errors import PipelineError
from headwater.limits import CONNECT_TIMEOUT_SECONDS
from headwater.model import Column, Position, Table
from headwater.pipeline.keys import key_expression
from headwater.pipeline.snapshots import FORMATS


class TableNow(msgspec.Struct, frozen=True):
    """A captured table as it is: its shape, and how an image of a row is written in SQL."""

    table: Table
    image: str
    label: str


class Reading:
    """One snapshot of the database."""

    def __init__(self, database: psycopg.Connection[Any], position: Position) -> None:
        self._database = database
        self.position = position
        self.tables: dict[str, TableNow] = {}

    def rows(self, name: str, at_once: int) -> Iterator[tuple[list[str], list[str]]]:
        """Keys and images of a table's rows, so many at a time."""
        found = self.tables[name]
        statement = sql.SQL(
            "select {key}, i.image::text from (select {image} as image from {table} o) i"
        ).format(
            key=key_expression("i.image", found.table.key),
            image=sql.SQL(found.image),
            table=sql.SQL(found.label),
        )
        with self._database.cursor("headwater_view") as cursor:
            cursor.execute(statement)
            while rows := cursor.fetchmany(at_once):
                keys, images = zip(*rows, strict=True)
                yield list(keys), list(images)


@contextmanager
def reading(url: str, names: tuple[str, ...], *, purpose: str) -> Iterator[Reading]:
    """Tables in one snapshot, each of them captured. PipelineError for one that is not."""
    with translated(url), psycopg.connect(url, connect_timeout=CONNECT_TIMEOUT_SECONDS) as database:
        labels = {name: _captured(database, name, purpose) for name in dict.fromkeys(names)}
        database.commit()
        database.execute("set transaction isolation level repeatable read, read only")
        # Before the snapshot is taken, so that nobody alters a table in between.
        for _, label in labels.values():
            database.execute(sql.SQL("lock table {} in access share mode").format(sql.SQL(label)))
        for setting in FORMATS:
            database.execute(setting)
        row = database.execute("select headwater.log_id(), pg_current_snapshot()::text").fetchone()
        assert row is not None
        found = Reading(database, Position.of_snapshot(*row))
        for name, (relation, label) in labels.items():
            found.tables[name] = _described(database, relation, label)
        yield found


def _captured(database: psycopg.Connection[Any], name: str, purpose: str) -> tuple[int, str]:
    row = database.execute(_FIND, {"name": name}).fetchone()
    if row is None or not row[2]:
        gone = row is None
        raise PipelineError(
            f"{purpose}: {'there is no captured table' if gone else 'no longer captured:'} {name}",
            hint=f"Enable it: headwater enable {name}",
        )
    return row[0], row[1]


def _described(database: psycopg.Connection[Any], relation: int, label: str) -> TableNow:
    row = database.execute(_DESCRIBE, {"relation": relation}).fetchone()
    assert row is not None
    image, shape, found = row
    columns = msgspec.convert(found["columns"], tuple[Column, ...])
    key = tuple(found["key"])
    return TableNow(
        Table(shape, found["schema"], found["name"], columns, key, relation), image, label
    )


_FIND = """
    select t.relid::bigint, t.relid::regclass::text, t.enabled
    from headwater.tables t join pg_class c on c.oid = t.relid
    where t.relid = headwater.find_table(%(name)s)
"""

_DESCRIBE = """
    select headwater.image('o', %(relation)s::oid, %(relation)s::oid),
           headwater.shape_id(%(relation)s::oid), headwater.describe(%(relation)s::oid)
"""
