"""Splits the changes of a part into runs: consecutive changes of one table that one statement can
apply. The order of changes of a row never changes: a run never contains a key twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias, TypeVar

import msgspec

from headwater.capture.source import UNCHANGED, RowChanges, SourceKey, SourceRow

Columns: TypeAlias = tuple[int, ...]

_T = TypeVar("_T")


class Insert(msgspec.Struct, frozen=True):
    rows: Sequence[SourceRow]


class Update(msgspec.Struct, frozen=True):
    """Rows whose keys stay. They all carry the values of these columns, none of them of the key."""

    rows: Sequence[SourceRow]
    columns: Columns


class Rekey(msgspec.Struct, frozen=True):
    """One row gets another key. With the same key: the row must be there, or is complete."""

    key: SourceKey
    row: SourceRow


class Delete(msgspec.Struct, frozen=True):
    keys: Sequence[SourceKey]


class Truncate(msgspec.Struct, frozen=True):
    pass


class Recopy(msgspec.Struct, frozen=True):
    """What became of a row cannot be decided from the change: the table is copied again."""


Run: TypeAlias = Insert | Update | Rekey | Delete | Truncate | Recopy


def tables_of(changes: Sequence[RowChanges]) -> Iterator[tuple[str, list[RowChanges]]]:
    """Consecutive changes of the same table and operation, together."""
    for (table, _), group in groupby(changes, key=lambda c: (c.table, c.op)):
        yield table, list(group)


class Splitter:
    """Makes runs for one table. `key` and `others` are the places of columns in a row."""

    def __init__(self, key: Columns, others: Columns) -> None:
        self._key = key
        self._others = others

    def key_of(self, row: SourceRow) -> SourceKey:
        return tuple([row[i] for i in self._key])  # type: ignore[misc]

    def runs(self, group: Sequence[RowChanges]) -> Iterator[Run]:
        """Of changes with the same operation."""
        match group[0].op:
            case "insert":
                yield from self._inserts([row for c in group for row in c.after])
            case "delete":
                keys = [self.key_of(row) for c in group for row in c.before if row is not None]
                yield from (Delete(part) for part in _without_repetition(keys, keys))
            case "truncate":
                yield Truncate()
            case "update":
                rows = [row for c in group for row in c.after]
                before = [row for c in group for row in (c.before or [None] * len(c.after))]
                yield from self._updates(rows, before)

    def _inserts(self, rows: list[SourceRow]) -> Iterator[Run]:
        keys = [self.key_of(row) for row in rows]
        yield from (Insert(part) for part in _without_repetition(keys, rows))

    def _updates(self, rows: list[SourceRow], before: list[SourceRow | None]) -> Iterator[Run]:
        """Splits where a key changes, where a key repeats, and where other columns are carried."""
        start, seen, columns = 0, set[SourceKey](), self._others
        for i, (row, old) in enumerate(zip(rows, before, strict=True)):
            key = self.key_of(row)
            moved = old is not None and self.key_of(old) != key
            carried = self._carried(row)
            if moved or key in seen or carried != columns:
                if start < i:
                    yield Update(rows[start:i], columns)
                start, seen, columns = i, set(), carried
            if moved:
                assert old is not None
                # What the source left out of the row may be in the version before.
                yield Rekey(self.key_of(old), merge(old, row))
                start = i + 1
            else:
                seen.add(key)
        if start < len(rows):
            yield Update(rows[start:], columns)

    def _carried(self, row: SourceRow) -> Columns:
        if UNCHANGED not in row:
            return self._others
        return tuple(i for i in self._others if row[i] is not UNCHANGED)


def merge(old: SourceRow, new: SourceRow) -> SourceRow:
    """The new row, with the values of the old one where it has none."""
    if UNCHANGED not in new:
        return new
    return tuple([o if n is UNCHANGED else n for o, n in zip(old, new, strict=True)])


def _without_repetition(keys: list[SourceKey], items: list[_T]) -> Iterator[Sequence[_T]]:
    """The items in order, in parts within which no key repeats."""
    if len(set(keys)) == len(keys):
        if items:
            yield items
        return
    start, seen = 0, set[SourceKey]()
    for i, key in enumerate(keys):
        if key in seen:
            yield items[start:i]
            start, seen = i, set()
        seen.add(key)
    yield items[start:]
