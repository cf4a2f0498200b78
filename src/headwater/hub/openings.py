"""Reads the first results of live queries on side connections, in the snapshot of a flush.

A first result may take long where no index fits or the table is locked, and nobody else shall wait
for it. So a flush only lends its snapshot: side connections import it, which takes a moment, and
the flush goes on. All results that are wanted at that moment are shared out among the connections
that are free. Of one table and of one user only some are read at a time (`fair_queue`), and where
all connections are busy for long, more are opened. What takes too long fails with an error that
says why: a lock that another transaction holds, or an index that is missing. What a lost connection
cut short is read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

import psycopg

from headwater import limits
from headwater.database import PIN, Connection, connect
from headwater.errors import DatabaseError, HeadwaterError, LimitExceeded
from headwater.fair_queue import FairQueue
from headwater.hub.live import LiveSubscription, Opening
from headwater.hub.questions import UNLOCK, Question, ask, rewritten
from headwater.hub.tables import FORMATS
from headwater.live.query import BoundQuery
from headwater.model import Delta, Match, Position
from headwater.protocol import Frame, Reset, Snapshot
from headwater.queries.pool import CLEAN

logger = logging.getLogger(__name__)

_OPTIONS = (
    f"{FORMATS} -c statement_timeout={limits.OPENING_SECONDS}s"
    f" -c lock_timeout={limits.OPENING_LOCK_SECONDS}s -c jit=off"
)
_BOUNDS = {
    "table": limits.OPENINGS_PER_TABLE,
    "user": limits.OPENINGS_PER_USER,
    "address": limits.OPENINGS_PER_USER,
}


class Openings:
    """The results that are wanted, and those who read them.

    `changed` is called when a result has arrived or a connection is free for more; `failed` with
    the driver's error, or a fault of ours, when a result cannot be had. What is read as a user's
    role is read over connections to `question_url`, if there is one.
    """

    def __init__(
        self,
        url: str,
        changed: Callable[[], None],
        failed: Callable[[Opening, Exception], None],
        *,
        question_url: str | None = None,
    ) -> None:
        self._url = url
        self._changed = changed
        self._failed = failed
        self._own = Readers(url, changed, self)
        self._as_roles = self._own
        if question_url is not None and question_url != url:
            self._as_roles = Readers(question_url, changed, self)
        self._blockers: WeakKeyDictionary[Opening, Blocker] = WeakKeyDictionary()
        self.arrived: list[Opening] = []

    @property
    def _all(self) -> set[Readers]:
        return {self._own, self._as_roles}

    @property
    def can_start(self) -> bool:
        return self._own.can_start or self._as_roles.can_start

    def want(self, opening: Opening) -> None:
        self._readers_of(opening).want(opening)

    def _readers_of(self, opening: Opening) -> Readers:
        return self._own if opening.view.scope is None else self._as_roles

    async def start(self, export: Callable[[], Awaitable[str]], position: Position) -> None:
        """Share out what is wanted. `export` lends the snapshot, which must stay until we return;
        the position is that of the snapshot."""
        for readers in self._all:
            if readers.can_start:
                await readers.start(export, position)

    def restart(self) -> None:
        """The snapshots that results are read in no longer fit the log: begin again with all."""
        for readers in self._all:
            readers.restart()
        self.arrived.clear()

    async def close(self) -> None:
        for readers in self._all:
            await readers.close()

    def failed(self, opening: Opening, error: Exception) -> None:
        self._failed(opening, error)

    def blockers_of(self, opening: Opening) -> Blocker | None:
        """Who held a lock that reading it waited for, when that was last looked at."""
        return self._blockers.get(opening)

    # -------------------------------------------------------------------- reading

    async def read(self, connection: Connection, opening: Opening) -> None:
        """Read one result, and say when it is there or cannot be had."""
        process, looking = connection.info.backend_pid, list[asyncio.Task[None]]()

        def look() -> None:
            looking.append(asyncio.create_task(self._look_for_locks(process, opening)))

        # Most results are there long before.
        timer = asyncio.get_running_loop().call_later(limits.OPENING_LOOK_SECONDS, look)
        try:
            await self._read(connection, opening)
        finally:
            timer.cancel()
            for task in looking:
                task.cancel()

    async def _look_for_locks(self, process: int, opening: Opening) -> None:
        while True:
            await self._look_for_lock(process, opening)
            await asyncio.sleep(limits.OPENING_LOOK_SECONDS)

    async def _look_for_lock(self, process: int, opening: Opening) -> None:
        """See from another connection whether this one waits for a lock."""
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
            self._blockers.pop(opening, None)
            return
        *known, statement = row
        self._blockers[opening] = Blocker(*known)
        label = opening.view.query.table.label
        logger.warning(
            "%s: a first result waits for a lock of process %d (%s): %s", label, *known, statement
        )

    async def _read(self, connection: Connection, opening: Opening) -> None:
        view, parts = opening.view, 0
        if not opening.wanted:  # another has taken its place, and those who wait
            opening.drop()
            return
        while opening.wanted:
            (need,) = opening.state.needs
            most = limits.OPENING_BYTES_MAX
            question = Question.of_need(view.known, view.query, need, view.scope, most=most)
            # The server ends what takes too long; one that hangs ends nothing.
            async with asyncio.timeout(2 * limits.OPENING_SECONDS):
                (answer,) = await ask(connection, [question])
            if isinstance(answer, Exception):
                self._failed(opening, answer)
                return
            if parts == 0 and not await self._was_whole(connection, opening):
                return
            outcome = opening.state.answer(need, answer)
            view.weigh()
            await self._tell(opening, outcome.deltas, first=parts == 0, more=bool(outcome.needs))
            parts += 1
            if not outcome.needs:
                opening.arrived = True
                self.arrived.append(opening)
                self._changed()
                return
        opening.drop()

    async def _was_whole(self, connection: Connection, opening: Opening) -> bool:
        """Rows that a table was rewritten with are not in a snapshot from before: such a result
        was empty, and is read again. Having been read from, the table stays as it is until we
        end the transaction."""
        oid = opening.view.known.table.oid
        found = await rewritten(connection, [oid])
        if oid not in found:
            self._failed(opening, psycopg.errors.UndefinedTable("the table was dropped"))
            return False
        if found[oid]:
            self._readers_of(opening).put_back(opening)
            return False
        return True

    async def _tell(
        self, opening: Opening, deltas: Sequence[Delta], *, first: bool, more: bool
    ) -> None:
        """Hand a part of a streamed result to those who wait, as fast as they take it."""
        view, frames = opening.view, {}
        matches = tuple(view.known.wire.delta(d) for d in deltas if isinstance(d, Match))
        for subscription in list(opening.told):
            if subscription.closed:
                continue
            reason = subscription.reason if first else None
            if reason not in frames:
                message = (view.id, str(opening.position))
                frames[reason] = Frame(
                    Snapshot(*message, matches, more)  # type: ignore[arg-type]
                    if reason is None
                    else Reset(*message, reason, matches, more)  # type: ignore[arg-type]
                )
                # Who had no room for a part must not take the next for the whole.
                frames[reason].is_step = not first
            if first:
                subscription.begin([frames[reason]], whole=False)
            else:
                subscription.hand(frames[reason], whole=False)
        if more:
            await asyncio.gather(*map(_room, opening.told))


class Readers:
    """Connections to one URL, and the results that they are to read."""

    def __init__(self, url: str, changed: Callable[[], None], openings: Openings) -> None:
        self._url = url
        self._changed = changed
        self._openings = openings
        self._queue: FairQueue[Opening] = FairQueue(_BOUNDS)
        self._queue_swept = 0
        self._share = 0
        self._idle: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Future[None]] = set()
        self._connections = 0
        self._timer: asyncio.TimerHandle | None = None
        self._begun = self._begun_before = 0

    @property
    def can_start(self) -> bool:
        return bool(self._idle) and self._queue.is_ready

    def want(self, opening: Opening) -> None:
        self._sweep()
        self._queue.add(opening, opening.owners)
        self._connect_more()
        self._changed()

    def _sweep(self) -> None:
        """Forget what nobody waits for any more: behind a locked table it would pile up."""
        if len(self._queue) > 2 * self._queue_swept + limits.OPENING_SHARE:
            for opening in [each for each in self._queue if not each.wanted]:
                self._queue.remove(opening)
                opening.drop()
            self._queue_swept = len(self._queue)

    async def start(self, export: Callable[[], Awaitable[str]], position: Position) -> None:
        """Share out what is wanted; see `Openings.start`."""
        share = self._new_share()
        if not share:
            return
        number = self._share
        connections, self._idle = self._idle[: len(share)], self._idle[len(share) :]
        try:
            snapshot = await export()
            ready = await asyncio.gather(*(self._import(each, snapshot) for each in connections))
        except BaseException:
            await self._close_all(connections)
            raise
        for opening in share:
            opening.start(position, number)
        for connection, is_ready in zip(connections, ready, strict=True):
            if is_ready:
                self._spawn(self._work(connection, number))
        self._look_later()

    def _new_share(self) -> list[Opening]:
        """What may be read and nobody is reading: also what waits behind a result that takes
        long."""
        self._share += 1
        share = []
        for opening in list(islice(self._queue.ready(), limits.OPENING_SHARE)):
            if opening.wanted:
                if opening.started:
                    opening.again()
                share.append(opening)
            else:
                self._queue.remove(opening)
                opening.drop()
        return share

    def restart(self) -> None:
        """Begin again with all; they will be wanted again."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._connections = 0
        self._share += 1
        self._idle, idle = [], self._idle
        self._queue = FairQueue(_BOUNDS)
        self._queue_swept = 0
        closing = asyncio.ensure_future(_close_all(idle))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        self.restart()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)

    # -------------------------------------------------------------------- connections

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _connect_more(self) -> None:
        if self._queue.is_ready:
            missing = len(self._queue) - len(self._idle)
            for _ in range(min(missing, limits.OPENING_CONNECTIONS - self._connections)):
                self._connections += 1
                self._spawn(self._connect())
            self._look_later()

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(limits.OPENING_STUCK_SECONDS, self._see)

    def _see(self) -> None:
        """One more connection where results wait and none was begun since the last look."""
        self._timer = None
        if not self._queue.is_ready:
            return
        is_stuck = not self._idle and self._begun == self._begun_before
        if is_stuck and self._connections < limits.OPENING_CONNECTIONS_MAX:
            self._connections += 1
            self._spawn(self._connect())
        self._begun_before = self._begun
        self._look_later()

    async def _connect(self) -> None:
        try:
            # At the end of a share code of others may have left statements of any name.
            connection = await connect(
                self._url, purpose="opening", options=_OPTIONS, prepares=False
            )
        except HeadwaterError as error:
            # The flush loop notices too when the database is away, and begins again with all.
            logger.warning("cannot read results: %s", error)
            await asyncio.sleep(limits.RECONNECT_SECONDS[1])
            self._spawn(self._connect())
            return
        await self._free(connection)

    async def _free(self, connection: Connection) -> None:
        if self._connections > limits.OPENING_CONNECTIONS and not self._queue.is_ready:
            self._connections -= 1
            await connection.close()
            return
        self._idle.append(connection)
        self._changed()

    async def _import(self, connection: Connection, snapshot: str) -> bool:
        try:
            async with asyncio.timeout(limits.FLUSH_QUESTION_SECONDS), connection.pipeline():
                await connection.execute("begin isolation level repeatable read, read only")
                await connection.execute(f"set transaction snapshot '{snapshot}'".encode())
        except (psycopg.Error, TimeoutError) as error:
            logger.warning("a side connection cannot read: %s", error)
            await self._replace(connection)
            return False
        return True

    async def _replace(self, connection: Connection) -> None:
        await connection.close()
        self._spawn(self._connect())

    async def _close_all(self, connections: Sequence[Connection]) -> None:
        self._connections -= len(connections)
        await _close_all(connections)

    def put_back(self, opening: Opening) -> None:
        """It is read again, in a later snapshot."""
        self._queue.done(opening)
        if opening.wanted:
            opening.again()
            self.want(opening)

    # -------------------------------------------------------------------- reading

    async def _work(self, connection: Connection, share: int) -> None:
        """Read what the share has, one after the other, then be free again."""
        queue, opening, as_role = self._queue, None, False
        try:
            while share == self._share:
                opening = queue.next(lambda each: each.share == share)
                if opening is None:
                    break
                self._begun += 1
                if queue:
                    self._look_later()  # others may come to wait for this one
                as_role = as_role or opening.view.scope is not None
                await self._openings.read(connection, opening)
                queue.done(opening)
                opening = None
            await connection.execute("rollback")
            # A policy is code of others, and so are functions of an index.
            await connection.execute(CLEAN if as_role else UNLOCK)
            if as_role:
                await connection.execute(PIN)  # which RESET ALL has undone
        except (psycopg.Error, TimeoutError) as error:
            logger.warning("a side connection was lost: %r", error)
            if opening is not None:
                self.put_back(opening)
            await self._replace(connection)
            return
        except Exception as error:
            logger.exception("a result could not be taken")
            if opening is not None:
                self._openings.failed(opening, error)
            await self._replace(connection)
            return
        except asyncio.CancelledError:
            await connection.close()
            raise
        finally:
            if opening is not None:
                queue.done(opening)
        await self._free(connection)


