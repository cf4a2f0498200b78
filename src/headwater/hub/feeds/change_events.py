"""Calls the handlers of `hw.on("change")` with all changes, in order.

Usually a flush calls the handlers itself. Changes that a flush skips (a backlog), or that come
faster than async handlers read them, are delivered beside the flushes: a range of the log that is
read page by page, then the changes of later flushes. Only changes that the log no longer has are
left out, and a `gap` event is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence

import msgspec
import psycopg

from headwater.errors import DatabaseError, HeadwaterError, ResyncRequired
from headwater.hub.flush_state import FlushState
from headwater.hub.part import Flush, Part
from headwater.hub.resources import Resources
from headwater.log.reconnect import is_lost, reconnect_pause
from headwater.model import Change, Position, Table, Transaction
from headwater.queries.events import ChangeEvent, Events, GapEvent

_EVENT_CHANGES_MAX = 10_000
"""Changes that wait for handlers of `hw.on("change")`. More are read from the log later."""


logger = logging.getLogger(__name__)


class _LogRange(msgspec.Struct):
    """A range of the log to deliver. Its transactions are in memory, or must be read."""

    since: Position
    until: Position
    restarts: int | None = None
    """The number of restarts of the server, if a crash can undo the positions; else None."""
    transactions: Sequence[Transaction] | None = None

    @property
    def count(self) -> int:
        return sum(len(each.changes) for each in self.transactions or ())


class ChangeEvents(Part):
    """Calls the handlers of an application."""

    def __init__(self, resources: Resources, flushes: FlushState, events: Events) -> None:
        self._resources = resources
        self._flushes = flushes
        self._events = events
        self._waiting: deque[_LogRange] = deque()
        self._task: asyncio.Task[None] | None = None
        self._lost_since: Position | None = None
        self._is_lost = False

    def ended(self, flush: Flush) -> None:
        if not self._events.wanted("change"):
            self._is_lost = False
            return
        if self._is_lost:
            self._is_lost = False
            self._events.emit(GapEvent(self._lost_since, flush.position))
        is_behind = self._task is not None
        rest = flush.changes if is_behind else self._emit_while_there_is_room(flush.changes)
        if rest:
            self._wait(_LogRange(flush.since, flush.position, self._flushes.restarts, rest))

    def skipped(self, since: Position, until: Position, tables: Collection[Table] | None) -> None:
        """Read them from the log."""
        if self._events.wanted("change") and (
            tables is None or any(not table.is_system for table in tables)
        ):
            self._wait(_LogRange(since, until))

    def skip_failed(self) -> None:
        self.resync()

    def resync(self) -> None:
        """Changes until the next flush cannot be read, nor those that waited for it."""
        if not self._is_lost:
            first = self._waiting[0].since if self._waiting else self._flushes.position
            self._is_lost, self._lost_since = True, first
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    # -------------------------------------------------------------------- at once

    def _emit_while_there_is_room(self, transactions: Sequence[Transaction]) -> list[Transaction]:
        """Returns the transactions that were not delivered."""
        for at, transaction in enumerate(transactions):
            for number, change in enumerate(transaction.changes):
                if not self._events.has_room:
                    rest = msgspec.structs.replace(
                        transaction, changes=transaction.changes[number:]
                    )
                    return [rest, *transactions[at + 1 :]]
                self._emit(change, transaction.position)
        return []

    def _emit(self, change: Change, position: Position) -> None:
        if not change.table.is_system:
            self._events.emit(
                ChangeEvent(
                    change.table.label,
                    change.op,
                    change.key,
                    change.changed,
                    change.at,
                    change.actor,
                    position,
                )
            )

    # -------------------------------------------------------------------- beside the flushes

    def _wait(self, range_: _LogRange) -> None:
        """Deliver it after all earlier ranges."""
        waiting = self._waiting
        waiting.append(range_)
        if sum(each.count for each in waiting) > _EVENT_CHANGES_MAX and len(waiting) > 1:
            # The first one is being delivered.
            first, second = waiting.popleft(), waiting[0]
            merged = _LogRange(second.since, range_.until, self._flushes.restarts)
            self._waiting = deque([first, merged])
        if self._task is None:
            self._task = self._resources.spawn(self._run())

    async def _run(self) -> None:
        while self._waiting:
            range_ = self._waiting[0]
            try:
                await self._hand_over(range_)
            except Exception:
                logger.exception("changes cannot be delivered to the application")
                self._events.emit(GapEvent(range_.since, range_.until))
            self._waiting.popleft()
        self._task = None

    async def _hand_over(self, range_: _LogRange) -> None:
        if range_.transactions is not None:
            for transaction in range_.transactions:
                for change in transaction.changes:
                    await self._events.room()
                    self._emit(change, transaction.position)
            return
        done: dict[int, int] = {}
        attempt = 0
        while True:
            try:
                if range_.restarts not in (None, self._flushes.restarts):
                    raise ResyncRequired("the server was restarted meanwhile")
                await self._read(range_, done)
                return
            except ResyncRequired:
                self._events.emit(GapEvent(range_.since, range_.until))
                return
            except (psycopg.Error, DatabaseError, HeadwaterError) as error:
                if isinstance(error, psycopg.Error | DatabaseError) and not is_lost(error):
                    raise
                await asyncio.sleep(reconnect_pause(attempt))
                attempt += 1

    async def _read(self, range_: _LogRange, done: dict[int, int]) -> None:
        """Read it from the log. `done` has the last delivered change of each transaction."""
        async with self._resources.log_reader() as (connection, reader):
            await reader.check(connection, range_.since)
            async for each in reader.catch_up(connection, range_.since, range_.until):
                for change in each.changes:
                    if change.seq > done.get(each.xid, 0):
                        await self._events.room()
                        self._emit(change, each.position)
                        done[each.xid] = change.seq
                await asyncio.sleep(0)
