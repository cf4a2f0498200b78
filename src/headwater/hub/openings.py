"""Reads the first results of live queries on side connections, in the snapshot of a flush.

A first result may take long where no index fits, and nobody else shall wait for it. So a flush only
lends its snapshot: side connections import it, which takes a moment, and the flush goes on. All
results that are wanted at that moment are shared out among the connections that are free, and what
waits behind a slow one is given to the next that is. What takes too long fails with an error that
says so; what a lost connection cut short is read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

import psycopg

from headwater import limits
from headwater.database import Connection, connect
from headwater.errors import DatabaseError, HeadwaterError, LimitExceeded
from headwater.hub.live import LiveSubscription, Opening
from headwater.hub.questions import Question, ask, rewritten
from headwater.hub.tables import FORMATS
from headwater.live.query import BoundQuery
from headwater.model import Delta, Match, Position
from headwater.protocol import Frame, Reset, Snapshot

logger = logging.getLogger(__name__)

_OPTIONS = f"{FORMATS} -c statement_timeout={limits.OPENING_SECONDS}s -c jit=off"


class Openings:
    """The results that are wanted, and those who read them.

    `changed` is called when a result has arrived or a connection is free for more; `failed` with
    the driver's error, or a fault of ours, when a result cannot be had.
    """

    def __init__(
        self,
        url: str,
        changed: Callable[[], None],
        failed: Callable[[Opening, Exception], None],
    ) -> None:
        self._url = url
        self._changed = changed
        self._failed = failed
        self._wanted: deque[Opening] = deque()
        self._shares: list[deque[Opening]] = []
        self._idle: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Future[None]] = set()
        self._connections = 0
        self.arrived: list[Opening] = []

    @property
    def can_start(self) -> bool:
        return bool(self._idle) and (bool(self._wanted) or any(self._shares))

    def want(self, opening: Opening) -> None:
        self._wanted.append(opening)
        self._connect_more()
        self._changed()

    async def start(self, export: Callable[[], Awaitable[str]], position: Position) -> None:
        """Share out what is wanted. `export` lends the snapshot, which must stay until we return;
        the position is that of the snapshot."""
        share = self._new_share()
        if not share:
            return
        connections, self._idle = self._idle[: len(share)], self._idle[len(share) :]
        try:
            snapshot = await export()
            ready = await asyncio.gather(*(self._import(each, snapshot) for each in connections))
        except BaseException:
            await _close_all(connections)
            raise
        for opening in share:
            opening.started, opening.position = True, position
        for connection, is_ready in zip(connections, ready, strict=True):
            if is_ready:
                self._spawn(self._work(connection, share))

    def _new_share(self) -> deque[Opening]:
        """Everything that nobody is reading: also what waits behind a result that takes long."""
        for unread in self._shares:
            self._put_back(unread)
            unread.clear()
        share: deque[Opening] = deque()
        while self._wanted:
            opening = self._wanted.popleft()
            if opening.wanted:
                share.append(opening)
            else:
                opening.drop()
        self._shares = [share]
        return share

    def restart(self) -> None:
        """The snapshots that results are read in no longer fit the log: begin again with all."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._connections = 0
        self._idle, idle = [], self._idle
        self._wanted.clear()
        self._shares = []
        self.arrived.clear()
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
        missing = len(self._wanted) - len(self._idle)
        for _ in range(min(missing, limits.OPENING_CONNECTIONS - self._connections)):
            self._connections += 1
            self._spawn(self._connect())

    async def _connect(self) -> None:
        try:
            connection = await connect(self._url, purpose="opening", options=_OPTIONS)
        except HeadwaterError as error:
            # The flush loop notices too when the database is away, and begins again with all.
            logger.warning("cannot read results: %s", error)
            await asyncio.sleep(limits.RECONNECT_SECONDS[1])
            self._spawn(self._connect())
            return
        self._free(connection)

    def _free(self, connection: Connection) -> None:
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

    def _put_back(self, openings: Iterable[Opening]) -> None:
        for opening in openings:
            if opening.wanted:
                opening.again()
                self._wanted.append(opening)

    # -------------------------------------------------------------------- reading

    async def _work(self, connection: Connection, share: deque[Opening]) -> None:
        opening: Opening | None = None
        try:
            while share:
                opening = share.popleft()
                await self._read(connection, opening)
                opening = None
            await connection.execute("commit")
        except (psycopg.Error, TimeoutError) as error:
            logger.warning("a side connection was lost: %r", error)
            self._put_back([opening] if opening is not None else [])
            await self._replace(connection)
            return
        except Exception as error:
            logger.exception("a result could not be taken")
            if opening is not None:
                self._failed(opening, error)
            await self._replace(connection)
            return
        except asyncio.CancelledError:
            await connection.close()
            raise
        self._free(connection)

    async def _read(self, connection: Connection, opening: Opening) -> None:
        view, parts = opening.view, 0
        if not opening.wanted:  # another has taken its place, and those who wait
            opening.drop()
            return
        if view.query.mode == "streamed" and not opening.quiet:
            opening.told, view.waiting = view.waiting, []
        while opening.wanted:
            (need,) = opening.state.needs
            question = Question.of_need(view.known, view.query, need, view.scope)
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
        commit."""
        oid = opening.view.known.table.oid
        found = await rewritten(connection, [oid])
        if oid not in found:
            self._failed(opening, psycopg.errors.UndefinedTable("the table was dropped"))
            return False
        if found[oid]:
            self._put_back([opening])
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


def slow_query(query: BoundQuery) -> HeadwaterError:
    """For a result that took longer than it may."""
    columns = ", ".join(str(by) for by in query.order.by)
    return DatabaseError(
        f"{query.table.label}: reading the first result took longer than"
        f" {limits.OPENING_SECONDS} seconds",
        code="slow_query",
        hint="An index that begins with the filter's columns and goes on with the order's"
        f" ({columns}) makes it quick.",
    )
