"""One subscriber's topic: live, paused, or catching up with what it missed.

Catching up only finds out in the log *which* rows were signalled since a position; flushes that
come meanwhile add theirs. The rows themselves are then read by the next flush, in its snapshot and
with its one statement, and from there on it is live. So nobody is ever told a row older than one
that it was told before, and nothing is kept for a viewer but keys.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TypeAlias

import psycopg

from headwater.database import connect
from headwater.errors import DatabaseError, HeadwaterError, ResyncRequired, Unavailable
from headwater.hub.arrival import Arrival
from headwater.hub.subscriber import Access, Subscriber, not_taken
from headwater.hub.topic import News, Place, TopicView
from headwater.hub.unreadable import unreadable
from headwater.log.follow import is_lost, reconnect_pause
from headwater.log.read import LogReader, check_history
from headwater.model import Position
from headwater.protocol import Frame

if TYPE_CHECKING:
    from headwater.hub.hub import Hub

logger = logging.getLogger(__name__)

State: TypeAlias = Literal["opening", "live", "paused", "catching", "ready"]


class TopicSubscription:
    """One subscriber's topic. Made by `Topics.subscribe`."""

    __slots__ = (
        "_arrived", "_hub", "_kept", "_lost", "_place", "_restarts", "_task", "access",
        "begun", "closed", "state", "subscriber", "topic",
    )  # fmt: skip

    def __init__(
        self,
        hub: Hub,
        topic: TopicView,
        subscriber: Subscriber,
        since: Position | None,
        access: Access,
    ) -> None:
        self.topic = topic
        self.subscriber = subscriber
        self.access = access
        self.state: State = "opening"
        self.begun = False
        """Whether its subscriber has heard of it; before, errors are raised where it is made."""
        self.closed = False
        self._hub = hub
        self._place = None if since is None else Place(since, since)
        """How far it was told everything, while it is not live."""
        self._restarts = hub.restarts
        self._kept = News()
        self._lost = False
        """Whether it is to be told, when it goes on, that it cannot be told what it missed."""
        self._task: asyncio.Task[None] | None = None
        self._arrived = Arrival()

    @property
    def view(self) -> int:
        return self.topic.id

    @property
    def is_live(self) -> bool:
        """Whether everything up to the last flush was delivered."""
        return self.state == "live" and not self.closed

    def close(self) -> None:
        """End it; nothing is delivered any more."""
        if self.closed:
            return
        self.closed = True
        self._stop()
        self._hub.topics.leave(self)
        self._arrived.settle(Unavailable("the topic was closed before it began", hint="Try again."))
        self._hub.stir()

    def pause(self) -> None:
        """Deliver nothing until `resume`. Said while a frame is being delivered, it means that the
        frame was not taken: what it told comes again."""
        if self.closed or self.state == "paused":
            return
        if self.state == "live":
            self._stay_at(self._hub.topics.place)
        self._stop()
        self.state = "paused"

    def resume(self) -> None:
        """Catch up with what came meanwhile, and go on."""
        if not self.closed and self.state == "paused":
            self._start()

    # -------------------------------------------------------------------- for the hub

    async def begin(self) -> None:
        """Returns once the subscriber was told that it is subscribed; errors are raised."""
        if self._place is not None:
            self._start()
            await self._arrived.wait()
            return
        await self._hub.between()
        if not self.closed:
            self._introduce(resumed=False)
            self.state = "live"
            self.deliver(self._hub.topics.position_frame(self.topic))

    async def settled(self, position: Position) -> None:
        """Wait until it is live, and what was signalled up to the position is not being collected
        any more."""
        while not self.closed and not (self.is_live and self.topic.has_sent(position)):
            await self._hub.stirred()

    def deliver(self, frame: Frame) -> None:
        """Hand a frame over, if it is live."""
        if self.closed or self.state != "live":
            return
        try:
            self.subscriber.deliver(frame)
        except Exception:
            logger.exception("a subscriber of topic %s failed to take a frame", self.topic.name)
            self.fail(not_taken())

    def missed(self, news: News) -> None:
        """A flush brought this while it catches up."""
        if self.state in ("catching", "ready"):
            self._keep(news)

    @property
    def owed(self) -> News:
        """What it is to be told when it joins."""
        return self._kept

    def join(self, frame: Frame) -> None:
        """What it missed was read; from here on it is live."""
        if self.state != "ready":
            return
        since, restarts = self._place, self._restarts
        self._stop()
        self.state = "live"
        self.deliver(frame)
        if self.state == "paused":  # type: ignore[comparison-overlap]
            self._place, self._restarts = since, restarts  # it was not taken

    def fell_behind(self, since: Place) -> None:
        """Flushes go by that nobody is told of: read them in the log."""
        if self.state == "live":
            self._stay_at(since)
        if self.state in ("live", "catching", "ready"):
            self._stop()
            self._start()

    def lose(self, position: Position) -> None:
        """What happened since it was last told cannot be told; it goes on from now."""
        if not self.begun:
            return
        if self.state == "paused":
            self._lost = True
            return
        self._stop()
        self.state = "live"
        news = News()
        news.gap = True
        self.deliver(self.topic.frame(news, str(position)))
        self._hub.stir()

    def fail(self, error: HeadwaterError) -> None:
        if self.closed:
            return
        if not self.begun:
            self._arrived.settle(error)
        self.close()
        if self.begun:
            with suppress(Exception):
                self.subscriber.failed(error)

    # -------------------------------------------------------------------- states

    def _introduce(self, *, resumed: bool) -> None:
        if self.begun:
            return
        self.begun = True
        try:
            self.subscriber.subscribed(self.topic.id, key=(), resumed=resumed)
        except Exception:
            logger.exception("a subscriber failed to be told that it is subscribed")
        self._arrived.settle()

    def _stay_at(self, place: Place) -> None:
        self._place, self._restarts = place, self._hub.restarts

    def _start(self) -> None:
        self.state = "catching"
        self._kept = News()
        self._task = asyncio.create_task(self._run())
        self._hub.watch(self._task)

    def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._hub.topics.ready.pop(self, None)
        self._kept = News()

    def _keep(self, news: News) -> None:
        """Which rows: what is in them is read when it joins."""
        named = News()
        named.at, named.poked, named.gap = news.at, news.poked, news.gap
        named.ops = dict.fromkeys(news.ops)
        self._kept.merge(named)

    # -------------------------------------------------------------------- catching up

    async def _run(self) -> None:
        """Until it is ready to join, however often the connection needs another start."""
        attempt = 0
        while not self.closed:
            try:
                async with self._hub.catch_ups:
                    await self._catch_up()
                await self.subscriber.room()
                self.state = "ready"
                self._hub.topics.ready[self] = None
                self._task = None
                self._hub.wake()
                return
            except ResyncRequired:
                await self._hub.between()
                self._lost = False
                self._introduce(resumed=False)
                self.lose(self._hub.topics.place.durable)
                return
            except (psycopg.Error, DatabaseError) as error:
                if not self.begun or not is_lost(error):
                    self.fail(unreadable(error, "a topic"))
                    return
                await asyncio.sleep(reconnect_pause(attempt))
                attempt += 1
            except HeadwaterError as error:
                self.fail(error)
                return
            except Exception:
                logger.exception("topic %s cannot be caught up with", self.topic.name)
                self.fail(Unavailable("the topic cannot be caught up with", hint="Try again."))
                return

    async def _catch_up(self) -> None:
        if self._lost:
            raise ResyncRequired("the log was lost while the topic was paused")
        since = self._since()
        topics = self._hub.topics
        gathering = topics.gathering({self.topic.name: self.topic})
        connection = await connect(self._hub.url, purpose="catch-up")
        try:
            reader = await LogReader.open(connection, gathering.wants)
            await reader.check(connection, since)
            if not self.begun and self.access.history is not None:
                await check_history(connection, since, self.access.history)
            until = await self._seam(since)
            if until != since:
                async for transaction in reader.catch_up(connection, since, until):
                    gathering.take(transaction.changes)
        finally:
            await connection.close()
        # Before what flushes brought meanwhile.
        later, self._kept = self._kept, News()
        for news in gathering.news.values():
            self._keep(news)
        self._kept.merge(later)

    def _since(self) -> Position:
        """After a restart of the server, what was not on disk may mean something else."""
        assert self._place is not None
        if self._restarts != self._hub.restarts:
            return self._place.durable
        return self._place.reached

    async def _seam(self, since: Position) -> Position:
        """The hub's position, from which on flushes add what they bring."""
        while True:
            await self._hub.between()
            until = self._hub.position
            if until is not None and until.covers(since):
                break
            await self._hub.next_flush()
        self._introduce(resumed=True)
        self._kept = News()
        return until
