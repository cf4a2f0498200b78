"""Follows the log: reads, waits for a wake-up, reads again; reconnects and resumes by itself.

The iterator yields every committed change once, also when connections are lost. When the log no
longer reaches back to its position, it raises `ResyncRequired`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import psycopg

from headwater.database import Connection, connect, translate
from headwater.errors import DatabaseError
from headwater.log.reading.progress import Progress
from headwater.log.reading.reader import LogReader
from headwater.log.reconnect import is_lost, reconnect_pause
from headwater.log.waking.waker import Waker
from headwater.model import Position, Table, Transaction

logger = logging.getLogger(__name__)

CaughtUp: TypeAlias = Callable[[Connection, Position, bool], Awaitable[None]]


async def _ignore(connection: Connection, position: Position, has_changes: bool) -> None:
    pass


async def follow(
    url: str,
    *,
    since: Position | None = None,
    wants: Callable[[Table], bool] | None = None,
    caught_up: CaughtUp = _ignore,
) -> AsyncGenerator[Transaction, None]:
    """Transactions after `since` (or from now on), for ever.

    `caught_up` is called at the start, and after every read when the consumer asks for more: with
    the connection that reads, the position up to which all was delivered, and whether the read
    found changes.
    """
    progress = Progress(since)
    attempt = 0
    while True:
        try:
            async with reading_session(url, wants) as (connection, reader, waker):
                await progress.begin(connection, reader)
                await caught_up(connection, progress.position, True)
                while True:
                    async for transaction in progress.read(connection, reader):
                        yield transaction
                    attempt = 0
                    await caught_up(connection, progress.position, progress.has_changes)
                    await waker.have_read(
                        has_changes=progress.has_changes, position=progress.position
                    )
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


@asynccontextmanager
async def reading_session(
    url: str, wants: Callable[[Table], bool] | None = None, *, options: str = ""
) -> AsyncIterator[tuple[Connection, LogReader, Waker]]:
    """A connection, a reader on it, and a waker. The waker listens before the first read, so it
    receives the NOTIFY of everything written after that read."""
    async with AsyncExitStack() as stack:
        waker = await stack.enter_async_context(Waker(url))
        connection = await connect(url, purpose="reader", options=options)
        stack.push_async_callback(connection.close)
        reader = await LogReader.open(connection, wants, url=url)
        stack.push_async_callback(reader.close)
        yield connection, reader, waker
