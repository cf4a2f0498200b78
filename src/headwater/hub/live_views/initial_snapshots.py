"""Reads the first results of live queries on side connections, in the snapshot of a flush.

A first result can take long, without a suitable index or when the table is locked, and no other
client must wait for it. So a flush only exports its snapshot: side connections import it, which is
quick, and the flush continues. The results that are wanted then are divided among the free
connections (a *share*). Only some results of one table and of one user are read at the same time
(`fair_queue`). If all connections are busy for long, more are opened. A result that takes too long
fails with an error that names the cause: a lock of another transaction, or a missing index. After a
lost connection, the result is read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import psycopg

from headwater import limits
from headwater.database import PIN, Connection, connect
from headwater.errors import DatabaseError, HeadwaterError, LimitExceeded
from headwater.fair_queue import FairQueue
from headwater.hub.live_views.view import InitialSnapshot, LiveSubscription
from headwater.hub.reading.snapshot_pool import Export, SnapshotPool
from headwater.hub.reading.snapshot_queries import UNLOCK, SnapshotQuery, ask, rewritten
from headwater.hub.reading.tables import FORMATS
from headwater.live.query import BoundQuery
from headwater.model import Delta, Match, Position
from headwater.protocol import Frame, ResetMessage, Snapshot
from headwater.queries.execution.pool import CLEAN

_OPENING_CONNECTIONS = 4
"""Connections that read first results of live queries, while these are quick."""

_OPENING_CONNECTIONS_MAX = 16
"""The same while results wait and no connection becomes free. If all are busy, results wait.
Connections of the question role are counted separately."""

_OPENING_STUCK_SECONDS = 0.25
"""If results wait and none was started for this long, one more connection is opened."""

_OPENINGS_PER_TABLE = 3
"""First results of one table that are read at the same time. Others wait, and results of other
tables pass them: so a locked table does not use all connections."""

_OPENINGS_PER_USER = 2
"""First results of one user, or of one address without a user, that are read at the same time.
Others wait, and results of other users pass them."""

_OPENING_SHARE = 1_000
"""First results that are read in the snapshot of one flush. The others wait for the next."""

_OPENING_LOOK_SECONDS = 5.0
"""While a first result takes longer than this, it is checked this often for locks: the log and the
error name the process that holds the lock."""

_OPENING_ROOM_SECONDS = 30.0
"""How long a client may take to read a part of a streamed result. Then its subscription fails."""


logger = logging.getLogger(__name__)

_OPTIONS = (
    f"{FORMATS} -c statement_timeout={limits.OPENING_SECONDS}s"
    f" -c lock_timeout={limits.OPENING_LOCK_SECONDS}s -c jit=off"
)
_BOUNDS = {
    "table": _OPENINGS_PER_TABLE,
    "user": _OPENINGS_PER_USER,
    "address": _OPENINGS_PER_USER,
}


class InitialSnapshots:
    """All first results of a hub.

    `changed` is called when a result has arrived or a connection is free. `failed` is called with
    the error of the driver, or of our own code, when a result cannot be read. Results with a user's
    role are read over connections to `question_url`, if there is one.
    """

    def __init__(
        self,
        url: str,
        changed: Callable[[], None],
        failed: Callable[[InitialSnapshot, Exception], None],
        *,
        question_url: str | None = None,
    ) -> None:
        self._url = url
        self._changed = changed
        self._failed = failed
        self._own = SnapshotReaders(url, changed, self)
        self._as_roles = self._own
        if question_url is not None and question_url != url:
            self._as_roles = SnapshotReaders(question_url, changed, self)
        self._blockers: WeakKeyDictionary[InitialSnapshot, Blocker] = WeakKeyDictionary()
        self.arrived: list[InitialSnapshot] = []

    @property
    def _all(self) -> set[SnapshotReaders]:
        return {self._own, self._as_roles}

    @property
    def can_start(self) -> bool:
        return self._own.can_start or self._as_roles.can_start

    def want(self, snapshot: InitialSnapshot) -> None:
        self._readers_of(snapshot).want(snapshot)

    def _readers_of(self, snapshot: InitialSnapshot) -> SnapshotReaders:
        return self._own if snapshot.view.scope is None else self._as_roles

    async def start(self, export: Export, position: Position) -> None:
        """Start reading the wanted results. `export` exports the snapshot, which must exist until
        this returns; `position` is that of the snapshot."""
        for readers in self._all:
            if readers.can_start:
                await readers.start(export, position)

    def restart(self) -> None:
        """The log is not followed any more: forget all results that are being read."""
        for readers in self._all:
            readers.restart()
        self.arrived.clear()

    async def close(self) -> None:
        for readers in self._all:
            await readers.close()

    def failed(self, snapshot: InitialSnapshot, error: Exception) -> None:
        self._failed(snapshot, error)

    def blockers_of(self, snapshot: InitialSnapshot) -> Blocker | None:
        """The process that held a lock it waited for, at the last check."""
        return self._blockers.get(snapshot)

    # -------------------------------------------------------------------- reading

    async def read(self, connection: Connection, snapshot: InitialSnapshot) -> None:
        """Read one result, and report when it has arrived or failed."""
        process, looking = connection.info.backend_pid, list[asyncio.Task[None]]()

        def look() -> None:
            looking.append(asyncio.create_task(self._look_for_locks(process, snapshot)))

        # Most results arrive before.
        timer = asyncio.get_running_loop().call_later(_OPENING_LOOK_SECONDS, look)
        try:
            await self._read(connection, snapshot)
        finally:
            timer.cancel()
            for task in looking:
                task.cancel()

    async def _look_for_locks(self, process: int, snapshot: InitialSnapshot) -> None:
        while True:
            await self._look_for_lock(process, snapshot)
            await asyncio.sleep(_OPENING_LOOK_SECONDS)

    async def _look_for_lock(self, process: int, snapshot: InitialSnapshot) -> None:
        """Check over another connection whether this one waits for a lock."""
        try:
            connection = await connect(self._url, purpose="locks", options=_LOOK_OPTIONS)
            try:
                cursor = await connection.execute(_BLOCKER, (process,))
                row = await cursor.fetchone()
            finally:
                await connection.close()
        except (psycopg.Error, HeadwaterError) as error:
            logger.warning("cannot see who holds a lock: %s", error)
            return
        if row is None:
            self._blockers.pop(snapshot, None)
            return
        *known, statement = row
        self._blockers[snapshot] = Blocker(*known)
        label = snapshot.view.query.table.label
        logger.warning(
            "%s: a first result waits for a lock of process %d (%s): %s", label, *known, statement
        )

    async def _read(self, connection: Connection, snapshot: InitialSnapshot) -> None:
        view, parts = snapshot.view, 0
        if not snapshot.wanted:  # another snapshot has replaced it
            snapshot.drop()
            return
        while snapshot.wanted:
            (need,) = snapshot.state.needs
            most = limits.OPENING_BYTES_MAX
            question = SnapshotQuery.of_need(view.known, view.query, need, view.scope, most=most)
            # The server ends slow statements, unless the server itself hangs.
            async with asyncio.timeout(2 * limits.OPENING_SECONDS):
                (answer,) = await ask(connection, [question])
            if isinstance(answer, Exception):
                self._failed(snapshot, answer)
                return
            if parts == 0 and not await self._was_whole(connection, snapshot):
                return
            outcome = snapshot.state.answer(need, answer)
            view.weigh()
            await self._send(snapshot, outcome.deltas, first=parts == 0, more=bool(outcome.needs))
            parts += 1
            if not outcome.needs:
                snapshot.arrived = True
                self.arrived.append(snapshot)
                self._changed()
                return
        snapshot.drop()

    async def _was_whole(self, connection: Connection, snapshot: InitialSnapshot) -> bool:
        """A table that was rewritten after the snapshot looks empty in it, so it is read again.
        After this read, our transaction prevents a rewrite until it ends."""
        oid = snapshot.view.known.table.oid
        found = await rewritten(connection, [oid])
        if oid not in found:
            self._failed(snapshot, psycopg.errors.UndefinedTable("the table was dropped"))
            return False
        if found[oid]:
            self._readers_of(snapshot).put_back(snapshot)
            return False
        return True

    async def _send(
        self, snapshot: InitialSnapshot, deltas: Sequence[Delta], *, first: bool, more: bool
    ) -> None:
        """Send a part of a streamed result to its receivers, as fast as they read."""
        view, frames = snapshot.view, {}
        matches = tuple(view.known.wire.delta(d) for d in deltas if isinstance(d, Match))
        for subscription in list(snapshot.receivers):
            if subscription.closed:
                continue
            reason = subscription.reason if first else None
            if reason not in frames:
                message = (view.id, str(snapshot.position))
                frames[reason] = Frame(
                    Snapshot(*message, matches, more)  # type: ignore[arg-type]
                    if reason is None
                    else ResetMessage(*message, reason, matches, more)  # type: ignore[arg-type]
                )
                # A client that missed a part must not take the next one for the whole result.
                frames[reason].is_step = not first
            if first:
                subscription.begin([frames[reason]], whole=False)
            else:
                subscription.hand(frames[reason], whole=False)
        if more:
            await asyncio.gather(*map(_room, snapshot.receivers))


class SnapshotReaders:
    """Connections to one URL, and the results to read over them."""

    def __init__(self, url: str, changed: Callable[[], None], results: InitialSnapshots) -> None:
        self._url = url
        self._changed = changed
        self._results = results
        self._pool = SnapshotPool(url, self._open, self._is_changed, purpose="first results")
        self._queue: FairQueue[InitialSnapshot] = FairQueue(_BOUNDS)
        self._queue_swept = 0
        self._share = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._begun = self._begun_before = 0

    @property
    def can_start(self) -> bool:
        return bool(self._pool.idle) and self._queue.is_ready

    def want(self, snapshot: InitialSnapshot) -> None:
        self._sweep()
        self._queue.add(snapshot, snapshot.owners)
        self._connect_more()
        self._changed()

    def _sweep(self) -> None:
        """Forget results that no client waits for. With a locked table there can be many."""
        if len(self._queue) > 2 * self._queue_swept + _OPENING_SHARE:
            for snapshot in [each for each in self._queue if not each.wanted]:
                self._queue.remove(snapshot)
                snapshot.drop()
            self._queue_swept = len(self._queue)

    async def start(self, export: Export, position: Position) -> None:
        """Start reading the wanted results; see `InitialSnapshots.start`."""
        share = self._new_share()
        if not share:
            return
        number = self._share
        begun = await self._pool.begin(self._pool.take(len(share)), export)
        for snapshot in share:
            snapshot.start(position, number)
        for connection in begun:
            if connection is not None:
                self._spawn(self._work(connection, number))
        if None in begun:
            self._connect_more()
        self._look_later()

    def _new_share(self) -> list[InitialSnapshot]:
        """The results that may be read and are not being read, also those that wait in an earlier
        share."""
        self._share += 1
        share = []
        for snapshot in list(islice(self._queue.ready(), _OPENING_SHARE)):
            if snapshot.wanted:
                if snapshot.started:
                    snapshot.again()
                share.append(snapshot)
            else:
                self._queue.remove(snapshot)
                snapshot.drop()
        return share

    def restart(self) -> None:
        """Forget everything; results will be wanted again."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._share += 1
        self._queue = FairQueue(_BOUNDS)
        self._queue_swept = 0
        self._pool.restart()

    async def close(self) -> None:
        tasks = list(self._tasks)
        self.restart()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()

    # -------------------------------------------------------------------- connections

    async def _open(self) -> Connection:
        # Code of others may have prepared statements of any name.
        return await connect(self._url, purpose="snapshot", options=_OPTIONS, prepares=False)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_changed(self) -> None:
        """A connection is free, or could not be opened."""
        self._connect_more()
        self._changed()

    def _connect_more(self) -> None:
        if self._queue.is_ready:
            self._pool.want(len(self._queue), _OPENING_CONNECTIONS)
            self._look_later()

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_OPENING_STUCK_SECONDS, self._see)

    def _see(self) -> None:
        """Open one more connection if results wait and none was started since the last call."""
        self._timer = None
        if not self._queue.is_ready:
            return
        is_stuck = not self._pool.idle and self._begun == self._begun_before
        if is_stuck and self._pool.size < _OPENING_CONNECTIONS_MAX:
            self._pool.open_more(1)
        self._begun_before = self._begun
        self._look_later()

    def _free(self, connection: Connection) -> None:
        if self._pool.size > _OPENING_CONNECTIONS and not self._queue.is_ready:
            self._pool.drop(connection)
        else:
            self._pool.free(connection)

    def _replace(self, connection: Connection) -> None:
        self._pool.drop(connection)
        self._is_changed()

    def put_back(self, snapshot: InitialSnapshot) -> None:
        """It is read again, in a later snapshot."""
        self._queue.done(snapshot)
        if snapshot.wanted:
            snapshot.again()
            self.want(snapshot)

    # -------------------------------------------------------------------- reading

    async def _work(self, connection: Connection, share: int) -> None:
        """Read the results of the share, one after the other; then free the connection."""
        queue, snapshot, as_role = self._queue, None, False
        try:
            while share == self._share:
                snapshot = queue.next(lambda each: each.share == share)
                if snapshot is None:
                    break
                self._begun += 1
                if queue:
                    self._look_later()  # others may wait for this one
                as_role = as_role or snapshot.view.scope is not None
                await self._results.read(connection, snapshot)
                queue.done(snapshot)
                snapshot = None
            await connection.execute("rollback")
            # Policies and functions of an index are code of others.
            await connection.execute(CLEAN if as_role else UNLOCK)
            if as_role:
                await connection.execute(PIN)  # which RESET ALL has undone
        except (psycopg.Error, TimeoutError) as error:
            logger.warning("a side connection was lost: %r", error)
            if snapshot is not None:
                self.put_back(snapshot)
            self._replace(connection)
            return
        except Exception as error:
            logger.exception("a result could not be taken")
            if snapshot is not None:
                self._results.failed(snapshot, error)
            self._replace(connection)
            return
        except asyncio.CancelledError:
            await connection.close()
            raise
        finally:
            if snapshot is not None:
                queue.done(snapshot)
        self._free(connection)


