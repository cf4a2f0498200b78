"""How often a process for capture from the WAL is started where it always ends at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater.capture.postgres.wal.append import process, runner
from headwater.capture.postgres.wal.append.process import WalCaptureProcess


class Database:
    """Is free for capture, or not, one look after the other. Then the watch is cancelled."""

    closed = False

    def __init__(self, looks: list[bool]) -> None:
        self.looks = iter(looks)

    async def close(self) -> None:
        pass


async def pauses_after(looks: list[bool], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []

    async def connect(url: str, purpose: str) -> Any:
        return Database(looks)

    async def is_free(database: Any) -> bool:
        for look in database.looks:
            return bool(look)
        raise asyncio.CancelledError

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    async def run_once(self: WalCaptureProcess) -> int:
        return 0

    monkeypatch.setattr(process, "connect", connect)
    monkeypatch.setattr(runner, "is_free", is_free)
    monkeypatch.setattr(process, "sleep", sleep)
    monkeypatch.setattr(WalCaptureProcess, "run_once", run_once)
    with pytest.raises(asyncio.CancelledError):
        await WalCaptureProcess("postgresql://").run()
    return found


async def test_after_a_process_that_ended_early_the_pause_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await pauses_after([True] * 7, monkeypatch) == [1, 2, 4, 8, 16, 30, 30]


async def test_the_pause_is_short_again_when_another_process_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await pauses_after([True, True, False, False, True], monkeypatch)
    assert found == [1, 2, 1, 1, 2]
