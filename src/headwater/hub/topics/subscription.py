"""One subscription of a topic. `CatchUp` has how it joins the flushes without a gap.

While it catches up, it collects the keys of rows, not the rows. Then it is *ready*: the next flush
reads these rows in its snapshot and sends them, and it is live.
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
from headwater.hub.topics.topic import TopicUpdate, TopicView, UpdateCollector
from headwater.log.reading.reader import LogReader
from headwater.model import Position, Table
from headwater.protocol import Frame

SubscriptionState: TypeAlias = Literal["opening", "live", "paused", "catching", "ready"]


class TopicHome(Protocol):
    """The registry, as its subscriptions use it."""

    ready: dict[TopicSubscription, None]

    @property
    def place(self) -> Place: ...

    def leave(self, subscription: TopicSubscription) -> None: ...

    def collector_of(
        self, view: TopicView[TopicSubscription]
    ) -> UpdateCollector[TopicSubscription]: ...

    def position_frame(self, view: TopicView[TopicSubscription]) -> Frame: ...


class TopicSubscription(CatchUp):
    """One subscriber's topic. Made by `TopicRegistry.subscribe`."""

    __slots__ = ("_collector", "_home", "_stored", "state", "topic")

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
        self._stored = TopicUpdate()
        self._collector: UpdateCollector[TopicSubscription] | None = None

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
        """Deliver nothing until `resume`. If this is called during `deliver`, the frame was not
        taken, and its rows are sent again."""
        if self.closed or self.state == "paused":
            return
        if self.state == "live":
            self._stay_at(self._home.place)
        self._stop()
        self.state = "paused"

    def resume(self) -> None:
        """Catch up from the log, and continue."""
        if not self.closed and self.state == "paused":
            self._restart()

    # -------------------------------------------------------------------- for the registry

    async def begin(self) -> None:
        """Returns when the subscriber was sent that it is subscribed. Errors are raised."""
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
        """Wait until it is live, and no signal up to the position is pending."""
        while not self.closed and not (self.is_live and self.topic.has_sent(position)):
            await self._flushes.changed()

    def deliver(self, frame: Frame) -> None:
        """Send a frame, if it is live."""
        if self.state == "live":
            self._deliver(frame)

    def missed(self, update: TopicUpdate) -> None:
        """An update of a flush, for one that catches up."""
        if self.state in ("catching", "ready"):
            self._store(update)

    @property
    def owed(self) -> TopicUpdate:
        """The update that it needs when it joins."""
        return self._stored

    def join(self, frame: Frame) -> None:
        """Send the rows that it missed. From here on it is live."""
        if self.state != "ready":
            return
        since, restarts = self._place, self._restarts
        self._stop()
        self.state = "live"
        self.deliver(frame)
        if self.state == "paused":  # type: ignore[comparison-overlap]
            self._place, self._restarts = since, restarts  # it was not taken

    def fell_behind(self, since: Place) -> None:
        """Changes were skipped: read them from the log."""
        if self.state == "live":
            self._stay_at(since)
        if self.state in ("live", "catching", "ready"):
            self._stop()
            self._restart()

    def lose(self, position: Position) -> None:
        """The log no longer has the changes since its place: continue from now on."""
        if not self.begun:
            return
        if self.state == "paused":
            self.missed_gap = True
            return
        self._stop()
        self.state = "live"
        update = TopicUpdate()
        update.gap = True
        self.deliver(self.topic.frame(update, str(position)))
        self._flushes.announce()

    # -------------------------------------------------------------------- states

    def _introduce_once(self, *, resumed: bool) -> None:
        if not self.begun:
            self._introduce(self.topic.id, resumed=resumed)
            self._arrived.settle()

    def _restart(self) -> None:
        self.state = "catching"
        self._stored = TopicUpdate()
        self._start()

    def _stop(self) -> None:
        super()._stop()
        self._home.ready.pop(self, None)
        self._stored = TopicUpdate()

    def _store(self, update: TopicUpdate) -> None:
        """Store only the keys: the rows are read when it joins."""
        named = TopicUpdate()
        named.at, named.poked, named.gap = update.at, update.poked, update.gap
        named.ops = dict.fromkeys(update.ops)
        self._stored.merge(named)

    # -------------------------------------------------------------------- catching up

    def _wants(self) -> Callable[[Table], bool]:
        self._collector = self._home.collector_of(self.topic)
        return self._collector.wants

    def _begin_storing(self) -> None:
        self._introduce_once(resumed=True)
        self._stored = TopicUpdate()

    async def _read(
        self, connection: Connection, reader: LogReader, since: Position, until: Position
    ) -> None:
        assert self._collector is not None
        async for transaction in reader.catch_up(connection, since, until):
            self._collector.take(transaction.changes)

    async def _join(self, since: Position, until: Position) -> bool:
        # Before the updates of flushes since the seam.
        assert self._collector is not None
        later, self._stored = self._stored, TopicUpdate()
        for update in self._collector.update.values():
            self._store(update)
        self._stored.merge(later)
        self._collector = None
        return True

    async def _caught_up(self) -> None:
        await self.subscriber.room()
        self.state = "ready"
        self._home.ready[self] = None
        self._task = None
        self._flushes.wake()

    async def _cannot_resume(self, error: ResyncRequired) -> None:
        await self._flushes.between()
        self.missed_gap = False
        self._introduce_once(resumed=False)
        self.lose(self._home.place.durable)
