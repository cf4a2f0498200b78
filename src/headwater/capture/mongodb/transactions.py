"""Puts the events of a change stream together into transactions.

Events with the same session and transaction number are one transaction. So are events with the same
cluster time: one entry of the server's log, such as a batch of inserts. A transaction ends where an
event of another one begins, or where the stream has reached the end of the log. A large one passes
in parts, so at most one part is in memory.

This does no I/O. What it returns are the items of the contract.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from headwater import limits
from headwater.capture.mongodb.positions import ClusterTime, Position
from headwater.capture.source import (
    Item,
    Progress,
    RowChanges,
    RowOp,
    SourceRow,
    TransactionPart,
)

_KEY_BYTES = 100
"""What a change counts beside its texts."""


class Event(NamedTuple):
    """One event without its rows: where it is in the stream, and in which transaction."""

    token: Mapping[str, Any]
    time: ClusterTime
    transaction: Hashable | None
    committed_at: datetime | None


class Change(NamedTuple):
    """What an event did to a row."""

    table: str
    op: RowOp
    after: SourceRow | None = None
    before: SourceRow | None = None


class Assembler:
    """Takes events in their order, and returns the items that they complete."""

    def __init__(self) -> None:
        self._last: Event | None = None
        self._changes: list[Change] = []
        self._bytes = 0
        self._parts = 0

    @property
    def in_transaction(self) -> bool:
        """Whether the open events belong to a transaction of a session."""
        return self._last is not None and self._last.transaction is not None

    def begin(self, event: Event) -> Iterator[Item]:
        """The next event: ends the open transaction, unless the event belongs to it."""
        if self._last is not None and not _same(self._last, event):
            yield from self.end(complete=True)
        self._last = event

    def add(self, changes: list[Change]) -> Iterator[Item]:
        """What the event did; nothing if it concerns no row of the mirror."""
        for change in changes:
            size = size_of(change)
            if self._full(size):
                yield TransactionPart(self._taken())
                self._parts += 1
            self._changes.append(change)
            self._bytes += size

    def end(self, *, complete: bool) -> Iterator[Item]:
        """The open transaction is over. `complete` says that no event of its time follows."""
        event, self._last = self._last, None
        if event is None:
            return
        position = str(Position.of_token(event.token, complete=complete))
        if self._changes or self._parts:
            yield TransactionPart(self._taken(), position, event.committed_at)
        else:
            yield Progress(position)
        self._parts = 0

    def _full(self, size: int) -> bool:
        return bool(self._changes) and (
            len(self._changes) >= limits.SOURCE_PART_CHANGES
            or self._bytes + size > limits.SOURCE_PART_BYTES
        )

    def _taken(self) -> list[RowChanges]:
        changes, self._changes, self._bytes = self._changes, [], 0
        return list(runs(changes))


def runs(changes: list[Change]) -> Iterator[RowChanges]:
    """Consecutive changes of one table with the same operation, together."""
    start = 0
    for end in range(1, len(changes) + 1):
        first = changes[start]
        if end == len(changes) or changes[end][:2] != first[:2]:
            yield _together(changes[start:end])
            start = end


def _together(changes: list[Change]) -> RowChanges:
    table, op = changes[0][:2]
    after = [change.after for change in changes if change.after is not None]
    before: list[SourceRow | None] = [change.before for change in changes]
    return RowChanges(table, op, after, before if any(b is not None for b in before) else ())


def _same(one: Event, other: Event) -> bool:
    if one.transaction is not None and one.transaction == other.transaction:
        return True
    return one.time == other.time


def size_of(change: Change) -> int:
    """About how much memory a change takes."""
    rows = (*(change.after or ()), *(change.before or ()))
    return _KEY_BYTES + sum(len(cell) for cell in rows if isinstance(cell, str))
