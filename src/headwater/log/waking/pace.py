"""Decides when a reader waits for NOTIFY and when it polls. Pure: callers pass the time.

Interrupt when idle, poll when busy. An *asleep* reader waits for NOTIFY. Woken too often, it starts
*polling*, and only then requests the lock that makes writers skip NOTIFY. When no changes have come
for a while, it releases the lock and is *draining*: it still polls, because a transaction that
skipped its NOTIFY may be open, and sleeps when every transaction that was running at that moment
has ended.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from headwater.model import Position

_SAFETY_POLL_SECONDS = 1.0
"""A sleeping reader reads the log this often without a NOTIFY."""

_WAKES_PER_SECOND_MAX = 300
"""A reader that is woken more often starts to poll."""

_POLL_SECONDS = 0.005
"""Pause between two reads of a polling reader."""

_POLL_QUIET_SECONDS = 1.0
"""A polling reader that found nothing for this long goes back to sleep."""


Mode = Literal["asleep", "polling", "draining"]

_WINDOW_SECONDS = 0.25


class Pace:
    """The pace of one reader."""

    def __init__(self) -> None:
        self.mode: Mode = "asleep"
        self._wakes: deque[float] = deque(maxlen=int(_WAKES_PER_SECOND_MAX * _WINDOW_SECONDS))
        self._last_changes = 0.0
        self._drained_at: int | None = None
        self._sleeps = True

    def never_sleep(self) -> None:
        """No writer sends NOTIFY."""
        self.mode = "polling"
        self._sleeps = False

    @property
    def pause(self) -> float:
        """The longest time to wait before the next read."""
        return _SAFETY_POLL_SECONDS if self.mode == "asleep" else _POLL_SECONDS

    def unannounced(self, now: float) -> None:
        """A read found changes without a NOTIFY before it: another reader holds the lock for which
        writers skip NOTIFY, and does not announce what it reads."""
        if self.mode == "asleep":
            self.mode = "polling"
            self._last_changes = now

    def woken(self, now: float) -> None:
        """A writer sent NOTIFY."""
        self._wakes.append(now)
        full = len(self._wakes) == self._wakes.maxlen
        if self.mode != "polling" and full and now - self._wakes[0] < _WINDOW_SECONDS:
            self.mode = "polling"
            self._last_changes = now

    def lock_lost(self) -> None:
        """The lock was lost with its connection; writers may have skipped NOTIFY until then."""
        if self.mode == "polling":
            self._drain()

    def have_read(self, now: float, *, has_changes: bool, position: Position) -> None:
        """A read has ended. In a draining reader, it began after the lock was released."""
        if has_changes:
            self._last_changes = now
        if self.mode == "polling" and now - self._last_changes >= _POLL_QUIET_SECONDS:
            self._drain()
        elif self.mode == "draining":
            if self._drained_at is None:
                self._drained_at = position.xmax
            if position.xmin >= self._drained_at:
                self.mode = "asleep"

    def _drain(self) -> None:
        if not self._sleeps:
            return
        self.mode = "draining"
        self._drained_at = None
        self._wakes.clear()
