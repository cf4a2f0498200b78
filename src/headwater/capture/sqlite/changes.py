"""Queue rows become inserts, updates and deletes.

A queue row says what the table has for a key at that moment, and whether the key came to be or
ceased to be. Rows written by nested triggers may be in an unusual order (an update of a row before
its insert), but each is true when it is written. So for a window of rows: the last row about a key
says whether the key exists at the end; this minus the sum of its beginnings and ends says whether
it existed at the start. From there on, a row about a key is an insert if the key does not exist,
else an update; a row about an absent key is a delete if it exists, else nothing.

A window must not divide the rows of a nested statement. `cut` finds such a place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headwater.capture.source import UNCHANGED, Cell, RowChanges, RowOp, SourceKey, SourceRow
from headwater.capture.sqlite import triggers
from headwater.capture.sqlite.shapes import Shape
from headwater.capture.sqlite.values import Misfit, converter
from headwater.limits import SOURCE_PART_BYTES

IMAGES_MAX = 1_000
"""Images of rows before a change that wait for the change. Each belongs to a trigger that runs, and
SQLite runs at most this many inside each other."""

NEIGHBOURS = 50
"""Queue rows around the end of a window in which a key must not be on both sides."""


class QueueRow(NamedTuple):
    id: int
    at: float
    shape: int | None
    op: str
    key: tuple[Any, ...]
    image: tuple[Any, ...]
    about: tuple[Any, ...]
    """The table and the key, as values of SQLite."""
    size: int


class Misfits:
    """Values and rows that the mirror cannot have, counted by column."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, str], int] = {}
        self.rows: dict[str, int] = {}

    def count_value(self, table: str, column: str, type: str) -> None:
        place = (table, column, type)
        self.values[place] = self.values.get(place, 0) + 1

    def count_row(self, table: str) -> None:
        self.rows[table] = self.rows.get(table, 0) + 1

    def warning(self) -> str | None:
        texts = [
            f"{n} values of {table}.{column} are not {type} and are NULL in the mirror: give the"
            f' column another type, types={{"{column}": "text"}}.'
            for (table, column, type), n in sorted(self.values.items())
        ]
        texts += [
            f"{n} rows of {table} have a key that is NULL or does not fit its type and are not in"
            " the mirror: correct them at the source."
            for table, n in sorted(self.rows.items())
        ]
        return "\n".join(texts) or None


class RowReader:
    """Images of one shape as rows of the mirror, whose columns may be newer ones."""

    def __init__(self, name: str, shape: Shape, target: Shape, misfits: Misfits) -> None:
        self.name = name
        self._misfits = misfits
        self._target = target
        places = {column: i for i, column in enumerate(shape.columns)}
        self._columns: list[tuple[int | None, Callable[[Any], str], str, str]] = [
            (places.get(column), converter(type), column, type)
            for column, type in zip(target.columns, target.types, strict=True)
        ]
        self._keys = [converter(target.types[i]) for i in target.key_places()]
        self._key_places = [places.get(column) for column in target.key]
        self._same_key = shape.key == target.key
        self._width = len(target.columns)

    def row(self, image: Sequence[Any], *, counts: bool = True) -> SourceRow:
        cells: list[Cell] = []
        for place, convert, column, type in self._columns:
            value = None if place is None else image[place]
            if value is None:
                cells.append(None)
                continue
            try:
                cells.append(convert(value))
            except Misfit:
                if counts:
                    self._misfits.count_value(self.name, column, type)
                cells.append(None)
        return tuple(cells)

    def key(self, values: Sequence[Any]) -> SourceKey | None:
        """The key of these values; None if the mirror cannot have it."""
        if not self._same_key:
            return None
        try:
            return tuple(
                [convert(value) for convert, value in zip(self._keys, values, strict=False)]
            )
        except Misfit:
            return None

    def key_of_image(self, image: Sequence[Any]) -> SourceKey | None:
        if any(place is None for place in self._key_places):
            return None
        return self.key([image[place] for place in self._key_places if place is not None])

    def key_only(self, key: SourceKey) -> SourceRow:
        """A row of which nothing but the key is known."""
        cells: list[Cell] = [UNCHANGED] * self._width
        for place, text in zip(self._target.key_places(), key, strict=True):
            cells[place] = text
        return tuple(cells)


class Step(NamedTuple):
    """What a queue row says. `old` and `new` are the keys that it is about; `row` is what `new`
    has, None if it is absent. `ends` and `begins` are the keys that ceased and came to be."""

    reader: RowReader
    old: SourceKey | None
    new: SourceKey | None
    row: SourceRow | None
    ends: SourceKey | None
    begins: SourceKey | None
    before: SourceRow | None


