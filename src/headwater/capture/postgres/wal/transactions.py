"""Turns decoded messages into the items of a source: rows in runs, transactions in bounded parts.

It is pure. A `Layout` says how the values of a relation become a row of the mirror; `TableLayouts`
in `source` decides which relations have one. Transactions arrive here complete and in the order of
their commits, since `spool` has put them so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from operator import itemgetter
from typing import Any

from headwater.capture.postgres.wal.pgoutput import (
    Delete,
    Insert,
    Message,
    Relation,
    Truncate,
    Update,
)
from headwater.capture.source import (
    UNCHANGED,
    RowChanges,
    RowOp,
    SourceRow,
    SourceTable,
    TransactionPart,
)
from headwater.limits import SOURCE_PART_BYTES, SOURCE_PART_CHANGES


class Layout:
    """How rows of a relation become rows of its table."""

    def __init__(self, relation: Relation, table: SourceTable) -> None:
        self.table = table.name
        names = [column.name for column in relation.columns]
        places = [names.index(column.name) for column in table.columns]
        self.pick = _picker(places, len(names))
        keys = set(table.key)
        self._key_cells = tuple(
            place if name in keys else None
            for place, name in zip(places, (c.name for c in table.columns), strict=True)
        )

    def key_row(self, old: SourceRow) -> SourceRow:
        """The key's values, everything else unknown."""
        return tuple(UNCHANGED if at is None else old[at] for at in self._key_cells)

    def update(self, change: Update) -> tuple[SourceRow | None, SourceRow]:
        """The row before, as far as it is known, and the row after."""
        pick = self.pick
        new = pick(change.new) if pick else change.new
        if change.old is not None:
            old = pick(change.old) if pick else change.old
            if UNCHANGED in new:
                # With all old values in the log, a value that was not touched is known.
                new = tuple(b if a is UNCHANGED else a for a, b in zip(new, old, strict=True))
            return old, new
        return (None if change.key is None else self.key_row(change.key)), new

    def delete(self, change: Delete) -> SourceRow:
        if change.old is not None:
            return self.pick(change.old) if self.pick else change.old
        assert change.key is not None
        return self.key_row(change.key)


def _picker(places: list[int], width: int) -> Callable[[Any], SourceRow] | None:
    """None if a row is taken as it is."""
    if places == list(range(width)):
        return None
    if len(places) == 1:
        (only,) = places
        return lambda row: (row[only],)
    return itemgetter(*places)


class PartBuilder:
    """Collects the changes of one transaction, and returns a part whenever it is full."""

    def __init__(
        self, part_changes: int = SOURCE_PART_CHANGES, part_bytes: int = SOURCE_PART_BYTES
    ) -> None:
        self._part_changes = part_changes
        self._part_bytes = part_bytes
        self._changes: list[RowChanges] = []
        self._count = 0
        self._bytes = 0
        self._table: str | None = None
        self._op: RowOp = "insert"
        self._after: list[SourceRow] = []
        self._before: list[SourceRow | None] = []
        self.began = False
        """Whether a part of this transaction was returned."""

    @property
    def is_empty(self) -> bool:
        return self._count == 0

    def add(self, layout: Layout, change: Message, size: int) -> TransactionPart | None:
        """Add a row's change. Returns the part before it, if it no longer fits into that."""
        full = None
        if self._count and (
            self._count >= self._part_changes or self._bytes + size > self._part_bytes
        ):
            full = self.part()
        self._count += 1
        self._bytes += size
        match change:
            case Insert():
                self._run(layout.table, "insert")
                self._after.append(layout.pick(change.new) if layout.pick else change.new)
            case Update():
                self._run(layout.table, "update")
                before, after = layout.update(change)
                self._before.append(before)
                self._after.append(after)
            case Delete():
                self._run(layout.table, "delete")
                self._before.append(layout.delete(change))
            case _:
                raise AssertionError("not a change of a row")
        return full

    def truncate(self, tables: Iterator[str], size: int) -> None:
        for table in tables:
            self._end_run()
            self._changes.append(RowChanges(table, "truncate"))
            self._count += 1
            self._bytes += size

    def part(self) -> TransactionPart:
        """What was collected, as a part that others follow."""
        self.began = True
        return TransactionPart(self._take())

    def finish(self, position: str, committed_at: datetime) -> TransactionPart:
        """The last part."""
        self.began = False
        return TransactionPart(self._take(), position, committed_at)

    def _run(self, table: str, op: RowOp) -> None:
        if table != self._table or op != self._op:
            self._end_run()
            self._table, self._op = table, op

    def _end_run(self) -> None:
        if self._table is not None:
            before = self._before
            if self._op == "update" and not any(before):
                before = []
            self._changes.append(RowChanges(self._table, self._op, self._after or (), before or ()))
            self._after, self._before, self._table = [], [], None

    def _take(self) -> list[RowChanges]:
        self._end_run()
        changes, self._changes, self._count, self._bytes = self._changes, [], 0, 0
        return changes


def truncated(message: Truncate, layouts: dict[int, Layout | None]) -> Iterator[str]:
    """The captured tables that were truncated, each once."""
    found = (layouts.get(oid) for oid in message.relations)
    return iter(dict.fromkeys(layout.table for layout in found if layout is not None))
