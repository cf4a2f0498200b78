"""Checks positions that clients send: has this hub read them, and are they of this database?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from headwater.errors import Behind, ResyncRequired
from headwater.hub.flush_state import FlushState
from headwater.hub.reading.tables import LookupConnection
from headwater.hub.subscriptions.subscriber import Settling
from headwater.log import marks
from headwater.model import Position

_CHECKED_POSITIONS_MAX = 1_000
"""Positions of returning clients that are cached with the answer whether they are of this history.
Others are checked in the database again."""


class Positions:
    """Asks over a connection of its own, and caches the answers until `forget`."""

    def __init__(self, url: str, flushes: FlushState) -> None:
        self._flushes = flushes
        self._history = LookupConnection(url, purpose="positions")
        self._checked: dict[str, bool] = {}
        """Positions, and whether they are of this history."""

    async def contains(
        self, position: Position, *, newest: bool = False, seconds: float | None = None
    ) -> bool:
        """Wait until the hub has read everything up to a position; with `newest`, everything that
        is in the database now. False if the database does not have the position: it is of another
        log or history, or was lost in a crash. Behind if that takes more than `seconds`."""
        flushes = self._flushes
        try:
            async with asyncio.timeout(seconds):
                is_of_log = flushes.position is None or position.log == flushes.position.log
                if is_of_log and (newest or not flushes.covers(position)):
                    await self._advance()
                if not flushes.covers(position) or not await self.is_of_this_history(position):
                    return False
                await flushes.between()
        except TimeoutError:
            raise Behind(
                f"this gateway has not read the log up to position {position}",
                hint="Try again, or at another gateway over the same database.",
            ) from None
        return flushes.covers(position)

    async def _advance(self) -> None:
        """Wait for a flush that began after this call and moved the position. It has everything
        that any gateway has read before this call."""
        flushes = self._flushes
        flush = flushes.begun + 1
        while flushes.advanced < flush:
            if not flushes.ready:
                raise flushes.unavailable()
            await flushes.next_flush()

    async def reached(self, position: Position, subscriptions: Iterable[Settling] = ()) -> None:
        """Wait until everything up to a position was sent to these subscriptions. ResyncRequired
        for a position that this database does not have."""
        if not await self.contains(position):
            raise ResyncRequired(
                f"position {position} is not of this database, or ahead of it",
                hint="Use the position of an answer; the database may have lost it since.",
            )
        for subscription in subscriptions:
            await subscription.settled(position)

    async def is_of_this_history(self, position: Position) -> bool:
        """Whether all transactions of a position are of this database, and it was not replaced by
        an earlier copy. That can only change when the server restarts."""
        if position.mark is None:
            return True
        text = str(position)
        if (known := self._checked.get(text)) is not None:
            return known
        (answer,) = await self._history.ask(marks.COVERED, marks.covered_parameters(position))
        found = marks.agrees(position, answer)
        # The answer for a position ahead of us can change.
        if self._flushes.covers(position):
            if len(self._checked) >= _CHECKED_POSITIONS_MAX:
                self._checked.clear()
            self._checked[text] = found
        return found

    def forget(self) -> None:
        """The hub has connected again: the database may have another history."""
        self._checked.clear()

    async def close(self) -> None:
        await self._history.close()
