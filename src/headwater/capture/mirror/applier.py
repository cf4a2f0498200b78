"""Applies transactions of a source over one connection, without waiting for each answer.

A source's transaction is one transaction here, which also saves the position. Statements are sent
in pipeline mode; `flush` waits for all answers and raises the first error. After an error the
server ignores what was sent behind it, so a prefix of the transactions is applied, never a part of
one. Nothing of an applier is used after an error.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from datetime import datetime
from typing import Any

import psycopg
from psycopg import AsyncRawCursor

from headwater.capture.mirror import positions
from headwater.capture.mirror.locking import brief_locks
from headwater.capture.mirror.statements import Statement
from headwater.database import Connection

SETTINGS = (
    # Commits are made durable by the server within a second; positions are acknowledged after that.
    "set synchronous_commit = off",
    # Rows are found by their key. A plan for ten rows does for any number of them.
    "set plan_cache_mode = force_generic_plan",
    "set enable_seqscan = off",
    "set jit = off",
    # A transaction takes as long as that of the source, whatever the role's settings are.
    "set statement_timeout = 0",
    "set lock_timeout = 0",
    "set idle_in_transaction_session_timeout = 0",
    "set default_transaction_isolation = 'read committed'",
    "set default_transaction_read_only = off",
    # A policy that is forced on the owner is an error here, and hides no row from a statement.
    "set row_security = off",
    # Images of feed-only tables are written as capture writes them.
    "set datestyle = 'ISO'",
    "set intervalstyle = 'iso_8601'",
    "set bytea_output = 'hex'",
    "set extra_float_digits = 1",
    "set lc_monetary = 'C'",
)

_PREPARED_MAX = 2_000
"""Statements that stay prepared: a few for each table."""


class Applier:
    """Sends statements and transactions. `position` is the one that was saved last."""

    def __init__(self, connection: Connection, source: str, position: str | None) -> None:
        self.connection = connection
        self.position = position
        self.is_open = False
        self._is_progress = False  # the newest saved position is one without changes
        self._source = source
        self._cursor: AsyncRawCursor[Any] = AsyncRawCursor(connection)
        self._pipeline: AsyncExitStack | None = None

    async def prepare(self) -> None:
        """Set the session up. The last setting is what the guard of a mirror asks for."""
        self.connection.prepared_max = _PREPARED_MAX
        for setting in SETTINGS:
            await self.connection.execute(setting.encode())
        await self.connection.execute(
            "select set_config('headwater.applies', %s, false)", (self._source,)
        )

    async def send(self, statement: Statement) -> None:
        if statement.locks is not None:
            await self.flush()
            async with brief_locks(self.connection, *statement.locks):
                await self.connection.execute(statement.text.encode())
            return
        await self._enter()
        await self._cursor.execute(statement.text, statement.parameters, prepare=True)

    async def find(self, statement: Statement) -> tuple[Any, ...] | None:
        await self._enter()
        cursor: AsyncRawCursor[Any] = AsyncRawCursor(self.connection)
        await cursor.execute(statement.text, statement.parameters, prepare=True)
        row: tuple[Any, ...] | None = await cursor.fetchone()
        return row

    async def begin(self) -> None:
        if not self.is_open:
            await self.send(_BEGIN)
            self.is_open = True

    async def commit(self, position: str, committed_at: datetime | None) -> None:
        """Save the position and commit."""
        await self._save(position, committed_at)
        await self.commit_only()
        self._is_progress = False

    async def commit_progress(self, position: str) -> None:
        """Save a position up to which nothing was changed. It replaces the last one of this kind,
        so a quiet source does not fill the table."""
        replaces = self._is_progress
        await self._save(position, None)
        if replaces:
            await self.send(Statement(_FORGET, [self._source]))
        await self.commit_only()
        self._is_progress = True

    async def commit_only(self) -> None:
        """Commit what belongs to no transaction of the source: a chunk."""
        await self.send(_COMMIT)
        self.is_open = False

    async def _save(self, position: str, committed_at: datetime | None) -> None:
        await self.begin()
        await self._cursor.execute(
            positions.SAVE, [self._source, self.position, position, committed_at], prepare=True
        )
        self.position = position

    async def flush(self) -> None:
        """Wait for every answer. Statements may be executed on the connection itself afterwards."""
        if self._pipeline is not None:
            pipeline, self._pipeline = self._pipeline, None
            await pipeline.aclose()

    async def close(self) -> None:
        """Close the connection. A transaction that is open is rolled back, also if statements of it
        are still being executed."""
        await self.connection.close()
        with suppress(psycopg.Error):
            await self.flush()

    async def _enter(self) -> None:
        if self._pipeline is None:
            self._pipeline = AsyncExitStack()
            await self._pipeline.enter_async_context(self.connection.pipeline())


_FORGET = (
    "delete from headwater.source_transactions t where t.xid = ("
    "select n.xid from headwater.source_transactions n where n.source = $1"
    " order by n.xid desc limit 1 offset 1)"
)
_BEGIN = Statement("begin", [])
_COMMIT = Statement("commit", [])
