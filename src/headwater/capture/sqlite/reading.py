"""Reading the queue: from the last position, window by window.

SQLite does not number transactions. What one read sees is what is committed, so everything between
two reads is one or more whole transactions, in the order of their commits: SQLite has one writer at
a time. The rows of one poll are therefore given as one transaction; a transaction is never divided,
and several that were committed between two polls are joined. Rows are read in windows, each by a
short statement, so that a reader never blocks a checkpoint or a commit for long.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from headwater.capture.source import RowChanges
from headwater.capture.sqlite.changes import (
    NEIGHBOURS,
    Images,
    Misfits,
    QueueRow,
    RowReader,
    changes_of,
    cut,
    step,
)
from headwater.capture.sqlite.position import QueuePosition
from headwater.capture.sqlite.queue import Queue, StoredShape, verify
from headwater.limits import SOURCE_PART_BYTES, SOURCE_PART_CHANGES

_EPOCH_JULIAN = 2440587.5


class Poll(NamedTuple):
    """What another connection may have changed, and how far the queue reaches."""

    data_version: int
    schema_version: int
    last: QueuePosition


def poll(
    queue: Queue, db: sqlite3.Connection, position: QueuePosition, known: int | None
) -> Poll | None:
    """None if no other connection has committed since `known`."""
    (data_version,) = db.execute("pragma data_version").fetchone()
    if data_version == known:
        return None
    verify(queue, db, position)
    (schema_version,) = db.execute("pragma schema_version").fetchone()
    return Poll(data_version, schema_version, queue.last(db))


class Announced(NamedTuple):
    """The newest shape of each table, at one moment."""

    shapes: Mapping[str, StoredShape]
    epoch: int
    schema_version: int


class Window(NamedTuple):
    """Changes up to a queue row."""

    changes: list[RowChanges]
    last: QueuePosition
    at: float


class QueueReader:
    """Turns queue rows into changes. `announced` has the shape of each table that the rows get."""

    def __init__(self, queue: Queue, misfits: Misfits) -> None:
        self._queue = queue
        self._misfits = misfits
        self._images = Images()
        self._shapes: Mapping[int, StoredShape] = {}
        self._readers: dict[int, RowReader | None] = {}
        self._announced: Mapping[str, StoredShape] = {}
        self._columns = ""
        self._keys = 0

    def announce(self, db: sqlite3.Connection) -> Announced:
        """From now on, rows have the columns that the tables have now."""
        self._shapes = self._queue.shapes(db)
        self._announced = self._queue.current(db)
        self._readers = {}
        names = [r[1] for r in db.execute(f"pragma table_info({self._queue.table})").fetchall()]
        self._keys = sum(name.startswith("k") for name in names)
        images = sum(name.startswith("c") for name in names)
        keys = [f"k{i}" for i in range(self._keys)] + [f"c{i}" for i in range(images)]
        self._columns = ", ".join(["id", "at", "shape", "op", *keys])
        (version,) = db.execute("pragma schema_version").fetchone()
        return Announced(self._announced, self._queue.epoch(db)[1], version)

    def begin(self) -> None:
        """A new poll: images before a change belong to one transaction."""
        self._images.clear()

    def read(self, db: sqlite3.Connection, after: QueuePosition, upto: QueuePosition) -> Window:
        rows, is_end = self._fetch(db, after, upto)
        if not is_end:
            rows = rows[: cut(rows, min(SOURCE_PART_CHANGES, len(rows)))]
        steps = []
        for row in rows:
            reader = self._reader(row.shape)
            if reader is not None and (found := step(reader, row, self._images, self._misfits)):
                steps.append(found)
        last = rows[-1]
        position = msgspec.structs.replace(after, id=last.id, at=repr(last.at))
        return Window(changes_of(steps), position, last.at)

    def _fetch(
        self, db: sqlite3.Connection, after: QueuePosition, upto: QueuePosition
    ) -> tuple[list[QueueRow], bool]:
        """Rows after a position, and whether they are all. The row that the position names is read
        with them: it proves that none was deleted in between."""
        cursor = db.execute(
            f"select {self._columns} from {self._queue.table} where id between ? and ? order by id",
            (after.id, upto.id),
        )
        first = cursor.fetchone()
        if first is None or first[0] != after.id or repr(first[1]) != after.at:
            cursor.close()
            verify(self._queue, db, after)
        rows: list[QueueRow] = []
        size = 0
        for values in cursor:
            rows.append(self._row(values))
            size += rows[-1].size
            if len(rows) >= SOURCE_PART_CHANGES + NEIGHBOURS or size > SOURCE_PART_BYTES:
                break
        cursor.close()
        if not rows:
            verify(self._queue, db, upto)
        return rows, rows[-1].id == upto.id and len(rows) <= SOURCE_PART_CHANGES

    def _row(self, values: tuple[Any, ...]) -> QueueRow:
        id, at, number, op = values[:4]
        key, image = values[4 : 4 + self._keys], values[4 + self._keys :]
        shape = self._shapes.get(number)
        if shape is None:
            return QueueRow(id, at, None, op, key, image, (), 0)
        key, image = key[: len(shape.shape.key)], image[: len(shape.shape.columns)]
        about = key if key[0] is not None else tuple(image[i] for i in shape.shape.key_places())
        size = sum(len(v) if isinstance(v, str | bytes) else 8 for v in image)
        return QueueRow(id, at, number, op, key, image, (number, *about), size)

    def _reader(self, number: int | None) -> RowReader | None:
        if number is None:
            return None
        if number not in self._readers:
            stored = self._shapes[number]
            target = self._announced.get(stored.name)
            is_there = target is not None and not target.dropped
            self._readers[number] = (
                RowReader(stored.name, stored.shape, target.shape, self._misfits)
                if target is not None and is_there
                else None
            )
        return self._readers[number]


def time_of(julian: float) -> datetime:
    """
    >>> time_of(2440588.5).isoformat()
    '1970-01-02T00:00:00+00:00'
    """
    seconds = (julian - _EPOCH_JULIAN) * 86400
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=round(seconds * 1000))
