"""A pool of connections for transactions, opened when they are needed.

A connection is cleaned before its next use: settings, locks and temporary objects are undone. One
that was lost while it was idle is replaced, without an error. Places are given out fairly
(`fair_queue`): one owner has at most a share of them, and requests of other owners pass those that
wait beyond it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psycopg
from psycopg.pq import TransactionStatus

from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.fair_queue import FairQueue, Owner
from headwater.log.reconnect import is_lost
from headwater.queries.execution.impersonation import PREPARED_BY_OTHERS

_CONNECTION_CLEAN_SECONDS = 5.0
"""How long it may take to undo the settings of a function. Then its connection is closed."""


CLEAN = (
    b"set session authorization default; reset all; close all; unlisten *;"
    b" select pg_catalog.pg_advisory_unlock_all(); discard temp; discard sequences"
)
"""Outside a transaction: like DISCARD ALL, but without removing prepared statements, which are
useful."""


class PoolBusy(Exception):
    """No place became free in time. `own` says that the owner has all the places it may have."""

    def __init__(self, *, own: bool = False) -> None:
        self.own = own


class Pool:
    """At most `size` connections to a database. One owner may use at most `share` of them, and at
    least one. With `as_role`, a connection to `question_url` is used, and `check` is called when it
    is opened."""

    def __init__(
        self,
        url: str,
        size: int,
        *,
        purpose: str,
        share: float = 1.0,
        question_url: str | None = None,
        check: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        self.size = size
        self.owner_size = max(1, int(size * share))
        self._url = url
        self._question_url = question_url or url
        self._purpose = purpose
        self._check = check
        bounds = dict.fromkeys(("user", "address"), self.owner_size)
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(bounds)
        self._idle: list[tuple[str, Connection]] = []
        self._cleaning: set[asyncio.Task[None]] = set()
        self._closed = False

    @asynccontextmanager
    async def begun(
        self,
        begin: Callable[[Connection], Awaitable[None]],
        *,
        wait: float,
        owner: Owner | None = None,
        as_role: bool = False,
    ) -> AsyncIterator[Connection]:
        """A connection after `begin`. PoolBusy if no place becomes free within `wait` seconds. If
        the transaction is not committed when the block ends, it is rolled back."""
        place = await self._place(owner, wait)
        url = self._question_url if as_role else self._url
        connection = None
        try:
            connection = await self._begin(url, begin)
            yield connection
        finally:
            if connection is None:
                self._leave(place)
            else:
                task = asyncio.create_task(self._take_back(url, connection, place))
                self._cleaning.add(task)
                task.add_done_callback(self._cleaning.discard)

    # -------------------------------------------------------------------- places

    async def _place(self, owner: Owner | None, wait: float) -> asyncio.Future[None]:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        owners = [] if owner is None else [owner]
        self._queue.add(place, owners)
        self._give_places()
        try:
            async with asyncio.timeout(wait):
                await place
        except BaseException as error:
            own = owner is not None and self._queue.at_bound(owner)
            self._queue.remove(place)
            self._leave(place)
            if isinstance(error, TimeoutError):
                raise PoolBusy(own=own) from None
            raise
        return place

    def _give_places(self) -> None:
        while self._queue.running < self.size and (place := self._queue.next()) is not None:
            if place.done():  # its request was cancelled
                self._queue.done(place)
            else:
                place.set_result(None)

    def _leave(self, place: asyncio.Future[None]) -> None:
        self._queue.done(place)
        self._give_places()

    # -------------------------------------------------------------------- connections

    async def _begin(self, url: str, begin: Callable[[Connection], Awaitable[None]]) -> Connection:
        while (connection := self._take_idle(url)) is not None:
            try:
                return await self._begin_on(url, connection, begin)
            except psycopg.Error as error:
                if not is_lost(error):
                    raise
        if self._idle and self._queue.running + len(self._idle) > self.size:
            # The idle ones have the other role.
            await self._idle.pop(0)[1].close()
        opened = await connect(url, purpose=self._purpose, prepares=False, application_path=True)
        if self._check is not None and url != self._url:
            try:
                await self._check(opened)
            except BaseException:
                await opened.close()
                raise
        return await self._begin_on(url, opened, begin)

    def _take_idle(self, url: str) -> Connection | None:
        for i in range(len(self._idle) - 1, -1, -1):
            if self._idle[i][0] == url:
                return self._idle.pop(i)[1]
        return None

    async def _begin_on(
        self, url: str, connection: Connection, begin: Callable[[Connection], Awaitable[None]]
    ) -> Connection:
        try:
            await begin(connection)
        except HeadwaterError:
            if self._closed:
                await connection.close()
            else:
                self._idle.append((url, connection))
            raise
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _take_back(
        self, url: str, connection: Connection, place: asyncio.Future[None]
    ) -> None:
        is_clean = False
        try:
            async with asyncio.timeout(_CONNECTION_CLEAN_SECONDS):
                if self._closed or connection.info.transaction_status == TransactionStatus.ACTIVE:
                    return
                await connection.rollback()
                await connection.execute(CLEAN)
                cursor = await connection.execute(PREPARED_BY_OTHERS)
                is_clean = await cursor.fetchone() is None
                if is_clean:
                    self._idle.append((url, connection))
        except (psycopg.Error, TimeoutError):
            pass
        finally:
            if not is_clean:
                await connection.close()
            self._leave(place)

    async def close(self) -> None:
        """Close all connections. Those in use are closed when they are returned."""
        self._closed = True
        await asyncio.gather(*self._cleaning, return_exceptions=True)
        while self._idle:
            await self._idle.pop()[1].close()
