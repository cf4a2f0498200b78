"""The pool of a streaming replica: executes queries there, and never with an older state.

A replica cannot import a snapshot. So a query waits until the replica has replayed the WAL of the
flush, and what the query has seen before. If that takes too long, or the replica is down, the
database executes it. A replica may show a newer state than the flush: that is stored (`Seen`), and
later executions of the query use no older snapshot. While a replica is not used, it is checked
regularly, and used again when it has caught up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

import psycopg

from headwater.database import Connection
from headwater.errors import HeadwaterError, Unavailable
from headwater.hub.reactive.execution import Execution
from headwater.hub.reactive.group import FlushMoment, QueryGroup, Seen
from headwater.hub.reactive.query_pool import QueryPool
from headwater.model import Position

_REPLICA_RETRY_SECONDS = 1.0
"""How often a replica that is not used is checked."""

_REPLICA_ANSWER_SECONDS = 2.0
"""How long a replica may take to answer how much it has replayed."""

_REPLICA_POLL_SECONDS = (0.002, 0.05)
"""How often a replica is asked whether it has replayed enough: at first, and later."""


logger = logging.getLogger(__name__)


class ReplicaPool(QueryPool):
    """Executes queries on a replica. `fall_back` gets those that it cannot execute in time."""

    def __init__(
        self,
        url: str,
        size: int,
        changed: Callable[[], None],
        execution: Execution,
        *,
        patience: float,
        fall_back: Callable[[QueryGroup], None],
    ) -> None:
        super().__init__(
            url, size, changed, execution, unreachable=lambda error: self._give_up(str(error))
        )
        self._fall_back = fall_back
        self._patience = patience
        self._moment: FlushMoment | None = None
        self._looking = False
        self.is_up = True
        """Whether it answered at the last check, and was not too far behind."""
        execution.metrics.replica_up.set(1)

    def start(self, moment: FlushMoment) -> None:
        """Start the wanted queries when the replica has replayed enough."""
        self._moment = moment
        self._share += 1
        # No other flush takes these queries while they wait: otherwise each would wait again.
        share = list(islice(self._queue.ready(), self._can_take()))
        for group in share:
            self._queue.remove(group)
        if share:
            connections = self._take_connections(len(share))
            self._spawn(self._begin(connections, share, moment, self._share), moment)

    def expect(self, moment: FlushMoment) -> None:
        """The flush that it must have replayed to be used again."""
        self._moment = moment

    def restart(self) -> None:
        super().restart()
        self._looking = False
        if not self.is_up:
            self._look_again()

    async def _begin(
        self,
        connections: list[Connection],
        share: list[QueryGroup],
        moment: FlushMoment,
        number: int,
    ) -> None:
        log = moment.position.log
        shown = [group.seen.replayed for group in share if group.seen is not None]
        try:
            await self._caught_up(connections[0], max([moment.written, *shown]), log)
            async with asyncio.timeout(_REPLICA_ANSWER_SECONDS):
                seen = [await _begin_reading(connection, log) for connection in connections]
        except (psycopg.Error, TimeoutError, HeadwaterError) as error:
            self._put_back(share)
            self._give_up(str(error).strip() or "it does not answer")
            for connection in connections:
                self._drop(connection)
            return
        except asyncio.CancelledError:
            for connection in connections:
                await connection.close()
            raise
        self._put_back(share)
        self._share += 1
        for connection, shows in zip(connections, seen, strict=True):
            fits = partial(_fits, number, shows)
            self._spawn(self._work(connection, self._share, moment, fits, shows), moment)

    def _put_back(self, share: Iterable[QueryGroup]) -> None:
        for group in share:
            self._queue.add(group, [] if group.owner is None else [group.owner])

    async def _caught_up(self, connection: Connection, needed: int, log: str) -> None:
        """Wait until the replica has replayed the WAL up to there, within the time limit."""
        until = time.monotonic() + self._patience
        pause, longest = _REPLICA_POLL_SECONDS
        async with asyncio.timeout(self._patience + _REPLICA_ANSWER_SECONDS):
            while await _replayed(connection, log) < needed:
                if time.monotonic() > until:
                    raise Unavailable(f"it is more than {self._patience:g} s behind")
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)

    def _lost(self, connection: Connection, group: QueryGroup | None, moment: FlushMoment) -> None:
        """The replica may be the cause: it ends queries that block the replay."""
        self._drop(connection)
        if group is not None:
            self._fall_back(group)

    def _give_up(self, reason: str) -> None:
        """The database executes all queries, and the replica is checked later."""
        if self.is_up:
            self.is_up = False
            logger.warning("the replica is not used: %s", reason)
        self._execution.metrics.replica_up.set(0)
        for group in list(self._queue):
            self._queue.remove(group)
            self._execution.metrics.replica_fallbacks.inc()
            self._fall_back(group)
        self._look_again()

    def _look_again(self) -> None:
        if not self._looking:
            self._looking = True
            self._spawn(self._look())

    async def _look(self) -> None:
        """Check until it answers and has replayed the last flush."""
        while not self.is_up:
            await asyncio.sleep(_REPLICA_RETRY_SECONDS)
            try:
                connection = await self._execution.open(self._url)
            except HeadwaterError:
                continue
            try:
                if (moment := self._moment) is not None:
                    await self._caught_up(connection, moment.written, moment.position.log)
            except (psycopg.Error, TimeoutError, HeadwaterError):
                await connection.close()
                continue
            except asyncio.CancelledError:
                await connection.close()
                raise
            self.is_up = True
            self._pool.add(connection)
        self._looking = False
        self._execution.metrics.replica_up.set(1)
        logger.warning("the replica is used again")


def _fits(share: int, shows: Seen, group: QueryGroup) -> bool:
    """Whether a query was wanted before that share, and has not seen a newer state."""
    return group.wanted_in < share and (group.seen is None or group.seen.replayed <= shows.replayed)


async def _replayed(connection: Connection, log: str) -> int:
    """How much of the WAL was replayed."""
    cursor = await connection.execute(_PROGRESS)
    row = await cursor.fetchone()
    assert row is not None
    in_recovery, its_log, replayed = row
    if not in_recovery or its_log != log:
        raise Unavailable("it is not a replica of this database, or no longer")
    return int(replayed)


async def _begin_reading(connection: Connection, log: str) -> Seen:
    """Begin a transaction, and return what it can see at most. On a replica, a snapshot does not
    list running transactions. Those that end between the snapshot and this query count as seen,
    which is safe."""
    await connection.execute("begin isolation level repeatable read, read only")
    cursor = await connection.execute(_SEEN)
    row = await cursor.fetchone()
    assert row is not None
    xmin, xmax, running, replayed = row
    xip = tuple(int(xid) for xid in running)
    return Seen(Position(log, min([xmin, *xip]), xmax, xip), int(replayed))


_PROGRESS = """
    select pg_catalog.pg_is_in_recovery(), headwater.log_id(),
           coalesce(pg_catalog.pg_last_wal_replay_lsn() operator(pg_catalog.-) '0/0', 0)::bigint
"""

_SEEN = """
    select xmin, xmax,
           array(select xid
                 from pg_catalog.generate_series(
                   greatest(xmin, xmax operator(pg_catalog.-) 10000),
                   xmax operator(pg_catalog.-) 1) xid
                 where pg_catalog.pg_xact_status(xid::pg_catalog.text::pg_catalog.xid8)
                       operator(pg_catalog.=) 'in progress'
                 order by xid),
           coalesce(pg_catalog.pg_last_wal_replay_lsn() operator(pg_catalog.-) '0/0', 0)::bigint
    from (select pg_catalog.pg_snapshot_xmin(s)::pg_catalog.text::bigint,
                 pg_catalog.pg_snapshot_xmax(s)::pg_catalog.text::bigint
          from pg_catalog.pg_current_snapshot() s) s (xmin, xmax)
"""
