"""What the hub does beside its flushes, without a database."""

from __future__ import annotations

import pytest

from headwater.errors import Unavailable
from headwater.hub.hub import Hub
from headwater.hub.part import Part


class Rechecked(Part):
    def __init__(self, error: Exception | None = None) -> None:
        self.times = 0
        self._error = error

    async def recheck(self, seconds: float) -> None:
        self.times += 1
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [Unavailable("a lock", hint="Try again."), RuntimeError()])
async def test_every_part_is_checked_again_although_one_fails(error: Exception) -> None:
    hub, parts = Hub("postgresql://unused"), (Rechecked(), Rechecked(error), Rechecked())
    hub.parts = parts
    await hub.recheck()
    assert [part.times for part in parts] == [1, 1, 1]