async def _room(subscription: LiveSubscription) -> None:
    if subscription.closed:
        return
    try:
        async with asyncio.timeout(limits.OPENING_ROOM_SECONDS):
            await subscription.subscriber.room()
    except TimeoutError:
        subscription.fail(
            LimitExceeded(
                f"the client did not take a part of its result in {limits.OPENING_ROOM_SECONDS:.0f}"
                " seconds",
                code="slow_client",
                hint="Read faster, or ask for fewer rows or columns.",
            )
        )


async def _close_all(connections: Iterable[Connection]) -> None:
    for connection in connections:
        await connection.close()


# ------------------------------------------------------------------------ what took too long


class Blocker(NamedTuple):
    """Who holds a lock that something waits for: a process of the database, and what it does. Its
    statement is for our log: a client may not be meant to see it."""

    process: int
    state: str


_LOOK_OPTIONS = f"-c statement_timeout={int(limits.OPENING_LOOK_SECONDS * 1000)}ms"

_BLOCKER = """
    select b.pid, coalesce(a.state, 'unknown'), coalesce(left(a.query, 1000), '')
    from unnest(pg_blocking_pids(%s)) b (pid) left join pg_stat_activity a on a.pid = b.pid
    order by b.pid limit 1
"""


def too_slow(query: BoundQuery, blocker: Blocker | None, error: psycopg.Error) -> HeadwaterError:
    """For a result that took longer than it may."""
    if blocker is None and not isinstance(error, psycopg.errors.LockNotAvailable):
        columns = ", ".join(str(by) for by in query.order.by)
        return DatabaseError(
            f"{query.table.label}: reading the first result took longer than"
            f" {limits.OPENING_SECONDS} seconds",
            code="slow_query",
            hint="An index that begins with the filter's columns and goes on with the order's"
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
