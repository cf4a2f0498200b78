"""The hub: follows the log, keeps the views true, and hands frames to subscribers.

One task flushes, over one connection, for as long as the hub lives; when the database is lost it
says so (`ready`, `trouble`), reconnects and goes on exactly where it was. What it cannot bridge it
reads anew and says it: a `reset` to live queries, a `gap` to feeds. Subscribing and sliding windows
happen between the steps of that task, so that nobody sees a state without its position.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

import psycopg

from headwater import limits
from headwater.database import translate
from headwater.errors import (
    Behind,
    ConfigError,
    DatabaseError,
    HeadwaterError,
    PermissionMissing,
    ResyncRequired,
    Unavailable,
)
from headwater.fair_queue import Owner
from headwater.hub.catch_up import FeedSubscription
from headwater.hub.change_events import ChangeEvents
from headwater.hub.coalesce import Coalescing
from headwater.hub.delivery import Delivery
from headwater.hub.feeds import FeedQuery, Feeds
from headwater.hub.flush import Flusher
from headwater.hub.groups import Groups
from headwater.hub.live import LiveSubscription, ViewInfo
from headwater.hub.lives import Lives
from headwater.hub.recheck import recheck_for_ever
from headwater.hub.reconcile import Reconciler
from headwater.hub.side_jobs import SideJobs
from headwater.hub.subscriber import Access, Settling, Subscriber
from headwater.hub.tables import FORMATS, LookupConnection, Tables
from headwater.hub.topics import Topics
from headwater.live.query import LiveQuery, Rules
from headwater.log import marks
from headwater.log.follow import link, reconnect_pause
from headwater.log.progress import Progress
from headwater.log.wake import Waker
from headwater.memory import Memory
from headwater.metrics import Metrics
from headwater.model import Position, Table
from headwater.queries.events import Events
from headwater.settings import Settings

logger = logging.getLogger(__name__)


class Hub:
    """Live queries and change feeds over one database.

    `rules` says by table label what live queries may use. `coalesce` is `adaptive`, or a quiet and
    a maximum time as in `50ms/200ms`. Every `recheck` seconds rights are looked at again.
    """

    def __init__(
        self,
        url: str,
        *,
        rules: Mapping[str, Rules] | None = None,
        coalesce: str = "adaptive",
        recheck: float = 60.0,
        metrics: Metrics | None = None,
        settings: Settings | None = None,
        events: Events | None = None,
    ) -> None:
        self._is_ready = asyncio.Event()
        self.trouble: str | None = "the hub has not been started"
        """Why it is not ready, as anybody may know it."""
        self._cause: str | None = None
        self.metrics = metrics or Metrics()
        self.url = url
        self._recheck = recheck
        self._coalescing = Coalescing.parse(coalesce)
        self._waker: Waker | None = None
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempted = asyncio.Event()
        # Shared with the flush
        self.progress = Progress()
        self._lost_track = False
        bounds = settings or Settings()
        self.tables = Tables(url, bounds.question_url)
        self.memory = Memory(bounds.bytes_per_user, bounds.bytes_total)
        self.memory.on_over = self._enforce_soon
        self.memory.on_shed = lambda code: self.metrics.memory_shed.labels(code).inc()
        self.delivery = Delivery(self)
        self.side_jobs = SideJobs(self, bounds.question_url)
        self.lives = Lives(self, rules or {}, question_url=bounds.question_url)
        self.feeds = Feeds(self)
        events = events or Events()
        self.groups = Groups(self, settings or Settings(), events)
        self.change_events = ChangeEvents(self, events)
        self.reconciler = Reconciler(self, (settings or Settings()).reconcile_seconds)
        window = (settings or Settings()).topic_window_period
        self.topics = Topics(self, window.total_seconds())
        self.position: Position | None = None
        self.position_text = ""
        self.faulted_at: Position | None = None
        """From where a flush failed for a reason that was not foreseen."""
        self.flushes = 0
        self.begun = 0
        """The flush that has begun last. What is read in a later one was there before."""
        self.completed = 0
        self.advanced = 0
        """The last flush that brought the position forward, which one that failed does not."""
        self.restarts = 0
        """How often the server was restarted under us."""
        self.position_before: Position | None = None
        self.durable_before: Position | None = None
        """Before the flush that is being handed out."""
        self.catch_ups = asyncio.Semaphore(limits.FEED_CATCH_UPS_MAX)
        self.emitting = False
        self._between = asyncio.Event()
        self._between.set()
        self._flushed = asyncio.Event()
        self._history = LookupConnection(url, purpose="positions")
        self._checked: dict[str, bool] = {}
        """Positions, and whether they are of this history; since the last connection."""

    @property
    def ready(self) -> bool:
        """Whether the log is being followed right now."""
        return self._is_ready.is_set()

    # -------------------------------------------------------------------- lifecycle

    async def __aenter__(self) -> Hub:
        self._task = asyncio.create_task(self._run())
        self.spawn(recheck_for_ever(self, self._recheck))
        self.spawn(self.groups.sweep_for_ever())
        self.spawn(self.topics.listener.run())
        try:
            await self._attempted.wait()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._task, *self._tasks, return_exceptions=True)
        self.trouble = "the hub is stopping"
        self._is_ready.clear()
        await self.lives.close()
        await self.side_jobs.close()
        await self.groups.close()
        self.feeds.close()
        self.topics.close()
        await self.tables.close()
        await self._history.close()

    async def _run(self) -> None:
        """For ever: follow the log; when that fails, say so and try again."""
        attempt = 0
        while True:
            try:
                # No policy is ever executed with our rights: such a statement fails instead.
                options = f"{FORMATS} -c row_security=off"
                linked = link(self.url, _everything, options=options)
                async with linked as (connection, reader, waker):
                    progress = Progress() if self._lost_track else self.progress
                    restarted = await progress.begin(connection, reader)
                    self.progress, self._lost_track = progress, False
                    self._checked.clear()
                    if restarted:
                        self.restarts += 1
                        self.lives.forget_positions()
                        self.groups.forget_positions()
                        self.topics.restarted()
                    self._waker = waker
                    attempt = 0
                    await self._follow(Flusher(self, connection, reader), waker)
            except ResyncRequired as error:
                self._resync(error)
            except (psycopg.Error, HeadwaterError) as error:
                found = translate(error, self.url) if isinstance(error, psycopg.Error) else error
                self._gone(_said(found), str(found))
            except Exception as error:
                logger.exception("a flush failed")
                self._gone(f"a fault in the hub: {type(error).__name__}")
            finally:
                self._waker = None
            pause = reconnect_pause(attempt)
            attempt += 1
            await asyncio.sleep(pause)

    async def _follow(self, flusher: Flusher, waker: Waker) -> None:
        while True:
            try:
                async with asyncio.timeout(limits.FLUSH_SECONDS_MAX):
                    news = await flusher.flush()
            except TimeoutError as error:
                raise DatabaseError(
                    f"the database did not answer for {limits.FLUSH_SECONDS_MAX:.0f} seconds"
                ) from error
            self.lives.sweep()
            self.side_jobs.sweep()
            await waker.have_read(news=news, position=self.progress.position)
            await self._coalescing.wait(waker)

    def _gone(self, trouble: str, cause: str | None = None) -> None:
        """The log is not being followed. The cause is for our own log, and is told once."""
        if self.ready or self._cause != (cause or trouble):
            self._cause = cause or trouble
            logger.warning("lost the database: %s", self._cause)
        self.trouble = trouble
        self._is_ready.clear()
        self.metrics.database_up.set(0)
        self._attempted.set()
        _call_each(self.lives.lost, self.groups.lost)
        self.end_step()

    def _resync(self, error: ResyncRequired) -> None:
        """The log cannot tell what happened: everything is read anew."""
        self._gone(str(error))
        self._lost_track = True
        _call_each(
            self.lives.read_all_again,
            self.groups.read_all_again,
            self.groups.forget_positions,
            self.feeds.gap,
            self.topics.gap,
            self.change_events.gap,
        )

    def leap(self, position: Position, tables: Collection[Table] | None) -> None:
        """More is new than a flush takes, of these tables (None for any). What rests on them is
        read as of this position instead, or in the log; all else holds as it is.

        A part that fails takes it that anything may have changed. The hub has leapt only when every
        part knows: what fails even then is passed over again by the next flush."""
        since = self.progress.position
        for leapt, fallback in (
            (partial(self.topics.fell_behind, tables), self.topics.gap),
            (partial(self.lives.leapt, tables), self.lives.reopen_all),
            (partial(self.groups.leapt, tables), self.groups.read_all_again),
            (partial(self.feeds.fell_behind, since, tables), self.feeds.end_all),
            (
                partial(self.change_events.fell_behind, since, position, tables),
                self.change_events.gap,
            ),
        ):
            try:
                leapt()
            except Exception:
                logger.exception("a backlog was not dealt with: everything is read again")
                fallback()
        self.position, self.position_text = position, str(position)
        self.advanced = self.begun
        self.progress.leap(position)
        self.wake()  # what is to be read now waits for the snapshot of a flush

    def _enforce_soon(self) -> None:
        """More memory is held than may be: end some of it when no step is in the way."""
        asyncio.get_running_loop().call_soon(self.memory.enforce)

    def unavailable(self) -> Unavailable:
        return Unavailable(
            f"live data is not available now: {self.trouble}",
            hint="It comes back by itself; try again.",
        )

    def wake(self) -> None:
        """Flush at once."""
        if self._waker is not None:
            self._waker.wake()

    def heard(self) -> None:
        """Somebody signalled, or may have."""
        if self._waker is not None:
            self._waker.heard()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside everything else, and end with the hub."""
        self.watch(asyncio.create_task(work))

    def watch(self, task: asyncio.Task[None]) -> None:
        """End it with the hub."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until_ready(self) -> None:
        await self._is_ready.wait()

    @property
    def stepping(self) -> bool:
        """Whether states are on their way to the position of a flush."""
        return not self._between.is_set()

    async def between(self) -> None:
        """Wait for the end of the step that is under way. Until the caller waits again, states and
        position belong together."""
        while self.stepping:
            await self._between.wait()

    async def next_flush(self) -> None:
        """Wait for a flush that began after this call."""
        flush = self.begun + 1
        while self.completed < flush:
            self.wake()
            self._flushed.clear()
            await self._flushed.wait()

    async def stirred(self) -> None:
        """Wait, without asking for one, until a flush ends or a subscription has caught up."""
        self._flushed.clear()
        await self._flushed.wait()

    def stir(self) -> None:
        """A subscription has caught up, or has ended."""
        self._flushed.set()

    async def contains(
        self, position: Position, *, newest: bool = False, seconds: float | None = None
    ) -> bool:
        """Wait until the hub has read everything up to a position, or with `newest`, everything
        that is in the database by now. False where the database does not have the position: it is
        of another log or history, or was lost in a crash. Behind if that takes more `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                is_of_log = self.position is None or position.log == self.position.log
                if is_of_log and (newest or not self._covers(position)):
                    await self._advance()
                if not self._covers(position) or not await self.is_of_this_history(position):
                    return False
                await self.between()
        except TimeoutError:
            raise Behind(
                f"this gateway has not read the log up to position {position}",
                hint="Try again, or at another gateway over the same database.",
            ) from None
        return self._covers(position)

    def _covers(self, position: Position) -> bool:
        return self.position is not None and self.position.covers(position)

    async def _advance(self) -> None:
        """Wait for a flush that began after this call and took the hub forward. A database shows
        everything then that it has shown to any gateway before."""
        flush = self.begun + 1
        while self.advanced < flush:
            if not self.ready:
                raise self.unavailable()
            await self.next_flush()

    async def reached(self, position: Position, subscriptions: Iterable[Settling] = ()) -> None:
        """Wait until everything up to a position was handed out to these subscriptions.
        ResyncRequired for a position that this database does not have."""
        if not await self.contains(position):
            raise ResyncRequired(
                f"position {position} is not of this database, or ahead of it",
                hint="Use the position of an answer; the database may have lost it since.",
            )
        for subscription in subscriptions:
            await subscription.settled(position)

    async def is_of_this_history(self, position: Position) -> bool:
        """Whether everything in a position happened in this database, and was not replaced by an
        earlier copy of it. One that was there can only be gone after a restart of the server."""
        if position.mark is None:
            return True
        text = str(position)
        if (known := self._checked.get(text)) is not None:
            return known
        (answer,) = await self._history.ask(marks.COVERED, marks.to_check(position))
        found = marks.agrees(position, answer)
        # What is not all in the past may come to be another one.
        if self._covers(position):
            if len(self._checked) >= limits.CHECKED_POSITIONS_MAX:
                self._checked.clear()
            self._checked[text] = found
        return found

    # -------------------------------------------------------------------- subscribing

    async def live(
        self,
        query: LiveQuery,
        subscriber: Subscriber,
        *,
        access: Access = Access(),  # noqa: B008
        since: str | None = None,
        verify: bool = False,
        owner: Owner | None = None,
    ) -> LiveSubscription:
        """Follow a live query. Returns when its snapshot, or what it missed since a position, has
        been handed over. Its memory counts for the `owner`, and of one owner only some snapshots
        are read at a time."""
        return await self.lives.join(query, subscriber, access, since, verify, owner)

    async def feed(
        self,
        query: FeedQuery,
        subscriber: Subscriber,
        *,
        access: Access = Access(),  # noqa: B008
    ) -> FeedSubscription:
        """Follow a change feed, from now on or from a position. Returns once it is certain that
        the log reaches back to there; ResyncRequired if it does not."""
        if not self.ready:
            raise self.unavailable()
        subscription = await self.feeds.open(query, subscriber, access)
        if not self.ready:
            raise self.unavailable()
        await subscription.begin()
        return subscription

    def describe(self) -> list[ViewInfo]:
        """Every live query that is maintained."""
        return [view.info() for view in self.lives]

    # -------------------------------------------------------------------- for the flush

    def begin_step(self, position: Position) -> None:
        """From here until `end_step`, states are on their way to this position."""
        self.flushes += 1
        self.advanced = self.begun
        self.position_before, self.position = self.position, position
        self.position_text = str(position)
        self._between.clear()
        if not self.ready:
            self.trouble = None
            self._is_ready.set()
            self.metrics.database_up.set(1)
            self._attempted.set()

    def end_step(self) -> None:
        self.emitting = False
        self.completed = self.begun
        self._flushed.set()
        self._between.set()


def _call_each(*parts: Callable[[], None]) -> None:
    """What only these calls say is lost for a part that is not called: an error in one of them
    stops no other, nor the loop that follows the log."""
    for call in parts:
        try:
            call()
        except Exception:
            logger.exception("a part of the hub failed")


def _everything(table: Table) -> bool:
    """Signals, too."""
    return True


def _said(error: HeadwaterError) -> str:
    """Of an error what clients may hear: not where the database is, nor who reads it."""
    if isinstance(error, DatabaseError | ConfigError) and not isinstance(error, PermissionMissing):
        return "the database does not answer; the log says why"
    return str(error)
