"""The queue in the SQLite file: its tables, and the triggers that fill it.

`synchronize` makes what is missing, in one write transaction: all of it or nothing. It compares
each table with the shape that its triggers were made for. A table that differs, or whose triggers
are not as they were made, gets a new shape, new triggers and a new epoch; a reader with an older
epoch copies that table again, because writes in between may not be in the queue. A column that was
dropped and added again leaves no difference, but the file counts the statements that alter its
schema: where two or more are not explained by what is there, every table gets a new epoch.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from headwater.capture.source import TableSpec
from headwater.capture.sqlite.position import QueuePosition
from headwater.capture.sqlite.shapes import OWN_PREFIX, SchemaMark, Shape, read_mark, read_shape
from headwater.capture.sqlite.statements import quoted
from headwater.capture.sqlite.triggers import TriggerWriter, trigger_names
from headwater.errors import PositionLost, SourceRefused


class StoredShape(NamedTuple):
    """A shape and what was made for it. `epoch` is when it became the table's; `dropped` says that
    the table no longer existed then."""

    number: int
    epoch: int
    name: str
    shape: Shape
    dropped: bool


class QueueNames(NamedTuple):
    """Two sources may read one file: each has its own queue and triggers."""

    prefix: str

    @classmethod
    def of(cls, source: str) -> QueueNames:
        return cls(f"{OWN_PREFIX}{source}_")

    @property
    def queue(self) -> str:
        return f"{self.prefix}queue"

    @property
    def state(self) -> str:
        return f"{self.prefix}state"

    @property
    def shapes(self) -> str:
        return f"{self.prefix}shapes"

    def tables(self) -> tuple[str, str, str]:
        return self.queue, self.state, self.shapes


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """A write transaction; all of it or nothing."""
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        if db.in_transaction:
            db.execute("rollback")
        raise


class Queue:
    """The queue of one source. Its methods run in the thread that has the connection."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.names = QueueNames.of(source)
        self.table = quoted(self.names.queue)
        self._state = quoted(self.names.state)
        self._shapes = quoted(self.names.shapes)

    # ------------------------------------------------------------ other sources

    def refuse_collision(self, db: sqlite3.Connection) -> None:
        """SQLite does not distinguish the case of names: two such sources would share a queue."""
        found = db.execute(
            "select name from sqlite_master where name = ? collate nocase and name <> ?",
            (self.names.queue, self.names.queue),
        ).fetchone()
        if found is not None:
            other = found[0][len(OWN_PREFIX) : -len("_queue")]
            raise SourceRefused(
                f"the SQLite file is captured by the source {other!r}, whose name differs from"
                f" {self._source!r} only in case",
                hint="SQLite does not distinguish them: give this source another name.",
            )

    # ------------------------------------------------------------ state

    def exists(self, db: sqlite3.Connection) -> bool:
        found = db.execute(
            "select count(*) from sqlite_master where type = 'table' and name in (?, ?, ?)",
            self.names.tables(),
        ).fetchone()
        return bool(found[0] == 3)

    def epoch(self, db: sqlite3.Connection) -> tuple[str, int]:
        """The generation of the queue and its epoch."""
        found = db.execute(f"select generation, epoch from {self._state}").fetchone()
        if found is None:
            raise self.lost("the state of its queue is missing")
        return found[0], found[1]

    def lost(self, reason: str) -> PositionLost:
        return PositionLost(
            f"the changes after the position are not in the SQLite file: {reason}",
            hint=f"copy the tables again: headwater source resnapshot {self._source}",
        )

    def renew(self, db: sqlite3.Connection) -> None:
        """Begin a new generation if the queue or its state was emptied."""
        sql = f"select (select count(*) from {self._state}), exists (select 1 from {self.table})"
        if db.execute(sql).fetchone() == (1, 1):
            return
        with transaction(db):
            (epoch,) = db.execute(
                f"select max(coalesce(max(epoch), 0), (select coalesce(max(epoch), 0)"
                f" from {self._state})) from {self._shapes}"
            ).fetchone()
            db.execute(f"delete from {self._state}")
            db.execute(
                f"insert into {self._state} (generation, epoch) values (?, ?)",
                (secrets.token_hex(8), epoch),
            )
            db.execute(f"insert into {self.table} (at, op) values (julianday('now'), 'a')")

    def shapes(self, db: sqlite3.Connection) -> dict[int, StoredShape]:
        rows = db.execute(f"select number, epoch, name, shape, dropped from {self._shapes}")
        return {
            number: StoredShape(
                number, epoch, name, msgspec.json.decode(shape, type=Shape), bool(dropped)
            )
            for number, epoch, name, shape, dropped in rows.fetchall()
        }

    def last(self, db: sqlite3.Connection) -> QueuePosition:
        """The position of the last row; there is always one."""
        generation, epoch = self.epoch(db)
        found = db.execute(f"select id, at from {self.table} order by id desc limit 1").fetchone()
        if found is None:
            raise self.lost("its queue was emptied")
        return QueuePosition(generation, found[0], repr(found[1]), epoch)

    # ------------------------------------------------------------ triggers

    def synchronize(self, db: sqlite3.Connection, specs: Sequence[TableSpec]) -> None:
        """Make what is missing. Reads first: without a difference nothing is locked."""
        if self.is_synchronized(db, specs):
            return
        with transaction(db):
            self._create_tables(db)
            different = self._differences(db, specs)
            mark = self._mark(db)
            is_hidden = mark is not None and self._present(db).hides_alterations(mark)
            if different or is_hidden:
                db.execute(f"update {self._state} set epoch = epoch + 1")
            for name, shape, stored in different:
                self._replace(db, name, shape, stored)
            if is_hidden:
                self._renew_epochs(db)
            mark = self._present(db)
            db.execute(f"update {self._state} set mark = ?", (msgspec.json.encode(mark).decode(),))

    def is_synchronized(self, db: sqlite3.Connection, specs: Sequence[TableSpec]) -> bool:
        if not self.exists(db):
            return False
        mark = self._mark(db)
        (version,) = db.execute("pragma main.schema_version").fetchone()
        return mark is not None and mark.version == version and not self._differences(db, specs)

    def _mark(self, db: sqlite3.Connection) -> SchemaMark | None:
        """The schema when the triggers were last compared with it."""
        found = db.execute(f"select * from {self._state}").fetchone()
        if found is None or len(found) < 3 or found[2] is None:
            return None
        return msgspec.json.decode(found[2], type=SchemaMark)

    def _present(self, db: sqlite3.Connection) -> SchemaMark:
        own = {*self.names.tables(), f"{self.names.prefix}tokens", *self._own_triggers(db)}
        return read_mark(db, own)

    def _renew_epochs(self, db: sqlite3.Connection) -> None:
        """So that every table is copied again. The triggers stay: making them again would look like
        such statements to another source of this file, which would do the same."""
        for stored in self.current(db).values():
            if not stored.dropped:
                db.execute(
                    f"update {self._shapes} set epoch = (select epoch from {self._state})"
                    " where number = ?",
                    (stored.number,),
                )

    def current(self, db: sqlite3.Connection) -> dict[str, StoredShape]:
        """The newest shape of each table, by the name in the definition."""
        return {stored.name: stored for _, stored in sorted(self.shapes(db).items())}

    def _create_tables(self, db: sqlite3.Connection) -> None:
        if self.exists(db):
            if len(db.execute(f"pragma table_info({self._state})").fetchall()) < 3:
                db.execute(f"alter table {self._state} add column mark")
            return
        self.refuse_collision(db)
        self._drop_tables(db)
        db.execute(
            f"create table {self.table} (id integer primary key autoincrement, at real, shape, op,"
            " token)"
        )
        index = quoted(f"{self.names.prefix}tokens")
        db.execute(f"create index {index} on {self.table} (token) where token is not null")
        db.execute(f"create table {self._state} (generation, epoch integer, mark)")
        db.execute(
            f"create table {self._shapes} (number integer primary key, epoch integer, name, shape,"
            " triggers, dropped integer)"
        )
        db.execute(
            f"insert into {self._state} (generation, epoch) values (?, 0)", (secrets.token_hex(8),)
        )
        # Positions name a row, so the queue is never empty.
        db.execute(f"insert into {self.table} (at, op) values (julianday('now'), 'a')")

    def _differences(
        self, db: sqlite3.Connection, specs: Sequence[TableSpec]
    ) -> list[tuple[str, Shape | None, StoredShape | None]]:
        current = self.current(db)
        wanted = {spec.name: read_shape(db, spec) for spec in specs}
        found: list[tuple[str, Shape | None, StoredShape | None]] = []
        for name in sorted({*current, *wanted}):
            stored, shape = current.get(name), wanted.get(name)
            if stored is None:
                is_same = shape is None
            elif shape is None:
                is_same = stored.dropped
            else:
                is_same = not stored.dropped and stored.shape == shape and self._intact(db, stored)
            if not is_same:
                found.append((name, shape, stored))
        return found

    def _intact(self, db: sqlite3.Connection, stored: StoredShape) -> bool:
        (made,) = db.execute(
            f"select triggers from {self._shapes} where number = ?", (stored.number,)
        ).fetchone()
        names = trigger_names(self.names.prefix, stored.number)
        rows = db.execute(
            "select rowid, name, sql from sqlite_master where type = 'trigger'"
            " and tbl_name = ? collate nocase order by rowid",
            (stored.shape.table,),
        ).fetchall()
        ours = [row for row in rows if row[1] in names]
        # SQLite runs the newest trigger first. One that runs before ours and fails with FAIL would
        # leave a change that is not in the queue.
        later = [row for row in rows if row[0] > ours[0][0]] if ours else []
        is_newest = all(row[1].startswith(OWN_PREFIX) for row in later)
        return is_newest and sorted(row[2] for row in ours) == msgspec.json.decode(
            made, type=list[str]
        )

    def _replace(
        self,
        db: sqlite3.Connection,
        name: str,
        shape: Shape | None,
        stored: StoredShape | None,
    ) -> None:
        if stored is not None:
            self._drop_triggers(db, trigger_names(self.names.prefix, stored.number))
        if shape is None:
            assert stored is not None
            self._insert_shape(db, name, stored.shape, [], dropped=True)
            return
        self._widen(db, shape)
        number = self._insert_shape(db, name, shape, [], dropped=False)
        statements = TriggerWriter(self.names.prefix, self.names.queue, number, shape).statements()
        for statement in statements:
            db.execute(statement)
        self._prove(db, shape)
        names = trigger_names(self.names.prefix, number)
        places = ", ".join("?" * len(names))
        rows = db.execute(
            f"select sql from sqlite_master where type = 'trigger' and name in ({places})", names
        )
        made = msgspec.json.encode(sorted(row[0] for row in rows.fetchall())).decode()
        db.execute(f"update {self._shapes} set triggers = ? where number = ?", (made, number))

    def _insert_shape(
        self, db: sqlite3.Connection, name: str, shape: Shape, triggers: list[str], *, dropped: bool
    ) -> int:
        cursor = db.execute(
            f"insert into {self._shapes} (epoch, name, shape, triggers, dropped)"
            f" select epoch, ?, ?, ?, ? from {self._state}",
            (
                name,
                msgspec.json.encode(shape).decode(),
                msgspec.json.encode(triggers).decode(),
                dropped,
            ),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _widen(self, db: sqlite3.Connection, shape: Shape) -> None:
        has = {row[1] for row in db.execute(f"pragma table_info({self.table})").fetchall()}
        needed = [f"c{i}" for i in range(len(shape.columns))]
        needed += [f"k{i}" for i in range(len(shape.key))]
        for column in needed:
            if column not in has:
                db.execute(f"alter table {self.table} add column {column}")

    def _prove(self, db: sqlite3.Connection, shape: Shape) -> None:
        """Compile statements that fire the triggers: a mistake in one must never be found by a
        program that writes."""
        table, column = quoted(shape.table), quoted(shape.key[0])
        try:
            db.execute(f"explain insert or replace into {table} default values")
            db.execute(f"explain update or replace {table} set {column} = {column}")
            db.execute(f"explain delete from {table}")
        except sqlite3.Error as error:
            raise SourceRefused(
                f"the SQLite table {shape.table!r} cannot be captured: its triggers do not compile"
                f" ({error})",
                hint="Leave the table out, or remove what its other triggers or indexes need.",
            ) from error

    # ------------------------------------------------------------ the end

    def remove(self, db: sqlite3.Connection) -> None:
        with transaction(db):
            self._drop_triggers(db, self._own_triggers(db))
            self._drop_tables(db)

    def _own_triggers(self, db: sqlite3.Connection) -> list[str]:
        """Also those of shapes that are not stored; the name of another source may begin alike."""
        pattern = re.compile(re.escape(self.names.prefix) + r"\d+_[a-z]{2}")
        names = db.execute("select name from sqlite_master where type = 'trigger'").fetchall()
        return [name for (name,) in names if pattern.fullmatch(name)]

    def _drop_triggers(self, db: sqlite3.Connection, names: Sequence[str]) -> None:
        for name in names:
            db.execute(f"drop trigger if exists {quoted(name)}")

    def _drop_tables(self, db: sqlite3.Connection) -> None:
        """Only those with exactly these names: DROP TABLE does not distinguish their case."""
        found = db.execute(
            "select name from sqlite_master where type = 'table' and name in (?, ?, ?)",
            self.names.tables(),
        ).fetchall()
        for (name,) in found:
            db.execute(f"drop table {quoted(name)}")

    def delete(self, db: sqlite3.Connection, before: int, rows: int) -> int:
        """Delete at most this many rows before an id. Returns how many."""
        return db.execute(
            f"delete from {self.table} where id in"
            f" (select id from {self.table} where id < ? order by id limit ?)",
            (before, rows),
        ).rowcount


def verify(queue: Queue, db: sqlite3.Connection, position: QueuePosition) -> None:
    """The row that the position names must be in the queue, as it was written."""
    if not queue.exists(db):
        raise queue.lost("it has no queue, so it is another file or its capture was removed")
    if queue.epoch(db)[0] != position.generation:
        raise queue.lost("its queue is not the one that the position belongs to")
    found = db.execute(f"select at from {queue.table} where id = ?", (position.id,)).fetchone()
    if found is None:
        raise queue.lost("its queue was emptied, or the file is an older copy")
    if repr(found[0]) != position.at:
        raise queue.lost("its queue has another row there, so the file is a copy that was changed")
