"""Decides when a reader sleeps until it is woken and when it polls. Pure: it is told the time.

Interrupt when idle, poll when busy. Asleep, a reader waits for NOTIFY. Woken too often it begins
*polling*, and only then asks for the lock that makes writers skip NOTIFY. When nothing has come for
a while it gives the lock up and is *draining*: it still polls, because a transaction that skipped
its NOTIFY may be open, and sleeps only when every transaction that was running at that moment has
ended.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from headwater.limits import (
    POLL_QUIET_SECONDS,
    POLL_SECONDS,
    SAFETY_POLL_SECONDS,
    WAKES_PER_SECOND_MAX,
)
from headwater.model import Position

Mode = Literal["asleep", "polling", "draining"]

_WINDOW_SECONDS = 0.25


class Pace:
    def __init__(self) -> None:
        self.mode: Mode = "asleep"
        self._wakes: deque[float] = deque(maxlen=int(WAKES_PER_SECOND_MAX * _WINDOW_SECONDS))
        self._last_news = 0.0
        self._drained_at: int | None = None
        self._sleeps = True

    def never_sleep(self) -> None:
        """Nobody will wake us."""
        self.mode = "polling"
        self._sleeps = False

    @property
    def pause(self) -> float:
        """How long to wait before the next read, at most."""
        return SAFETY_POLL_SECONDS if self.mode == "asleep" else POLL_SECONDS

    def unannounced(self, now: float) -> None:
        """A look without being woken brought something: writers send no NOTIFY. The reader for
        which they leave it out is not ours, or does not say what it reads."""
        if self.mode == "asleep":
            self.mode = "polling"
            self._last_news = now

    def woken(self, now: float) -> None:
        """A writer sent NOTIFY."""
        self._wakes.append(now)
        full = len(self._wakes) == self._wakes.maxlen
        if self.mode != "polling" and full and now - self._wakes[0] < _WINDOW_SECONDS:
            self.mode = "polling"
            self._last_news = now

    def lock_lost(self) -> None:
        """The lock went with its connection; writers may have skipped NOTIFY until then."""
        if self.mode == "polling":
            self._drain()

    def have_read(self, now: float, *, news: bool, position: Position) -> None:
        """A read came back. In a draining reader, it began after the lock was given up."""
        if news:
            self._last_news = now
        if self.mode == "polling" and now - self._last_news >= POLL_QUIET_SECONDS:
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
