"""How far a reader of the log has come, over lost connections and crashes of the server.

A server that crashes may lose transactions that were read already: aborted ones, and committed ones
where commits are asynchronous. It then gives their ids to other transactions, which a position that
contains these ids would hide. So the reader also remembers the last position that was on disk
(`durable`). After a restart it continues from there and leaves out what it has delivered since. A
transaction that was delivered and then lost by the server is `ResyncRequired`, never a silent
difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from datetime import datetime
from typing import NamedTuple, TypeAlias

from headwater.database import Connection
from headwater.errors import ResyncRequired
from headwater.log.reading.reader import LogBatch, LogReader
from headwater.model import Position, Transaction


class Progress:
    """How far one reader has come. Call `begin` with every new connection. Then call either `read`,
    which yields every transaction, or `LogReader.read` with `undelivered` and `advance` around its
    batch, and `skip_to` for a backlog that is not read row by row."""

    def __init__(self, since: Position | None = None) -> None:
        self.begun = False
        self.has_changes = False
        self._position = since
        self._durable = since
        self._unflushed: deque[_Step] = deque()
        self._delivered_before: set[_Identity] = set()
        self._server_started: object = None
        self._backlog: Position | None = None
        self._backlog_delivered: set[int] = set()

    @property
    def position(self) -> Position:
        """Everything up to here was delivered."""
        assert self._position is not None
        return self._position

    @property
    def durable(self) -> Position:
        """The newest such position that survives a crash of the server. Clients get this one."""
        assert self._durable is not None
        return self._durable

    async def begin(self, connection: Connection, reader: LogReader) -> bool:
        """Continue over a new connection. Returns whether the server was restarted since."""
        if self._position is None:
            self._position = self._durable = await reader.now(connection)
        cursor = await connection.execute("select pg_catalog.pg_postmaster_start_time()")
        started = await cursor.fetchone()
        restarted = self.begun and started != self._server_started
        if restarted:
            self._position = self._durable
            self._delivered_before.update(
                _identity(t) for step in self._unflushed for t in step.delivered
            )
            self._unflushed.clear()
        self._server_started = started
        await reader.check(connection, self.position)
        self.begun = True
        return restarted

    async def read(self, connection: Connection, reader: LogReader) -> AsyncIterator[Transaction]:
        """The transactions since the last read, however many."""
        if self._backlog is None:
            batch = await reader.read(connection, self.position)
            self.has_changes = batch.has_changes
            if not batch.backlog:
                for transaction in self.undelivered(batch):
                    yield transaction
                self.advance(batch)
                return
            await flush(connection)
            self._backlog = batch.position
        async for transaction in self._read_backlog(connection, reader, self._backlog):
            yield transaction
        self.skip_to(self._backlog)
        self._check_none_lost()

    async def _read_backlog(
        self, connection: Connection, reader: LogReader, until: Position
    ) -> AsyncIterator[Transaction]:
        """After a lost connection, a backlog continues with the transactions that were not
        delivered; both of its positions are on disk."""
        async for transaction in reader.catch_up(connection, self.position, until):
            if transaction.xid in self._backlog_delivered or self._was_delivered(transaction):
                continue
            yield transaction
            if transaction.complete:
                self._backlog_delivered.add(transaction.xid)

    def undelivered(self, batch: LogBatch) -> list[Transaction]:
        """The transactions of a read that were not delivered before the server restarted."""
        if not self._delivered_before:
            return list(batch.transactions)
        return [
            each for each in batch.transactions if _identity(each) not in self._delivered_before
        ]

    def advance(self, batch: LogBatch) -> None:
        """Count the transactions of a read as delivered. Raises ResyncRequired if transactions that
        were delivered before are missing."""
        if self._delivered_before:
            self._delivered_before.difference_update(map(_identity, batch.transactions))
        self._check_none_lost()
        self._unflushed.append(_Step(batch.position, batch.written, batch.transactions))
        while self._unflushed and self._unflushed[0].written <= batch.flushed:
            self._durable = self._unflushed.popleft().position
        self._position = batch.position

    def skip_to(self, position: Position) -> None:
        """Continue from a later position that is on disk."""
        self._position = self._durable = position
        self._unflushed.clear()
        self._backlog = None
        self._backlog_delivered.clear()

    def _was_delivered(self, transaction: Transaction) -> bool:
        if (
            not self._delivered_before
            or (identity := _identity(transaction)) not in self._delivered_before
        ):
            return False
        self._delivered_before.remove(identity)
        return True

    def _check_none_lost(self) -> None:
        if self._delivered_before:
            raise ResyncRequired(
                f"the server crashed and lost {len(self._delivered_before)} transactions that were"
                " delivered before",
                hint="Commits were asynchronous. Read the tables again, then follow the log from "
                "its present position.",
            )


class _Step(NamedTuple):
    """A read whose position may not be on disk yet."""

    position: Position
    written: int
    delivered: tuple[Transaction, ...]


_Identity: TypeAlias = tuple[int, int, datetime]


def _identity(transaction: Transaction) -> _Identity:
    """Identifies a transaction even when its id and numbers are used a second time."""
    return transaction.xid, transaction.changes[-1].seq, transaction.at


async def flush(connection: Connection) -> None:
    """Wait until everything written so far is on disk: a commit that waits for its own WAL waits
    for all WAL before it."""
    async with connection.transaction():
        await connection.execute("set local synchronous_commit = local")
        await connection.execute("select pg_catalog.pg_logical_emit_message(true, 'headwater', '')")
