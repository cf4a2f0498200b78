"""Connections for those who need one for a transaction, opened when first wanted.

A connection goes back as it came: whatever its user set, locked or left behind is undone before
the next one gets it. One that went stale while it was idle is replaced without anybody noticing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psycopg
from psycopg.pq import TransactionStatus

from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.limits import CONNECTION_CLEAN_SECONDS
from headwater.log.follow import is_lost

_CLEAN = (
    b"set session authorization default; reset all; close all; unlisten *;"
    b" select pg_catalog.pg_advisory_unlock_all(); discard temp; discard sequences"
)
"""What DISCARD ALL does, but for prepared statements: those are worth keeping."""


class PoolBusy(Exception):
    """Nobody gave a connection back in time."""


class Pool:
    """At most `size` connections to a database."""

    def __init__(self, url: str, size: int, *, purpose: str) -> None:
        self.size = size
        self._url = url
        self._purpose = purpose
        self._room = asyncio.Semaphore(size)
        self._idle: list[Connection] = []
        self._cleaning: set[asyncio.Task[None]] = set()
        self._closed = False

    @asynccontextmanager
    async def begun(
        self, begin: Callable[[Connection], Awaitable[None]], *, wait: float
    ) -> AsyncIterator[Connection]:
        """A connection on which `begin` has been done. PoolBusy if none becomes free within `wait`
        seconds. What is not committed when the block ends is rolled back."""
        try:
            async with asyncio.timeout(wait):
                await self._room.acquire()
        except TimeoutError:
            raise PoolBusy from None
        connection = None
        try:
            connection = await self._begin(begin)
            yield connection
        finally:
            if connection is None:
                self._room.release()
            else:
                task = asyncio.create_task(self._take_back(connection))
                self._cleaning.add(task)
                task.add_done_callback(self._cleaning.discard)

    async def _begin(self, begin: Callable[[Connection], Awaitable[None]]) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._begin_on(connection, begin)
            except psycopg.Error as error:
                if not is_lost(error):
                    raise
        opened = await connect(
            self._url, purpose=self._purpose, prepares=False, application_path=True
        )
        return await self._begin_on(opened, begin)

    async def _begin_on(
        self, connection: Connection, begin: Callable[[Connection], Awaitable[None]]
    ) -> Connection:
        try:
            await begin(connection)
        except HeadwaterError:
            if self._closed:
                await connection.close()
            else:
                self._idle.append(connection)
            raise
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _take_back(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(CONNECTION_CLEAN_SECONDS):
                if self._closed or connection.info.transaction_status == TransactionStatus.ACTIVE:
                    return
                await connection.rollback()
                await connection.execute(_CLEAN)
                self._idle.append(connection)
        except (psycopg.Error, TimeoutError):
            pass
        finally:
            if connection not in self._idle:
                await connection.close()
            self._room.release()

    async def close(self) -> None:
        """Close them all. Those in use are closed when they come back."""
        self._closed = True
        await asyncio.gather(*self._cleaning, return_exceptions=True)
        while self._idle:
            await self._idle.pop().close()
