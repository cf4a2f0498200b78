"""All live views of a hub: how subscriptions join and leave them, and how they are read again.

A view is found by its query and scope. It is opened beside the flushes, and updated by them
(`part`). Subscriptions join, leave and move between the steps of flushes, so a client never has a
state of another position than it was sent. A state that may be wrong is read again, and subscribers
are sent the reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import msgspec
import psycopg

from headwater import limits
from headwater.errors import (
    Forbidden,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
    ResultError,
    Unavailable,
)
from headwater.fair_queue import Owner
from headwater.hub.drift import DRIFT, cut, differing
from headwater.hub.flush_state import FlushState
from headwater.hub.live_views.errors import (
    NO_RIGHT,
    TABLE_CHANGED,
    fault,
    refusal,
    slow_question,
)
from headwater.hub.live_views.initial_snapshots import InitialSnapshots, too_slow
from headwater.hub.live_views.lag import Lag
from headwater.hub.live_views.replay_buffer import ReplayBuffers
from headwater.hub.live_views.view import InitialSnapshot, LiveSubscription, LiveView, attempts_left
from headwater.hub.live_views.visibility import guarded
from headwater.hub.reading.row_security import scope_of
from headwater.hub.reading.snapshot_queries import Scope
from headwater.hub.reading.tables import KnownTable, TableIdentity, identities
from headwater.hub.resources import Resources
from headwater.hub.subscriptions.subscriber import Access, Subscriber
from headwater.live.filters.check import check
from headwater.live.filters.filter import EVERYTHING
from headwater.live.query import BoundQuery, LiveQuery, Rules
from headwater.live.state.comparison import Difference, difference
from headwater.live.state.streamed import Streamed
from headwater.live.state.window import Window
from headwater.live.view import Views
from headwater.model import Change, Table
from headwater.protocol import Frame, ResetReason

_VIEW_LINGER_SECONDS = 30.0
"""How long a live query stays in memory without subscribers, so that a returning one can resume."""

_VIEWS_LINGERING_MAX = 1_000
"""Live queries without subscribers that stay in memory. The oldest is removed first."""


logger = logging.getLogger(__name__)

CheckedQuery: TypeAlias = tuple[LiveQuery, BoundQuery, KnownTable, Scope | None]
"""A query with the filter of the authorize hook, the same bound to its table, the table, and the
scope it is read with."""


class LiveViews:
    """All live queries of a hub. `rules` has, by table label, what they may use. `expect` is called
    with each new view: it may need background queries."""

    def __init__(
        self,
        resources: Resources,
        flushes: FlushState,
        rules: Mapping[str, Rules],
        expect: Callable[[LiveView], None],
        snapshots: Callable[..., InitialSnapshots] = InitialSnapshots,
    ) -> None:
        self._resources = resources
        self._flushes = flushes
        self._expect = expect
        self._rules = dict(rules)
        self.views: Views[LiveView] = Views(LiveView, resources.next_id)
        self.replay_buffers = ReplayBuffers()
        self.snapshots = snapshots(
            resources.url,
            flushes.wake,
            self._snapshot_failed,
            question_url=resources.question_url,
        )
        self.lagging: dict[LiveView, None] = {}
        """Views that lag. Those without a job wait for one."""
        resources.metrics.views_lagging.set_function(lambda: len(self.lagged()))
        resources.metrics.lagging_seconds.set_function(
            lambda: max((lag.seconds for _, lag in self.lagged()), default=0.0)
        )
        self.sending = False
        """Whether frames of a flush are being sent: all states are as of its position."""
        self._overflowed: list[LiveSubscription] = []
        self._rechecks: dict[LiveView, None] = {}
        self._lingering: dict[LiveView, float] = {}
        self._shown: dict[LiveView, None] = {}
        self._shapes: dict[TableIdentity, dict[int, set[LiveView]]] = {}

    def __iter__(self) -> Iterator[LiveView]:
        return iter(list(self.views))

    def is_followed(self, schema: str, name: str) -> bool:
        """Whether a client follows a live query over a table."""
        shapes = self._shapes.get((schema, name), {})
        return any(view.followers for views in shapes.values() for view in views)

    # -------------------------------------------------------------------- joining

    async def join(
        self,
        query: LiveQuery,
        subscriber: Subscriber,
        known: KnownTable | None,
        access: Access,
        since: str | None,
        verify: bool,
        owner: Owner | None = None,
    ) -> LiveSubscription:
        """Follow a live query; see `Hub.live`."""
        subscription = LiveSubscription(
            self, self._flushes, query, subscriber, access, verify, owner
        )
        bound = await self._bind(query, access, known)
        await self._flushes.between()
        self._join(subscription, *bound, since=since)
        try:
            await subscription.arrived()
        except BaseException:
            subscription.close()
            raise
        return subscription

    async def _bind(
        self, query: LiveQuery, access: Access, known: KnownTable | None = None
    ) -> CheckedQuery:
        """The query, checked against its table as it is now, and its scope."""
        request, bound, known = await self.check(query, access, known)
        return request, bound, known, await scope_of(self._resources.tables, known, bound, access)

    async def check(
        self, query: LiveQuery, access: Access, known: KnownTable | None = None
    ) -> tuple[LiveQuery, BoundQuery, KnownTable]:
        """The query, checked against its table as it is now, without a check of rights."""
        if not self._flushes.ready:
            raise self._flushes.unavailable()
        known = known or await self._resources.tables.find(query.table)
        known.check_has_rows()
        rules = self._rules.get(known.table.label, Rules())
        check(query.where, known.table, filterable=rules.filterable)
        request = query
        if access.where != EVERYTHING:
            request = msgspec.structs.replace(query, where=query.where & access.where)
        # The filter of the authorize hook may use any column.
        bound = BoundQuery(request, known.table, msgspec.structs.replace(rules, filterable=None))
        return request, bound, known

    def _join(
        self,
        subscription: LiveSubscription,
        request: LiveQuery,
        bound: BoundQuery,
        known: KnownTable,
        scope: Scope | None,
        *,
        since: str | None = None,
    ) -> None:
        """Join the view of a query: at once if it is live, else when its result has arrived."""
        if not self._flushes.ready and not subscription.begun:
            raise self._flushes.unavailable()
        view = self._view(request, bound, known, scope)
        subscription.target = view
        if self._lingering.pop(view, None) is not None and view.holding is not None:
            view.holding.resume()
        # A view that lags may be behind `since`: then wait for its whole result.
        if view.live and view.lag is None and since is not None:
            missed = view.replay.after(since)
            if missed is not None:
                view.attach(subscription)
                if self._has_memory(subscription, view):
                    subscription.begin(missed, resumed=True)
                return
        self._wait(subscription, view)
        if not self._has_memory(subscription, view):
            return
        if not view.live or not isinstance(view.state, Window):
            self.open(view)
        elif guarded(view):
            self._recheck(view)
        elif view.lag is None:
            self.welcome(view, self._flushes.number)

    def _wait(self, subscription: LiveSubscription, view: LiveView) -> None:
        """Wait for a whole result that is as of now or later."""
        subscription.joined = self._flushes.number
        view.waiting.append(subscription)

    def _recheck(self, view: LiveView) -> None:
        """Check the rows of a guarded view again, before new subscribers are sent them."""
        self._rechecks[view] = None
        self._flushes.wake()

    def _has_memory(self, subscription: LiveSubscription, view: LiveView) -> bool:
        """Count the view for the user of a subscription. False if that ended the subscription."""
        assert view.holding is not None
        subscription.holding = view.holding
        view.holding.join(subscription.owner)
        self._resources.memory.enforce()
        return not subscription.closed

    def _shed(self, view: LiveView, owner: Owner, error: LimitExceeded) -> None:
        """End the subscriptions of this user: the view takes too much memory."""
        receivers = [each for snapshot in view.snapshots for each in snapshot.receivers]
        for subscription in [*view.subscribers, *view.waiting, *receivers]:
            if subscription.owner == owner:
                subscription.fail(error)
        if not view.followers and not view.removed:
            self._remove(view)

    def _view(
        self, request: LiveQuery, bound: BoundQuery, known: KnownTable, scope: Scope | None
    ) -> LiveView:
        view = self.views.find(bound, scope)
        if view.subscribers or view.waiting or view.live or view.snapshots:
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
        view.request, view.known = request, known
        if view.holding is None:
            view.holding = self._resources.memory.open(partial(self._shed, view))
            view.weigh()
        self._expect(view)
        for identity in identities(known.table):
            self._shapes.setdefault(identity, {}).setdefault(known.table.id, set()).add(view)
        self._resources.metrics.views.set(len(self.views))
        return view

    def open(self, view: LiveView, *, quiet: bool = False) -> None:
        """Read its result, unless it is being read. A streamed result that is being read is not for
        later subscribers."""
        streamed = view.query.mode == "streamed"
        for snapshot in view.snapshots:
            if snapshot.quiet == quiet and not (streamed and snapshot.started):
                return
        snapshot = InitialSnapshot(view, quiet=quiet)
        view.snapshots.append(snapshot)
        self.snapshots.want(snapshot)

    # -------------------------------------------------------------------- leaving

    def forget(self, subscription: LiveSubscription) -> None:
        """A subscription is over. A view without subscribers stays in memory for a while."""
        view = subscription.target
        holding, subscription.holding = subscription.holding, None
        if view is None or view.removed:
            return
        view.detach(subscription)
        if (
            view.subscribers
            or view.waiting
            or any(snapshot.receivers for snapshot in view.snapshots)
        ):
            if holding is not None:
                holding.leave(subscription.owner)
            return
        if not view.live:
            self._remove(view)
            return
        self._lingering[view] = time.monotonic()
        if holding is not None:
            holding.rest()
        if len(self._lingering) > _VIEWS_LINGERING_MAX:
            self._remove(next(iter(self._lingering)))

    def _whole(self, view: LiveView, reason: ResetReason | None) -> Frame:
        """The frame with the view's present rows. It is shared until the next flush, and then
        forgotten to save memory."""
        self._shown[view] = None
        position = self._flushes.position_text if view.lag is None else view.lag.text
        return view.whole(position, reason)

    def sweep(self) -> None:
        """Remove views that had no subscribers for long, and frames with whole results."""
        for view in self._shown:
            view.forget_whole()
        self._shown.clear()
        before = time.monotonic() - _VIEW_LINGER_SECONDS
        while self._lingering:
            view, left = next(iter(self._lingering.items()))
            if left > before:
                return
            self._remove(view)

    def _remove(self, view: LiveView) -> None:
        if view.removed:
            return
        self._lingering.pop(view, None)
        self._rechecks.pop(view, None)
        self.replay_buffers.clear(view.replay)
        self.set_lag(view, None)
        view.snapshots = []
        view.live, view.removed = False, True
        if view.holding is not None:
            view.holding.close()
        self.views.remove(view)
        shape = view.known.table.id
        for identity in identities(view.known.table):
            shapes = self._shapes[identity]
            shapes[shape].discard(view)
            if not shapes[shape]:
                del shapes[shape]
            if not shapes:
                del self._shapes[identity]
        self._resources.metrics.views.set(len(self.views))

    # -------------------------------------------------------------------- reading again

    def read_again(self, view: LiveView, reason: ResetReason) -> None:
        """Its state may be wrong. Its subscribers are sent the new one when that has arrived."""
        if view.removed:
            return
        self._abandon_snapshots(view, reason)
        self.replay_buffers.clear(view.replay)
        self.set_lag(view, None)
        view.live = False
        for subscription in list(view.subscribers):
            subscription.expect(reason)
            if view.query.mode == "streamed":
                view.detach(subscription)
                view.waiting.append(subscription)
        if not (view.subscribers or view.waiting):
            self._remove(view)
            return
        self._resources.metrics.resyncs.labels(reason).inc()
        self.open(view)

    def read_all_again(self, views: Iterable[LiveView] | None = None) -> None:
        """Read all views again, or these."""
        self._for_all(list(self if views is None else views), self.read_again)

    def reopen_all(self) -> None:
        """Any table and its columns may have changed: open all views again."""
        self._for_all(list(self), self.reopen)

    def _for_all(
        self, views: Iterable[LiveView], act: Callable[[LiveView, ResetReason], None]
    ) -> None:
        for view in views:
            try:
                act(view, "resync")
            except Exception as error:
                logger.exception("view %d cannot be read again", view.id)
                self.fail_all(view, fault(view, error))

    def skipped(self, tables: Iterable[Table] | None) -> None:
        """Changes of these tables, or of any table, were skipped."""
        if tables is None:
            self.reopen_all()
            return
        resting: dict[LiveView, None] = {}
        for identity in (each for table in tables for each in identities(table)):
            for views in self._shapes.get(identity, {}).values():
                resting.update(dict.fromkeys(views))
        self.reshape(tables)
        self.read_all_again(resting)

    def forget_positions(self) -> None:
        """The server restarted, and may use transaction ids a second time: older positions may then
        mean other transactions."""
        for view in self:
            self.replay_buffers.clear(view.replay)

    def lost(self) -> None:
        """The database cannot be reached. Results that were being read are read again later.
        Subscriptions that wait for a first result are refused."""
        self.snapshots.restart()
        # Jobs of views that lag may have lost their snapshots, and their changes may come again.
        self.read_all_again(list(self.lagging))
        for view in self:
            self._refuse_newcomers(view)
            if not view.removed and (view.waiting or not view.live):
                self.open(view)

    async def close(self) -> None:
        for view in self:
            self._refuse_newcomers(view)
        await self.snapshots.close()

    def _refuse_newcomers(self, view: LiveView) -> None:
        self._abandon_snapshots(view)
        for subscription in list(view.waiting):
            if not subscription.begun:
                subscription.fail(self._flushes.unavailable())

    def _abandon_snapshots(self, view: LiveView, reason: ResetReason = "resync") -> None:
        snapshots, view.snapshots = view.snapshots, []
        for snapshot in snapshots:
            snapshot.again(reason)

    def begin_again(self, snapshot: InitialSnapshot) -> None:
        """It has stored too many changes: read it again."""
        view = snapshot.view
        if snapshot in view.snapshots:
            view.snapshots.remove(snapshot)
            snapshot.again()
            self.open(view, quiet=snapshot.quiet)

    def reshape(self, tables: Iterable[Table]) -> None:
        """Tables as in the changes. Views with another shape of a table, or of another table with
        its name, are opened again."""
        for table in tables:
            for identity in identities(table):
                shapes = self._shapes.get(identity)
                if shapes is None or shapes.keys() == {table.id}:
                    continue
                for shape, views in list(shapes.items()):
                    for view in list(views) if shape != table.id else ():
                        # A view that is not being read yet will read the table as it is.
                        if view.live or any(snapshot.started for snapshot in view.snapshots):
                            self.reopen(view)

    def reopen(self, view: LiveView, reason: ResetReason = "table") -> None:
        """Its table changed: all subscriptions look the table up again by name."""
        self._abandon_snapshots(view)
        subscriptions = [*view.subscribers, *view.waiting]
        for subscription in subscriptions:
            view.detach(subscription)
            subscription.expect(reason)
        self._remove(view)
        if subscriptions:
            self._resources.metrics.resyncs.labels(reason).inc()
            self._resources.spawn(self._rejoin(view, subscriptions))

    async def _rejoin(self, left: LiveView, subscriptions: list[LiveSubscription]) -> None:
        """Look up once for equal subscriptions. Those that moved to another view stay there."""
        groups: dict[str, tuple[LiveQuery, Access, list[LiveSubscription]]] = {}
        for each in subscriptions:
            request = (each.query, each.access)
            groups.setdefault(repr(request), (*request, []))[2].append(each)
        for query, access, group in groups.values():
            try:
                bound = await self._bind_when_ready(query, access)
            except HeadwaterError as error:
                for subscription in group:
                    if subscription.target is left:
                        subscription.fail(error)
                continue
            await self._flushes.between()
            for subscription in group:
                if not subscription.closed and subscription.target is left:
                    self._try_join(subscription, bound)

    def _try_join(self, subscription: LiveSubscription, bound: CheckedQuery) -> None:
        try:
            self._join(subscription, *bound)
        except HeadwaterError as error:
            subscription.fail(error)

    async def _bind_when_ready(self, query: LiveQuery, access: Access) -> CheckedQuery:
        while True:
            await self._flushes.until_ready()
            try:
                return await self._bind(query, access)
            except Unavailable:
                await asyncio.sleep(limits.RECONNECT_SECONDS[0])

    def take_arrived(self) -> list[InitialSnapshot]:
        """The first results that have arrived and are still wanted."""
        arrived, self.snapshots.arrived = self.snapshots.arrived, []
        wanted = [snapshot for snapshot in arrived if snapshot.wanted]
        # While a job updates the view, its state cannot be compared or replaced.
        busy = [each for each in wanted if each.view.lag is not None and each.view.lag.job]
        self.snapshots.arrived += busy
        return [snapshot for snapshot in wanted if snapshot not in busy]

    def take_rechecks(self) -> list[LiveView]:
        """Views to check again. Not those that lag: their next job checks them."""
        rechecks, self._rechecks = self._rechecks, {}
        return [view for view in rechecks if view.lag is None]

    # -------------------------------------------------------------------- lagging

    def lagged(self) -> list[tuple[LiveView, Lag]]:
        """Views that lag for long enough to be reported."""
        return [
            (view, view.lag)
            for view in self.lagging
            if view.lag is not None and view.lag.seconds >= limits.LAG_SHOWN_SECONDS
        ]

    def begin_lag(self, view: LiveView) -> None:
        """In the step of a flush: it will be updated beside the flush."""
        if view.lag is None:
            self.set_lag(view, Lag(self._flushes.position_before if view.live else None))

    def set_lag(self, view: LiveView, lag: Lag | None) -> None:
        before, view.lag = view.lag, lag
        if lag is not None:
            self.lagging[view] = None
            return
        self.lagging.pop(view, None)
        if before is not None and before.job is not None:
            before.job.left()

    def end_lag(self, view: LiveView) -> None:
        """A job has updated it to the position of its flush. Later changes need another job."""
        lag = view.lag
        if lag is not None and not (view.live and lag.is_behind):
            self.set_lag(view, None)
            if view.waiting and view.live and isinstance(view.state, Window):
                if guarded(view):
                    self._recheck(view)
                else:
                    self.welcome(view, self._flushes.number)
        self._flushes.announce()

    def take_lagging(self) -> dict[LiveView, list[list[Change]]]:
        """Views that wait for a job, with their changes."""
        return {
            view: view.lag.take()
            for view in self.lagging
            if view.lag is not None and view.lag.job is None and view.live and view.lag.is_behind
        }

    def end_idle_lags(self, taken: Container[LiveView]) -> None:
        """End the lag of views that have no job and are not in this flush."""
        for view in list(self.lagging):
            if view.lag is not None and view.lag.job is None and view not in taken:
                self.end_lag(view)

    def make_live(self, view: LiveView, state: Window) -> None:
        view.take(state)
        self._resources.memory.enforce()  # before rows are encoded for users that may not have them
        self.replay_buffers.clear(view.replay)
        for subscription in list(view.subscribers):
            self._hand_whole(view, subscription, subscription.reason or "resync")

    def _hand_whole(
        self,
        view: LiveView,
        subscription: LiveSubscription,
        reason: ResetReason | None,
        *,
        begin: bool = False,
    ) -> None:
        """Send the present rows to one subscription. If they cannot be encoded, it ends."""
        try:
            frame = self._whole(view, reason)
            _ = frame.json
        except Exception as error:
            logger.exception("view %d has rows that cannot be sent", view.id)
            view.forget_whole()
            subscription.fail(fault(view, error))
            return
        if begin:
            subscription.begin([frame])
        else:
            subscription.hand(frame)

    def compare(self, view: LiveView, state: Window | Streamed) -> None:
        """A live view was read again, as of the last flush: repair it if it differs. For a guarded
        view, a difference can come from changed rights."""
        assert view.lag is None or view.lag.job is None, "a job updates its state"
        view.weigh()
        found = difference(view.state, state, view.known.wire.row)
        if found is None:
            return
        reason: ResetReason = "drift"
        if guarded(view) and not found.in_both:
            reason = "access"
        else:
            self._log_drift(view, found)
        if not isinstance(state, Window):
            self.read_again(view, reason)
            return
        view.take(state)
        if found.visible:
            self.replay_buffers.clear(view.replay)
            self._resources.metrics.resyncs.labels(reason).inc()
            for subscription in list(view.subscribers):
                self._hand_whole(view, subscription, reason)

    def _log_drift(self, view: LiveView, found: Difference) -> None:
        """Count and log a difference, which is then repaired."""
        self._resources.metrics.reconcile_drift.labels("live").inc()
        ours, theirs = differing(found.ours, found.theirs, secret=view.known.secured)
        logger.error(
            "%s: view %d of %s, key %s: sent %s, the database has %s; it is sent again",
            DRIFT, view.id, view.query.table.label, cut(found.key), ours, theirs,
        )  # fmt: skip

    def welcome(self, view: LiveView, flush: int) -> None:
        """Send the result of a live view to subscriptions that wait for it, unless they joined
        after this flush: they may have seen something newer elsewhere."""
        if not view.live or not isinstance(view.state, Window) or not view.waiting:
            return
        if view.lag is not None and view.lag.job is not None:
            return  # a job updates its state
        waiting = [each for each in view.waiting if each.joined <= flush]
        view.waiting = [each for each in view.waiting if each.joined > flush]
        for subscription in waiting:
            view.attach(subscription)
        for subscription in waiting:
            if not subscription.closed:
                self._hand_whole(view, subscription, subscription.reason, begin=True)

    def resend(self, subscription: LiveSubscription, reason: ResetReason) -> None:
        """Send the whole present result to one subscription."""
        view = subscription.target
        assert view is not None
        subscription.expect(reason)
        if view.removed or subscription in view.waiting:
            return  # the whole result is being read
        if view.query.mode == "streamed" or (view.live and (guarded(view) or view.lag is not None)):
            view.detach(subscription)
            self._wait(subscription, view)
            if view.query.mode == "streamed":
                self.open(view)
            elif guarded(view):
                self._recheck(view)
        elif view.live:
            subscription.caught_up = self._flushes.number
            if self.sending or not self._flushes.stepping:
                self._hand_whole(view, subscription, reason)
            else:
                self._overflowed.append(subscription)

    def resend_overflowed(self) -> None:
        overflowed, self._overflowed = self._overflowed, []
        for subscription in overflowed:
            view = subscription.target
            if view is None or not view.live or subscription not in view.subscribers:
                continue
            if view.lag is not None:
                view.detach(subscription)
                self._wait(subscription, view)
            else:
                self._hand_whole(view, subscription, subscription.reason or "overflow")

    # -------------------------------------------------------------------- failures

    def step_failed(self, view: LiveView, error: Exception) -> None:
        """A step of a flush failed. If it only took too long, or by an unknown error, the view is
        read beside the flushes."""
        if view.removed:
            return
        if isinstance(error, NO_RIGHT):
            self.fail_all(view, refusal(view, error, self._resources.url))
        elif isinstance(error, TABLE_CHANGED):
            self.reopen(view)
        elif attempts_left(view.subscribers, view.waiting):
            self.read_again(view, "resync")
        elif isinstance(error, psycopg.errors.QueryCanceled):
            self.fail_all(view, slow_question(view))
        elif isinstance(error, psycopg.Error):
            self.read_again(view, "resync")
        else:
            self.fail_all(view, fault(view, error))

    def _snapshot_failed(self, snapshot: InitialSnapshot, error: Exception) -> None:
        view = snapshot.view
        if snapshot not in view.snapshots:
            return
        if isinstance(error, TABLE_CHANGED) and attempts_left(
            view.subscribers, view.waiting, snapshot.receivers
        ):
            self.reopen(view)
            return
        view.snapshots.remove(snapshot)
        view.weigh()
        if isinstance(error, psycopg.errors.QueryCanceled | psycopg.errors.LockNotAvailable):
            found = too_slow(view.query, self.snapshots.blockers_of(snapshot), error)
        elif isinstance(error, psycopg.Error):
            found = refusal(view, error, self._resources.url)
        elif isinstance(error, ResultError):
            found = error
        else:
            found = fault(view, error)
        if snapshot.receivers:
            for subscription in list(snapshot.receivers):
                subscription.fail(found)
        elif not snapshot.quiet or isinstance(found, Forbidden | InvalidQuery):
            self.fail_all(view, found)

    def fail_all(self, view: LiveView, error: HeadwaterError) -> None:
        # Receivers of a part of a result are not subscribers yet.
        receivers = [each for snapshot in view.snapshots for each in snapshot.receivers]
        for subscription in [*view.subscribers, *view.waiting, *receivers]:
            subscription.fail(error)
        if not view.removed:
            self._remove(view)  # its state may be wrong, so no subscription must find it

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
        """Move to the view of another query or scope, if it is another one."""
        while True:
            old = (subscription.query, subscription.access)
            query, access = changed(*old)
            bound = await self._bind(query, access)
            await self._flushes.between()
            if subscription.query is old[0] and subscription.access is old[1]:
                break  # otherwise it has moved since, and this request is outdated
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
