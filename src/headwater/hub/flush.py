"""One flush: what is new in the log, taken to every view it touches, in one database snapshot.

Read the log; see which views it touches; lend the snapshot to openings; apply; hand the frames out;
commit. What row-level security hides, and what memory cannot know, is asked beside the flush, in
its snapshot (`side_jobs`). The flush waits a moment for the answers; views whose answers come later
lag, and no other is concerned. So do views that take long in memory, once some of them have had
their part of a flush: they take their changes with a later one. Everything between the first change
applied and the last frame handed out is one step for clients that join a view: no client sees a
state without its position.

Whatever fails in a step, each view that it touched has either handed its frame to all subscribers
or is read again. A flush that fails before its step begins, for a reason that was not foreseen,
would fail again: the next one leaps over the same changes, as over a backlog.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
import psycopg
from opentelemetry import trace

from headwater import limits
from headwater.database import Connection
from headwater.errors import HeadwaterError
from headwater.hub.delivery import Flushed
from headwater.hub.group import Moment
from headwater.hub.live import LiveView
from headwater.hub.questions import allow_any_plan
from headwater.hub.side_jobs import Unit, units_of
from headwater.hub.steps import Step
from headwater.hub.visibility import guarded
from headwater.log.follow import is_lost
from headwater.log.progress import flush as flush_wal
from headwater.log.read import Batch, LogReader
from headwater.log.signals import is_signals
from headwater.model import Change, Position, Transaction

if TYPE_CHECKING:
    from headwater.hub.hub import Hub


tracer = trace.get_tracer("headwater")


class Flusher:
    """Flushes over one connection, for as long as it lasts."""

    def __init__(self, hub: Hub, connection: Connection, reader: LogReader) -> None:
        self._hub = hub
        self._connection = connection
        self._reader = reader
        self._any_plan = False
        self._snapshot: str | None = None

    async def flush(self) -> bool:
        """Returns whether anything was written at all since the last time."""
        self._any_plan = False
        self._snapshot = None
        self._hub.begun += 1
        since = self._hub.progress.position
        await self._connection.execute("begin isolation level repeatable read, read only")
        try:
            return await self._flush(since)
        except Exception as error:
            if not _is_foreseen(error):
                self._hub.faulted_at = since
            raise

    async def _flush(self, since: Position) -> bool:
        started = time.perf_counter()
        batch = await self._read(since)
        if batch.backlog:
            await self._connection.execute("rollback")
            await self._leap(since, batch.position)
        else:
            await self._take(batch, started)
            await self._hub.reconciler.run(self._connection, self._allow_any_plan, self._export)
            await self._connection.execute("commit")
        return batch.news

    async def _read(self, since: Position) -> Batch:
        try:
            if since != self._hub.faulted_at:
                return await self._reader.read(self._connection, since)
        except psycopg.errors.InFailedSqlTransaction:
            # The rows of this read were too large to be sent at once: a backlog, too.
            await self._connection.execute("rollback")
        now = await self._reader.now(self._connection)
        return Batch((), now, 0, 0, news=True, backlog=True)

    async def _leap(self, since: Position, position: Position) -> None:
        """Go on from a later position; what rests on the tables that changed is read again."""
        await flush_wal(self._connection)
        tables = await self._reader.tables_since(self._connection, since)
        if tables is not None:
            await self._hub.feeds.meet(tables)
        self._hub.leap(position, tables)

    async def _take(self, batch: Batch, started: float) -> None:
        hub, since = self._hub, self._hub.progress.position
        everything = hub.progress.new(batch)
        new = list(_changes_of(everything))
        steps = self._route(new)
        hub.groups.flushed(new)
        await self._lend(batch)
        if hub.feeds:
            await hub.feeds.meet({change.table for each in new for change in each.changes})
        handout = await hub.topics.prepare(everything, self._connection, self._allow_any_plan)
        hub.durable_before = hub.progress.durable
        hub.progress.advance(batch)
        hub.begin_step(batch.position)
        try:
            hub.feeds.flushed(new)
            hub.topics.hand_out(handout)
            flushed = Flushed(hub.flushes, batch.position, hub.position_text)
            await self._take_steps(steps.values(), flushed)
        except BaseException:
            hub.lives.read_all_again(step.view for step in steps.values() if not step.done)
            hub.feeds.read_unsent()
            hub.topics.read_unsent(handout)
            raise
        finally:
            hub.end_step()
            hub.change_events.flushed(new, since, batch.position)
        if everything:
            took = time.perf_counter() - started
            self._measure(everything[-1].at, new, len(steps), took)

    async def _lend(self, batch: Batch) -> None:
        """Let what is wanted be read in the snapshot of this flush, beside it."""
        hub = self._hub
        if hub.lives.openings.can_start:
            await hub.lives.openings.start(self._export, batch.position)
        if hub.groups.can_start:
            moment = Moment(hub.begun, batch.position, batch.written)
            await hub.groups.start(self._export, moment)

    async def _take_steps(self, steps: Iterable[Step], flushed: Flushed) -> None:
        """Take every view to this flush: those that must ask beside it, and within it those whose
        answers come soon."""
        hub, began = self._hub, time.monotonic()
        ready, asking = list[Unit](), list[Unit]()
        slow_tables, spent = set[int](), 0.0
        for unit in sorted(units_of(steps), key=_waits_since):
            if not guarded(unit.view):
                table, cost = unit.view.known.table.id, unit.view.cost
                if spent > limits.FLUSH_APPLY_SECONDS and cost.is_slow(
                    at_first=table in slow_tables
                ):
                    hub.side_jobs.put_off(unit)
                    hub.wake()
                    continue
                if took := self._apply(unit):
                    slow_tables.add(table)
                    spent += took
                if all(step.need is None for step in unit.steps):
                    ready.append(unit)
                    continue
            asking.append(unit)
        left = await hub.side_jobs.start(asking, self._export, flushed) if asking else []
        await self._settle(left)
        await hub.side_jobs.wait(flushed, limits.FLUSH_BUDGET_SECONDS - (time.monotonic() - began))
        hub.emitting = True
        for unit in (*ready, *left):
            hub.lives.set_lag(unit.view, None)
        hub.delivery.deliver([step for unit in (*ready, *left) for step in unit.steps], flushed)
        hub.lives.catch_up_laggards()

    def _apply(self, unit: Unit) -> float:
        """Returns how long the loop was busy with it; 0 for a moment."""
        began = time.thread_time()
        for step in unit.steps:
            self._hub.delivery.apply(step)
        took = time.thread_time() - began
        return took if took > limits.APPLY_QUICK_SECONDS else 0.0

    async def _settle(self, units: Iterable[Unit]) -> None:
        """Without a free connection beside the flush, for no longer than its budget."""
        until = time.monotonic() + limits.FLUSH_BUDGET_SECONDS
        for step in (step for unit in units for step in unit.steps if step.need is not None):
            seconds = until - time.monotonic()
            if step.view.scope is not None or seconds <= 0:
                step.error = psycopg.errors.QueryCanceled("to be read beside the flush")
                continue
            await self._allow_any_plan()
            await self._connection.execute(_timeout(seconds))
            await self._hub.side_jobs.settle(self._connection, [step])

    def _measure(self, written: datetime, new: list[Transaction], views: int, took: float) -> None:
        metrics, now = self._hub.metrics, time.time()
        # What Headwater itself writes down is not what anybody means by changes.
        changes = sum(not each.table.is_system for one in new for each in one.changes)
        metrics.flushes.inc()
        metrics.changes.inc(changes)
        metrics.flush_seconds.observe(took)
        metrics.lag_seconds.observe(max(0.0, now - written.timestamp()))
        attributes = {"headwater.changes": changes, "headwater.views": views}
        began = int((now - took) * 1e9)
        tracer.start_span("headwater.flush", attributes=attributes, start_time=began).end()

    async def _export(self) -> str:
        """Lend the snapshot to side connections, until the flush ends."""
        if self._snapshot is None:
            cursor = await self._connection.execute("select pg_catalog.pg_export_snapshot()")
            row = await cursor.fetchone()
            assert row is not None
            self._snapshot = str(row[0])
        return self._snapshot

    async def _allow_any_plan(self) -> None:
        if not self._any_plan:
            self._any_plan = True
            await allow_any_plan(self._connection)

    # -------------------------------------------------------------------- what it touches

    def _route(self, new: list[Transaction]) -> dict[object, Step]:
        """A step for every view that changes, every opening that has arrived, and every guarded
        view that somebody new waits for."""
        hub, steps = self._hub, dict[object, Step]()
        hub.lives.reshape({change.table for each in new for change in each.changes})
        for transaction in new:
            for view, changes in hub.lives.views.touched(transaction.changes).items():
                self._take_to(view, changes, steps)
        for view, waiting in hub.lives.take_lagging().items():
            steps[view] = Step(view)
            steps[view].changes = waiting
        for opening in hub.lives.take_arrived():
            steps[opening] = Step(opening.view, opening)
        for view in hub.lives.take_rechecks():
            if view.live and view not in steps:
                steps[view] = Step(view)
        hub.lives.end_idle_lags({step.view for step in steps.values()})
        return steps

    def _take_to(self, view: LiveView, changes: list[Change], steps: dict[object, Step]) -> None:
        if any(change.op == "reset" for change in changes):
            steps.pop(view, None)
            self._hub.lives.read_again(view, "table")
            return
        for opening in list(view.openings):  # one that begins again takes itself out
            if opening.started and not opening.keep(changes):
                self._hub.lives.begin_again(opening)
        if view.live and view.lag is not None:
            if not view.lag.add(changes):
                self._hub.lives.read_again(view, "resync")
        elif view.live:
            step = steps.get(view)
            if step is None:
                step = steps[view] = Step(view)
            step.add(changes)


def _changes_of(transactions: Iterable[Transaction]) -> Iterator[Transaction]:
    """Without the signals, which concern topics only."""
    for transaction in transactions:
        if not any(is_signals(change.table) for change in transaction.changes):
            yield transaction
            continue
        changes = tuple(each for each in transaction.changes if not is_signals(each.table))
        if changes:
            yield msgspec.structs.replace(transaction, changes=changes)


def _waits_since(unit: Unit) -> float:
    """Views that were put off come first, and those that lag for longest before the others."""
    return math.inf if unit.view.lag is None else unit.view.lag.began


def _timeout(seconds: float) -> bytes:
    return f"set local statement_timeout = '{max(1, int(seconds * 1000))}ms'".encode()


def _is_foreseen(error: Exception) -> bool:
    """Whether trying the same flush again is right: the database may answer then."""
    if isinstance(error, psycopg.Error):
        return is_lost(error)
    return isinstance(error, HeadwaterError)
