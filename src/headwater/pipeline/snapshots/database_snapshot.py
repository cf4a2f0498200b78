"""Reads captured tables as they are now, all in one snapshot of the database.

Snapshots of the lake and streaming views are built from it: it also has what the log lacks (rows
from before capture, a reset, a rewritten column).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
from psycopg import sql

from headwater import limits
from headwater.database import connect_blocking, translate, translated
from headwater.errors import CaptureError, HeadwaterError, TableLocked
from headwater.model import Column, Position, Table
from headwater.pipeline.snapshots import catalog_marks, reader
from headwater.pipeline.snapshots.catalog_marks import CatalogMark
from headwater.pipeline.snapshots.chunks import RowSource, StoredRelation, chunks_of
from headwater.pipeline.snapshots.reader import FORMATS, ExportedSnapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class NotCapturedError(CaptureError):
    """A table is not captured: its later changes would be unknown."""


class SnapshotTable(msgspec.Struct, frozen=True):
    """A captured table, and how its rows are read."""

    table: Table
    label: str
    source: RowSource
    catalog: CatalogMark


class DatabaseSnapshot:
    """One snapshot of the database: its position, its time, and its captured tables. `exported` is
    what Spark's tasks need to read it, while it is open."""

    def __init__(
        self,
        database: psycopg.Connection[Any],
        position: Position,
        at: datetime,
        exported: ExportedSnapshot,
    ) -> None:
        self._database = database
        self.position = position
        self.at = at
        self.exported = exported
        self.tables: dict[str | int, SnapshotTable] = {}

    def frame(self, spark: SparkSession, name: str | int) -> DataFrame:
        """The rows of a table (`key`, `image`, `shape`), read by Spark's tasks in this snapshot. It
        must be executed while the snapshot is open."""
        return reader.frame(spark, self.exported, chunks_of(self.tables[name].source))

    def rows(self, name: str | int, at_once: int) -> Iterator[tuple[list[str], list[str]]]:
        """Keys and images of a table's rows, at most `at_once` at a time."""
        with self._database.cursor("headwater_rows") as cursor:
            for chunk in chunks_of(self.tables[name].source):
                cursor.execute(chunk.statement.encode())
                while rows := cursor.fetchmany(at_once):
                    keys, images = zip(*rows, strict=True)
                    yield list(keys), list(images)


@contextmanager
def database_snapshot(
    url: str,
    names: Iterable[str | int],
    *,
    purpose: str = "",
    skipped: dict[str | int, HeadwaterError] | None = None,
) -> Iterator[DatabaseSnapshot]:
    """Open a snapshot of tables, each given by its name or relation. CaptureError for a table that
    is not captured, TableLocked for one that is being altered; with `skipped` it is put there
    instead."""
    with (
        translated(url),
        # The transaction is idle while Spark's tasks read, which may take hours.
        connect_blocking(url, purpose="pipeline", autocommit=False, has_timeouts=False) as database,
    ):
        labels = _captured(database, dict.fromkeys(names), purpose, skipped)
        database.commit()
        database.execute("set transaction isolation level repeatable read, read only")
        # Before the snapshot is taken, so that no table is altered in between.
        for name in list(labels):
            if (error := _lock(database, labels[name][1])) is not None:
                _refuse(name, error, skipped)
                del labels[name]
        for setting in FORMATS:
            database.execute(setting.encode())
        row = database.execute(_HERE).fetchone()
        assert row is not None
        log, snapshot, at, exported = row
        found = DatabaseSnapshot(
            database,
            Position.of_snapshot(log, snapshot),
            at.astimezone(UTC),
            ExportedSnapshot(url, exported),
        )
        described = _described(database, dict(labels.values()))
        found.tables = {name: described[relation] for name, (relation, _) in labels.items()}
        yield found


def _lock(database: psycopg.Connection[Any], label: str) -> HeadwaterError | None:
    """Lock a table, or say why that is not possible. The lock is not waited for very long: behind a
    statement that alters the table, further statements would wait for it, too."""
    milliseconds = f"{limits.SNAPSHOT_LOCK_SECONDS * 1000:.0f}"
    database.execute(f"set local lock_timeout = {milliseconds}".encode())
    try:
        with database.transaction():
            database.execute(sql.SQL("lock table {} in access share mode").format(sql.SQL(label)))
    except psycopg.errors.LockNotAvailable:
        return TableLocked(
            f"table {label} is being altered",
            hint="It is read when the statement that alters it has ended.",
        )
    except psycopg.errors.UndefinedTable as error:
        return translate(error)
    return None