async def _room(subscription: LiveSubscription) -> None:
    if subscription.closed:
        return
    try:
        async with asyncio.timeout(_OPENING_ROOM_SECONDS):
            await subscription.subscriber.room()
    except TimeoutError:
        subscription.fail(
            LimitExceeded(
                f"the client did not take a part of its result in {_OPENING_ROOM_SECONDS:.0f}"
                " seconds",
                code="slow_client",
                hint="Read faster, or ask for fewer rows or columns.",
            )
        )


# ------------------------------------------------------------------------ what took too long


class Blocker(NamedTuple):
    """The server process that holds a lock, and its state. Its statement goes to the log only,
    because clients may not be allowed to see it."""

    process: int
    state: str


_LOOK_OPTIONS = f"-c statement_timeout={int(_OPENING_LOOK_SECONDS * 1000)}ms"

_BLOCKER = """
    select b.pid, coalesce(a.state, 'unknown'), coalesce(left(a.query, 1000), '')
    from unnest(pg_blocking_pids(%s)) b (pid) left join pg_stat_activity a on a.pid = b.pid
    order by b.pid limit 1
"""


def too_slow(query: BoundQuery, blocker: Blocker | None, error: psycopg.Error) -> HeadwaterError:
    """The error for a result that took too long."""
    if blocker is None and not isinstance(error, psycopg.errors.LockNotAvailable):
        columns = ", ".join(str(by) for by in query.order.by)
        return DatabaseError(
            f"{query.table.label}: reading the first result took longer than"
            f" {limits.OPENING_SECONDS} seconds",
            code="slow_query",
            hint="An index that begins with the filter's columns and continues with the order's"
            f" ({columns}) makes it quick.",
        )
    who = "another transaction"
    if blocker is not None:
        who += f" (process {blocker.process} of the database, {blocker.state})"
    return DatabaseError(
        f"{query.table.label} is locked by {who}: its rows could not be read for"
        f" {limits.OPENING_LOCK_SECONDS} seconds",
        code="table_locked",
        hint="Try again when that transaction has ended. pg_stat_activity shows what it does, and"
        " pg_terminate_backend() ends it.",
    )
