"""The progress of the flushes, as the parts of the hub see it: their position, and waiting for one.

A flush has a *step*: from the first change that is applied to the last frame that is sent. Between
two steps, every state in memory is as of `position`; `between` waits for that. Only the flush loop
changes this object (`begin_step`, `end_step`, `lose`). Parts read it, wait for it, and request a
flush with `wake`. It does no I/O, so a unit test can drive a part with it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from headwater.errors import Unavailable
from headwater.log.reading.progress import Progress
from headwater.model import Position


class Wakes(Protocol):
    """Starts a flush, as `headwater.log.waking.waker.Waker` does."""

    def wake(self) -> None:
        """Flush at once."""

    def notified(self) -> None:
        """A notification arrived, or may have arrived."""


class FlushState:
    """The progress of one hub's flushes. `position` is None until the first one."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.position: Position | None = None
        self.position_text = ""
        self.position_before: Position | None = None
        """The position before the current step, or before the last one."""
        self.durable_before: Position | None = None
        """The durable position before the current step, or before the last one."""
        self.problem: str | None = "the hub has not been started"
        """Why no flush is possible now. Clients may read it."""
        self.faulted_at: Position | None = None
        """The position from which a flush failed by an error that is not the database's."""
        self.number = 0
        """The number of the last step."""
        self.begun = 0
        """The number of the last flush that has begun. A later one reads everything that is
        committed now."""
        self.completed = 0
        self.advanced = 0
        """The number of the last flush that moved the position. A flush that fails does not."""
        self.restarts = 0
        """How often the server was restarted since the hub started."""
        self.waker: Wakes | None = None
        self._ready = asyncio.Event()
        self._between = asyncio.Event()
        self._between.set()
        self._changed = asyncio.Event()

    # -------------------------------------------------------------------- progress

    @property
    def ready(self) -> bool:
        """Whether the log is followed now."""
        return self._ready.is_set()

    @property
    def durable(self) -> Position:
        """The newest position that is on the server's disk: a crash cannot undo it."""
        return self.progress.durable

    @property
    def stepping(self) -> bool:
        """Whether a step is under way: states in memory belong to different positions."""
        return not self._between.is_set()

    def covers(self, position: Position) -> bool:
        return self.position is not None and self.position.covers(position)

    def unavailable(self) -> Unavailable:
        return Unavailable(
            f"live data is not available now: {self.problem}",
            hint="It comes back by itself; try again.",
        )

    # -------------------------------------------------------------------- for the parts

    def wake(self) -> None:
        """Request a flush at once."""
        if self.waker is not None:
            self.waker.wake()

    def notified(self) -> None:
        """A notification of a signal arrived, or may have arrived."""
        if self.waker is not None:
            self.waker.notified()

    async def until_ready(self) -> None:
        await self._ready.wait()

    async def between(self) -> None:
        """Wait for the end of the current step. Until the caller awaits again, all states are as of
        `position`."""
        while self.stepping:
            await self._between.wait()

    async def next_flush(self) -> None:
        """Wait for a flush that began after this call."""
        flush = self.begun + 1
        while self.completed < flush:
            self.wake()
            await self.changed()

    async def changed(self) -> None:
        """Wait until a flush ends or a subscription has caught up. Requests no flush."""
        self._changed.clear()
        await self._changed.wait()

    def announce(self) -> None:
        """A subscription has caught up, or has ended: wake the tasks in `changed`."""
        self._changed.set()

    # -------------------------------------------------------------------- for the flush loop

    def begin_step(self, position: Position) -> bool:
        """Begin the step to this position. Returns whether the log was not followed before."""
        self.number += 1
        self.advanced = self.begun
        self.position_before, self.position = self.position, position
        self.position_text = str(position)
        self._between.clear()
        was_lost = not self.ready
        if was_lost:
            self.problem = None
            self._ready.set()
        return was_lost

    def end_step(self) -> None:
        self.completed = self.begun
        self._changed.set()
        self._between.set()

    def skip_to(self, position: Position) -> None:
        """Continue from a later position that is on disk, without a step."""
        self.position, self.position_text = position, str(position)
        self.advanced = self.begun
        self.progress.skip_to(position)

    def lose(self, problem: str) -> None:
        """The log is no longer followed, for this reason."""
        self.problem = problem
        self._ready.clear()
