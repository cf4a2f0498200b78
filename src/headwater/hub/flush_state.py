"""What the parts of the hub may know of the flushes: how far they are, and when to wait for them.

A flush has a *step*: from the first change that is applied to the last frame that is sent. Between
two steps, every state in memory belongs to `position`; `between` waits for such a moment. The flush
loop alone moves this state forward (`begin_step`, `end_step`, `lose`); parts read it, wait for it,
and ask for a flush with `wake`. It does no I/O, so a unit test can drive a part with it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from headwater.errors import Unavailable
from headwater.log.reading.progress import Progress
from headwater.model import Position


class Wakes(Protocol):
    """What makes the flush loop run, as `headwater.log.waking.waker.Waker` does."""

    def wake(self) -> None:
        """Flush at once."""

    def notified(self) -> None:
        """A notification came, or may have come."""


class FlushState:
    """How far the flushes of one hub are. `position` is None until the first one."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.position: Position | None = None
        self.position_text = ""
        self.position_before: Position | None = None
        """Before the flush whose step is under way, or was the last one."""
        self.durable_before: Position | None = None
        """The same for the position that is safe on disk."""
        self.problem: str | None = "the hub has not been started"
        """Why no flush is possible now, in words that a client may read."""
        self.faulted_at: Position | None = None
        """From where a flush failed for a reason that was not foreseen."""
        self.number = 0
        """How many steps there were. The number of the flush whose step was the last one."""
        self.begun = 0
        """The flush that has begun last. What is read in a later one was committed before."""
        self.completed = 0
        self.advanced = 0
        """The last flush that moved the position forward. A flush that fails does not."""
        self.restarts = 0
        """How often the server was restarted meanwhile."""
        self.waker: Wakes | None = None
        self._ready = asyncio.Event()
        self._between = asyncio.Event()
        self._between.set()
        self._changed = asyncio.Event()

    # -------------------------------------------------------------------- how far they are

    @property
    def ready(self) -> bool:
        """Whether the log is being followed right now."""
        return self._ready.is_set()

    @property
    def durable(self) -> Position:
        """The newest position that a crash of the server cannot take back."""
        return self.progress.durable

    @property
    def stepping(self) -> bool:
        """Whether states are on their way to the position of a flush."""
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
        """Ask for a flush at once."""
        if self.waker is not None:
            self.waker.wake()

    def heard(self) -> None:
        """A topic was signalled, or may have been."""
        if self.waker is not None:
            self.waker.notified()

    async def until_ready(self) -> None:
        await self._ready.wait()

    async def between(self) -> None:
        """Wait for the end of the step that is under way. Until the caller awaits again, states and
        position belong together."""
        while self.stepping:
            await self._between.wait()

    async def next_flush(self) -> None:
        """Wait for a flush that began after this call."""
        flush = self.begun + 1
        while self.completed < flush:
            self.wake()
            await self.changed()

    async def changed(self) -> None:
        """Wait, without asking for one, until a flush ends or a subscription has caught up."""
        self._changed.clear()
        await self._changed.wait()

    def announce(self) -> None:
        """A subscription has caught up, or has ended: those in `changed` look again."""
        self._changed.set()

    # -------------------------------------------------------------------- for the flush loop

    def begin_step(self, position: Position) -> bool:
        """From here until `end_step`, states are on their way to this position. Returns whether the
        log was not followed before."""
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
        """Continue from a later position that is safe on disk, without a step."""
        self.position, self.position_text = position, str(position)
        self.advanced = self.begun
        self.progress.skip_to(position)

    def lose(self, problem: str) -> None:
        """The log is not followed any more, for this reason."""
        self.problem = problem
        self._ready.clear()
