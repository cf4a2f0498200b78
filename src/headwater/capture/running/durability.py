"""Acknowledges positions once they are durable.

Commits of a runner do not wait for the disk, which the server writes a little later. A position is
acknowledged only when the WAL up to its commit has been written: a source may forget everything
before a position that it was given.
"""

from __future__ import annotations

import time

from headwater.capture.mirror.applier import Applier
from headwater.capture.source import Source
from headwater.limits import SOURCE_ACKNOWLEDGE_SECONDS


class Acknowledger:
    """Looks at the WAL between transactions."""

    def __init__(self, source: Source, applier: Applier) -> None:
        self._source = source
        self._applier = applier
        self._acknowledged: str | None = None
        self._at = time.monotonic()
        self._waiting: tuple[str, str] | None = None  # a position, and the end of the WAL then

    async def look(self, *, idle: bool) -> None:
        """Acknowledge what is durable by now; without a pause, about once a second."""
        position = self._applier.position
        assert position is not None
        if position == self._acknowledged:
            return
        if not idle and time.monotonic() - self._at < SOURCE_ACKNOWLEDGE_SECONDS:
            return
        if self._waiting is None:
            self._waiting = position, await self._fetch("select pg_current_wal_insert_lsn()::text")
            return
        position, end = self._waiting
        if await self._fetch("select pg_current_wal_flush_lsn() >= %s::pg_lsn", end):
            self._waiting = None
            await self._source.acknowledge(position)
            self._acknowledged, self._at = position, time.monotonic()

    async def _fetch(self, statement: str, *values: str) -> str:
        cursor = await self._applier.connection.execute(statement.encode(), values)
        row = await cursor.fetchone()
        assert row is not None
        found: str = row[0]
        return found
