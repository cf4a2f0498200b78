"""The hub: follows the log, keeps the views true, and hands frames to subscribers.

One task flushes, over one connection, for as long as the hub lives; when the database is lost it
says so (`ready`, `trouble`), reconnects and goes on exactly where it was. What it cannot bridge it
reads anew and says it: a `reset` to live queries, a `gap` to feeds. Subscribing and sliding windows
happen between the steps of that task, so that nobody sees a state without its position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
import psycopg

from headwater import limits
from headwater.database import translate
from headwater.errors import (
    ConfigError,
    DatabaseError,
    Forbidden,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
    PermissionMissing,
    ResyncRequired,
    Unavailable,
)
from headwater.hub.catch_up import FeedSubscription
from headwater.hub.coalesce import Coalescing
from headwater.hub.feeds import FeedQuery, Feeds
from headwater.hub.flush import Flusher
from headwater.hub.live import LiveSubscription, LiveView, Opening, ViewInfo
from headwater.hub.openings import Openings, slow_query
from headwater.hub.questions import Scope
from headwater.hub.recent import Recents
from headwater.hub.recheck import recheck_for_ever
from headwater.hub.subscriber import Access, Subscriber
from headwater.hub.tables import FORMATS, KnownTable, Tables
from headwater.hub.visibility import guarded, scope_of
from headwater.live.filter import EVERYTHING
from headwater.live.filter_check import check
from headwater.live.query import BoundQuery, LiveQuery, Rules
from headwater.live.streamed import Streamed
from headwater.live.view import Views
from headwater.live.window import Window
from headwater.log.follow import link, reconnect_pause
from headwater.log.progress import Progress
from headwater.log.wake import Waker
from headwater.metrics import Metrics
from headwater.model import Position, Table
from headwater.protocol import Frame, ResetReason

logger = logging.getLogger(__name__)

Bound: TypeAlias = tuple[LiveQuery, BoundQuery, KnownTable, Scope | None]
"""A query with what the hook adds to it, the same bound to its table, and as whom it is read."""


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
    ) -> None:
        self._is_ready = asyncio.Event()
        self.trouble: str | None = "the hub has not been started"
        """Why it is not ready, as anybody may know it."""
        self._cause: str | None = None
        self.metrics = metrics or Metrics()
        self.url = url
        self._rules = dict(rules or {})
        self._recheck = recheck
        self._coalescing = Coalescing.parse(coalesce)
        self._waker: Waker | None = None
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempted = asyncio.Event()
        # Shared with the flush
        self.progress = Progress()
        self._lost_track = False
        self.views: Views[LiveView] = Views(LiveView)
        self.recents = Recents()
        self.tables = Tables(url)
        self.feeds = Feeds(self)
        self.openings = Openings(url, self.wake, self._opening_failed)
        self.position: Position | None = None
        self.position_text = ""
        self.flushes = 0
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
        self._laggards: list[LiveSubscription] = []
        self._rechecks: dict[LiveView, None] = {}
        self._lingering: dict[LiveView, float] = {}
        self._shown: dict[LiveView, None] = {}
        self._shapes: dict[_TableMark, dict[int, set[LiveView]]] = {}

    @property
    def ready(self) -> bool:
        """Whether the log is being followed right now."""
        return self._is_ready.is_set()

    # -------------------------------------------------------------------- lifecycle

    async def __aenter__(self) -> Hub:
        self._task = asyncio.create_task(self._run())
        self.spawn(recheck_for_ever(self, self._recheck))
        await self._attempted.wait()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._task, *self._tasks, return_exceptions=True)
        self.trouble = "the hub is stopping"
        self._is_ready.clear()
        for view in list(self.views):
            self._refuse_newcomers(view)
        self.feeds.close()
        await self.openings.close()
        await self.tables.close()

    async def _run(self) -> None:
        """For ever: follow the log; when that fails, say so and try again."""
        attempt = 0
        while True:
            try:
                async with link(self.url, options=FORMATS) as (connection, reader, waker):
                    progress = Progress() if self._lost_track else self.progress
                    restarted = await progress.begin(connection, reader)
                    self.progress, self._lost_track = progress, False
                    if restarted:
                        self.restarts += 1
                        self._forget_positions()
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
            self._sweep()
            await waker.have_read(news=news, position=self.progress.position)
            await self._coalescing.wait(waker)

    def _gone(self, trouble: str, cause: str | None = None) -> None:
        """The log is not being followed. Results that were being read are read again later; who
        waits for a first one is refused. The cause is for the log, and is told once."""
        if self.ready or self._cause != (cause or trouble):
            self._cause = cause or trouble
            logger.warning("lost the database: %s", self._cause)
        self.trouble = trouble
        self._is_ready.clear()
        self.metrics.database_up.set(0)
        self._attempted.set()
        self.openings.restart()
        for view in list(self.views):
            self._refuse_newcomers(view)
            if not view.removed and (view.waiting or not view.live):
                self.open(view)
        self.end_step()

    def _refuse_newcomers(self, view: LiveView) -> None:
        self._abandon_openings(view)
        for subscription in list(view.waiting):
            if not subscription.begun:
                subscription.fail(self._unavailable())

    def _resync(self, error: ResyncRequired) -> None:
        """The log cannot tell what happened: everything is read anew."""
        self._gone(str(error))
        self._lost_track = True
        self._read_all_again()
        self.feeds.gap()

    def leap(self, position: Position) -> None:
        """More is new than a flush takes. The views are read as of this position instead."""
        behind, self.position = self.position, position
        self.position_text = str(position)
        self.progress.leap(position)
        self._read_all_again()
        self.feeds.fell_behind(behind or position)

    def _read_all_again(self) -> None:
        for view in list(self.views):
            self.read_again(view, "resync")

    def _forget_positions(self) -> None:
        """The server restarted, and may give transaction ids out again: a position from before
        may come to mean something else."""
        for view in self.views:
            self.recents.clear(view.recent)

    def _unavailable(self) -> Unavailable:
        return Unavailable(
            f"live data is not available now: {self.trouble}",
            hint="It comes back by itself; try again.",
        )

    def wake(self) -> None:
        """Flush at once."""
        if self._waker is not None:
            self._waker.wake()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside everything else, and end with the hub."""
        self.watch(asyncio.create_task(work))

    def watch(self, task: asyncio.Task[None]) -> None:
        """End it with the hub."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        flush = self.flushes + (2 if self.stepping else 1)
        while self.flushes < flush:
            self.wake()
            self._flushed.clear()
            await self._flushed.wait()

    # -------------------------------------------------------------------- subscribing

    async def live(
        self,
        query: LiveQuery,
        subscriber: Subscriber,
        *,
        access: Access = Access(),  # noqa: B008
        since: str | None = None,
        verify: bool = False,
    ) -> LiveSubscription:
        """Follow a live query. Returns when its snapshot, or what it missed since a position, has
        been handed over."""
        subscription = LiveSubscription(self, query, subscriber, access, verify)
        bound = await self._bind(query, access)
        await self.between()
        self._join(subscription, *bound, since=since)
        try:
            await subscription.arrived()
        except BaseException:
            subscription.close()
            raise
        return subscription

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
            raise self._unavailable()
        subscription = await self.feeds.open(query, subscriber, access)
        if not self.ready:
            raise self._unavailable()
        await subscription.begin()
        return subscription

    def describe(self) -> list[ViewInfo]:
        return [view.info() for view in self.views]

    async def _bind(self, query: LiveQuery, access: Access) -> Bound:
        """The query, checked against its table as it is now, and as whom it is read."""
        if not self.ready:
            raise self._unavailable()
        known = await self.tables.find(query.table)
        rules = self._rules.get(known.table.label, Rules())
        check(query.where, known.table, filterable=rules.filterable)
        wish = query
        if access.where != EVERYTHING:
            wish = msgspec.structs.replace(query, where=query.where & access.where)
        # What the authorisation hook adds may use any column.
        bound = BoundQuery(wish, known.table, msgspec.structs.replace(rules, filterable=None))
        return wish, bound, known, await scope_of(self.tables, known, bound, access)

    def _join(
        self,
        subscription: LiveSubscription,
        wish: LiveQuery,
        bound: BoundQuery,
        known: KnownTable,
        scope: Scope | None,
        *,
        since: str | None = None,
    ) -> None:
        """Take part in the view of a query: at once where it is live, else when it is."""
        if not self.ready and not subscription.begun:
            raise self._unavailable()
        view = self._view(wish, bound, known, scope)
        subscription.target = view
        self._lingering.pop(view, None)
        if view.live and since is not None:
            missed = view.recent.after(since)
            if missed is not None:
                view.attach(subscription)
                subscription.begin(missed, resumed=True)
                return
        view.waiting.append(subscription)
        if not view.live or not isinstance(view.state, Window):
            self.open(view)
        elif guarded(view):
            self._rechecks[view] = None
            self.wake()
        else:
            self.welcome(view)

    def _view(
        self, wish: LiveQuery, bound: BoundQuery, known: KnownTable, scope: Scope | None
    ) -> LiveView:
        view = self.views.find(bound, scope)
        if view.subscribers or view.waiting or view.live or view.openings:
            if view.known.table.id == known.table.id:
                return view
            self.reopen(view)
            view = self.views.find(bound, scope)
        if len(self.views) > limits.VIEWS_MAX:
            self.views.remove(view)
            raise LimitExceeded(
                f"more than {limits.VIEWS_MAX:,} different live queries",
                code="views",
                hint="Share them: the same query by many users is one.",
            )
        view.wish, view.known = wish, known
        for mark in _marks(known.table):
            self._shapes.setdefault(mark, {}).setdefault(known.table.id, set()).add(view)
        self.metrics.views.set(len(self.views))
        return view

    def open(self, view: LiveView, *, quiet: bool = False) -> None:
        """Have its result read, unless that is on its way. A streamed result that is being read
        is of no use to who comes later."""
        streamed = view.query.mode == "streamed"
        for opening in view.openings:
            if opening.quiet == quiet and not (streamed and opening.started):
                return
        opening = Opening(view, quiet=quiet)
        view.openings.append(opening)
        self.openings.want(opening)

    # -------------------------------------------------------------------- leaving

    def forget(self, subscription: LiveSubscription) -> None:
        """A subscription is over. The last one to leave a view leaves it behind for a while."""
        view = subscription.target
        if view is None or view.removed:
            return
        view.detach(subscription)
        if view.subscribers or view.waiting or any(opening.told for opening in view.openings):
            return
        if not view.live:
            self._remove(view)
            return
        self._lingering[view] = time.monotonic()
        if len(self._lingering) > limits.VIEWS_LINGERING_MAX:
            self._remove(next(iter(self._lingering)))

    def _whole(self, view: LiveView, reason: ResetReason | None) -> Frame:
        """The view's present rows. Those who come before the next flush share the frame; for
        longer it is not worth its memory."""
        self._shown[view] = None
        return view.whole(self.position_text, reason)

    def _sweep(self) -> None:
        """Take away the views that have been left for long enough, and frames nobody waits for."""
        for view in self._shown:
            view.forget_whole()
        self._shown.clear()
        before = time.monotonic() - limits.VIEW_LINGER_SECONDS
        while self._lingering:
            view, left = next(iter(self._lingering.items()))
            if left > before:
                return
            self._remove(view)

    def _remove(self, view: LiveView) -> None:
        self._lingering.pop(view, None)
        self._rechecks.pop(view, None)
        self.recents.clear(view.recent)
        view.openings = []
        view.live, view.removed = False, True
        self.views.remove(view)
        shape = view.known.table.id
        for mark in _marks(view.known.table):
            shapes = self._shapes[mark]
            shapes[shape].discard(view)
            if not shapes[shape]:
                del shapes[shape]
            if not shapes:
                del self._shapes[mark]
        self.metrics.views.set(len(self.views))

    # -------------------------------------------------------------------- reading anew

    def read_again(self, view: LiveView, reason: ResetReason) -> None:
        """Its state no longer holds. Its subscribers are told the new one when it is there."""
        self._abandon_openings(view)
        self.recents.clear(view.recent)
        view.live = False
        for subscription in list(view.subscribers):
            subscription.expect(reason)
            if view.query.mode == "streamed":
                view.detach(subscription)
                view.waiting.append(subscription)
        if not (view.subscribers or view.waiting):
            self._remove(view)
            return
        self.metrics.resyncs.labels(reason).inc()
        self.open(view)

    def _abandon_openings(self, view: LiveView) -> None:
        openings, view.openings = view.openings, []
        for opening in openings:
            opening.again()

    def begin_again(self, opening: Opening) -> None:
        """More changes came than it can keep."""
        view = opening.view
        if opening in view.openings:
            view.openings.remove(opening)
            opening.again()
            self.open(view, quiet=opening.quiet)

    def reshape(self, tables: Iterable[Table]) -> None:
        """Tables as changes show them. Views that know another shape of one, or another table of
        its name, are opened anew."""
        for table in tables:
            for mark in _marks(table):
                shapes = self._shapes.get(mark)
                if shapes is None or shapes.keys() == {table.id}:
                    continue
                for shape, views in list(shapes.items()):
                    for view in list(views) if shape != table.id else ():
                        # One that has not begun to read will read the table as it is.
                        if view.live or any(opening.started for opening in view.openings):
                            self.reopen(view)

    def reopen(self, view: LiveView) -> None:
        """Its table changed: everyone asks again, by the name they asked for."""
        self._abandon_openings(view)
        subscriptions = [*view.subscribers, *view.waiting]
        for subscription in subscriptions:
            view.detach(subscription)
            subscription.expect("table")
        self._remove(view)
        if subscriptions:
            self.metrics.resyncs.labels("table").inc()
            self.spawn(self._rejoin(view, subscriptions))

    async def _rejoin(self, left: LiveView, subscriptions: list[LiveSubscription]) -> None:
        """Ask once for all who ask the same. Who moved to another view meanwhile stays there."""
        groups: dict[str, tuple[LiveQuery, Access, list[LiveSubscription]]] = {}
        for each in subscriptions:
            wish = (each.query, each.access)
            groups.setdefault(repr(wish), (*wish, []))[2].append(each)
        for query, access, group in groups.values():
            try:
                bound = await self._bind_when_ready(query, access)
            except HeadwaterError as error:
                for subscription in group:
                    if subscription.target is left:
                        subscription.fail(error)
                continue
            await self.between()
            for subscription in group:
                if not subscription.closed and subscription.target is left:
                    self._try_join(subscription, bound)

    def _try_join(self, subscription: LiveSubscription, bound: Bound) -> None:
        try:
            self._join(subscription, *bound)
        except HeadwaterError as error:
            subscription.fail(error)

    async def _bind_when_ready(self, query: LiveQuery, access: Access) -> Bound:
        while True:
            await self._is_ready.wait()
            try:
                return await self._bind(query, access)
            except Unavailable:
                await asyncio.sleep(limits.RECONNECT_SECONDS[0])

    # -------------------------------------------------------------------- for the flush

    def begin_step(self, position: Position) -> None:
        """From here until `end_step`, states are on their way to this position."""
        self.flushes += 1
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
        self._flushed.set()
        self._between.set()

    def take_arrived(self) -> list[Opening]:
        """The results that have been read, and are still wanted."""
        arrived, self.openings.arrived = self.openings.arrived, []
        return [opening for opening in arrived if opening.wanted]

    def take_rechecks(self) -> Iterable[LiveView]:
        rechecks, self._rechecks = self._rechecks, {}
        return rechecks

    def make_live(self, view: LiveView, state: Window) -> None:
        view.take(state)
        self.recents.clear(view.recent)
        for subscription in list(view.subscribers):
            reason = subscription.reason or "resync"
            subscription.hand(self._whole(view, reason))

    def compare(self, view: LiveView, state: Window | Streamed) -> None:
        """A guarded view was read again. What others did to rights shows only now."""
        if not isinstance(state, Window) or not isinstance(view.state, Window):
            if view.differs(state):
                self.read_again(view, "access")
            return
        before = view.rows()
        view.take(state)
        if view.rows() != before:
            self.recents.clear(view.recent)
            self.metrics.resyncs.labels("access").inc()
            for subscription in list(view.subscribers):
                subscription.hand(self._whole(view, "access"))

    def welcome(self, view: LiveView) -> None:
        """Those who wait for the result of a live view get it."""
        if not view.live or not isinstance(view.state, Window) or not view.waiting:
            return
        waiting, view.waiting = view.waiting, []
        for subscription in waiting:
            view.attach(subscription)
        for subscription in waiting:
            if not subscription.closed:
                frame = self._whole(view, subscription.reason)
                subscription.begin([frame])

    def resync(self, subscription: LiveSubscription, reason: ResetReason) -> None:
        view = subscription.target
        assert view is not None
        subscription.expect(reason)
        if view.removed or subscription in view.waiting:
            return  # the whole result is on its way
        if view.query.mode == "streamed" or (view.live and guarded(view)):
            view.detach(subscription)
            view.waiting.append(subscription)
            if view.query.mode == "streamed":
                self.open(view)
            else:
                self._rechecks[view] = None
                self.wake()
        elif view.live:
            subscription.caught_up = self.flushes
            if self.emitting or self._between.is_set():
                subscription.hand(self._whole(view, reason))
            else:
                self._laggards.append(subscription)

    def catch_up_laggards(self) -> None:
        laggards, self._laggards = self._laggards, []
        for subscription in laggards:
            view = subscription.target
            if view is not None and view.live and subscription in view.subscribers:
                reason = subscription.reason or "overflow"
                subscription.hand(self._whole(view, reason))

    # -------------------------------------------------------------------- what goes wrong

    def step_failed(self, view: LiveView, error: Exception) -> None:
        """A question within a flush. What only took too long is read beside the flushes."""
        if view.removed:
            return
        if not isinstance(error, psycopg.Error):
            self.fail_all(view, _fault(view, error))
            return
        if isinstance(error, _NO_RIGHT):
            self.fail_all(view, self._refusal(view, error))
        elif isinstance(error, _CHANGED):
            self.reopen(view)
        else:
            self.read_again(view, "resync")

    def _opening_failed(self, opening: Opening, error: Exception) -> None:
        view = opening.view
        if opening not in view.openings:
            return
        if isinstance(error, _CHANGED) and opening.attempts_left():
            self.reopen(view)
            return
        view.openings.remove(opening)
        if isinstance(error, psycopg.errors.QueryCanceled):
            found = slow_query(view.query)
        elif isinstance(error, psycopg.Error):
            found = self._refusal(view, error)
        else:
            found = _fault(view, error)
        if opening.told:
            for subscription in list(opening.told):
                subscription.fail(found)
        elif not opening.quiet or isinstance(found, Forbidden):
            self.fail_all(view, found)

    def _refusal(self, view: LiveView, error: psycopg.Error) -> HeadwaterError:
        found = translate(error, self.url)
        if isinstance(found, PermissionMissing) and view.scope is not None:
            role, label = view.scope.role, view.query.table.label
            return Forbidden(
                f"role {role} may not read {label}: {found}",
                hint=f'grant select on {label} to "{role}"',
            )
        return found

    def fail_all(self, view: LiveView, error: HeadwaterError) -> None:
        for subscription in [*view.subscribers, *view.waiting]:
            subscription.fail(error)
        if not view.removed:
            self._remove(view)  # its state may be behind; nobody shall find it

    # -------------------------------------------------------------------- moving

    async def reanchor(self, subscription: LiveSubscription, after: list[Any] | None) -> None:
        if subscription.query.mode == "streamed":
            raise InvalidQuery("a streamed query has no cursor", path="after")
        cursor = None if after is None else tuple(after)

        def slid(query: LiveQuery, access: Access) -> tuple[LiveQuery, Access]:
            return msgspec.structs.replace(query, after=cursor), access

        await self._move(subscription, slid, "window")

    async def change_access(self, subscription: LiveSubscription, access: Access) -> None:
        if access == subscription.access:
            return
        try:
            await self._move(subscription, lambda query, _: (query, access), "access")
        except HeadwaterError as error:
            subscription.fail(error)

    async def _move(
        self,
        subscription: LiveSubscription,
        changed: Callable[[LiveQuery, Access], tuple[LiveQuery, Access]],
        reason: ResetReason,
    ) -> None:
        """Over to the view of another query or scope, if it is another."""
        while True:
            old = (subscription.query, subscription.access)
            query, access = changed(*old)
            bound = await self._bind(query, access)
            await self.between()
            if subscription.query is old[0] and subscription.access is old[1]:
                break  # else it moved meanwhile, and what it left shall not come back
        view = subscription.target
        if subscription.closed or view is None:
            return
        subscription.query, subscription.access = query, access
        _, wanted, known, scope = bound
        same = (wanted.canonical, scope) == view.identity and known.table.id == view.known.table.id
        if same and not view.removed:
            return
        self.forget(subscription)
        subscription.expect(reason)
        self._try_join(subscription, bound)
        await subscription.arrived()


def _fault(view: LiveView, error: Exception) -> HeadwaterError:
    return HeadwaterError(
        f"{view.query.table.label}: a fault in the hub ({type(error).__name__}); the log has it"
        f" under view {view.id}",
        code="internal",
    )


_TableMark: TypeAlias = int | tuple[str, str]


def _marks(table: Table) -> tuple[_TableMark, ...]:
    """What a change may know a view's table by: another table may have taken its name."""
    return table.oid, (table.schema, table.name)


def _said(error: HeadwaterError) -> str:
    """Of an error what clients may hear: not where the database is, nor who reads it."""
    if isinstance(error, DatabaseError | ConfigError) and not isinstance(error, PermissionMissing):
        return "the database does not answer; the log says why"
    return str(error)


_NO_RIGHT = psycopg.errors.InsufficientPrivilege
_CHANGED = (
    psycopg.errors.UndefinedTable
    | psycopg.errors.UndefinedColumn
    | psycopg.errors.UndefinedFunction
    | psycopg.errors.DatatypeMismatch
)
"""What a statement meets when its table was altered after it was looked up."""