class Images:
    """Rows as they were before a change that follows."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[str, SourceKey], tuple[SourceRow, int]] = OrderedDict()
        self._bytes = 0

    def put(self, table: str, key: SourceKey, row: SourceRow, size: int) -> None:
        self.take(table, key)
        self._rows[table, key] = row, size
        self._bytes += size
        while len(self._rows) > IMAGES_MAX or self._bytes > SOURCE_PART_BYTES:
            _, (_, dropped) = self._rows.popitem(last=False)
            self._bytes -= dropped

    def take(self, table: str, key: SourceKey | None) -> SourceRow | None:
        if key is None or (table, key) not in self._rows:
            return None
        row, size = self._rows.pop((table, key))
        self._bytes -= size
        return row

    def clear(self) -> None:
        self._rows.clear()
        self._bytes = 0


def step(reader: RowReader, row: QueueRow, images: Images, misfits: Misfits) -> Step | None:
    """What a queue row says; None for an image before a change, which is put into `images`."""
    match row.op:
        case triggers.BEFORE:
            key = reader.key_of_image(row.image)
            if key is not None:
                images.put(reader.name, key, reader.row(row.image, counts=False), row.size)
            return None
        case triggers.DELETE | triggers.VANISHED:
            old = reader.key(row.key)
            return Step(reader, old, None, None, old, None, images.take(reader.name, old))
        case triggers.INSERTED_GONE:
            new = reader.key(row.key)
            if new is None:
                misfits.count_row(reader.name)
            return Step(reader, None, new, None, None, new, None)
        case triggers.UPDATED_GONE:
            old, new = reader.key(row.key), reader.key_of_image(row.image)
            before = images.take(reader.name, old)
            if old == new:
                return Step(reader, old, None, None, None, None, before)
            return Step(reader, old, new, None, old, new, before)
    return _present(reader, row, images, misfits)


def _present(reader: RowReader, row: QueueRow, images: Images, misfits: Misfits) -> Step | None:
    new = reader.key_of_image(row.image)
    if new is None:
        misfits.count_row(reader.name)
    after = None if new is None else reader.row(row.image)
    match row.op:
        case triggers.INSERT if row.key[0] is None:
            return Step(reader, None, new, after, None, new, None)
        case triggers.PRESENT:
            return Step(reader, None, new, after, None, None, images.take(reader.name, new))
        case triggers.UPDATE | triggers.INSERT:
            old = reader.key(row.key)
            before = images.take(reader.name, old)
            if old == new:
                return Step(reader, None, new, after, None, None, before)
            return Step(reader, old, new, after, old, new, before)
    return None  # the first row of the queue


class Batch:
    """Changes in their order, joined where table and operation are the same."""

    def __init__(self) -> None:
        self.changes: list[RowChanges] = []

    def add(self, table: str, op: RowOp, before: SourceRow | None, after: SourceRow | None) -> None:
        last = self.changes[-1] if self.changes else None
        if last is None or last.table != table or last.op != op:
            last = RowChanges(table, op, [], [])
            self.changes.append(last)
        assert isinstance(last.after, list)
        assert isinstance(last.before, list)
        if after is not None:
            last.after.append(after)
        if op != "insert":
            last.before.append(before)


def changes_of(steps: Sequence[Step]) -> list[RowChanges]:
    """The changes of a window."""
    exists = _at_start(steps)
    batch = Batch()
    for step in steps:
        table = step.reader.name
        old = (table, step.old) if step.old is not None else None
        new = (table, step.new) if step.new is not None else None
        if old and new and exists[old] and not exists[new] and step.row is not None:
            assert step.old is not None
            batch.add(table, "update", step.before or step.reader.key_only(step.old), step.row)
            exists[old], exists[new] = False, True
            continue
        if old and exists[old]:
            assert step.old is not None
            batch.add(table, "delete", step.before or step.reader.key_only(step.old), None)
            exists[old] = False
        if new:
            _state_of_new(batch, step, exists, new)
    return batch.changes


def _state_of_new(
    batch: Batch,
    step: Step,
    exists: dict[tuple[str, SourceKey], bool],
    new: tuple[str, SourceKey],
) -> None:
    assert step.new is not None
    if step.row is None:
        if exists[new]:
            batch.add(new[0], "delete", step.reader.key_only(step.new), None)
    elif exists[new]:
        batch.add(new[0], "update", step.before if step.old is None else None, step.row)
    else:
        batch.add(new[0], "insert", None, step.row)
    exists[new] = step.row is not None


def _at_start(steps: Sequence[Step]) -> dict[tuple[str, SourceKey], bool]:
    """Whether each key existed before the window."""
    final = dict[tuple[str, SourceKey], bool]()
    sums = dict[tuple[str, SourceKey], int]()
    for step in steps:
        table = step.reader.name
        if step.old is not None:
            final[table, step.old] = False
        if step.new is not None:
            final[table, step.new] = step.row is not None
        if step.ends is not None:
            sums[table, step.ends] = sums.get((table, step.ends), 0) - 1
        if step.begins is not None:
            sums[table, step.begins] = sums.get((table, step.begins), 0) + 1
    return {key: int(is_there) - sums.get(key, 0) > 0 for key, is_there in final.items()}


def cut(rows: Sequence[QueueRow], most: int) -> int:
    """How many rows to use now, of rows that others follow. The last place where another statement
    begins (its time differs), or else where no key is near on both sides."""
    for end in range(min(most, len(rows) - 1), max(most // 2, 0), -1):
        if rows[end - 1].at != rows[end].at:
            return end
    for end in range(min(most, len(rows) - NEIGHBOURS), max(most // 2, 0), -1):
        before = {row.about for row in rows[max(end - NEIGHBOURS, 0) : end]}
        if before.isdisjoint([row.about for row in rows[end : end + NEIGHBOURS]]):
            return end
    return min(most, len(rows))