def _refuse(
    name: str | int, error: HeadwaterError, skipped: dict[str | int, HeadwaterError] | None
) -> None:
    if skipped is None:
        raise error
    skipped[name] = error


def _captured(
    database: psycopg.Connection[Any],
    names: Iterable[str | int],
    purpose: str,
    skipped: dict[str | int, HeadwaterError] | None,
) -> dict[str | int, tuple[int, str]]:
    """The relation and label of each captured table."""
    relations = [name for name in names if isinstance(name, int)]
    rows = database.execute(_OF_RELATIONS, {"relations": relations}).fetchall()
    by_relation = dict(rows)
    found: dict[str | int, tuple[int, str]] = {}
    for name in names:
        if isinstance(name, int):
            label = by_relation.get(name)
            row = None if label is None else (name, label)
        else:
            row = database.execute(_OF_NAME, {"name": name}).fetchone()
        if row is not None:
            found[name] = row
            continue
        error = NotCapturedError(
            f"{purpose}{': ' if purpose else ''}table {name} is not captured",
            hint=f"Enable it first: headwater enable {name}",
        )
        _refuse(name, error, skipped)
    return found


def _described(
    database: psycopg.Connection[Any], labels: dict[int, str]
) -> dict[int, SnapshotTable]:
    relations = {"relations": list(labels)}
    stored: dict[int, list[StoredRelation]] = {relation: [] for relation in labels}
    for root, *fields in database.execute(_STORED, relations):
        stored[root].append(StoredRelation(*fields))
    marks = catalog_marks.read(database, labels)
    found = {}
    for relation, image, shape, description in database.execute(_DESCRIBE, relations):
        columns = msgspec.convert(description["columns"], tuple[Column, ...])
        table = Table(
            shape,
            description["schema"],
            description["name"],
            columns,
            tuple(description["key"]),
            relation,
        )
        parts = tuple(stored[relation])
        names = tuple(column.name for column in columns)
        is_simple = [part.oid for part in parts] == [relation]
        source = RowSource(relation, shape, image, table.key, () if is_simple else names, parts)
        found[relation] = SnapshotTable(table, labels[relation], source, marks[relation])
    return found


_OF_NAME = """
    select t.relid::bigint, t.relid::regclass::text
    from headwater.tables t join pg_class c on c.oid = t.relid
    where t.relid = headwater.find_table(%(name)s) and t.enabled
"""

_OF_RELATIONS = """
    select t.relid::bigint, t.relid::regclass::text
    from headwater.tables t join pg_class c on c.oid = t.relid
    where t.relid = any(%(relations)s::oid[]) and t.enabled
"""

_HERE = """
    select headwater.log_id(), pg_current_snapshot()::text, clock_timestamp(), pg_export_snapshot()
"""

# The relations with rows: a partitioned table itself has none.
_STORED = """
    with recursive members (root, oid) as (
      select r, r from unnest(%(relations)s::oid[]) r
      union
      select m.root, i.inhrelid from members m join pg_inherits i on i.inhparent = m.oid
    )
    select m.root::bigint, m.oid::bigint, m.oid::regclass::text,
           coalesce(pg_relation_filenode(m.oid), 0)::bigint,
           case when a.amname = 'heap' then
             pg_relation_size(m.oid) / current_setting('block_size')::bigint end,
           coalesce(pg_relation_size(m.oid) + pg_relation_size(nullif(c.reltoastrelid, 0)),
                    pg_relation_size(m.oid), 0)
    from members m join pg_class c on c.oid = m.oid left join pg_am a on a.oid = c.relam
    where c.relkind <> 'p' order by m.root, m.oid
"""

_DESCRIBE = """
    select r::bigint, headwater.image('o', r, r), headwater.shape_id(r), headwater.describe(r)
    from unnest(%(relations)s::oid[]) r
"""
