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
from headwater.log.progress import Progress
from headwater.log.read import LogReader
from headwater.log.wake import Waker
from headwater.model import Position, Table, Transaction

logger = logging.getLogger(__name__)

CaughtUp: TypeAlias = Callable[[Connection, Position, bool], Awaitable[None]]


async def _ignore(connection: Connection, position: Position, news: bool) -> None:
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
    more was asked for: at the start and after every read, and whether there was any news in it.
    """
    progress = Progress(since)
    attempt = 0
    while True:
        try:
            async with link(url, wants) as (connection, reader, waker):
                await progress.begin(connection, reader)
                await caught_up(connection, progress.position, True)
                while True:
                    async for transaction in progress.read(connection, reader):
                        yield transaction
                    attempt = 0
                    await caught_up(connection, progress.position, progress.news)
                    await waker.have_read(news=progress.news, position=progress.position)
                    await waker.wait()
        except (psycopg.Error, DatabaseError) as error:
            if not (progress.begun and is_lost(error)):
                raise (
                    translate(error, url) if isinstance(error, psycopg.Error) else error
                ) from error
            pause = reconnect_pause(attempt)
            attempt += 1
            logger.warning("lost the database, trying again in %.2f s: %s", pause, error)
            await asyncio.sleep(pause)


def reconnect_pause(attempt: int) -> float:
    """Seconds to wait before that attempt to reach a lost database; not the same for everybody."""
    first, longest = RECONNECT_SECONDS
    pause = min(first * 2.0 ** min(attempt, 16), longest)
    return pause * random.uniform(0.5, 1.0)


def is_lost(error: psycopg.Error | DatabaseError) -> bool:
    """Whether it is the connection or the server that failed, not what we asked."""
    if isinstance(error, DatabaseError):
        return error.retryable
    passing = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return passing and (error.sqlstate is None or error.sqlstate[:2] in ("08", "40", "53", "57"))


@asynccontextmanager
async def link(
    url: str, wants: Callable[[Table], bool] | None = None, *, options: str = ""
) -> AsyncIterator[tuple[Connection, LogReader, Waker]]:
    """A connection to read through and a waker that already listens, so that nothing written
    after the first read goes unheard."""
    async with AsyncExitStack() as stack:
        waker = await stack.enter_async_context(Waker(url))
        connection = await connect(url, purpose="reader", options=options)
        stack.push_async_callback(connection.close)
        yield connection, await LogReader.open(connection, wants), waker
