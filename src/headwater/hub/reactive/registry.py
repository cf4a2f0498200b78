"""All reactive queries of a hub, in groups: equal calls for the same users are one group.

A group has one execution, one result, and one frame for all subscribers. A flush finds the groups
that its changes may affect. Those with subscribers are executed in its snapshot, beside the flush,
and a different result is sent. The result of a group without subscribers stays cached until a
change may affect it, or the memory is needed.

What a query reads is known only after it has run. So the changes of flushes during an execution are
stored, and compared with what the query has read: no change is missed. When a query fails, its
subscribers are sent the error, and it is tried again with the next change and after a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec

from headwater import limits
from headwater.errors import (
    CaptureError,
    FunctionFailed,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
)
from headwater.fair_queue import Owner
from headwater.hub.drift import DRIFT
from headwater.hub.flush_state import FlushState
from headwater.hub.part import Flush, Part
from headwater.hub.positions import Positions
from headwater.hub.reactive.execution import Execution, ExecutionOutcome
from headwater.hub.reactive.group import (
    Answered,
    FlushMoment,
    QueryGroup,
    QuerySubscription,
    Reason,
    retry_pause,
)
from headwater.hub.reactive.placement import Placement
from headwater.hub.resources import Resources
from headwater.hub.subscriptions.subscriber import Subscriber
from headwater.identity import Identity
from headwater.log.signals import is_signals
from headwater.model import Change, Position, Table, Transaction
from headwater.protocol import Frame, ResetReason
from headwater.queries.analysis.analyst import FEED_ONLY, Analyst
from headwater.queries.analysis.statements import Read, Statement
from headwater.queries.analysis.watches import Watches, concerns
from headwater.queries.events import Events
from headwater.queries.functions import Arguments, Query
from headwater.settings import Settings

_QUERY_LATER_CHANGES_MAX = 50_000
"""Changes stored while queries are running. If there are more, the queries are executed again."""


__all__ = ["Answered", "QuerySubscription", "ReactiveQueries"]

logger = logging.getLogger(__name__)

_ONCE_MORE_MAX = 3
"""How often a query is executed again at once because of new statements. Their dependencies are
found step by step; a statement with a different text each time never ends."""


class ReactiveQueries(Part):
    """All reactive queries of a hub. `placement` executes them in the database; a unit test passes
    another."""

    def __init__(
        self,
        resources: Resources,
        flushes: FlushState,
        positions: Positions,
        settings: Settings,
        events: Events,
        *,
        placement: Callable[..., Placement] = Placement,
    ) -> None:
        self._resources = resources
        self._flushes = flushes
        self._positions = positions
        self._cache_bytes = settings.query.cache_bytes
        self._cache_entry_bytes = settings.query.cache_entry_bytes
        self._sweep_seconds = settings.query.sweep_period.total_seconds()
        self.analyst = Analyst(resources.url)
        execution = Execution(settings, self.analyst, events, self._finished, resources.metrics)
        self._executions = placement(resources.url, settings, self._wake, execution)
        self._groups: dict[Hashable, QueryGroup] = {}
        self._watches: Watches[QueryGroup] = Watches()
        self._cached: OrderedDict[QueryGroup, int] = OrderedDict()
        self._cached_bytes = 0
        self._later_changes = _LaterChanges()
        self._shapes: dict[int, int] = {}
        self._flushing = False

    def __iter__(self) -> Iterator[QueryGroup]:
        return iter(list(self._groups.values()))

    @property
    def position_text(self) -> str:
        return self._flushes.position_text

    @property
    def reached(self) -> Position | None:
        """The position that the hub has read."""
        return self._flushes.position

    # -------------------------------------------------------------------- calls

    async def call(
        self,
        query: Query,
        arguments: Arguments,
        identity: Identity,
        *,
        after: Position | None = None,
        trace_id: str | None = None,
        owner: Owner | None = None,
    ) -> Answered:
        """A result: the cached one if nothing that it depends on has changed, else a new one. With
        `after`, one that contains that position. Raises the function's error, translated. Only some
        queries of one `owner` are executed at the same time."""
        if not self._flushes.ready:
            raise self._flushes.unavailable()
        if after is not None:
            await self._positions.reached(after)
        group = self._find(query, arguments, identity, owner)
        if group.has_answer:
            assert group.result is not None
            self._resources.metrics.query_cache_hits.inc()
            self._cached.move_to_end(group)
            return Answered(msgspec.Raw(group.result), self._flushes.position_text)
        group.trace_id = trace_id
        # An execution that is running may be older than this call.
        answered = self._wait(group, self._flushes.begun + 1)
        self._want(group, "call")
        try:
            return await answered
        finally:
            self._release(group)

    def _wait(self, group: QueryGroup, flush: int) -> asyncio.Future[Answered]:
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        group.waiters.append((flush, future))
        return future

    async def answered(self, group: QueryGroup, flush: int) -> None:
        """Wait for an execution as of that flush or a later one. Raises its error."""
        if group.answered_at < flush:
            await self._wait(group, flush)

    # -------------------------------------------------------------------- subscriptions

    async def subscribe(
        self,
        query: Query,
        arguments: Arguments,
        identity: Identity,
        subscriber: Subscriber,
        *,
        since: str | None = None,
        delta: bool = False,
        trace_id: str | None = None,
        owner: Owner | None = None,
    ) -> QuerySubscription:
        """Follow a query. Returns when the subscriber was sent the first result; raises its error.
        Later errors are `failed` frames, and it continues."""
        if delta and not query.key:
            raise InvalidQuery(
                f"query {query.name} has no key that identifies its rows",
                path="delta",
                hint='Declare one: @hw.query(key="id"), or subscribe without delta.',
            )
        if not self._flushes.ready:
            raise self._flushes.unavailable()
        if since is not None and not await self._is_of_this_history(since):
            since = None
        group = self._find(query, arguments, identity, owner)
        flush = self._flushes.advanced
        subscription = QuerySubscription(
            self, group, subscriber, delta=delta, since=since, flush=flush, owner=owner
        )
        group.trace_id = trace_id
        self._join(subscription)
        try:
            await subscription.arrived()
        except BaseException:
            subscription.close()
            raise
        return subscription

    async def _is_of_this_history(self, since: str) -> bool:
        try:
            position = Position.parse(since)
        except ValueError:
            return False
        return await self._positions.is_of_this_history(position)

    def _find(
        self, query: Query, arguments: Arguments, identity: Identity, owner: Owner | None
    ) -> QueryGroup:
        caller = query.identity(identity)
        who = (caller.user, caller.tenant, caller.role, caller.claims_json)
        key = (query.name, arguments.key, who)
        group = self._groups.get(key)
        if group is None:
            self._make_room()
            id = self._resources.next_id()
            group = self._groups[key] = QueryGroup(id, key, query, arguments, caller)
            group.holding = self._resources.memory.open(partial(self._shed, group))
            self._resources.metrics.query_groups.set(len(self._groups))
        if not group.is_needed:
            group.owner = owner
        return group

    def _make_room(self) -> None:
        """Make room for one more group: remove one without subscribers, if there are too many."""
        if len(self._groups) < limits.GROUPS_MAX:
            return
        unneeded = next((group for group in self._cached if not group.is_needed), None)
        if unneeded is None:
            raise LimitExceeded(
                f"more than {limits.GROUPS_MAX:,} different queries",
                code="groups",
                hint="Share them: @hw.query(share=…) gives many users the same result.",
            )
        self._remove(unneeded)

    def _shed(self, group: QueryGroup, owner: Owner, error: LimitExceeded) -> None:
        """End the subscriptions of this user: the result takes too much memory."""
        for subscription in [*group.subscribers, *group.joining]:
            if subscription.owner == owner:
                subscription.fail(error)

    def _join(self, subscription: QuerySubscription) -> None:
        group = subscription.group
        assert group.holding is not None
        subscription.holding = group.holding
        group.holding.join(subscription.owner)
        if group.has_answer:
            self._begin(subscription)
        else:
            group.joining.append(subscription)
            self._want(group, "first")

    def _begin(self, subscription: QuerySubscription) -> None:
        group = subscription.group
        if not group.uncaptured:
            if self._has_memory(subscription):
                subscription.begin()
        elif subscription.begun or subscription.doubted:
            subscription.report(_not_captured(group))
        else:
            # The table may have been enabled since: analyse again before it is refused.
            subscription.doubted = True
            self.analyst.forget_statements(group.statements)
            group.joining.append(subscription)
            group.touched_at = max(group.touched_at, self._flushes.begun + 1)
        group.weigh()

    def _has_memory(self, subscription: QuerySubscription) -> bool:
        """Count the result for the user of a subscription. False if that ended it."""
        group = subscription.group
        group.joining.append(subscription)  # so that `_shed` finds it
        group.weigh(by_row=subscription.delta)
        self._resources.memory.enforce()
        if subscription.closed:
            return False
        group.joining.remove(subscription)
        return True

    def leave(self, subscription: QuerySubscription) -> None:
        """A subscription is over, or moves to another group."""
        group = subscription.group
        group.subscribers.pop(subscription, None)
        if subscription in group.joining:
            group.joining.remove(subscription)
        if subscription.delta and not any(each.delta for each in group.subscribers):
            group.forget_rows()
        holding, subscription.holding = subscription.holding, None
        if holding is not None:
            holding.leave(subscription.owner)
        group.weigh()
        self._release(group)

    def resend(self, subscription: QuerySubscription, reason: ResetReason) -> None:
        """Send the whole present result, or the error."""
        group = subscription.group
        if subscription in group.joining:
            return  # it waits for a whole result already
        problem = _not_captured(group) if group.uncaptured else group.error
        if problem is not None:
            subscription.deliver(group.failure(problem, self._flushes.position_text))
        elif group.result is not None:
            subscription.expect(reason)
            subscription.begin()
        else:
            # The result is too large to be cached: execute again.
            subscription.expect(reason)
            group.subscribers.pop(subscription, None)
            group.joining.append(subscription)
            self._want(group, "first")

    async def change_identity(self, subscription: QuerySubscription, identity: Identity) -> None:
        """Move to the group of the new identity, if it is another one."""
        old = subscription.group
        group = self._find(old.query, old.arguments, identity, subscription.owner)
        if group is old or subscription.closed:
            self._release(group)
            return
        self.leave(subscription)
        subscription.group = group
        subscription.expect("access")
        self._join(subscription)
        await subscription.arrived()

    # -------------------------------------------------------------------- changes

    def start(self) -> None:
        self._resources.spawn(self.sweep_for_ever())

    async def prepare(self, flush: Flush) -> None:
        self.flushed(flush.changes)
        if self._executions.can_start:
            moment = FlushMoment(self._flushes.begun, flush.position, flush.written)
            await self._executions.start(flush.export, moment)

    def flushed(self, transactions: Sequence[Transaction]) -> None:
        """Find the groups that the changes of the flush may affect."""
        changes = [change for each in transactions for change in each.changes]
        if not changes:
            return
        flush = self._flushes.begun
        self._flushing = True
        try:
            # Also without groups: a table of a refused query may be captured now.
            self._altered(changes)
            if self._groups:
                self._later_changes.add(flush, changes, since=self._executions.oldest)
                for group in self._watches.touched(changes):
                    self._touch(group, flush)
        except Exception:
            logger.exception("the affected queries are not known: every query is executed again")
            self._touch_every(flush)
        finally:
            self._flushing = False

    def skipped(self, since: Position, until: Position, tables: Collection[Table] | None) -> None:
        """Any row of these tables may have changed."""
        if tables is None:
            self.read_all_again()
            return
        now = datetime.now(UTC)
        changes = tuple(
            Change(0, 0, now, table, "reset") for table in tables if not is_signals(table)
        )
        self.flushed([Transaction(0, changes, self._flushes.progress.position)])

    def _wake(self) -> None:
        """Request a flush to start queries, unless the current flush starts them."""
        if not self._flushing:
            self._flushes.wake()

    def _altered(self, changes: Iterable[Change]) -> None:
        """Forget analyses of statements over tables that were altered."""
        altered = {
            change.table.oid: change.table.id
            for change in changes
            if change.op == "reset"
            or self._shapes.get(change.table.oid, change.table.id) != change.table.id
        }
        if altered:
            self._touch_all(self.analyst.forget(altered))
            self._shapes.update(altered)  # forget once for each alteration

    def _touch(self, group: QueryGroup, flush: int, reason: Reason = "change") -> None:
        group.touched_at = flush
        if group.is_needed:
            self._want(group, reason)
        else:
            self._remove(group)

    def skip_failed(self) -> None:
        self.read_all_again()

    def resync(self) -> None:
        self.restarted()
        self.read_all_again()

    def read_all_again(self) -> None:
        """Changes were lost: any result may be wrong."""
        self._touch_every(self._flushes.begun + 1)

    def _touch_every(self, flush: int) -> None:
        """Every query is executed again, and its statements are analysed again."""
        self.analyst.forget_all()
        for group in self:
            self._touch(group, flush)

    def restarted(self) -> None:
        """The server restarted, and may use transaction ids a second time."""
        for group in self:
            group.since, group.seen = None, None

    # -------------------------------------------------------------------- executions

    def _want(self, group: QueryGroup, reason: Reason) -> None:
        if group.delayed is not None:
            group.delayed.cancel()
            group.delayed = None
        if group.state == "idle":
            group.state, group.reason = "wanted", reason
            self._executions.want(group)
        elif group.state == "wanted" and reason == "change":
            group.reason = reason

    def _finished(self, group: QueryGroup, outcome: ExecutionOutcome) -> None:
        """An execution has ended."""
        group.state = "idle"
        if self._groups.get(group.key) is not group:
            return
        moment = outcome.moment
        try:
            self._take(group, outcome)
        except BaseException:
            # It counts as not executed, also where the database is lost before it is tried again.
            group.forget_sent()
            raise
        touched = group.touched_at > moment.flush
        group.analyses = group.analyses + 1 if outcome.analysed else 0
        if group.error is None and 0 < group.analyses <= _ONCE_MORE_MAX:
            # It is not known whether its tables were captured in its snapshot. Execute once more.
            group.touched_at = self._flushes.begun + 1
        if not group.is_needed:
            self._release(group)
        elif touched:
            self._want(group, "change")
        elif group.touched_at > moment.flush:
            self._want(group, "catalog")
        elif group.waiters:
            self._want(group, "call")
        elif group.error is None and group.analyses:
            # Its statements are different each time: pause, or this would never end.
            self._delay(group, group.analyses - _ONCE_MORE_MAX, "catalog")

    def _take(self, group: QueryGroup, outcome: ExecutionOutcome) -> None:
        group.answered_at = outcome.moment.flush
        group.seen = outcome.seen or group.seen
        self._learn(group, outcome)
        if outcome.error is not None:
            self._failed(group, outcome.error)
        else:
            assert outcome.value is not None
            self._succeeded(group, outcome.value, outcome)

    def _delay(self, group: QueryGroup, times: int, reason: Reason) -> None:
        """Execute it after a pause, which grows with the number of times."""
        pause = retry_pause(times - 1)
        group.delayed = asyncio.get_running_loop().call_later(pause, self._want, group, reason)

    def _learn(self, group: QueryGroup, outcome: ExecutionOutcome) -> None:
        """Store what it read. After a failure, it may have read only a part."""
        reads = tuple(dict.fromkeys(_merged(group, outcome)))
        everything = outcome.everything or (outcome.error is not None and group.everything)
        if reads != group.reads or everything != group.everything:
            group.reads, group.everything = reads, everything
            self._watches.put(group, reads, everything=everything)
            for read in reads:
                self._shapes[read.table.oid] = read.table.id
            later = self._later_changes.after(outcome.moment.flush)
            if later is None or (everything and later) or concerns(reads, later):
                group.touched_at = max(group.touched_at, self._flushes.begun)
        if outcome.error is None:
            group.statements = outcome.statements
            group.uncaptured = outcome.uncaptured

    def _succeeded(self, group: QueryGroup, value: bytes, outcome: ExecutionOutcome) -> None:
        known, moment = group.since is not None, outcome.moment
        differs = group.take(value, moment)
        # A replica may show changes that no flush has read yet.
        if differs and known and outcome.reason == "sweep" and outcome.seen is None:
            self._resources.metrics.reconcile_drift.labels("query").inc()
            logger.warning("%s: query %s; the sweep found it", DRIFT, group.query.name)
        if group.uncaptured:
            self._send_failure(group, _not_captured(group))
        else:
            recovered = group.reported_error is not None
            group.reported_error = None
            if differs or recovered:
                self._hand_out(group, recovered)
        self._resolve(group, Answered(msgspec.Raw(value), str(moment.position)))
        joining, group.joining = group.joining, []
        for subscription in joining:
            if group.is_fresh or moment.flush >= subscription.flush:
                self._begin(subscription)
            else:
                group.joining.append(subscription)  # it waits for the next execution
        if group.size <= self._cache_entry_bytes:
            self._cache(group)
        else:
            self._forget(group)
        group.weigh()

    def _hand_out(self, group: QueryGroup, recovered: bool) -> None:
        subscribers = list(group.subscribers)
        position = group.position(self._flushes.position)
        whole = [each for each in subscribers if not each.delta]
        if whole:
            frame = group.present(False, None, position)
            for subscription in whole:
                subscription.deliver(frame)
            group.cost.sent(frame, len(whole))
        by_row = [each for each in subscribers if each.delta]
        if not by_row:
            group.forget_rows()  # no subscriber has them
        deltas = self._row_deltas(group, position, recovered) if by_row else None
        if deltas is not None:
            for subscription in by_row:
                subscription.deliver(deltas)
            group.cost.sent(deltas, len(by_row))

    def _row_deltas(self, group: QueryGroup, position: str, recovered: bool) -> Frame | None:
        if recovered:
            group.forget_rows()  # subscribers that were sent a failure are sent the rows whole
        try:
            return group.row_deltas(position)
        except HeadwaterError as error:
            return group.failure(error, position)

    def _failed(self, group: QueryGroup, error: HeadwaterError) -> None:
        group.error = error
        # By class: the codes of an application are unlimited.
        self._resources.metrics.query_failures.labels(type(error).code).inc()
        self._resolve(group, error)
        self._send_failure(group, error)
        joining, group.joining = group.joining, []
        for subscription in joining:
            subscription.report(error)
        if group.subscribers:
            group.retries += 1
            self._delay(group, group.retries, "retry")

    def _send_failure(self, group: QueryGroup, error: HeadwaterError) -> None:
        """Send an error once, until it changes."""
        # An unexpected error has another id each time.
        said = (error.code, "" if isinstance(error, FunctionFailed) else str(error))
        if group.subscribers and group.reported_error != said:
            frame = group.failure(error, self._flushes.position_text)
            for subscription in list(group.subscribers):
                subscription.deliver(frame)
        group.reported_error = said

    def _resolve(self, group: QueryGroup, answer: Answered | HeadwaterError) -> None:
        """Answer the calls that waited for this execution."""
        for needed, future in group.waiters:
            if future.done() or needed > group.answered_at:
                continue
            if isinstance(answer, Answered):
                future.set_result(answer)
            else:
                future.set_exception(answer)
        group.waiters = [each for each in group.waiters if not each[1].done()]

    # -------------------------------------------------------------------- the cache

    def _cache(self, group: QueryGroup) -> None:
        """Cache its result, and drop the results that were used longest ago."""
        self._cached_bytes += group.size - self._cached.pop(group, 0)
        self._cached[group] = group.size
        while self._cached_bytes > self._cache_bytes and len(self._cached) > 1:
            oldest = next(iter(self._cached))
            if oldest is group:
                break
            self._forget(oldest)

    def _forget(self, group: QueryGroup) -> None:
        """Drop its result; and the group, if it is not needed."""
        self._cached_bytes -= self._cached.pop(group, 0)
        group.forget_result()
        group.weigh()
        self._release(group)

    def _release(self, group: QueryGroup) -> None:
        """Remove a group that is not needed and has no result."""
        group.waiters = [each for each in group.waiters if not each[1].done()]
        if group.is_needed or self._groups.get(group.key) is not group:
            return
        if not group.has_answer:
            self._remove(group)

    def _remove(self, group: QueryGroup) -> None:
        if group.delayed is not None:
            group.delayed.cancel()
        self._groups.pop(group.key, None)
        self._watches.remove(group)
        self._cached_bytes -= self._cached.pop(group, 0)
        if group.holding is not None:
            group.holding.close()
        self._resources.metrics.query_groups.set(len(self._groups))

    # -------------------------------------------------------------------- rechecks

    async def sweep_for_ever(self) -> None:
        """Execute every subscribed query once a period, to find and repair drift."""
        while True:
            groups = [group for group in self if group.subscribers]
            for group in groups:
                await asyncio.sleep(self._sweep_seconds / len(groups))
                if group.subscribers:
                    self._resources.metrics.reconcile_checks.labels("query").inc()
                    self._want(group, "sweep")
            if not groups:
                await asyncio.sleep(min(self._sweep_seconds, 1.0))

    async def recheck(self, seconds: float = 0.0) -> None:
        """Check what queries depend on beside rows: views, functions, types, policies, roles,
        settings. Also close idle connections."""
        self._executions.close_idle()
        if await self.analyst.settings_changed(self._executions.users):
            self._executions.renew()
            for group in self:
                self._touch(group, self._flushes.begun + 1, "catalog")
        statements = await self.analyst.recheck()
        if statements:
            self._executions.renew()
        self._touch_all(statements)

    def _touch_all(self, statements: set[Statement]) -> None:
        """Execute the queries with these statements again: they may read something else now."""
        for group in self if statements else ():
            if not statements.isdisjoint(group.statements):
                self._touch(group, self._flushes.begun + 1, "catalog")

    def lost(self) -> None:
        """The database cannot be reached. Running queries are executed again later. Subscriptions
        that wait for a first result are refused."""
        self._executions.restart()
        for group in self:
            group.state = "idle"
            self._refuse(group)
            if group.joining or (group.is_needed and not group.is_fresh):
                self._want(group, "retry")

    def _refuse(self, group: QueryGroup) -> None:
        error = self._flushes.unavailable()
        for _, future in group.waiters:
            if not future.done():
                future.set_exception(error)
        group.waiters = []
        for subscription in list(group.joining):
            if not subscription.begun:
                subscription.report(error)

    async def close(self) -> None:
        for group in self:
            if group.delayed is not None:
                group.delayed.cancel()
            self._refuse(group)
        await self._executions.close()
        await self.analyst.close()


class _LaterChanges:
    """The changes of flushes since the oldest running execution."""

    def __init__(self) -> None:
        self._flushes: deque[tuple[int, list[Change]]] = deque()
        self._count = 0
        self._dropped = 0

    def add(self, flush: int, changes: list[Change], *, since: int | None) -> None:
        """`since` is the flush of the oldest running execution; None if there is none."""
        while self._flushes and (since is None or self._flushes[0][0] <= since):
            self._drop()
        if since is None:
            return
        self._flushes.append((flush, changes))
        self._count += len(changes)
        while self._count > _QUERY_LATER_CHANGES_MAX:
            self._dropped = self._flushes[0][0]
            self._drop()

    def _drop(self) -> None:
        _, changes = self._flushes.popleft()
        self._count -= len(changes)

    def after(self, flush: int) -> list[Change] | None:
        """The changes of later flushes; None if there were too many to store."""
        if flush < self._dropped:
            return None
        return [change for number, each in self._flushes if number > flush for change in each]


def _merged(group: QueryGroup, outcome: ExecutionOutcome) -> Iterable[Read]:
    """What it reads. After a failure, an execution may have read only a part."""
    return outcome.reads if outcome.error is None else (*group.reads, *outcome.reads)


def _not_captured(group: QueryGroup) -> CaptureError:
    names = ", ".join(group.uncaptured)
    if any(name.endswith(FEED_ONLY) for name in group.uncaptured):
        return CaptureError(
            f"query {group.query.name} reads {names}, whose rows are not stored",
            hint="Follow the changes of a feed-only source with a change feed, or remove the source"
            " and declare it without feed_only.",
        )
    return CaptureError(
        f"query {group.query.name} reads {names}, whose changes are not captured",
        hint=f"Tables are captured with headwater enable {group.uncaptured[0]}, and mirrors of"
        " sources when they are copied (headwater source list); a query over anything else can be"
        " called, not followed.",
    )
