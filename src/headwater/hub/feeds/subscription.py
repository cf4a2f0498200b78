"""One subscription of a change feed. `CatchUp` has how it joins the flushes without a gap.

While it catches up, its subscriber is sent the log page by page, as fast as the client reads. If
flushes bring more changes than can be stored, it catches up again from the place it has reached.

The position that a subscriber is sent to resume from is on disk. It may be before the last change
that was sent, but never before the place where the feed began: otherwise, after a reconnect, a feed
from now on would get older changes. So a feed begins when its first position is on disk; the
changes of flushes until then are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from headwater import limits
from headwater.database import Connection
from headwater.errors import Forbidden, HeadwaterError, InvalidQuery, ResyncRequired, Unavailable
from headwater.hub.feeds.view import FeedQuery, FeedView
from headwater.hub.flush_state import FlushState
from headwater.hub.resources import Resources
from headwater.hub.subscriptions.catch_up import CatchUp, Place, SlowClient
from headwater.hub.subscriptions.subscriber import Access, Subscriber
from headwater.live.needs import Undecided
from headwater.log.reading.progress import flush as flush_wal
from headwater.log.reading.reader import LogReader
from headwater.model import Position, Table, Transaction
from headwater.protocol import Frame

_FEED_FRAME_CHANGES = 500
"""Changes in one message of a feed that catches up. Transactions are not split."""

_FEED_STORED_CHANGES_MAX = 10_000
"""Changes stored for a feed while it catches up. If there are more, it reads them from the log."""


class FeedHome(Protocol):
    """The registry, as its subscriptions use it."""

    gap_since: Position | None

    def join(self, subscription: FeedSubscription) -> None: ...

    def leave(self, subscription: FeedSubscription) -> None: ...

    def frame(
        self,
        view: FeedView[FeedSubscription],
        transactions: Sequence[Transaction],
        position: Position,
    ) -> Frame: ...

    def gap_frame(self, view: FeedView[FeedSubscription], since: Position | None) -> Frame: ...


class FeedSubscription(CatchUp):
    """One subscriber's change feed. Made by `Hub.feed`."""

    kind: ClassVar[str] = "feed"

    def __init__(
        self,
        resources: Resources,
        flushes: FlushState,
        home: FeedHome,
        feed: FeedView[FeedSubscription],
        query: FeedQuery,
        subscriber: Subscriber,
        access: Access,
    ) -> None:
        super().__init__(resources, flushes, subscriber, access, query.since)
        self.feed = feed
        self._home = home
        self._may_deliver = asyncio.Event()
        self._may_deliver.set()
        self._flush = 0
        """The last flush that it was sent."""
        self._delivered: set[int] = set()
        """Transactions after its place that were sent already."""
        self._stored: list[Transaction] | None = None
        """The transactions of flushes while it catches up; None if there were too many."""
        self._stored_changes = 0
        self._is_opened = asyncio.Event()
        """Whether its subscriber can pause it. Before, a frame that is not taken would be lost."""

    @property
    def view(self) -> int:
        return self.feed.id

    @property
    def live(self) -> bool:
        return not self._is_catching_up and self._may_deliver.is_set()

    @property
    def _is_catching_up(self) -> bool:
        return self._task is not None or not self.begun

    def _leave(self) -> None:
        self._home.leave(self)
        self._stop()
        self._flushes.announce()

    def pause(self) -> None:
        """Deliver nothing until `resume`. If this is called during `deliver`, the frame was not
        taken, and is sent again."""
        if self.closed or not self._may_deliver.is_set():
            return
        if not self._is_catching_up:
            self._stop_here()
        self._may_deliver.clear()

    def resume(self) -> None:
        """Catch up from the log, and continue."""
        if self.closed or self._may_deliver.is_set():
            return
        self._may_deliver.set()
        self._start()

    # -------------------------------------------------------------------- for the registry

    async def begin(self) -> None:
        """Returns when the subscriber was sent that it is subscribed. Errors are raised."""
        try:
            if self._place is not None or not await self._begins_here():
                self._start()
            await self._arrived.wait()
            self._is_opened.set()
        except BaseException:
            self.close()
            raise

    async def settled(self, position: Position) -> None:
        """Wait until it is live: then it was sent the changes of all flushes."""
        while not self.closed and not self.live:
            await self._flushes.changed()

    def flushed(self, transactions: Sequence[Transaction], frame: Frame | None) -> None:
        """The transactions of a flush for this feed, and their shared frame."""
        if self._is_catching_up:
            self._store(transactions)
        elif self._may_deliver.is_set() and frame is not None:
            self._deliver(frame)
        self._flush = self._flushes.number

    def fell_behind(self, since: Position) -> None:
        """Changes were skipped: read them from the log."""
        if self._is_catching_up:
            self._stored = None
        elif self._may_deliver.is_set():
            self._stay_at(Place(since, since))
            self._delivered.clear()
            self._start()

    def read_again(self) -> None:
        """If it was not sent the last flush, continue from the log, from the same place."""
        if self._flush == self._flushes.number:
            return
        if self._is_catching_up:
            self._stored = None
        elif self._may_deliver.is_set():
            self._stop_here()
            self._start()

    def gap(self) -> None:
        """The log no longer has the changes since its place: continue from now on."""
        if not self.begun:
            self.fail(Unavailable("the log was lost before the feed began", hint="Try again."))
            return
        since = self._home.gap_since if self.live else self._durable
        if self._task is not asyncio.current_task():
            self._stop()
        self._stored = None
        if self._may_deliver.is_set():
            self._deliver(self._home.gap_frame(self.feed, since))
        else:
            self.missed_gap = True

    # -------------------------------------------------------------------- how it begins

    async def _begins_here(self) -> bool:
        """Begin now. Returns whether that was possible without reading the log."""
        await self._flushes.between()
        self._check_ready()
        assert self._flushes.position is not None
        self._stay_at(Place(self._flushes.position, self._flushes.position))
        if self._is_on_disk:
            self._begin_at_place()
            return True
        self._stored, self._stored_changes = [], 0
        self._home.join(self)
        return await self._joins_when_on_disk()

    async def _joins_when_on_disk(self) -> bool:
        """Its position is usually on disk with the next flush. Changes until then are stored."""
        flushes = self._flushes
        flush = flushes.begun + 1
        while flushes.completed < flush and not self.closed:
            flushes.wake()
            await flushes.changed()
        await flushes.between()
        if self.closed:
            return True
        self._check_ready()
        if self._stored is None or self._restarts != flushes.restarts or not self._is_on_disk:
            self._stored = None
            return False
        self._begin_at_place()
        self._start(self._join_when_opened())
        return True

    async def _join_when_opened(self) -> None:
        await self._may_join()
        if self._stored is not None:
            self._join_flushes()
        else:
            await self._run()

    def _check_ready(self) -> None:
        if not self._flushes.ready:
            raise self._flushes.unavailable()

    @property
    def _durable(self) -> Position | None:
        return None if self._place is None else self._place.durable

    @property
    def _is_on_disk(self) -> bool:
        """Whether its place is on disk: the hub sends no older position from here on."""
        assert self._place is not None
        return self._flushes.durable.covers(self._place.reached)

    def _begin_at_place(self) -> None:
        """Inform the subscriber that it has begun, and where."""
        assert self._place is not None
        place = self._place = Place(self._place.reached, self._place.reached)
        self._home.join(self)
        self._introduce(self.feed.id, resumed=not self.from_now)
        if self.from_now:
            # A client that is disconnected before the first change resumes from here.
            self._deliver(self._home.frame(self.feed, (), place.reached))
        self._arrived.settle()

    def _stop_here(self) -> None:
        """Store its place. During a flush, that depends on whether it was sent this flush."""
        flushes = self._flushes
        has_flush = self._flush == flushes.number or not flushes.stepping
        reached = flushes.position if has_flush else flushes.position_before
        durable = flushes.durable if has_flush else flushes.durable_before
        assert reached is not None
        assert durable is not None
        self._stay_at(Place(reached, durable))
        self._delivered.clear()

    def _store(self, transactions: Sequence[Transaction]) -> None:
        if self._stored is None:
            return
        self._stored += transactions
        self._stored_changes += sum(len(each.changes) for each in transactions)
        if self._stored_changes > _FEED_STORED_CHANGES_MAX:
            self._stored = None

    # -------------------------------------------------------------------- catching up

    def _wants(self) -> Callable[[Table], bool]:
        return self.feed.wants

    def _rewound(self) -> None:
        self._delivered.clear()  # clients recognise changes that are sent twice by their seq

    async def _before_seam(self, connection: Connection) -> None:
        if self.begun:
            return
        if not self._is_on_disk:
            await self._flushes.next_flush()
        while not self._is_on_disk:
            self._check_ready()
            # Without another commit, the server may not write the WAL to disk for long.
            await flush_wal(connection)
            await self._flushes.next_flush()

    def _begin_storing(self) -> None:
        if not self.begun:
            self._begin_at_place()
        self._stored, self._stored_changes = [], 0

    async def _read(
        self, connection: Connection, reader: LogReader, since: Position, until: Position
    ) -> None:
        pending: list[Transaction] = []
        size = 0
        async for transaction in reader.catch_up(connection, since, until):
            if transaction.xid in self._delivered or not (seen := self.feed.seen(transaction)):
                continue
            pending.append(seen)
            size += len(seen.changes)
            if size >= _FEED_FRAME_CHANGES:
                await self._hand_over(pending, since)
                pending, size = [], 0
        if pending:
            await self._hand_over(pending, since)

    async def _hand_over(self, transactions: list[Transaction], since: Position) -> None:
        frame = self._home.frame(self.feed, transactions, since)
        taken = False
        while not taken:
            await self._may_deliver.wait()
            try:
                async with asyncio.timeout(limits.FEED_ROOM_SECONDS):
                    await self.subscriber.room()
            except TimeoutError:
                raise SlowClient from None
            if self._may_deliver.is_set():
                self.subscriber.deliver(frame)  # an error ends the feed
                taken = self._may_deliver.is_set()
        self._delivered.update(each.xid for each in transactions if each.complete)

    async def _join(self, since: Position, until: Position) -> bool:
        await self._may_join()
        self._reached(since, until)
        if self._stored is None:
            return False
        self._join_flushes()
        return True

    async def _may_join(self) -> None:
        """Wait until it is opened, and then until it is not paused and no step is under way, both
        at the same time: what is delivered to a paused feed would be sent again."""
        await self._is_opened.wait()
        while True:
            await self._may_deliver.wait()
            await self._flushes.between()
            if self._may_deliver.is_set():
                return

    def _reached(self, since: Position, until: Position) -> None:
        assert self._place is not None
        durable, newest = self._place.durable, self._flushes.durable
        if newest.covers(until):
            durable = until
        elif newest.covers(since):
            durable = newest
        self._place = Place(until, durable)
        self._delivered.clear()

    def _join_flushes(self) -> None:
        """Send the stored changes, and join the flushes, without waiting. A frame is sent also
        without changes, because it has a newer position to resume from."""
        stored, self._stored = self._stored, None
        self._deliver(self._home.frame(self.feed, stored or (), self._flushes.durable))
        # Only now: if `deliver` pauses it, it must continue from before these changes.
        self._task = None
        self._flushes.announce()

    async def _cannot_resume(self, error: ResyncRequired) -> None:
        if not self.begun:
            self.fail(error)
            return
        await self._flushes.between()
        self._task = None
        # If it was paused since, it is sent the gap when it continues.
        self.missed_gap = not self._may_deliver.is_set()
        if not self.missed_gap:
            self._deliver(self._home.gap_frame(self.feed, self._durable))
        self._flushes.announce()

    def _explain(self, error: Exception) -> HeadwaterError:
        if isinstance(error, InvalidQuery | Undecided):
            return explained(error)
        return super()._explain(error)


def explained(error: Exception) -> HeadwaterError:
    """The error for a feed whose filter cannot be decided."""
    if isinstance(error, Undecided):
        return Forbidden(
            "only the database can decide which of these rows this session may see",
            hint="Let the authorization hook filter by columns whose equality memory can decide: "
            "numbers, times, uuids, and text in a collation of PostgreSQL's own.",
        )
    assert isinstance(error, HeadwaterError)
    return error
