"""The step of one view in a flush: its changes, and the deltas that they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from headwater.hub.live_views.view import InitialSnapshot, LiveView
from headwater.live.needs import Need
from headwater.live.state.streamed import Streamed
from headwater.live.state.window import Window
from headwater.model import Change, Delta, Row

_ONE_BY_ONE_MAX = 16
"""Up to this many changes are applied transaction by transaction. More are applied together, and
only the final difference is sent."""


class ViewStep:
    """Updates a state from the last flush to this one."""

    __slots__ = (
        "applied", "at", "changes", "deltas", "done", "error", "snapshot", "state", "view",
    )  # fmt: skip

    def __init__(self, view: LiveView, snapshot: InitialSnapshot | None = None) -> None:
        self.view = view
        self.snapshot = snapshot
        self.state: Window | Streamed = view.state if snapshot is None else snapshot.state
        self.changes: list[list[Change]] = []
        if snapshot is not None and snapshot.changes:
            self.changes.append(snapshot.changes)
            snapshot.changes = []  # from here on for later flushes
        self.applied = False
        """Whether the changes were applied to the state."""
        self.deltas: list[Delta] = []
        self.at: datetime | None = None
        self.error: Exception | None = None
        """The error of the driver, or of our own code."""
        self.done = False
        """Whether all subscribers were sent its result, the view is read again, or a background job
        is responsible for it."""

    def add(self, changes: list[Change]) -> None:
        """Add the changes of one transaction."""
        self.changes.append(changes)

    def apply(self) -> None:
        self.applied = True
        count = sum(map(len, self.changes))
        if not count:
            return
        last = next(changes[-1] for changes in reversed(self.changes) if changes)
        self.at = last.at
        if count > _ONE_BY_ONE_MAX or self.snapshot is not None or self.view.scope is not None:
            # Rows that are hidden from the scope are among the changes as deletes. All of them must
            # be applied together.
            self._take([change for changes in self.changes for change in changes])
        else:
            for changes in self.changes:
                self._take(changes)

    def _take(self, changes: Sequence[Change]) -> None:
        self.deltas += self.state.apply(changes).deltas

    @property
    def need(self) -> Need | None:
        """What must be read from the database before it is done."""
        needs = self.state.needs if self.error is None else ()
        return needs[0] if needs else None

    def answer(self, need: Need, rows: Sequence[Row]) -> None:
        self.deltas += self.state.answer(need, rows).deltas
