"""Follows the log: reads, waits to be woken, reads again; reconnects and resumes by itself.

Every committed change comes once for as long as the iterator lives, whatever happens to the
connection. What it cannot bridge it says: `ResyncRequired`, when the log no longer reaches back to
where it was.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from typing import NamedTuple, TypeAlias

import psycopg

from headwater.database import Connection, connect, translate
from headwater.errors import DatabaseError, ResyncRequired
from headwater.limits import RECONNECT_SECONDS
from headwater.log.read import Batch, LogReader
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
    progress = _Progress(since)
    attempt = 0
    while True:
        try:
            async with _link(url, wants) as (connection, reader, waker):
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
            if not (progress.begun and _is_lost(error)):
                raise (
                    translate(error, url) if isinstance(error, psycopg.Error) else error
                ) from error
            pause = min(RECONNECT_SECONDS[0] * 2**attempt, RECONNECT_SECONDS[1])
            attempt = min(attempt + 1, 16)
            logger.warning("lost the database, trying again in %.2f s: %s", pause, error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))


def _is_lost(error: psycopg.Error | DatabaseError) -> bool:
    """Whether it is the connection or the server that failed, not what we asked."""
    if isinstance(error, DatabaseError):
        return error.retryable
    passing = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return passing and (error.sqlstate is None or error.sqlstate[:2] in ("08", "40", "53", "57"))


class _Progress:
    """Where a follower is, kept across connections.

    A server that crashes may forget transactions that we have seen: aborted ones, and committed
    ones where commits are asynchronous. It then gives their ids out again, so a position that
    contains them would hide the newcomers. Therefore we also know the last position that was safe
    on disk, and after a restart go on from there, leaving out what we have delivered since.
    """

    def __init__(self, since: Position | None) -> None:
        self.begun = False
        self.news = False
        self._position = since
        self._durable = since
        self._unflushed: deque[_Step] = deque()
        self._repeated: set[_Trait] = set()
        self._server_started: object = None
        self._backlog: Position | None = None
        self._backlog_delivered: set[int] = set()

    @property
    def position(self) -> Position:
        assert self._position is not None
        return self._position

    async def begin(self, connection: Connection, reader: LogReader) -> None:
        if self._position is None:
            self._position = self._durable = await reader.now(connection)
        cursor = await connection.execute("select pg_postmaster_start_time()")
        started = await cursor.fetchone()
        if self.begun and started != self._server_started:
            self._position = self._durable
            self._repeated.update(_trait(t) for step in self._unflushed for t in step.delivered)
            self._unflushed.clear()
        self._server_started = started
        await reader.check(connection, self.position)
        self.begun = True

    async def read(self, connection: Connection, reader: LogReader) -> AsyncIterator[Transaction]:
        """What is new since the last time."""
        if self._backlog is None:
            batch = await reader.read(connection, self.position)
            self.news = batch.news
            if not batch.backlog:
                for transaction in batch.transactions:
                    if not self._was_delivered(transaction):
                        yield transaction
                self._advance(batch)
                return
            await _flush(connection)
            self._backlog = batch.position
        async for transaction in self._read_backlog(connection, reader, self._backlog):
            yield transaction
        self._position = self._durable = self._backlog
        self._unflushed.clear()
        self._backlog = None
        self._backlog_delivered.clear()
        self._check_none_lost()

    async def _read_backlog(
        self, connection: Connection, reader: LogReader, until: Position
    ) -> AsyncIterator[Transaction]:
        """One that a lost connection cut short goes on with what it has not delivered; the pair of
        positions is safe on disk."""
        async for transaction in reader.catch_up(connection, self.position, until):
            if transaction.xid in self._backlog_delivered or self._was_delivered(transaction):
                continue
            yield transaction
            if transaction.complete:
                self._backlog_delivered.add(transaction.xid)

    def _advance(self, batch: Batch) -> None:
        self._check_none_lost()
        self._unflushed.append(_Step(batch.position, batch.written, batch.transactions))
        while self._unflushed and self._unflushed[0].written <= batch.flushed:
            self._durable = self._unflushed.popleft().position
        self._position = batch.position

    def _was_delivered(self, transaction: Transaction) -> bool:
        if not self._repeated or (trait := _trait(transaction)) not in self._repeated:
            return False
        self._repeated.remove(trait)
        return True

    def _check_none_lost(self) -> None:
        if self._repeated:
            raise ResyncRequired(
                f"the server crashed and lost {len(self._repeated)} transactions that had been"
                " delivered",
                hint="Commits were asynchronous. Read the tables again, then follow the log from "
                "its present position.",
            )


class _Step(NamedTuple):
    """A read whose position may not be on disk yet."""

    position: Position
    written: int
    delivered: tuple[Transaction, ...]


_Trait: TypeAlias = tuple[int, int, datetime]


def _trait(transaction: Transaction) -> _Trait:
    """Tells a transaction apart even when its id and numbers are given out again."""
    return transaction.xid, transaction.changes[-1].seq, transaction.at


async def _flush(connection: Connection) -> None:
    """Have everything written so far on disk: a commit that waits takes all before it along."""
    async with connection.transaction():
        await connection.execute("set local synchronous_commit = local")
        await connection.execute("select pg_logical_emit_message(true, 'headwater', '')")


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
