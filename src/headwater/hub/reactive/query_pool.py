"""A pool of connections to one server, and the queries to execute over them.

When a flush begins, the wanted queries are divided among a few idle connections (a *share*): one
transaction executes several quick queries, which costs little more than one. On the database itself
the connections import the snapshot of the flush, so all results are as of one position. Queries
that wait behind slow ones are soon given to more connections, with a newer snapshot. After a
failure, the rest of a share waits for the next flush. Queries of one user use only a part of the
connections (`fair_queue`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import TypeAlias

import psycopg
from psycopg.pq import TransactionStatus

from headwater import limits
from headwater.database import Connection
from headwater.errors import HeadwaterError
from headwater.fair_queue import FairQueue
from headwater.hub.reactive.execution import Execution
from headwater.hub.reactive.group import FlushMoment, QueryGroup, Seen
from headwater.hub.reading.snapshot_pool import Export, SnapshotPool
from headwater.model import Position
from headwater.queries.execution.impersonation import PREPARED_BY_OTHERS

_QUERY_CONNECTIONS_QUICK = 8
"""Connections for quick queries. More are opened if queries wait and none was started lately."""

_QUERY_SLOW_SECONDS = 0.02
"""Queries that have waited for this long are given to more connections."""


logger = logging.getLogger(__name__)

Fits: TypeAlias = Callable[[QueryGroup], bool]
"""Whether a query may be executed in this transaction."""

_LOSSES_MAX = 3
"""How often a query is tried after lost connections. The query may be the cause."""


class QueryPool:
    """The base class of the pools of all servers. `changed` is called when a flush can start
    more."""

    def __init__(
        self,
        url: str,
        size: int,
        changed: Callable[[], None],
        execution: Execution,
        *,
        unreachable: Callable[[HeadwaterError], None] | None = None,
    ) -> None:
        self._url = url
        self._size = size
        self._changed = changed
        self._execution = execution
        part = max(1, int(size * limits.QUERY_USER_SHARE))
        self._bounds = {"user": part, "address": part}
        self._queue: FairQueue[QueryGroup] = FairQueue(self._bounds)
        self._share = 0
        """The number of the last share. A worker ends when there is a newer one."""
        self._pool = SnapshotPool(
            url,
            lambda: execution.open(url),
            self._start_or_look,
            purpose="queries",
            unreachable=unreachable,
            usable=execution.is_current,
        )
        self._tasks: dict[asyncio.Task[None], int | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._begun = self._begun_before = 0

    @property
    def can_start(self) -> bool:
        return bool(self._pool.idle) and self._queue.is_ready

    @property
    def flushes(self) -> Iterable[int]:
        """The flushes in whose snapshots queries are running."""
        return (flush for flush in self._tasks.values() if flush is not None)

    def want(self, group: QueryGroup) -> None:
        """Execute it in the snapshot of a flush that begins after this."""
        group.state, group.wanted_in = "wanted", self._share
        self._queue.done(group)  # if it has just been executed
        self._queue.add(group, [] if group.owner is None else [group.owner])
        self._start_or_look()

    def _start_or_look(self) -> None:
        """Request a flush if it can start something; otherwise check again later."""
        if self.can_start:
            self._changed()
        elif self._queue.is_ready:
            self._look_later()
            if not self._pool.size:
                self._connect_more()

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_QUERY_SLOW_SECONDS, self._see)

    def _see(self) -> None:
        """Queries that still wait may wait for a slow one: open connections for them."""
        self._timer = None
        if self._queue.is_ready:
            if not self._pool.idle:
                self._connect_more()
            self._begun_before = self._begun
            self._start_or_look()
            self._look_later()

    def restart(self) -> None:
        """Forget all wanted and running queries."""
        self._stop()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._queue = FairQueue(self._bounds)
        self._share += 1
        self._pool.restart()

    async def close(self) -> None:
        tasks = list(self._tasks)
        self._stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()

    # -------------------------------------------------------------------- shares

    def _take_connections(self, count: int) -> list[Connection]:
        """Idle connections for this many queries."""
        self._look_later()
        return self._pool.take(-(-count // limits.QUERY_SHARE))

    def _can_take(self) -> int:
        """How many queries the idle connections take in one share."""
        return limits.QUERY_SHARE * self._pool.idle

    # -------------------------------------------------------------------- connections

    def _connect_more(self) -> None:
        """At most double the number of connections. While queries are quick, few connections are
        faster than many. If none was started lately, there may be as many as the setting says."""
        is_stuck = self._begun == self._begun_before
        most = self._size if is_stuck else min(self._size, _QUERY_CONNECTIONS_QUICK)
        self._pool.grow(len(self._queue), most)

    def _drop(self, connection: Connection) -> None:
        self._pool.drop(connection)
        self._start_or_look()

    def close_idle(self) -> None:
        """Close connections that were idle for long. One stays open."""
        self._pool.close_idle()

    def close_outdated(self) -> None:
        """Close connections whose sessions are outdated. Busy ones are closed when they are
        free."""
        self._pool.close_unusable()
        self._start_or_look()

    def _spawn(self, work: Awaitable[None], moment: FlushMoment | None = None) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task] = None if moment is None else moment.flush
        task.add_done_callback(lambda task: self._tasks.pop(task, None))

    # -------------------------------------------------------------------- executing

    async def _work(
        self,
        connection: Connection,
        share: int,
        moment: FlushMoment,
        fits: Fits,
        seen: Seen | None = None,
    ) -> None:
        """Execute queries that fit the transaction, one after the other, until there is a newer
        share; then free the connection."""
        queue, group = self._queue, None
        is_lost = True
        try:
            usable = True
            while usable and share == self._share and (group := queue.next(fits)) is not None:
                if group.is_needed:
                    self._begun += 1
                    if queue:
                        self._look_later()  # others may wait for this one
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
            self._pool.free(connection)

    @property
    def _knows_us(self) -> bool:
        """Whether the current task was not cancelled. A function can ignore a cancellation."""
        return asyncio.current_task() in self._tasks

    def _lost(self, connection: Connection, group: QueryGroup | None, moment: FlushMoment) -> None:
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
    """End the transaction, and undo settings and locks. A connection with statements that others
    have prepared counts as lost."""
    cursor = await connection.execute(
        "rollback; reset all; select pg_catalog.pg_advisory_unlock_all();"
        f" {PREPARED_BY_OTHERS}".encode()
    )
    while cursor.nextset():
        pass
    if cursor.rowcount > 0:
        raise psycopg.OperationalError("a query has prepared statements on it")


class Primary(QueryPool):
    """The pool of the database itself: queries are executed in the snapshot of the flush."""

    async def start(self, export: Export, moment: FlushMoment) -> None:
        """Start the wanted queries. Returns when the snapshot is no longer needed."""
        share = self._share + 1

        def fits(group: QueryGroup) -> bool:
            return group.wanted_in < share and _contains(moment.position, group.seen)

        ready = list(islice(self._queue.ready(), self._can_take()))
        fitting = sum(map(fits, ready))
        if fitting < len(ready):
            # A replica has shown something newer than this snapshot: wait for a later one.
            self._look_later()
        if not fitting:
            return
        self._share = share
        begun = await self._pool.begin(self._take_connections(fitting), export)
        for connection in begun:
            if connection is not None:
                self._spawn(self._work(connection, share, moment, fits), moment)
        if None in begun:
            self._start_or_look()


def _contains(position: Position, seen: Seen | None) -> bool:
    return seen is None or position.covers(seen.position)
