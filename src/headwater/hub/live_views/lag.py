"""The lag of a live query behind the flushes. Pure.

A view whose queries take too long for a flush is updated beside it: its background job reads in the
snapshot of one flush, and the changes of later flushes wait here in order. Its subscribers have
everything up to `reached`, and its frames have that position, not the hub's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from headwater import limits
from headwater.model import Change, Position, Row


class LagJob(Protocol):
    """The background job that updates a view."""

    def left(self) -> None:
        """A view no longer waits for it."""


class Lag:
    """The lag of one view, from its first background query until no changes wait."""

    __slots__ = (
        "_bytes", "_count", "_recheck", "_taken", "began", "changes", "job", "losses", "reached",
        "since", "text",
    )  # fmt: skip

    def __init__(self, reached: Position | None) -> None:
        self.reached = reached
        """Its subscribers have everything up to here. None for a view without a first result."""
        self.text = "" if reached is None else str(reached)
        self.job: LagJob | None = None
        """The job that updates it now. Its state must not be used until the job is done."""
        self.changes: list[list[Change]] = []
        """Those of each transaction since the job's snapshot."""
        self.losses = 0
        """How many of its jobs in a row have lost their connection."""
        self.since = datetime.now(UTC)
        self.began = time.monotonic()
        self._recheck = False
        self._count = self._bytes = 0
        self._taken: tuple[list[list[Change]], int, int] = [], 0, 0
        """The changes taken last, with their count and size. With very many views they are put back
        each time."""

    @property
    def is_behind(self) -> bool:
        """Whether it needs another job."""
        return bool(self.changes) or self._recheck

    def add(self, changes: Sequence[Change]) -> bool:
        """Add the changes of a transaction. False if there are too many."""
        if changes:
            self.changes.append(list(changes))
        self._count += len(changes)
        self._bytes += sum(map(_size, changes))
        return self._fits

    @property
    def _fits(self) -> bool:
        return self._count <= limits.LAG_CHANGES_MAX and self._bytes <= limits.LAG_BYTES_MAX

    def take(self) -> list[list[Change]]:
        """The changes that wait, for the next job."""
        changes, self.changes = self.changes, []
        self._taken = changes, self._count, self._bytes
        self._count = self._bytes = 0
        self._recheck = False
        return changes

    def put_back(self, changes: list[list[Change]]) -> bool:
        """A job did not apply them: they come before the changes since. False if there are too
        many."""
        self._recheck = True  # also without changes: clients wait for it
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
"""Sizes of changes by `seq`: the same change waits for many views."""


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
