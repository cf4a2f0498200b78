"""An event that a subscription waits for: it has happened, or it has failed."""

from __future__ import annotations

import asyncio

from headwater.errors import HeadwaterError


class Arrival:
    """Settled once. An error is raised in each task that waits."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_settled(self) -> bool:
        return self._future.done()

    async def wait(self) -> None:
        await asyncio.shield(self._future)

    def settle(self, error: HeadwaterError | None = None) -> None:
        """It has happened, or has failed. Only the first call counts."""
        if self.is_settled:
            return
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
            self._future.exception()  # the task that waited may be gone

    def renew(self) -> None:
        """Wait for another one. Tasks that wait already continue to wait."""
        if self.is_settled:
            self._future = asyncio.get_running_loop().create_future()
