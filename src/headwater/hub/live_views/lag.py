"""How far a live query lags behind the flushes. Pure.

A view whose questions do not fit into a flush is taken forward beside it: questions are asked in
the snapshot of one flush, while the changes of later flushes wait here in their order. Its
subscribers have everything up to `reached`, and frames bear that position, not the hub's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from headwater import limits
from headwater.model import Change, Position, Row


class Asks(Protocol):
    """What takes a view forward beside the flushes."""

    def left(self) -> None:
        """A view no longer waits for it."""


class Lag:
    """That of one view, from the moment that a question is asked for it beside a flush until
    nothing waits any more."""

    __slots__ = (
        "_bytes", "_count", "_recheck", "_taken", "began", "changes", "job", "losses", "reached",
        "since", "text",
    )  # fmt: skip

    def __init__(self, reached: Position | None) -> None:
        self.reached = reached
        """Its subscribers have everything up to here. None for a view without a first result."""
        self.text = "" if reached is None else str(reached)
        self.job: Asks | None = None
        """What asks for it now; its state must not be looked at meanwhile."""
        self.changes: list[list[Change]] = []
        """Of each transaction since the job's snapshot."""
        self.losses = 0
        """Connections in a row that were lost while they asked for it."""
        self.since = datetime.now(UTC)
        self.began = time.monotonic()
        self._recheck = False
        self._count = self._bytes = 0
        self._taken: tuple[list[list[Change]], int, int] = [], 0, 0
        """What was taken last, with what it counts: of very many views it comes back each time."""

    @property
    def is_behind(self) -> bool:
        """Whether there is something to ask for, and not only for a result that has arrived."""
        return bool(self.changes) or self._recheck

    def add(self, changes: Sequence[Change]) -> bool:
        """One more transaction; False where there is no room for it."""
        if changes:
            self.changes.append(list(changes))
        self._count += len(changes)
        self._bytes += sum(map(_size, changes))
        return self._fits

    @property
    def _fits(self) -> bool:
        return self._count <= limits.LAG_CHANGES_MAX and self._bytes <= limits.LAG_BYTES_MAX

    def take(self) -> list[list[Change]]:
        """What waits, for the next job."""
        changes, self.changes = self.changes, []
        self._taken = changes, self._count, self._bytes
        self._count = self._bytes = 0
        self._recheck = False
        return changes

    def put_back(self, changes: list[list[Change]]) -> bool:
        """A job could not take them: they come before what came since. False where there is no
        room for all."""
        self._recheck = True  # also where nothing changed: clients wait for it
        taken, count, size = self._taken
        if changes is not taken:
            count, size = (
                sum(map(len, changes)),
                sum(_size(each) for some in changes for each in some),
            )
        self._taken = [], 0, 0
        self.changes = changes + self.changes
        self._count += count
        self._bytes += size
        return self._fits

    def covers(self, position: Position) -> bool:
        """Whether its subscribers have everything up to a position."""
        return self.reached is not None and self.reached.covers(position)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


_sizes: dict[int, int] = {}
"""Of changes by their `seq`: the same ones wait for many views."""


def _size(change: Change) -> int:
    size = _sizes.get(change.seq)
    if size is None:
        if len(_sizes) >= limits.LAG_CHANGES_MAX:
            _sizes.clear()
        size = 100 + _row_size(change.before) + _row_size(change.after)
        _sizes[change.seq] = size
    return size


def _row_size(row: Row | None) -> int:
    if row is None:
        return 0
    return sum(16 + len(value) if isinstance(value, str | bytes) else 32 for value in row.values())
