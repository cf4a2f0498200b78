"""Live queries as a part of the hub: updates every live view in a flush.

Rows that row-level security may hide, and rows that are not in memory, are read beside the flush,
in its snapshot (`background`). The flush waits a short time for the answers. Views whose answers
come later lag, and no other view waits for them. Views that take long in memory also lag, when the
flush has spent its time on such views: their changes are applied with a later flush. When a step
fails, each of its views has either sent its frame to all subscribers or is read again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import psycopg

from headwater import limits
from headwater.hub.flush_state import FlushState
from headwater.hub.live_views.background import BackgroundQueries, Unit, units_of
from headwater.hub.live_views.delivery import Delivery, Flushed
from headwater.hub.live_views.initial_snapshots import InitialSnapshots
from headwater.hub.live_views.recheck import recheck
from headwater.hub.live_views.registry import LiveViews
from headwater.hub.live_views.steps import ViewStep
from headwater.hub.live_views.view import LiveView
from headwater.hub.live_views.visibility import guarded
from headwater.hub.part import Flush, Part
from headwater.hub.resources import Resources
from headwater.live.query import Rules
from headwater.model import Change, Position, Table, Transaction

_FLUSH_APPLY_SECONDS = 0.05
"""How long a flush applies changes to slow live queries, for example patterns over long texts.
After that, other slow ones, and new ones over the same table, lag until a later flush."""


class LivePart(Part):
    """The hub and the gateway use `views`. `snapshots` and `background` read from the database; a
    unit test passes others."""

    def __init__(
        self,
        resources: Resources,
        flushes: FlushState,
        rules: Mapping[str, Rules],
        *,
        snapshots: Callable[..., InitialSnapshots] = InitialSnapshots,
        background: Callable[..., BackgroundQueries] = BackgroundQueries,
    ) -> None:
        self._resources = resources
        self._flushes = flushes
        self.views = LiveViews(resources, flushes, rules, self._expect_questions, snapshots)
        self._delivery = Delivery(self.views)
        self.background = background(resources, flushes, self.views, self._delivery)
        self._steps: dict[object, ViewStep] = {}

    def _expect_questions(self, view: LiveView) -> None:
        self.background.expect(view)

    # -------------------------------------------------------------------- a flush

    async def prepare(self, flush: Flush) -> None:
        self._steps = self._route(flush.changes)
        flush.touched += len(self._steps)
        if self.views.snapshots.can_start:
            await self.views.snapshots.start(flush.export, flush.position)

    async def send(self, flush: Flush) -> None:
        """Update all views: beside the flush those that need the database, and in the flush the
        others and those whose answers come soon."""
        flushed, began = (
            Flushed(flush.number, flush.position, str(flush.position)),
            time.monotonic(),
        )
        ready, asking = self._apply_all(units_of(self._steps.values()))
        left = await self.background.start(asking, flush.export, flushed) if asking else []
        await self._settle(left, flush)
        await self.background.wait(
            flushed, limits.FLUSH_BUDGET_SECONDS - (time.monotonic() - began)
        )
        self.views.sending = True
        try:
            for unit in (*ready, *left):
                self.views.set_lag(unit.view, None)
            self._delivery.deliver(
                [step for unit in (*ready, *left) for step in unit.steps], flushed
            )
            self.views.resend_overflowed()
        finally:
            self.views.sending = False

    def _apply_all(self, units: Iterable[Unit]) -> tuple[list[Unit], list[Unit]]:
        """The units that are ready to be delivered, and those that need the database first."""
        ready, asking = list[Unit](), list[Unit]()
        slow_tables, spent = set[int](), 0.0
        for unit in sorted(units, key=_waits_since):
            if not guarded(unit.view):
                table, cost = unit.view.known.table.id, unit.view.cost
                if spent > _FLUSH_APPLY_SECONDS and cost.is_slow(at_first=table in slow_tables):
                    self.background.put_off(unit)
                    self._flushes.wake()
                    continue
                if took := self._apply(unit):
                    slow_tables.add(table)
                    spent += took
                if all(step.need is None for step in unit.steps):
                    ready.append(unit)
                    continue
            asking.append(unit)
        return ready, asking

    def _apply(self, unit: Unit) -> float:
        """Returns how long this took; 0 if it was quick."""
        began = time.thread_time()
        for step in unit.steps:
            self._delivery.apply(step)
        took = time.thread_time() - began
        return took if took > limits.APPLY_QUICK_SECONDS else 0.0

    async def _settle(self, units: Iterable[Unit], flush: Flush) -> None:
        """Read over the connection of the flush, within its budget: no other one is free."""
        until = time.monotonic() + limits.FLUSH_BUDGET_SECONDS
        for step in (step for unit in units for step in unit.steps if step.need is not None):
            seconds = until - time.monotonic()
            if step.view.scope is not None or seconds <= 0:
                step.error = psycopg.errors.QueryCanceled("to be read beside the flush")
                continue
            await flush.allow_any_plan()
            await flush.connection.execute(_timeout(seconds))
            await self.background.settle(flush.connection, [step])

    def unsent(self, flush: Flush) -> None:
        self.views.read_all_again(step.view for step in self._steps.values() if not step.done)

    def ended(self, flush: Flush) -> None:
        self._steps = {}

    # -------------------------------------------------------------------- routing

    def _route(self, new: Iterable[Transaction]) -> dict[object, ViewStep]:
        """A step for every view that changes, every first result that has arrived, and every
        guarded view that new subscribers wait for."""
        views, steps = self.views, dict[object, ViewStep]()
        views.reshape({change.table for each in new for change in each.changes})
        for transaction in new:
            for view, changes in views.views.touched(transaction.changes).items():
                self._take_to(view, changes, steps)
        for view, waiting in views.take_lagging().items():
            steps[view] = ViewStep(view)
            steps[view].changes = waiting
        for snapshot in views.take_arrived():
            steps[snapshot] = ViewStep(snapshot.view, snapshot)
        for view in views.take_rechecks():
            if view.live and view not in steps:
                steps[view] = ViewStep(view)
        views.end_idle_lags({step.view for step in steps.values()})
        return steps

    def _take_to(
        self, view: LiveView, changes: list[Change], steps: dict[object, ViewStep]
    ) -> None:
        if any(change.op == "reset" for change in changes):
            steps.pop(view, None)
            self.views.read_again(view, "table")
            return
        for snapshot in list(view.snapshots):  # `begin_again` removes it
            if snapshot.started and not snapshot.store(changes):
                self.views.begin_again(snapshot)
        if view.live and view.lag is not None:
            if not view.lag.add(changes):
                self.views.read_again(view, "resync")
        elif view.live:
            step = steps.get(view)
            if step is None:
                step = steps[view] = ViewStep(view)
            step.add(changes)

    # -------------------------------------------------------------------- the rest of the contract

    def sweep(self) -> None:
        self.views.sweep()
        self.background.sweep()

    def skipped(self, since: Position, until: Position, tables: Collection[Table] | None) -> None:
        self.views.skipped(tables)

    def skip_failed(self) -> None:
        self.views.reopen_all()

    def resync(self) -> None:
        self.views.read_all_again()

    def lost(self) -> None:
        self.views.lost()

    def restarted(self) -> None:
        self.views.forget_positions()

    async def recheck(self, seconds: float) -> None:
        await recheck(self.views, self._resources.tables, seconds)

    async def close(self) -> None:
        await self.views.close()
        await self.background.close()


def _waits_since(unit: Unit) -> float:
    """The sort key of units: views that lag come first, in the order in which they began to lag."""
    return math.inf if unit.view.lag is None else unit.view.lag.began


def _timeout(seconds: float) -> bytes:
    return f"set local statement_timeout = '{max(1, int(seconds * 1000))}ms'".encode()
