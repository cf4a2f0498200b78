"""Capture from the WAL inside a test: a runner in this process, or tables of an application that
are captured by a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from headwater.capture.postgres import triggers
from headwater.capture.postgres.wal.append import WalCapture
from headwater.database import Connection
from headwater.log.complete import StillBehind
from headwater.model import Position
from headwater.pipeline.stream.planning import Planner


@asynccontextmanager
async def capturing(url: str) -> AsyncIterator[WalCapture]:
    """A runner, which ends with the block."""
    capture = WalCapture(url)
    task = asyncio.create_task(capture.run())
    try:
        yield capture
    finally:
        capture.stop()
        await task


async def enable_wal(connection: Connection, *names: str) -> None:
    for name in names:
        await triggers.enable(connection, name, "wal")


async def ends(connection: Connection, *, seconds: float = 10.0) -> bool:
    """Wait until no slot of this database is left."""
    async with asyncio.timeout(seconds):
        while True:
            cursor = await connection.execute(
                "select from pg_replication_slots where database = current_database()"
            )
            if await cursor.fetchone() is None:
                return True
            await asyncio.sleep(0.05)


@contextmanager
def still_behind(patch: pytest.MonkeyPatch) -> Iterator[list[Planner]]:
    """Inside the block, capture is too far behind for the first planner whose caller holds a
    snapshot of the database. Yields that planner in a list, once there was one."""
    met: list[Planner] = []
    now = Planner.now

    def behind(planner: Planner, *, holds_snapshot: bool = False) -> Position:
        if holds_snapshot and not met:
            met.append(planner)
            raise StillBehind("a large transaction")
        return now(planner, holds_snapshot=holds_snapshot)

    with patch.context() as own:
        own.setattr(Planner, "now", behind)
        yield met
