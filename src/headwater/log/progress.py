"""Where a reader of the log is, kept across connections and crashes of the server.

A server that crashes may forget transactions that we have seen: aborted ones, and committed ones
where commits are asynchronous. It then gives their ids out again, so a position that contains them
would hide the newcomers. Therefore we also know the last position that was safe on disk (`durable`)
and after a restart go on from there, leaving out what we have delivered since. What was delivered
and then forgotten by the server is `ResyncRequired`, never a silent difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from datetime import datetime
from typing import NamedTuple, TypeAlias

from headwater.database import Connection
from headwater.errors import ResyncRequired
from headwater.log.read import Batch, LogReader
from headwater.model import Position, Transaction


class Progress:
    """How far one reader has come. `begin` with every new connection; then either `read`, which
    brings everything, or `LogReader.read` with `new` and `advance` around its batch, and `leap`
    over a backlog that nobody needs row by row."""

    def __init__(self, since: Position | None = None) -> None:
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
        """Up to here everything was delivered."""
        assert self._position is not None
        return self._position

    @property
    def durable(self) -> Position:
        """The newest such position that survives a crash of the server: what may be handed out."""
        assert self._durable is not None
        return self._durable

    async def begin(self, connection: Connection, reader: LogReader) -> bool:
        """Go on over a new connection. Says whether the server was restarted meanwhile."""
        if self._position is None:
            self._position = self._durable = await reader.now(connection)
        cursor = await connection.execute("select pg_catalog.pg_postmaster_start_time()")
        started = await cursor.fetchone()
        restarted = self.begun and started != self._server_started
        if restarted:
            self._position = self._durable
            self._repeated.update(_trait(t) for step in self._unflushed for t in step.delivered)
            self._unflushed.clear()
        self._server_started = started
        await reader.check(connection, self.position)
        self.begun = True
        return restarted

    async def read(self, connection: Connection, reader: LogReader) -> AsyncIterator[Transaction]:
        """What is new since the last time, however much it is."""
        if self._backlog is None:
            batch = await reader.read(connection, self.position)
            self.news = batch.news
            if not batch.backlog:
                for transaction in self.new(batch):
                    yield transaction
                self.advance(batch)
                return
            await flush(connection)
            self._backlog = batch.position
        async for transaction in self._read_backlog(connection, reader, self._backlog):
            yield transaction
        self.leap(self._backlog)
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

    def new(self, batch: Batch) -> list[Transaction]:
        """Those of a read that were not delivered before the server restarted."""
        if not self._repeated:
            return list(batch.transactions)
        return [each for each in batch.transactions if _trait(each) not in self._repeated]

    def advance(self, batch: Batch) -> None:
        """The new ones of a read count as delivered. Raises ResyncRequired if ones that had been
        delivered before are gone."""
        if self._repeated:
            self._repeated.difference_update(map(_trait, batch.transactions))
        self._check_none_lost()
        self._unflushed.append(_Step(batch.position, batch.written, batch.transactions))
        while self._unflushed and self._unflushed[0].written <= batch.flushed:
            self._durable = self._unflushed.popleft().position
        self._position = batch.position

    def leap(self, position: Position) -> None:
        """Go on from a later position that is safe on disk."""
        self._position = self._durable = position
        self._unflushed.clear()
        self._backlog = None
        self._backlog_delivered.clear()

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


async def flush(connection: Connection) -> None:
    """Have everything written so far on disk: a commit that waits takes all before it along."""
    async with connection.transaction():
        await connection.execute("set local synchronous_commit = local")
        await connection.execute("select pg_catalog.pg_logical_emit_message(true, 'headwater', '')")
