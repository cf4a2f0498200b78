"""SQLite as a source: the queue that triggers fill, read by polling and by notification.

Any program may write to the file. `start` makes the queue and the triggers, `changes` reads it,
`acknowledge` deletes what was read, in small transactions that hold the write lock briefly. One
connection reads changes, another does the rest; each has a thread of its own.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from headwater.capture.source import (
    Chunk,
    Health,
    Item,
    Problem,
    Progress,
    SchemaChange,
    SourceDefinition,
    SourceKey,
    SourceTable,
    TableDropped,
    TableSpec,
    TransactionPart,
)
from headwater.capture.sqlite.changes import Misfits
from headwater.capture.sqlite.connection import Busy, FileConnection, FileReplaced, path_of
from headwater.capture.sqlite.copying import read_chunk
from headwater.capture.sqlite.notification import POLL_SECONDS_MAX, POLL_SECONDS_MIN, FileWatch
from headwater.capture.sqlite.position import QueuePosition
from headwater.capture.sqlite.queue import Queue
from headwater.capture.sqlite.reading import Announced, Poll, QueueReader, poll, time_of
from headwater.capture.sqlite.shapes import find_specs, read_shape, refusal, virtual_tables
from headwater.capture.sqlite.statements import quoted
from headwater.errors import ConfigError, SourceError, SourceRefused

BUSY_SECONDS = 5.0
"""How long a statement waits for the lock of another program."""

DELETE_ROWS = 500
"""Queue rows that one transaction deletes, so that writers wait a few milliseconds at most."""

DELETE_SECONDS = 1.0
"""Fewer acknowledged rows than that are deleted this often."""

QUEUE_ROWS_WARN = 1_000_000

VERSION_MIN = (3, 35, 0)


class SqliteSource:
    kind = "sqlite"
    filters_rows = False

    def __init__(self, definition: SourceDefinition) -> None:
        unknown = set(definition.options) - {"busy_seconds"}
        if unknown:
            raise ConfigError(
                f"a SQLite source has no option {sorted(unknown)[0]!r}", hint="It has busy_seconds."
            )
        self._definition = definition
        self._busy_seconds = float(definition.options.get("busy_seconds", BUSY_SECONDS))
        self._path = path_of(definition.url)
        self._queue = Queue(definition.name)
        self._misfits = Misfits()
        self._main = FileConnection(self._path, self._busy_seconds)
        self._deleted, self._deleted_at = 0, 0.0

    # ------------------------------------------------------------ before the start

    async def check(self) -> list[Problem]:
        try:
            return await self._main.run(self._problems)
        except SourceRefused as error:
            return [Problem(str(error), error.hint or "")]

    def _problems(self, db: sqlite3.Connection) -> list[Problem]:
        db.execute("select count(*) from sqlite_master").fetchone()
        problems = []
        if sqlite3.sqlite_version_info < VERSION_MIN:
            problems.append(
                Problem(
                    f"SQLite {sqlite3.sqlite_version} of this Python is too old",
                    "Use a Python with SQLite 3.35 or later.",
                )
            )
        for path in (self._path, self._path.parent):
            if not os.access(path, os.W_OK):
                fix = "Capture writes triggers and a queue into the file: grant the right to write."
                problems.append(Problem(f"{str(path)!r} cannot be written", fix))
        self._queue.refuse_collision(db)
        specs = find_specs(db, self._definition.tables)
        if not specs:
            problems.append(Problem("the SQLite file has no tables", "Create one first."))
        if not self._definition.tables:
            problems += [_left_out(name) for name in virtual_tables(db)]
        for spec in specs:
            try:
                shape = read_shape(db, spec)
            except SourceError as error:
                problems.append(Problem(str(error), error.hint or ""))
                continue
            if shape is None:
                problems.append(_missing(spec.name))
                continue
            nulls = " or ".join(f"{quoted(name)} is null" for name in shape.key)
            if db.execute(f"select 1 from {quoted(shape.table)} where {nulls} limit 1").fetchone():
                problems.append(
                    Problem(
                        f"rows of {shape.table} have a NULL in their key and will not be mirrored",
                        "Give them keys.",
                        warning=True,
                    )
                )
        return problems

    async def tables(self) -> list[SourceTable]:
        return await self._main.run(self._tables)

    def _tables(self, db: sqlite3.Connection) -> list[SourceTable]:
        found = []
        for spec in find_specs(db, self._definition.tables):
            shape = read_shape(db, spec)
            if shape is not None:
                found.append(shape.described(spec))
        return found

    async def start(self) -> str:
        def make(db: sqlite3.Connection) -> str:
            self._synchronize(db)
            self._queue.renew(db)
            return str(self._queue.last(db))

        return await self._main.run(make)

    def _synchronize(self, db: sqlite3.Connection) -> None:
        self._queue.synchronize(db, find_specs(db, self._definition.tables))

    async def estimate(self, table: SourceTable) -> int | None:
        """By the rowids, which SQLite finds without reading the table; counted where there are
        none."""

        def count(db: sqlite3.Connection) -> int | None:
            name = quoted(table.name)
            try:
                found = db.execute(f"select max(rowid) - min(rowid) + 1 from {name}").fetchone()
            except sqlite3.OperationalError:
                found = db.execute(f"select count(*) from {name}").fetchone()
            return found[0] or 0

        return await self._main.run(count)

    async def snapshot(self, table: SourceTable, after: SourceKey | None, rows: int) -> Chunk:
        def read(db: sqlite3.Connection) -> Chunk:
            return read_chunk(db, self._queue, table, after, rows, self._misfits)

        return await self._main.run(read)

    # ------------------------------------------------------------ changes

    async def changes(self, after: str) -> AsyncGenerator[Item, None]:
        position = QueuePosition.parse(after)
        connection = FileConnection(self._path, self._busy_seconds)
        watch = FileWatch(self._path)
        try:
            async with aclosing(self._follow(connection, watch, position)) as items:
                async for item in items:
                    yield item
        finally:
            watch.close()
            await connection.close()

    async def _follow(
        self, connection: FileConnection, watch: FileWatch, position: QueuePosition
    ) -> AsyncGenerator[Item, None]:
        reader = QueueReader(self._queue, self._misfits)
        known: Poll | None = None
        pause = POLL_SECONDS_MIN
        is_sent = is_woken = False

        def look(db: sqlite3.Connection) -> Poll | None:
            return poll(self._queue, db, position, known and known.data_version)

        while True:
            try:
                found = await connection.run(look)
                if found and (known is None or found.schema_version != known.schema_version):
                    announced = await connection.run(lambda db: self._announce(db, reader))
                    for change in self._schema_items(announced, position):
                        yield change
                        is_sent = False
                    position = msgspec.structs.replace(position, epoch=announced.epoch)
                    found = found._replace(schema_version=announced.schema_version)
            except Busy:
                await watch.wait(POLL_SECONDS_MAX)
                continue
            except FileReplaced:
                known = None
                continue
            known = found or known
            if found is None or (found.last.id == position.id and is_sent):
                if await watch.wait(pause):
                    # Changes of other tables wake, too: not more often than polling would.
                    await asyncio.sleep(POLL_SECONDS_MIN if is_woken else 0)
                    is_woken, pause = True, POLL_SECONDS_MIN
                else:
                    is_woken, pause = False, min(pause * 2, POLL_SECONDS_MAX)
                continue
            is_woken = False
            pause = POLL_SECONDS_MIN
            if found.last.id == position.id:
                yield Progress(str(position))
            else:
                last = msgspec.structs.replace(found.last, epoch=position.epoch)
                async with aclosing(self._read(connection, reader, position, last)) as items:
                    async for item in items:
                        yield item
                position = last
            is_sent = True

    async def _read(
        self,
        connection: FileConnection,
        reader: QueueReader,
        position: QueuePosition,
        last: QueuePosition,
    ) -> AsyncGenerator[Item, None]:
        """The rows of one poll, as one transaction in parts."""
        reader.begin()
        has_parts = False
        while position.id < last.id:
            start = position
            try:
                window = await connection.run(lambda db: reader.read(db, start, last))  # noqa: B023
            except Busy:
                continue
            position = window.last
            if position.id < last.id:
                if window.changes:
                    has_parts = True
                    yield TransactionPart(window.changes)
            elif window.changes or has_parts:
                yield TransactionPart(window.changes, str(last), time_of(window.at))
            else:
                yield Progress(str(last))

    def _announce(self, db: sqlite3.Connection, reader: QueueReader) -> Announced:
        """Make the triggers fit the tables, and read what they are, at one moment."""
        while True:
            self._synchronize(db)
            db.execute("begin")
            try:
                specs = find_specs(db, self._definition.tables)
                if self._queue.is_synchronized(db, specs):
                    return reader.announce(db)
            finally:
                db.execute("rollback")

    def _schema_items(
        self, announced: Announced, position: QueuePosition
    ) -> list[SchemaChange | TableDropped]:
        specs = {spec.name: spec for spec in self._definition.tables}
        items: list[SchemaChange | TableDropped] = []
        for stored in announced.shapes.values():
            spec = TableSpec(stored.name) if not specs else specs.get(stored.name)
            if spec is None or stored.epoch <= position.epoch:
                continue
            if stored.dropped:
                items.append(TableDropped(stored.name))
            else:
                items.append(SchemaChange(stored.shape.described(spec)))
        return items

    # ------------------------------------------------------------ afterwards

    async def acknowledge(self, upto: str) -> None:
        position = QueuePosition.parse(upto)
        now = time.monotonic()
        few = position.id - self._deleted < DELETE_ROWS
        if few and now - self._deleted_at < DELETE_SECONDS:
            return
        self._deleted_at = now

        def delete(db: sqlite3.Connection) -> int:
            if not self._queue.exists(db) or self._queue.epoch(db)[0] != position.generation:
                return 0
            return self._queue.delete(db, position.id, DELETE_ROWS)

        try:
            while await self._main.run(delete) == DELETE_ROWS:
                pass
        except (Busy, FileReplaced):
            return  # the next acknowledgement deletes them
        self._deleted = position.id

    async def health(self) -> Health:
        def count(db: sqlite3.Connection) -> int:
            if not self._queue.exists(db):
                return 0
            found = db.execute(f"select max(id) - min(id) from {self._queue.table}").fetchone()
            return int(found[0] or 0)

        rows = await self._main.run(count)
        warning = self._misfits.warning()
        if rows > QUEUE_ROWS_WARN:
            text = f"the queue in the SQLite file has {rows} rows, and the file grows"
            warning = "\n".join(filter(None, [f"{text}: is the source paused?", warning]))
            return Health("lagging", None, warning)
        return Health("ok", None, warning)

    def contains(self, position: str, mark: str) -> bool:
        return QueuePosition.parse(position).contains(QueuePosition.parse(mark))

    async def remove(self) -> None:
        if not self._path.exists():
            return
        await self._main.run(self._queue.remove)

    async def close(self) -> None:
        await self._main.close()


def _left_out(name: str) -> Problem:
    return Problem(
        f"the virtual table {name} is not mirrored, and neither are the tables that belong to it",
        "Mirror the tables that its rows come from.",
        warning=True,
    )


def _missing(name: str) -> Problem:
    error = refusal(name, "there is no such table", "Create it, or name another one.")
    return Problem(str(error), error.hint or "", missing=name)
