"""One subscriber of a change feed: live, catching up from the log, or paused.

The seam. To join the flushes, it notes the hub's position, keeps what later flushes bring, reads
the log from where it is up to exactly that position, hands over what was kept, and is live. Nothing
is missed, because every transaction is in the position or comes later; nothing is doubled, because
none is both. When more comes meanwhile than can be kept, it begins again from where it has got to.

The beginning. The position that a subscriber is sent to resume from is on disk. It may lie before
the last change that was sent, but never before the place where the feed began: else, after a
reconnect, a feed from now on would bring older changes behind newer ones. So a feed begins once its
first position is on disk; what flushes bring until then is held back for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg

from headwater import limits
from headwater.database import Connection, connect
from headwater.errors import (
    DatabaseError,
    HeadwaterError,
    InvalidQuery,
    ResyncRequired,
    Unavailable,
)
from headwater.hub.arrival import Arrival
from headwater.hub.subscriber import Access, Subscriber, not_taken
from headwater.hub.unreadable import unreadable
from headwater.live.needs import Undecided
from headwater.log.follow import is_lost, reconnect_pause
from headwater.log.progress import flush as flush_wal
from headwater.log.read import LogReader, check_history
from headwater.model import Position, Transaction
from headwater.protocol import Frame

if TYPE_CHECKING:
    from headwater.hub.feeds import FeedQuery, FeedView
    from headwater.hub.hub import Hub

logger = logging.getLogger(__name__)


class _Slow(Exception):
    """The client takes what it is sent too slowly to hold a connection for it."""


class FeedSubscription:
    """One subscriber's change feed. Made by `Hub.feed`."""

    def __init__(
        self, hub: Hub, feed: FeedView, query: FeedQuery, subscriber: Subscriber, access: Access
    ) -> None:
        self.feed = feed
        self.query = query
        self.access = access
        self.closed = False
        self._hub = hub
        self._subscriber = subscriber
        self._begun = False
        self._task: asyncio.Task[None] | None = None
        self._may_deliver = asyncio.Event()
        self._may_deliver.set()
        self._flush = 0
        """The last flush it was told of."""
        self._position: Position | None = query.since
        """Up to here it has everything, while it is not live."""
        self._durable: Position | None = query.since
        """The same as far as it is on disk; None until that is known."""
        self._restarts = hub.restarts
        self._delivered: set[int] = set()
        """Transactions after the position that it has, too."""
        self._kept: list[Transaction] | None = None
        self._kept_changes = 0
        self._missed = False
        """Whether a gap was announced that it was not told of."""
        self._arrived = Arrival()
        self._is_opened = asyncio.Event()
        """Whether its subscriber can pause it: what is not taken before that would be lost."""

    @property
    def view(self) -> int:
        return self.feed.id

    @property
    def live(self) -> bool:
        return not self._is_catching_up and self._may_deliver.is_set()

    @property
    def _is_catching_up(self) -> bool:
        return self._task is not None or not self._begun

    def close(self) -> None:
        """End it; nothing is delivered any more."""
        if self.closed:
            return
        self.closed = True
        self._hub.feeds.leave(self)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._arrived.settle(Unavailable("the feed was closed before it began", hint="Try again."))
        self._hub.stir()

    def pause(self) -> None:
        """Deliver nothing until `resume`. Said while a frame is being delivered, it means that the
        frame was not taken: it comes again."""
        if self.closed or not self._may_deliver.is_set():
            return
        if not self._is_catching_up:
            self._stop_here()
        self._may_deliver.clear()

    def resume(self) -> None:
        """Catch up with what came meanwhile, and go on."""
        if self.closed or self._may_deliver.is_set():
            return
        self._may_deliver.set()
        self._start()

    # -------------------------------------------------------------------- for the hub

    async def begin(self) -> None:
        """Returns once the subscriber was told that it is subscribed; errors are raised."""
        try:
            if self._position is not None or not await self._begins_here():
                self._start()
            await self._arrived.wait()
            self._is_opened.set()
        except BaseException:
            self.close()
            raise

    async def settled(self, position: Position) -> None:
        """Wait until it is live: then it was handed what every flush brought."""
        while not self.closed and not self.live:
            await self._hub.stirred()

    def flushed(self, transactions: Sequence[Transaction], frame: Frame | None) -> None:
        """What a flush brought for this feed; the frame of it is shared."""
        if self._is_catching_up:
            self._keep(transactions)
        elif self._may_deliver.is_set() and frame is not None:
            self._deliver(frame)
        self._flush = self._hub.flushes

    def fell_behind(self, since: Position) -> None:
        """Flushes went by that nobody was told of."""
        if self._is_catching_up:
            self._kept = None
        elif self._may_deliver.is_set():
            self._position = self._durable = since
            self._restarts = self._hub.restarts
            self._delivered.clear()
            self._start()

    def read_again(self) -> None:
        """A flush may not have been handed to it: it continues from the log, where it was."""
        if self._flush == self._hub.flushes:
            return
        if self._is_catching_up:
            self._kept = None
        elif self._may_deliver.is_set():
            self._stop_here()
            self._start()

    def gap(self) -> None:
        """What happened since it was last told cannot be told; it goes on from now."""
        if not self._begun:
            self.fail(Unavailable("the log was lost before the feed began", hint="Try again."))
            return
        since = self._hub.feeds.gap_since if self.live else self._durable
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            self._task = None
        self._kept = None
        if self._may_deliver.is_set():
            self._deliver(self._hub.feeds.gap_frame(self.feed, since))
        else:
            self._missed = True

    def fail(self, error: HeadwaterError) -> None:
        if self.closed:
            return
        if not self._begun:
            self._arrived.settle(error)
        self.close()
        if self._begun:
            with suppress(Exception):
                self._subscriber.failed(error)

    # -------------------------------------------------------------------- states

    async def _begins_here(self) -> bool:
        """From now on. Whether that was possible without reading the log."""
        await self._hub.between()
        self._check_ready()
        self._position = self._hub.position
        if self._is_on_disk:
            self._tell_subscribed()
            return True
        self._kept, self._kept_changes = [], 0
        self._hub.feeds.join(self)
        return await self._joins_when_on_disk()

    async def _joins_when_on_disk(self) -> bool:
        """Its position usually is with the next flush; what comes until then is held back."""
        hub = self._hub
        flush = hub.begun + 1
        while hub.completed < flush and not self.closed:
            hub.wake()
            await hub.stirred()
        await hub.between()
        if self.closed:
            return True
        self._check_ready()
        if self._kept is None or self._restarts != hub.restarts or not self._is_on_disk:
            self._kept = None
            return False
        self._tell_subscribed()
        self._start(self._join_when_opened())
        return True

    async def _join_when_opened(self) -> None:
        await self._may_join()
        if self._kept is not None:
            self._join()
        else:
            await self._run()

    def _check_ready(self) -> None:
        if not self._hub.ready:
            raise self._hub.unavailable()

    @property
    def _is_on_disk(self) -> bool:
        """Whether the hub sends no position any more that lies before the one where it is."""
        assert self._position is not None
        return self._hub.progress.durable.covers(self._position)

    def _tell_subscribed(self) -> None:
        self._begun = True
        self._durable = self._position
        self._hub.feeds.join(self)
        try:
            self._subscriber.subscribed(self.feed.id, key=(), resumed=self.query.since is not None)
        except Exception:
            logger.exception("a subscriber failed to be told that it is subscribed")
        if self.query.since is None:
            # Where it begins: who is cut off before the first change goes on from there.
            assert self._position is not None
            self._deliver(self._hub.feeds.frame(self.feed, (), self._position))
        self._arrived.settle()

    def _stop_here(self) -> None:
        """Remember where it is. In the middle of handing a flush out, that depends on whether its
        own turn has come."""
        hub = self._hub
        told = self._flush == hub.flushes or not hub.stepping
        self._position = hub.position if told else hub.position_before
        self._durable = hub.progress.durable if told else hub.durable_before
        self._restarts = hub.restarts
        self._delivered.clear()

    def _start(self, work: Coroutine[None, None, None] | None = None) -> None:
        if self._task is None:
            self._task = asyncio.create_task(work or self._run())
            self._hub.watch(self._task)

    def _deliver(self, frame: Frame) -> None:
        if self.closed:
            return
        try:
            self._subscriber.deliver(frame)
        except Exception:
            logger.exception("a subscriber of feed %d failed to take a frame", self.feed.id)
            self.fail(not_taken())

    def _keep(self, transactions: Sequence[Transaction]) -> None:
        if self._kept is None:
            return
        self._kept += transactions
        self._kept_changes += sum(len(each.changes) for each in transactions)
        if self._kept_changes > limits.FEED_KEPT_CHANGES_MAX:
            self._kept = None

    # -------------------------------------------------------------------- catching up

    async def _run(self) -> None:
        """Until it is live, however often the connection or the client needs another start."""
        attempt = 0
        while not self.closed:
            try:
                async with self._hub.catch_ups:
                    await self._catch_up()
                return
            except _Slow:
                await self._subscriber.room()
            except ResyncRequired as error:
                if not self._begun:
                    self.fail(error)
                    return
                await self._hub.between()
                self._task = None
                self._deliver(self._hub.feeds.gap_frame(self.feed, self._durable))
                self._hub.stir()
                return
            except (InvalidQuery, Undecided) as error:
                from headwater.hub.feeds import feed_error

                self.fail(feed_error(self.feed, error))
                return
            except (psycopg.Error, DatabaseError) as error:
                if not self._begun or not is_lost(error):
                    self.fail(unreadable(error, "a feed"))
                    return
                await asyncio.sleep(reconnect_pause(attempt))
                attempt += 1
            except HeadwaterError as error:
                self.fail(error)
                return
            except Exception:
                logger.exception("feed %d cannot be caught up with", self.feed.id)
                self.fail(not_taken())
                return

    async def _catch_up(self) -> None:
        connection = await connect(self._hub.url, purpose="catch-up")
        try:
            reader = await LogReader.open(connection, self.feed.wants)
            while True:
                since = await self._begin_from(connection, reader)
                if not self._begun:
                    await self._until_on_disk(connection)
                until = await self._seam(since)
                if until != since:
                    await self._read(connection, reader, since, until)
                await self._may_join()
                self._reached(since, until)
                if self._kept is not None:
                    self._join()
                    return
        finally:
            await connection.close()

    async def _may_join(self) -> None:
        """Wait until it is opened, and then until it is between two flushes and not paused, both at
        once: what is delivered to one that was paused meanwhile would come again."""
        await self._is_opened.wait()
        while True:
            await self._may_deliver.wait()
            await self._hub.between()
            if self._may_deliver.is_set():
                return

    async def _begin_from(self, connection: Connection, reader: LogReader) -> Position:
        if self._missed:
            self._missed = False
            raise ResyncRequired("the log was lost while the feed was paused")
        if self._restarts != self._hub.restarts:
            # What is not on disk may mean something else now; what comes twice is told by its seq.
            if self._durable is None:
                raise Unavailable("the database restarted before the feed began", hint="Try again.")
            self._restarts = self._hub.restarts
            self._position = self._durable
            self._delivered.clear()
        since = self._position
        assert since is not None
        await reader.check(connection, since)
        if not self._begun and self.access.history is not None:
            await check_history(connection, since, self.access.history)
        return since

    async def _until_on_disk(self, connection: Connection) -> None:
        hub = self._hub
        if not self._is_on_disk:
            await hub.next_flush()
        while not self._is_on_disk:
            self._check_ready()
            # Without another commit the WAL may stay in memory for long.
            await flush_wal(connection)
            await hub.next_flush()

    async def _seam(self, since: Position) -> Position:
        """The hub's position, from which on everything is kept."""
        while True:
            await self._hub.between()
            until = self._hub.position
            if until is not None and until.covers(since):
                break
            await self._hub.next_flush()
        if not self._begun:
            self._tell_subscribed()
        self._kept, self._kept_changes = [], 0
        return until

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
            if size >= limits.FEED_FRAME_CHANGES:
                await self._hand_over(pending, since)
                pending, size = [], 0
        if pending:
            await self._hand_over(pending, since)

    async def _hand_over(self, transactions: list[Transaction], since: Position) -> None:
        frame = self._hub.feeds.frame(self.feed, transactions, since)
        taken = False
        while not taken:
            await self._may_deliver.wait()
            try:
                async with asyncio.timeout(limits.FEED_ROOM_SECONDS):
                    await self._subscriber.room()
            except TimeoutError:
                raise _Slow from None
            if self._may_deliver.is_set():
                self._subscriber.deliver(frame)  # what it raises ends the feed
                taken = self._may_deliver.is_set()
        self._delivered.update(each.xid for each in transactions if each.complete)

    def _reached(self, since: Position, until: Position) -> None:
        durable = self._hub.progress.durable
        if durable.covers(until):
            self._durable = until
        elif durable.covers(since):
            self._durable = durable
        self._position = until
        self._delivered.clear()

    def _join(self) -> None:
        """Synchronously: what was kept, and then the flushes. Also without a change, for now there
        is a newer place to resume from than any that it was sent."""
        kept, self._kept = self._kept, None
        durable = self._hub.progress.durable
        self._deliver(self._hub.feeds.frame(self.feed, kept or (), durable))
        # Only now: one that is paused by what was kept goes on from before it.
        self._task = None
        self._hub.stir()
