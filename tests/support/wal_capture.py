"""Capture from the WAL inside a test: a runner in this process, or tables of an application that
are captured by a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headwater.capture.postgres import triggers
from headwater.capture.postgres.wal.append import WalCapture
from headwater.database import Connection


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
