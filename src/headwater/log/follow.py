"""Follows the log: reads, waits to be woken, reads again; reconnects and resumes by itself.

Every committed change comes once for as long as the iterator lives, whatever happens to the
connection. What it cannot bridge it says: `ResyncRequired`, when the log no longer reaches back to
where it was.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import psycopg

from headwater.database import Connection, connect, translate
from headwater.errors import DatabaseError
from headwater.limits import RECONNECT_SECONDS
from headwater.log.read import LogReader
from headwater.log.wake import Waker
from headwater.model import Position, Table, Transaction

logger = logging.getLogger(__name__)

CaughtUp: TypeAlias = Callable[[Connection, Position], Awaitable[None]]


async def _ignore(connection: Connection, position: Position) -> None:
    pass


async def follow(
    url: str,
    *,
    since: Position | None = None,
    wants: Callable[[Table], bool] | None = None,
    caught_up: CaughtUp = _ignore,
) -> AsyncGenerator[Transaction, None]:
    """Transactions after `since` (or from now on), for ever.

    `caught_up` hears, on the reading connection, of positions up to which all was delivered and
    more was asked for: at the start and after every read, also when nothing in it was for us.
    """
    progress = _Progress(since)
    attempt = 0
    while True:
        try:
            async with _link(url, wants) as (connection, reader, waker):
                await progress.begin(connection, reader)
                attempt = 0
                await caught_up(connection, progress.position)
                while True:
                    async for transaction in progress.read(connection, reader):
                        yield transaction
                    await caught_up(connection, progress.position)
                    await waker.have_read(news=progress.news, position=progress.position)
                    await waker.wait()
        except (psycopg.OperationalError, psycopg.InterfaceError, DatabaseError) as error:
            if not progress.begun:
                raise translate(error, url) if isinstance(error, psycopg.Error) else error from None
            pause = min(RECONNECT_SECONDS[0] * 2**attempt, RECONNECT_SECONDS[1])
            attempt = min(attempt + 1, 16)
            logger.warning("lost the database, trying again in %.2f s: %s", pause, error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))


class _Progress:
    """Where a follower is, kept across connections."""

    def __init__(self, since: Position | None) -> None:
        self.begun = False
        self.news = False
        self._position = since
        self._backlog: Position | None = None
        self._delivered = 0

    @property
    def position(self) -> Position:
        assert self._position is not None
        return self._position

    async def begin(self, connection: Connection, reader: LogReader) -> None:
        if self._position is None:
            self._position = await reader.now(connection)
        await reader.check(connection, self._position)
        self.begun = True

    async def read(self, connection: Connection, reader: LogReader) -> AsyncIterator[Transaction]:
        """What is new. A backlog that a lost connection cut short goes on behind the last
        transaction it delivered: they come in the order of their last change."""
        if self._backlog is None:
            batch = await reader.read(connection, self.position)
            self.news = batch.backlog or bool(batch.transactions)
            if not batch.backlog:
                for transaction in batch.transactions:
                    yield transaction
                self._position = batch.position
                return
            self._backlog = batch.position
        async for transaction in reader.catch_up(connection, self.position, self._backlog):
            last = transaction.changes[-1].seq
            if last > self._delivered:
                yield transaction
                if transaction.complete:
                    self._delivered = last
        self._position, self._backlog = self._backlog, None


@asynccontextmanager
async def _link(
    url: str, wants: Callable[[Table], bool] | None
) -> AsyncIterator[tuple[Connection, LogReader, Waker]]:
    """A connection to read through and a waker that already listens, so that nothing written
    after the first read goes unheard."""
    async with AsyncExitStack() as stack:
        waker = await stack.enter_async_context(Waker(url))
        connection = await connect(url, purpose="reader")
        stack.push_async_callback(connection.close)
        yield connection, await LogReader.open(connection, wants), waker
