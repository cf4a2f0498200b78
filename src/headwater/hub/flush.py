"""One flush: what is new in the log, taken to every view it touches, in one database snapshot.

Read the log; see which views it touches; lend the snapshot to openings; ask what row-level security
hides; apply; ask what memory cannot know; hand the frames out; commit. Everything between the first
change applied and the last frame handed out is one step for whoever joins a view: nobody sees a
state without its position. A view whose questions fail or take too long is read again beside the
flush, and no other is concerned.

Whatever fails in a step, each view that it touched has either handed its frame to all subscribers
or is read again. A flush that fails before its step begins, for a reason that was not foreseen,
would fail again: the next one leaps over the same changes, as over a backlog.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import psycopg
from opentelemetry import trace

from headwater.database import Connection
from headwater.errors import HeadwaterError
from headwater.hub.group import Moment
from headwater.hub.live import LiveSubscription, LiveView, Opening, logger
from headwater.hub.questions import Question, allow_any_plan, ask_in_flush
from headwater.hub.steps import Step
from headwater.hub.subscriber import not_taken
from headwater.hub.visibility import guarded, hide
from headwater.live.needs import Need, Refill
from headwater.live.streamed import Streamed
from headwater.live.window import Window
from headwater.log.follow import is_lost
from headwater.log.progress import flush as flush_wal
from headwater.log.read import Batch, LogReader
from headwater.log.signals import is_signals
from headwater.model import Change, Position, Transaction
from headwater.protocol import Frame

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
            await self._hub.reconciler.run(self._connection, self._allow_any_plan)
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
        if any(guarded(step.view) for step in steps.values()):
            await self._allow_any_plan()
            asked = await hide(self._connection, steps.values(), datetime.now(UTC))
            hub.metrics.questions.labels("visibility").inc(asked)
        if hub.feeds:
            await hub.feeds.meet({change.table for each in new for change in each.changes})
        handout = await hub.topics.prepare(everything, self._connection, self._allow_any_plan)
        hub.durable_before = hub.progress.durable
        hub.progress.advance(batch)
        hub.begin_step(batch.position)
        try:
            hub.feeds.flushed(new)
            hub.topics.hand_out(handout)
            for step in steps.values():
                self._apply(step)
            await self._settle(steps.values())
            self._emit(steps.values())
        except BaseException:
            hub.lives.read_all_again(step.view for step in steps.values() if not step.done)
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

    def _apply(self, step: Step) -> None:
        if step.error is None:
            began = time.perf_counter()
            self._try(step, step.apply)
            if step.changes:
                step.view.cost.ran(time.perf_counter() - began)

    def _try(self, step: Step, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._fault(step, error)

    def _fault(self, step: Step, error: Exception) -> None:
        """A fault in one view harms no other: it is read again."""
        logger.error("view %d cannot take a flush: it is read again", step.view.id, exc_info=error)
        step.error = error

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
            cursor = await self._connection.execute("select pg_export_snapshot()")
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
        for opening in hub.lives.take_arrived():
            steps[opening] = Step(opening.view, opening)
        for view in hub.lives.take_rechecks():
            if view.live and view not in steps:
                steps[view] = Step(view)
        return steps

    def _take_to(self, view: LiveView, changes: list[Change], steps: dict[object, Step]) -> None:
        if any(change.op == "reset" for change in changes):
            steps.pop(view, None)
            self._hub.lives.read_again(view, "table")
            return
        for opening in view.openings:
            if opening.started and not opening.keep(changes):
                self._hub.lives.begin_again(opening)
        if view.live:
            step = steps.get(view)
            if step is None:
                step = steps[view] = Step(view)
            step.add(changes)

    # -------------------------------------------------------------------- asking

    async def _settle(self, steps: Iterable[Step]) -> None:
        """Ask what the states need until they need nothing."""
        asking = [step for step in steps if step.need is not None]
        if asking:
            await self._allow_any_plan()
        for step in asking:
            if isinstance(step.state, Streamed) and isinstance(step.need, Refill):
                # All of its members, page by page: nobody else shall wait for that.
                step.error = psycopg.errors.QueryCanceled("to be read beside the flush")
        asking = [step for step in asking if step.need is not None]
        while asking:
            asked = list(self._questions(asking))
            questions = [question for _, _, question in asked]
            answers = await ask_in_flush(self._connection, questions)
            for (step, need, _), answer in zip(asked, answers, strict=True):
                self._hub.metrics.questions.labels(type(need).__name__.lower()).inc()
                if isinstance(answer, Exception):
                    step.error = answer
                else:
                    self._try(step, partial(step.answer, need, answer))
            asking = [step for step in asking if step.need is not None]

    def _questions(self, asking: Iterable[Step]) -> Iterator[tuple[Step, Need, Question]]:
        for step in asking:
            need, view = step.need, step.view
            assert need is not None
            try:
                yield step, need, Question.of_need(view.known, view.query, need, view.scope)
            except Exception as error:
                self._fault(step, error)

    # -------------------------------------------------------------------- who is sent what

    def _emit(self, steps: Iterable[Step]) -> None:
        hub = self._hub
        frames = [
            (step, frame)
            for step in steps
            if step.error is None and step.opening is None and (frame := self._frame(step))
        ]
        hub.emitting = True
        for step, frame in frames:
            fan_out(step.view.subscribers, frame, hub.flushes)
            step.view.cost.sent(frame, len(step.view.subscribers))
            if not step.view.removed:
                hub.lives.recents.add(step.view.recent, frame, hub.position_text)
            step.done = True
        for step in steps:
            if step.error is None and step.opening is not None:
                self._try(step, partial(self._finish, step, step.opening))
            if step.error is not None:
                hub.lives.step_failed(step.view, step.error)
            step.done = True
        for step in steps:
            hub.lives.welcome(step.view)
        hub.lives.catch_up_laggards()

    def _frame(self, step: Step) -> Frame | None:
        """What its subscribers are sent, encoded; None for nothing, or for what cannot be sent."""
        at = step.at or datetime.now(UTC)
        try:
            frame = step.view.frame(self._hub.position_text, at, step.deltas)
            if frame is not None:
                _ = frame.json
            return frame
        except Exception as error:
            self._fault(step, error)
            return None

    def _finish(self, step: Step, opening: Opening) -> None:
        """A result is there, true as of this flush."""
        hub, view = self._hub, step.view
        if opening not in view.openings:
            return
        view.openings.remove(opening)
        if opening.quiet and view.live:
            hub.lives.compare(view, step.state)
            return
        if isinstance(step.state, Window):
            hub.lives.make_live(view, step.state)
            return
        frame = self._frame(step)
        if step.error is not None:
            return
        if not view.live:
            view.take(step.state)
        elif view.differs(step.state):
            # Rights changed meanwhile: those before see other rows than those who come now.
            if view.subscribers:
                hub.lives.read_again(view, "access")
            hub.lives.recents.clear(view.recent)
            view.take(step.state)
        for subscription in list(opening.told):
            if not subscription.closed:
                view.attach(subscription)
                if frame is None:
                    subscription.done()
                else:
                    subscription.hand(frame)


def _changes_of(transactions: Iterable[Transaction]) -> Iterator[Transaction]:
    """Without the signals, which concern topics only."""
    for transaction in transactions:
        if not any(is_signals(change.table) for change in transaction.changes):
            yield transaction
            continue
        changes = tuple(each for each in transaction.changes if not is_signals(each.table))
        if changes:
            yield msgspec.structs.replace(transaction, changes=changes)


def fan_out(subscribers: Iterable[LiveSubscription], frame: Frame, flush: int) -> None:
    """Hand the same frame to everybody but those who were told out of turn."""
    for subscription in tuple(subscribers):
        if subscription.caught_up < flush and not subscription.closed:
            try:
                subscription.deliver(frame)
            except Exception:
                logger.exception(
                    "a subscriber of view %d failed to take a frame", subscription.view
                )
                subscription.fail(not_taken())


def _is_foreseen(error: Exception) -> bool:
    """Whether trying the same flush again is right: the database may answer then."""
    if isinstance(error, psycopg.Error):
        return is_lost(error)
    return isinstance(error, HeadwaterError)
