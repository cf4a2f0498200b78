"""Reads the log of a source from a position on, as the items of the contract.

It joins the parts: messages come from `replication`, large transactions pass through `spool`, rows
become parts in `transactions`, and `CapturedTables` says which tables there are. While it reads, it
looks at the catalog now and then, for what the log does not say: a table that was dropped, columns
that were added to a table without changes, partitions that were detached or truncated. What it
finds is returned when the log has been read up to that moment, so it is in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from headwater.capture.postgres.wal.captured import CapturedTables, CatalogView
from headwater.capture.postgres.wal.pgoutput import (
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    Truncate,
    Update,
)
from headwater.capture.postgres.wal.positions import Position
from headwater.capture.postgres.wal.replication import Keepalive, Received, ReplicationStream
from headwater.capture.postgres.wal.snapshot import Visibility
from headwater.capture.postgres.wal.spool import Replay, Spool
from headwater.capture.postgres.wal.transactions import Layout, PartBuilder, truncated
from headwater.capture.source import Item, Progress

PROGRESS_SECONDS = 0.1
"""Positions without changes that follow each other more quickly are returned together."""

REPLAY_PAUSE_ROWS = 1_000
"""After this many changes from disk, other tasks have a turn."""


class Tail:
    """One reading of the log. `position` is how far it was returned."""

    def __init__(
        self,
        stream: ReplicationStream,
        spool: Spool,
        tables: CapturedTables,
        visibility: Visibility,
        position: Position,
    ) -> None:
        self._stream = stream
        self._spool = spool
        self._tables = tables
        self._visibility = visibility
        self.position = position
        self._builder = PartBuilder()
        self._layouts: dict[int, Layout | None] = {}
        self._xid = 0
        self._in_transaction = False
        self._reached = 0
        self._progress_at = 0.0
        self.view: CatalogView | None = None
        """What the catalog said at a later position."""

    async def items(self) -> AsyncIterator[Item]:
        while True:
            for received in await self._receive():
                if isinstance(received, Keepalive):
                    self._keepalive(received)
                    continue
                message = self._spool.take(received.payload)
                if message is None:
                    continue
                kind = message.__class__
                if kind is Insert or kind is Update or kind is Delete:
                    layout = self._layouts.get(message.relation)  # type: ignore[union-attr]
                    if layout is not None:
                        size = len(received.payload)
                        part = self._builder.add(layout, message, size)  # type: ignore[arg-type]
                        if part is not None:
                            yield part
                elif isinstance(message, Replay):
                    async for item in self._replay(message):
                        yield item
                else:
                    async for item in self._control(message, len(received.payload)):
                        yield item
            if not self._in_transaction:
                async for item in self._between():
                    yield item

    async def _receive(self) -> Sequence[Received]:
        """What comes next; nothing when a position waits to be returned."""
        if self._in_transaction or not self._is_behind():
            return await self._stream.receive()
        try:
            async with asyncio.timeout(PROGRESS_SECONDS):
                return await self._stream.receive()
        except TimeoutError:
            return ()

    def _keepalive(self, received: Keepalive) -> None:
        # Inside a transaction it is the position before it.
        if not self._in_transaction:
            self._reached = max(self._reached, received.end_lsn)

    # -------------------------------------------------------------------- messages

    async def _control(self, message: Message, size: int) -> AsyncIterator[Item]:
        match message:
            case Begin(_, _, xid):
                self._in_transaction, self._xid = True, xid
            case Relation():
                async for item in self._relation(message):
                    yield item
            case Truncate():
                names = list(truncated(message, self._layouts))
                self._tables.truncated.update(names)
                self._builder.truncate(iter(names), size)
            case Commit(_, end_lsn, committed_at):
                self._in_transaction = False
                for item in self._commit(end_lsn, committed_at):
                    yield item
            case _:
                pass  # origins, types and messages have no rows

    async def _relation(self, relation: Relation) -> AsyncIterator[Item]:
        table, change = await self._tables.relation(relation)
        self._layouts[relation.oid] = None if table is None else Layout(relation, table)
        if change is not None:
            if not self._builder.is_empty:
                yield self._builder.part()
            yield change

    async def _replay(self, replay: Replay) -> AsyncIterator[Item]:
        """A transaction from disk."""
        self._in_transaction, self._xid = True, replay.commit.xid
        builder, layouts = self._builder, self._layouts
        for count, (message, size) in enumerate(replay.messages, 1):
            kind = message.__class__
            if kind is Insert or kind is Update or kind is Delete:
                layout = layouts.get(message.relation)  # type: ignore[union-attr]
                part = None if layout is None else builder.add(layout, message, size)
                if part is not None:
                    yield part
            else:
                async for item in self._control(message, size):
                    yield item
            if count % REPLAY_PAUSE_ROWS == 0:
                await asyncio.sleep(0)
        self._in_transaction = False
        for item in self._commit(replay.commit.end_lsn, replay.commit.committed_at):
            yield item

    def _commit(self, end_lsn: int, committed_at: datetime) -> list[Item]:
        if self._builder.is_empty and not self._builder.began:
            self._reached = max(self._reached, end_lsn)
            return []
        # Before the caller gets the item: it may ask for a snapshot as soon as it has it.
        self.position = self.position.at(end_lsn)
        self._visibility.returned(self._xid)
        return [self._builder.finish(str(self.position), committed_at)]

    # -------------------------------------------------------------------- between transactions

    def _is_behind(self) -> bool:
        return self._reached > self.position.lsn

    async def _between(self) -> AsyncIterator[Item]:
        """The position, if it has advanced without changes, and what the catalog said."""
        now = time.monotonic()
        if self._is_behind() and now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            self.position = self.position.at(self._reached)
            yield Progress(str(self.position))
        view = self.view
        if view is not None and max(self.position.lsn, self._reached) >= view.lsn:
            self.view = None
            found = False
            for item in self._tables.compare(view):
                found = True
                yield item
            if found:  # the source may be idle: the runner applies them with a position
                self.position = self.position.at(max(self.position.lsn, self._reached))
                yield Progress(str(self.position))
