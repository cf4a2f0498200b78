"""Whether what a subscription waits for has been handed over, or failed."""

from __future__ import annotations

import asyncio

from headwater.errors import HeadwaterError


class Arrival:
    """Settled once. The error, if there is one, is raised in each task that waits."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_settled(self) -> bool:
        return self._future.done()

    async def wait(self) -> None:
        await asyncio.shield(self._future)

    def settle(self, error: HeadwaterError | None = None) -> None:
        """It is there, or never will be. Only the first call counts."""
        if self.is_settled:
            return
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
            self._future.exception()  # the task that waited may be gone

    def renew(self) -> None:
        """Something else is to come. Tasks that wait already continue to wait for it."""
        if self.is_settled:
            self._future = asyncio.get_running_loop().create_future()
