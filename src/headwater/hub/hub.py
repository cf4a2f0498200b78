"""The hub: follows the log, calls its parts in every flush, and reports faults to them.

One task flushes over one connection until the hub stops. When the connection is lost, the task
reports it (`ready`, `problem`), reconnects and continues at the same position. If the log no longer
reaches back to it, the parts read everything again, and clients are informed: a `reset` to live
queries, a `gap` to feeds. Each kind of subscription is a part (`part`); the hub only joins them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping

import psycopg

from headwater import limits
from headwater.database import translate
from headwater.errors import (
    ConfigError,
    DatabaseError,
    HeadwaterError,
    PermissionMissing,
    ResyncRequired,
    Unavailable,
)
from headwater.fair_queue import Owner
from headwater.hub.coalesce import Coalescing
from headwater.hub.feeds.change_events import ChangeEvents
from headwater.hub.feeds.registry import FeedRegistry
from headwater.hub.feeds.subscription import FeedSubscription
from headwater.hub.feeds.view import FeedQuery
from headwater.hub.flush import Flusher
from headwater.hub.flush_state import FlushState
from headwater.hub.live_views.part import LivePart
from headwater.hub.live_views.view import LiveSubscription
from headwater.hub.part import Part, call_each
from headwater.hub.positions import Positions
from headwater.hub.reactive.registry import ReactiveQueries
from headwater.hub.reading.tables import FORMATS, KnownTable, Tables
from headwater.hub.reconcile import Reconciler
from headwater.hub.resources import Resources
from headwater.hub.subscriptions.subscriber import Access, Settling, Subscriber
from headwater.hub.topics.registry import TopicRegistry
from headwater.live.query import LiveQuery, Rules
from headwater.log.reading.follow import reading_session
from headwater.log.reading.progress import Progress
from headwater.log.reconnect import reconnect_pause
from headwater.log.waking.waker import Waker
from headwater.memory import Memory
from headwater.metrics import Metrics
from headwater.model import Position, Table
from headwater.queries.events import Events
from headwater.settings import Settings

logger = logging.getLogger(__name__)


class Hub:
    """Live queries, reactive queries, topics and change feeds over one database.

    `rules` has, by table label, what live queries may use. `coalesce` is `adaptive`, or a quiet and
    a maximum time as in `50ms/200ms`. Rights are checked again every `recheck` seconds.
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
        settings, events = settings or Settings(), events or Events()
        self.url = url
        self.metrics = metrics or Metrics()
        self.memory = Memory(settings.limits.bytes_per_user, settings.limits.bytes_total)
        self.memory.on_over = self._enforce_soon
        self.memory.on_shed = lambda code: self.metrics.memory_shed.labels(code).inc()
        self.flushes = FlushState()
        self.positions = Positions(url, self.flushes)
        self.tables = Tables(url, settings.question_url)
        self._resources = Resources(
            url, settings.question_url, self.tables, self.memory, self.metrics
        )
        shared = self._resources, self.flushes
        self.live_part = LivePart(*shared, rules or {})
        self.live_views = self.live_part.views
        self.reactive = ReactiveQueries(*shared, self.positions, settings, events)
        self.feeds = FeedRegistry(*shared)
        self.topics = TopicRegistry(*shared, settings.live.topic_window_period.total_seconds())
        self.reconciler = Reconciler(
            self.live_part, self.topics, self.metrics, settings.live.reconcile_seconds
        )
        self.parts: tuple[Part, ...] = (
            self.reactive,
            self.feeds,
            self.topics,
            self.live_part,
            ChangeEvents(*shared, events),
            self.reconciler,
        )
        """In the order in which a flush calls them."""
        self._recheck = recheck
        self._coalescing = Coalescing.parse(coalesce)
        self._task: asyncio.Task[None] | None = None
        self._attempted = asyncio.Event()
        self._lost_track = False
        """Whether the log did not reach back to our position. Then it is followed from now on."""
        self._cause: str | None = None

    @property
    def ready(self) -> bool:
        """Whether the log is followed now."""
        return self.flushes.ready

    @property
    def problem(self) -> str | None:
        """Why it is not ready. Clients may read it."""
        return self.flushes.problem

    @property
    def position(self) -> Position | None:
        """How far the log was read."""
        return self.flushes.position

    def next_view_id(self) -> int:
        """A number that no other view has."""
        return self._resources.next_id()

    def unavailable(self) -> Unavailable:
        return self.flushes.unavailable()

    # -------------------------------------------------------------------- lifecycle

    async def __aenter__(self) -> Hub:
        self._task = asyncio.create_task(self._run())
        self._resources.spawn(self._recheck_for_ever())
        call_each(self.parts, lambda part: part.start())
        try:
            await self._attempted.wait()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await self._resources.end_tasks()
        await asyncio.gather(self._task, return_exceptions=True)
        self.flushes.lose("the hub is stopping")
        for part in self.parts:
            await part.close()
        await self.tables.close()
        await self.positions.close()

    async def _run(self) -> None:
        """Follow the log until cancelled. After each failure, report it and try again."""
        attempt = 0
        while True:
            try:
                # Policies are never executed with our rights: such a statement fails instead.
                options = f"{FORMATS} -c row_security=off"
                linked = reading_session(self.url, _everything, options=options)
                async with linked as (connection, reader, waker):
                    progress = Progress() if self._lost_track else self.flushes.progress
                    restarted = await progress.begin(connection, reader)
                    self.flushes.progress, self._lost_track = progress, False
                    self.positions.forget()
                    if restarted:
                        self.flushes.restarts += 1
                        call_each(self.parts, lambda part: part.restarted())
                    self.flushes.waker = waker
                    attempt = 0
                    await self._follow(
                        Flusher(
                            self.parts,
                            self.flushes,
                            self.metrics,
                            connection,
                            reader,
                            self._is_followed,
                        ),
                        waker,
                    )
            except ResyncRequired as error:
                self._gone(str(error))
                self._lost_track = True
                call_each(self.parts, lambda part: part.resync())
            except (psycopg.Error, HeadwaterError) as error:
                found = translate(error, self.url) if isinstance(error, psycopg.Error) else error
                self._gone(_public(found), str(found))
            except Exception as error:
                logger.exception("a flush failed")
                self._gone(f"a fault in the hub: {type(error).__name__}")
            finally:
                self.flushes.waker = None
            pause = reconnect_pause(attempt)
            attempt += 1
            await asyncio.sleep(pause)

    async def _follow(self, flusher: Flusher, waker: Waker) -> None:
        while True:
            try:
                async with asyncio.timeout(limits.FLUSH_SECONDS_MAX):
                    has_changes = await flusher.flush()
            except TimeoutError as error:
                raise DatabaseError(
                    f"the database did not answer for {limits.FLUSH_SECONDS_MAX:.0f} seconds"
                ) from error
            for part in self.parts:
                part.sweep()
            await waker.have_read(has_changes=has_changes, position=self.flushes.progress.position)
            await self._coalescing.wait(waker)

    def _is_followed(self) -> None:
        """The log is followed, for the first time or again."""
        self.metrics.database_up.set(1)
        self._attempted.set()

    def _gone(self, problem: str, cause: str | None = None) -> None:
        """The log is not followed. The cause is logged once, and not shown to clients."""
        if self.ready or self._cause != (cause or problem):
            self._cause = cause or problem
            logger.warning("lost the database: %s", self._cause)
        self.flushes.lose(problem)
        self.metrics.database_up.set(0)
        self._attempted.set()
        call_each(self.parts, lambda part: part.lost())
        self.flushes.end_step()

    async def _recheck_for_ever(self) -> None:
        """Check what the log does not show: rights, policies, altered tables."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(self._recheck / 2)
            await self.recheck(self._recheck / 2)
            await asyncio.sleep(max(0.0, self._recheck - (time.monotonic() - began)))

    async def recheck(self, seconds: float = 0.0) -> None:
        """One check, with expensive reads spread over this many seconds."""
        for part in self.parts:
            try:
                await part.recheck(seconds)
            except Unavailable:
                continue  # the next round checks this part again
            except Exception:
                logger.exception("rights could not be checked again")

    def _enforce_soon(self) -> None:
        """A memory bound is exceeded: end subscriptions outside of this call."""
        asyncio.get_running_loop().call_soon(self.memory.enforce)

    # -------------------------------------------------------------------- positions

    async def contains(
        self, position: Position, *, newest: bool = False, seconds: float | None = None
    ) -> bool:
        """Wait until the hub has read a position; see `Positions.contains`."""
        return await self.positions.contains(position, newest=newest, seconds=seconds)

    async def reached(self, position: Position, subscriptions: Iterable[Settling] = ()) -> None:
        """Wait until everything up to a position was sent to these subscriptions."""
        await self.positions.reached(position, subscriptions)

    # -------------------------------------------------------------------- subscribing

    async def live(
        self,
        query: LiveQuery,
        subscriber: Subscriber,
        *,
        known: KnownTable | None = None,
        access: Access = Access(),  # noqa: B008
        since: str | None = None,
        verify: bool = False,
        owner: Owner | None = None,
    ) -> LiveSubscription:
        """Follow a live query. Returns when the subscriber was sent the snapshot, or the changes
        since a position. `known` is its table, if the caller has looked it up. Its memory counts
        for the `owner`. Only some snapshots of one owner are read at the same time."""
        return await self.live_views.join(query, subscriber, known, access, since, verify, owner)

    async def feed(
        self,
        query: FeedQuery,
        subscriber: Subscriber,
        *,
        known: Collection[KnownTable] = (),
        access: Access = Access(),  # noqa: B008
    ) -> FeedSubscription:
        """Follow a change feed, from now on or from a position. Returns when the log was found to
        reach back to there; ResyncRequired if it does not. `known` are its tables, if the caller
        has looked them up."""
        return await self.feeds.follow(query, subscriber, access, known)


def _everything(table: Table) -> bool:
    """The reader returns signals, too."""
    return True


def _public(error: HeadwaterError) -> str:
    """The error as clients may read it: without the database's address and role."""
    if isinstance(error, DatabaseError | ConfigError) and not isinstance(error, PermissionMissing):
        return "the database does not answer; the gateway's log has the reason"
    return str(error)
