"""A lane: connections to one server, and the queries they are to execute.

What is wanted when a flush begins is shared out among a few of the lane's free connections: one
that has begun serves several quick queries for little more than one. On the database itself they
import the snapshot that the flush lends, so that all results are as of one position. What waits
behind queries that take long is soon given to further connections, with a newer snapshot; one that
fails takes its snapshot with it, and the rest is for the next flush. Queries of one user have a
part of the connections at most (`fair_queue`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import TypeAlias

import psycopg
from psycopg.pq import TransactionStatus

from headwater import limits
from headwater.database import Connection
from headwater.errors import HeadwaterError
from headwater.fair_queue import FairQueue
from headwater.hub.execution import Execution
from headwater.hub.group import Group, Moment, Seen
from headwater.model import Position
from headwater.queries.acting import PREPARED_BY_OTHERS

logger = logging.getLogger(__name__)

Export: TypeAlias = Callable[[], Awaitable[str]]
"""Lends the snapshot of the flush, for as long as the flush lasts."""

Fits: TypeAlias = Callable[[Group], bool]
"""Whether a query may be executed in a transaction."""

_LOSSES_MAX = 3
"""How often a query is executed again whose connection was lost. It may be why."""


class Lane:
    """What the lanes have in common. `changed` is called when a flush could start more."""

    def __init__(
        self, url: str, size: int, changed: Callable[[], None], execution: Execution
    ) -> None:
        self._url = url
        self._size = size
        self._changed = changed
        self._execution = execution
        part = max(1, int(size * limits.QUERY_USER_SHARE))
        self._bounds = {"user": part, "address": part}
        self._queue: FairQueue[Group] = FairQueue(self._bounds)
        self._share = 0
        """How often something was shared out. A worker ends when it is done again after it."""
        self._idle: list[tuple[Connection, float]] = []
        self._open = 0
        self._connecting = 0
        self._tasks: dict[asyncio.Task[None], int | None] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._begun = self._begun_before = 0

    @property
    def can_start(self) -> bool:
        return bool(self._idle) and self._queue.is_ready

    @property
    def flushes(self) -> Iterable[int]:
        """Those in whose snapshots something is being executed."""
        return (flush for flush in self._tasks.values() if flush is not None)

    def want(self, group: Group) -> None:
        """Execute it in the snapshot of a flush that begins after this."""
        group.state, group.wanted_in = "wanted", self._share
        self._queue.done(group)  # where it has just been executed
        self._queue.add(group, [] if group.owner is None else [group.owner])
        self._tell()

    def _tell(self) -> None:
        """Something may be wanted, or a connection free: have a flush start it, or see later."""
        if self.can_start:
            self._changed()
        elif self._queue.is_ready:
            self._look_later()
            if self._open + self._connecting == 0:
                self._connect_more()

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(limits.QUERY_SLOW_SECONDS, self._see)

    def _see(self) -> None:
        """What still waits may wait for something slow."""
        self._timer = None
        if self._queue.is_ready:
            if not self._idle:
                self._connect_more()
            self._begun_before = self._begun
            self._tell()
            self._look_later()

    def restart(self) -> None:
        """Forget everything that is wanted or under way."""
        self._stop()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        idle, self._idle = self._idle, []
        self._open = self._connecting = 0
        self._queue = FairQueue(self._bounds)
        self._share += 1
        self._close_all(connection for connection, _ in idle)

    async def close(self) -> None:
        tasks = list(self._tasks)
        self._stop()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)

    # -------------------------------------------------------------------- sharing out

    def _take_connections(self, count: int) -> list[Connection]:
        """Some of the free ones, for so many queries."""
        count = -(-count // limits.QUERY_SHARE)
        taken = self._idle[-count:]
        del self._idle[-count:]
        self._look_later()
        return [connection for connection, _ in taken]

    def _can_take(self) -> int:
        """How many queries the free connections take at once."""
        return limits.QUERY_SHARE * len(self._idle)

    # -------------------------------------------------------------------- connections

    def _connect_more(self) -> None:
        """As many again as there are, at most. While queries are quick, few are quicker than many:
        only when none was begun for a while, there may be as many as the setting says."""
        is_stuck = self._begun == self._begun_before
        most = self._size if is_stuck else min(self._size, limits.QUERY_CONNECTIONS_QUICK)
        room = min(most - self._open, max(1, self._open), len(self._queue)) - self._connecting
        for _ in range(room):
            self._connecting += 1
            self._spawn(self._connect())

    async def _connect(self) -> None:
        try:
            connection = await self._execution.open(self._url)
        except HeadwaterError as error:
            await self._unreachable(error)
            return
        self._connecting -= 1
        self._open += 1
        self._free(connection)

    async def _unreachable(self, error: HeadwaterError) -> None:
        logger.warning("cannot execute queries: %s", error)
        await asyncio.sleep(limits.RECONNECT_SECONDS[1])
        self._connecting -= 1
        self._tell()

    def _free(self, connection: Connection) -> None:
        if not self._execution.is_current(connection):
            self._drop(connection)
            return
        self._idle.append((connection, time.monotonic()))
        self._tell()

    def _drop(self, connection: Connection) -> None:
        self._open -= 1
        self._close_all([connection])
        self._tell()

    def close_idle(self) -> None:
        """Let go of connections that were not needed for a while; one stays."""
        before = time.monotonic() - limits.QUERY_IDLE_SECONDS
        unused = [connection for connection, since in self._idle[:-1] if since < before]
        self._idle = [each for each in self._idle if each[0] not in unused]
        self._open -= len(unused)
        self._close_all(unused)

    def close_outdated(self) -> None:
        """Let go of connections whose sessions are not current; those at work go when they are
        free."""
        outdated = [each for each, _ in self._idle if not self._execution.is_current(each)]
        self._idle = [each for each in self._idle if each[0] not in outdated]
        for connection in outdated:
            self._drop(connection)

    def _close_all(self, connections: Iterable[Connection]) -> None:
        for connection in connections:
            closing = asyncio.ensure_future(connection.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _spawn(self, work: Awaitable[None], moment: Moment | None = None) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task] = None if moment is None else moment.flush
        task.add_done_callback(lambda task: self._tasks.pop(task, None))

    # -------------------------------------------------------------------- executing

    async def _work(
        self,
        connection: Connection,
        share: int,
        moment: Moment,
        fits: Fits,
        seen: Seen | None = None,
    ) -> None:
        """Execute one after the other what fits the transaction that was begun, until something is
        shared out again; then be free again."""
        queue, group = self._queue, None
        is_lost = True
        try:
            usable = True
            while usable and share == self._share and (group := queue.next(fits)) is not None:
                if group.is_needed:
                    self._begun += 1
                    if queue:
                        self._look_later()  # others may come to wait for this one
                    group.state = "running"
                    as_it_was = await self._execution.run(connection, group, moment, seen)
                    usable = as_it_was and _is_in_transaction(connection) and self._knows_us
                else:
                    group.state = "idle"
                queue.done(group)
                group = None
            await _finish(connection)
            is_lost = False
        except psycopg.Error as error:
            logger.warning("a connection for queries was lost: %s", str(error).strip())
        except Exception:
            logger.exception("a query could not be executed")
        except asyncio.CancelledError:
            await connection.close()
            raise
        finally:
            if group is not None:
                queue.done(group)
        if not self._knows_us:
            await connection.close()
            return
        if is_lost:
            self._lost(connection, group, moment)
        else:
            self._free(connection)

    @property
    def _knows_us(self) -> bool:
        """Whether the task that asks still counts. A function may not heed that it is cancelled."""
        return asyncio.current_task() in self._tasks

    def _lost(self, connection: Connection, group: Group | None, moment: Moment) -> None:
        self._drop(connection)
        if group is None:
            return
        group.losses += 1
        if group.losses < _LOSSES_MAX:
            self.want(group)
        else:
            group.losses = 0
            self._execution.give_up(group, moment)


def _is_in_transaction(connection: Connection) -> bool:
    return connection.info.transaction_status == TransactionStatus.INTRANS


async def _finish(connection: Connection) -> None:
    """End the transaction, and leave no settings and no locks behind. One on which code of others
    has prepared statements counts as lost."""
    cursor = await connection.execute(
        "rollback; reset all; select pg_catalog.pg_advisory_unlock_all();"
        f" {PREPARED_BY_OTHERS}".encode()
    )
    while cursor.nextset():
        pass
    if cursor.rowcount > 0:
        raise psycopg.OperationalError("a query has prepared statements on it")


class Primary(Lane):
    """The database itself: queries are executed in the flush's own snapshot."""

    async def start(self, export: Export, moment: Moment) -> None:
        """Share out what is wanted; returns once the snapshot is no longer needed."""
        share = self._share + 1

        def fits(group: Group) -> bool:
            return group.wanted_in < share and _contains(moment.position, group.seen)

        ready = list(islice(self._queue.ready(), self._can_take()))
        fitting = sum(map(fits, ready))
        if fitting < len(ready):
            # A replica has shown more than this snapshot holds; a later one will hold it.
            self._look_later()
        if not fitting:
            return
        self._share = share
        connections = self._take_connections(fitting)
        try:
            snapshot = await export()
            imported = await asyncio.gather(*(self._import(each, snapshot) for each in connections))
        except BaseException:
            for connection in connections:
                self._drop(connection)
            raise
        for connection, is_ready in zip(connections, imported, strict=True):
            if is_ready:
                self._spawn(self._work(connection, share, moment, fits), moment)
            else:
                self._drop(connection)

    async def _import(self, connection: Connection, snapshot: str) -> bool:
        try:
            async with asyncio.timeout(limits.FLUSH_QUESTION_SECONDS):
                # Both as one message: a pipeline costs several times that.
                await connection.execute(
                    "begin isolation level repeatable read, read only;"
                    f" set transaction snapshot '{snapshot}'".encode()
                )
        except (psycopg.Error, TimeoutError) as error:
            logger.warning("a connection for queries cannot read: %s", error)
            return False
        return True


def _contains(position: Position, seen: Seen | None) -> bool:
    return seen is None or position.covers(seen.position)
