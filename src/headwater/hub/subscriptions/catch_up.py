"""A subscription that follows the log from a position: live, catching up, or paused.

To join the flushes, it takes the hub's position (the seam), stores the changes of later flushes,
reads the log from its own place up to exactly the seam, sends the stored changes, and is live. No
change is missed or sent twice: every transaction is either in the position of the seam or comes
later.

A subscriber may resume from a position that is on disk (`Place.durable`). After a restart of the
server, a position that was not on disk may mean other transactions; so the subscription continues
from the durable one. Change feeds and topics differ in what they store and how they join: both
implement the methods at the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import msgspec
import psycopg

from headwater.database import Connection
from headwater.errors import DatabaseError, HeadwaterError, ResyncRequired, Unavailable
from headwater.hub.flush_state import FlushState
from headwater.hub.resources import Resources
from headwater.hub.subscriptions.read_errors import unreadable
from headwater.hub.subscriptions.subscriber import Access, Subscriber
from headwater.hub.subscriptions.subscription import HubSubscription, not_taken
from headwater.log.reach import check_age
from headwater.log.reading.reader import LogReader
from headwater.log.reconnect import is_lost, reconnect_pause
from headwater.model import Position, Table
from headwater.protocol import Frame

logger = logging.getLogger(__name__)


class Place(msgspec.Struct, frozen=True):
    """The subscriber was sent everything up to `reached`. It may resume from `durable`, which a
    crash of the server cannot undo."""

    reached: Position
    durable: Position


class SlowClient(Exception):
    """The client reads too slowly to use a connection for it."""


class CatchUp(HubSubscription):
    """A feed or a topic of one subscriber."""

    __slots__ = (
        "_flushes", "_place", "_resources", "_restarts", "_task", "access", "from_now",
        "missed_gap",
    )  # fmt: skip

    kind: ClassVar[str]
    """Its name in messages."""

    def __init__(
        self,
        resources: Resources,
        flushes: FlushState,
        subscriber: Subscriber,
        access: Access,
        since: Position | None,
    ) -> None:
        super().__init__(subscriber)
        self.access = access
        self.from_now = since is None
        self._resources = resources
        self._flushes = flushes
        self._place = None if since is None else Place(since, since)
        """Its place in the log, while it is not live."""
        self._restarts = flushes.restarts
        """The number of restarts of the server when it was at this place."""
        self._task: asyncio.Task[None] | None = None
        self.missed_gap = False
        """Whether it must be sent a gap when it continues."""

    def _closed_early(self) -> HeadwaterError:
        return Unavailable(f"the {self.kind} was closed before it began", hint="Try again.")

    def _deliver(self, frame: Frame) -> None:
        if self.closed:
            return
        try:
            self.subscriber.deliver(frame)
        except Exception:
            logger.exception("a subscriber of a %s failed to take a frame", self.kind)
            self.fail(not_taken())

    def _introduce(self, view: int, *, resumed: bool) -> None:
        self.begun = True
        try:
            self.subscriber.subscribed(view, key=(), resumed=resumed)
        except Exception:
            logger.exception("a subscriber of a %s failed to take that it begins", self.kind)

    # -------------------------------------------------------------------- its place

    def _stay_at(self, place: Place) -> None:
        """Store its place: it is no longer live."""
        self._place, self._restarts = place, self._flushes.restarts

    def _since(self) -> Position:
        """The position to read from. After a restart of the server, the durable one."""
        if self.missed_gap:
            raise ResyncRequired(f"the log was lost while the {self.kind} was paused")
        assert self._place is not None
        if self._restarts != self._flushes.restarts:
            if self.from_now and not self.begun:
                raise Unavailable(
                    f"the database restarted before the {self.kind} began", hint="Try again."
                )
            self._stay_at(Place(self._place.durable, self._place.durable))
            self._rewound()
        return self._place.reached

    async def _seam(self, since: Position) -> Position:
        """The hub's position. The changes of later flushes are stored."""
        while True:
            await self._flushes.between()
            until = self._flushes.position
            if until is not None and until.covers(since):
                break
            await self._flushes.next_flush()
        self._begin_storing()
        return until

    # -------------------------------------------------------------------- catching up

    def _start(self, work: Coroutine[Any, Any, None] | None = None) -> None:
        if self._task is None:
            self._task = self._resources.spawn(work or self._run())

    def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _run(self) -> None:
        """Try until it has caught up: connections can be lost, and clients can be slow."""
        attempt = 0
        while not self.closed:
            try:
                async with self._resources.catch_ups:
                    await self._catch_up()
                await self._caught_up()
                return
            except SlowClient:
                await self.subscriber.room()
            except ResyncRequired as error:
                await self._cannot_resume(error)
                return
            except (psycopg.Error, DatabaseError) as error:
                if not self.begun or not is_lost(error):
                    self.fail(unreadable(error, f"a {self.kind}"))
                    return
                await asyncio.sleep(reconnect_pause(attempt))
                attempt += 1
            except Exception as error:
                self.fail(self._explain(error))
                return

    async def _catch_up(self) -> None:
        async with self._resources.log_reader(self._wants()) as (connection, reader):
            while True:
                since = self._since()
                await reader.check(connection, since)
                if not self.begun and self.access.history is not None:
                    await check_age(connection, since, self.access.history)
                await self._before_seam(connection)
                until = await self._seam(since)
                if until != since:
                    await self._read(connection, reader, since, until)
                if await self._join(since, until):
                    return

    def _explain(self, error: Exception) -> HeadwaterError:
        """The error that its subscriber is sent when it ends."""
        if isinstance(error, HeadwaterError):
            return error
        logger.error("a %s cannot catch up with the log", self.kind, exc_info=error)
        return Unavailable(
            f"the {self.kind} cannot catch up with the log; the gateway's log has the reason",
            hint="Subscribe again: nothing is lost.",
        )

    # -------------------------------------------------------------------- different for each kind

    def _wants(self) -> Callable[[Table], bool]:
        """The tables whose changes it reads."""
        raise NotImplementedError

    def _rewound(self) -> None:
        """It continues from the durable position."""

    async def _before_seam(self, connection: Connection) -> None:
        """Wait until it may join."""

    def _begin_storing(self) -> None:
        """Store the changes of flushes from here on. Inform the subscriber that it has begun."""
        raise NotImplementedError

    async def _read(
        self, connection: Connection, reader: LogReader, since: Position, until: Position
    ) -> None:
        """Read the changes between the two positions."""
        raise NotImplementedError

    async def _join(self, since: Position, until: Position) -> bool:
        """It has everything up to `until`: join the flushes. False if there were more changes than
        it could store."""
        raise NotImplementedError

    async def _caught_up(self) -> None:
        """It has caught up, and its connection is closed."""

    async def _cannot_resume(self, error: ResyncRequired) -> None:
        """The log does not reach back to its place."""
        raise NotImplementedError
