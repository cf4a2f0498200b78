"""One subscriber of a topic. `CatchUp` says how it joins the flushes without a gap.

While it catches up it collects which rows were named, not what is in them. Then it is *ready*: the
next flush reads those rows in its snapshot, sends them, and it is live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, Protocol, TypeAlias

from headwater.database import Connection
from headwater.errors import ResyncRequired
from headwater.hub.flush_state import FlushState
from headwater.hub.resources import Resources
from headwater.hub.subscriptions.catch_up import CatchUp, Place
from headwater.hub.subscriptions.subscriber import Access, Subscriber
from headwater.hub.topics.topic import Gathering, News, TopicView
from headwater.log.reading.reader import LogReader
from headwater.model import Position, Table
from headwater.protocol import Frame

SubscriptionState: TypeAlias = Literal["opening", "live", "paused", "catching", "ready"]


class TopicHome(Protocol):
    """What a subscription asks of the registry that it belongs to."""

    ready: dict[TopicSubscription, None]

    @property
    def place(self) -> Place: ...

    def leave(self, subscription: TopicSubscription) -> None: ...

    def gathering_of(self, view: TopicView[TopicSubscription]) -> Gathering[TopicSubscription]: ...

    def position_frame(self, view: TopicView[TopicSubscription]) -> Frame: ...


class TopicSubscription(CatchUp):
    """One subscriber's topic. Made by `TopicRegistry.subscribe`."""

    __slots__ = ("_gathering", "_home", "_stored", "state", "topic")

    kind: ClassVar[str] = "topic"

    def __init__(
        self,
        resources: Resources,
        flushes: FlushState,
        home: TopicHome,
        topic: TopicView[TopicSubscription],
        subscriber: Subscriber,
        since: Position | None,
        access: Access,
    ) -> None:
        super().__init__(resources, flushes, subscriber, access, since)
        self.topic = topic
        self.state: SubscriptionState = "opening"
        self._home = home
        self._stored = News()
        self._gathering: Gathering[TopicSubscription] | None = None

    @property
    def view(self) -> int:
        return self.topic.id

    @property
    def is_live(self) -> bool:
        """Whether everything up to the last flush was delivered."""
        return self.state == "live" and not self.closed

    def _leave(self) -> None:
        self._stop()
        self._home.leave(self)
        self._flushes.announce()

    def pause(self) -> None:
        """Deliver nothing until `resume`. Called while a frame is being delivered, it means that
        the frame was not taken: its rows come again."""
        if self.closed or self.state == "paused":
            return
        if self.state == "live":
            self._stay_at(self._home.place)
        self._stop()
        self.state = "paused"

    def resume(self) -> None:
        """Catch up with what came meanwhile, and continue."""
        if not self.closed and self.state == "paused":
            self._restart()

    # -------------------------------------------------------------------- for the registry

    async def begin(self) -> None:
        """Returns once the subscriber was sent that it is subscribed; errors are raised."""
        if self._place is not None:
            self._restart()
            await self._arrived.wait()
            return
        await self._flushes.between()
        if not self.closed:
            self._introduce_once(resumed=False)
            self.state = "live"
            self.deliver(self._home.position_frame(self.topic))

    async def settled(self, position: Position) -> None:
        """Wait until it is live, and what was signalled up to the position is not being collected
        any more."""
        while not self.closed and not (self.is_live and self.topic.has_sent(position)):
            await self._flushes.changed()

    def deliver(self, frame: Frame) -> None:
        """Hand a frame over, if it is live."""
        if self.state == "live":
            self._deliver(frame)

    def missed(self, news: News) -> None:
        """A flush brought this while it catches up."""
        if self.state in ("catching", "ready"):
            self._store(news)

    @property
    def owed(self) -> News:
        """What it is to be sent when it joins."""
        return self._stored

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
        """Changes were passed over: it reads them from the log."""
        if self.state == "live":
            self._stay_at(since)
        if self.state in ("live", "catching", "ready"):
            self._stop()
            self._restart()

    def lose(self, position: Position) -> None:
        """The log cannot say what happened since its place; it continues from now."""
        if not self.begun:
            return
        if self.state == "paused":
            self.missed_gap = True
            return
        self._stop()
        self.state = "live"
        news = News()
        news.gap = True
        self.deliver(self.topic.frame(news, str(position)))
        self._flushes.announce()

    # -------------------------------------------------------------------- states

    def _introduce_once(self, *, resumed: bool) -> None:
        if not self.begun:
            self._introduce(self.topic.id, resumed=resumed)
            self._arrived.settle()

    def _restart(self) -> None:
        self.state = "catching"
        self._stored = News()
        self._start()

    def _stop(self) -> None:
        super()._stop()
        self._home.ready.pop(self, None)
        self._stored = News()

    def _store(self, news: News) -> None:
        """Which rows: what is in them is read when it joins."""
        named = News()
        named.at, named.poked, named.gap = news.at, news.poked, news.gap
        named.ops = dict.fromkeys(news.ops)
        self._stored.merge(named)

    # -------------------------------------------------------------------- catching up

    def _wants(self) -> Callable[[Table], bool]:
        self._gathering = self._home.gathering_of(self.topic)
        return self._gathering.wants

    def _begin_storing(self) -> None:
        self._introduce_once(resumed=True)
        self._stored = News()

    async def _read(
        self, connection: Connection, reader: LogReader, since: Position, until: Position
    ) -> None:
        assert self._gathering is not None
        async for transaction in reader.catch_up(connection, since, until):
            self._gathering.take(transaction.changes)

    async def _join(self, since: Position, until: Position) -> bool:
        # Before what flushes brought meanwhile.
        assert self._gathering is not None
        later, self._stored = self._stored, News()
        for news in self._gathering.news.values():
            self._store(news)
        self._stored.merge(later)
        self._gathering = None
        return True

    async def _caught_up(self) -> None:
        await self.subscriber.room()
        self.state = "ready"
        self._home.ready[self] = None
        self._task = None
        self._flushes.wake()

    async def _cannot_resume(self, error: ResyncRequired) -> None:
        await self._flushes.between()
        self._introduce_once(resumed=False)
        self.lose(self._home.place.durable)
