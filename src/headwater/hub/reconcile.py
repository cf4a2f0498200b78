"""Compares what is served with the database: a net under live queries and topics.

A view that has drifted from its table stays wrong until the row changes again. So every view is
compared once in an interval, a few in each flush, in the snapshot of that flush and after its
changes were applied: both sides are as of one position, and any difference is a defect. It is
repaired (a `reset` with the reason `drift`, the rows of a topic sent again), counted and logged.

A window is read as its opening reads it; a streamed query holds no rows, and its members are
compared. What takes too long for a flush, or has too many rows, is read beside the flushes as an
opening is, one at a time. Of a topic that is derived from a table, the last rows that were sent are
read again; any other topic sends what it is told to. Reactive queries have their sweep (`groups`).
Where row-level security decides, rows may come and go without a trace in the log, so only a row
that is there with other values has drifted; the rest is `recheck`'s.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import psycopg

from headwater import limits
from headwater.database import Connection
from headwater.hub.live import LiveView
from headwater.hub.questions import Question, ask_in_flush, lost
from headwater.hub.topic import News, TopicView
from headwater.live.comparison import Difference, State
from headwater.live.view import new_state
from headwater.model import Key, Row, Table
from headwater.protocol import Upsert

if TYPE_CHECKING:
    from headwater.hub.hub import Hub

logger = logging.getLogger(__name__)

DRIFT = "what was sent is not what the database has"
"""How every message of the log about drift begins."""

Served: TypeAlias = LiveView | TopicView


class Reconciler:
    """Compares a few views in every flush. `seconds` is the interval: None for never, 0 for all
    that fit into each flush."""

    def __init__(self, hub: Hub, seconds: float | None) -> None:
        self._hub = hub
        self.seconds = seconds
        self._round: deque[Served] = deque()
        """Those that are yet to be compared in this interval."""
        self._share = 0.0
        """How many of them are due, with what is left of the last flush."""
        self._at = time.monotonic()
        self._paused_until = 0.0
        """After a question that took long, others shall not wait for the next one at once."""
        self._slow: set[int] = set()
        """Views that did not fit into a flush."""
        self._beside: LiveView | None = None
        """The one that is being read beside the flushes."""

    async def run(
        self, connection: Connection, allow_any_plan: Prepare, export: Callable[[], Awaitable[str]]
    ) -> None:
        """Compare what is due, in the snapshot of the flush that was handed out. A fault here harms
        nobody else."""
        if time.monotonic() < self._paused_until:
            return
        due = self._due()
        if not due:
            return
        await allow_any_plan()
        await connection.execute(_TIMEOUT)
        seconds = limits.RECONCILE_QUESTION_SECONDS
        if any(isinstance(each, LiveView) and each.scope is not None for each in due):
            async with self._hub.side_jobs.scoped_connection(export, seconds) as scoped:
                await self._compare_all(due, connection, scoped)
        else:
            await self._compare_all(due, connection, None)

    async def _compare_all(
        self, due: deque[Served], connection: Connection, scoped: Connection | None
    ) -> None:
        """`scoped` asks as users' roles; without one, their views wait for another flush."""
        later = list[Served]()
        captured = await _captured(connection, set(map(self._oid, due)))
        rows, until = limits.RECONCILE_ROWS_MAX, time.monotonic() + limits.RECONCILE_SECONDS
        while due and rows > 0 and self._paused_until < time.monotonic() < until:
            served = due.popleft()
            try:
                if self._oid(served) not in captured:
                    continue
                if isinstance(served, TopicView):
                    rows -= await self._compare_topic(connection, served)
                elif served.scope is None:
                    rows -= await self._compare_view(connection, connection, served)
                elif scoped is None or scoped.closed:
                    later.append(served)
                elif not self._hub.side_jobs.is_slow(served):
                    # What is slow is left to `recheck`, which reads it beside the flushes.
                    rows -= await self._compare_view(connection, scoped, served)
            except psycopg.Error as error:
                if lost(error) and (isinstance(served, TopicView) or served.scope is None):
                    raise
                self._skip("error")
            except Exception:
                logger.exception("view %d cannot be compared", served.id)
                self._skip("error")
        self._round.extendleft(reversed(due))
        self._round.extend(later)

    def drifted(self, view: LiveView, found: Difference) -> None:
        """Count and log a difference that is being repaired."""
        self._hub.metrics.reconcile_drift.labels("live").inc()
        ours, theirs = _differing(found.ours, found.theirs, secret=view.known.secured)
        logger.error(
            "%s: view %d of %s, key %s: sent %s, the database has %s; it is sent again",
            DRIFT, view.id, view.query.table.label, _cut(found.key), ours, theirs,
        )  # fmt: skip

    def _oid(self, served: Served) -> int:
        """Of the table that it shows; 0 for a topic that is derived from none."""
        if isinstance(served, LiveView):
            return served.known.table.oid
        return self._hub.topics.table_of(served).oid if served.definition.table else 0

    # -------------------------------------------------------------------- what is due

    def _due(self) -> deque[Served]:
        """The next ones. Over the interval each comes once."""
        if self.seconds is None:
            return deque()
        count = len(self._hub.lives.views) + len(self._hub.topics)
        now = time.monotonic()
        passed, self._at = now - self._at, now
        self._share += count if not self.seconds else passed * count / self.seconds
        self._share = min(self._share, count, limits.RECONCILE_VIEWS_MAX)
        due: deque[Served] = deque()
        while self._share >= 1.0:
            if not self._round:
                if due:
                    break  # no one twice
                self._begin_round()
            self._share -= 1.0
            if not self._round:
                break
            due.append(self._round.popleft())
        return due

    def _begin_round(self) -> None:
        self._round.extend(self._hub.lives)
        self._round.extend(self._hub.topics)
        self._slow &= {served.id for served in self._round}

    # -------------------------------------------------------------------- live queries

    async def _compare_view(
        self, connection: Connection, asking: Connection, view: LiveView
    ) -> int:
        """Read it and compare; how many rows that took."""
        if not view.live or view.removed or view.lag is not None or view.state.needs:
            return 0  # it is being read or lags, or its subscribers have gone
        if view.id in self._slow or view.held > limits.RECONCILE_ROWS_MAX:
            self._read_beside(view)
            return 0
        state, rows = new_state(view.query), 0
        while needs := state.needs:
            question = Question.of_need(view.known, view.query, needs[0], view.scope)
            (answer,) = await ask_in_flush(asking, [question])
            self._hub.metrics.questions.labels("reconcile").inc()
            if isinstance(answer, Exception):
                self._failed(view, answer)
                return rows
            rows += len(answer)
            state.answer(needs[0], answer)
            if rows > 2 * limits.RECONCILE_ROWS_MAX:
                self._slow.add(view.id)
                return rows
        if await _was_read(connection, view.known.table):
            self._compare(view, state)
        return rows

    def _compare(self, view: LiveView, state: State) -> None:
        # It may have been left meanwhile, or have begun to lag.
        if view.live and not view.removed and view.lag is None:
            self._hub.metrics.reconcile_checks.labels("live").inc()
            self._hub.lives.compare(view, state)

    def _failed(self, view: LiveView, error: Exception) -> None:
        """What only took too long is read beside the flushes; rights and tables that changed are
        for others to notice."""
        if isinstance(error, psycopg.errors.QueryCanceled):
            self._paused_until = time.monotonic() + limits.FLUSH_BUDGET_PAUSE_SECONDS
            if view.scope is not None:
                self._hub.side_jobs.was_slow(view)
                return
            self._slow.add(view.id)
            self._read_beside(view)
        else:
            self._skip("error")

    def _read_beside(self, view: LiveView) -> None:
        """As an opening, whose result is compared when it is there. One at a time."""
        if view.held > limits.RECONCILE_STREAMED_ROWS_MAX:
            self._skip("large")
        elif self._beside is not None and any(each.quiet for each in self._beside.openings):
            self._round.append(view)
        else:
            self._beside = view
            self._hub.metrics.reconcile_checks.labels("live").inc()
            self._hub.lives.open(view, quiet=True)

    def _skip(self, reason: str) -> None:
        self._hub.metrics.reconcile_skipped.labels(reason).inc()

    # -------------------------------------------------------------------- topics

    async def _compare_topic(self, connection: Connection, view: TopicView) -> int:
        if not view.sent or view.pending is not None:
            return 0
        count = len(view.sent)
        sent = dict(view.sent)
        news = await self._hub.topics.compare(connection, view)
        if news is None:
            self._skip("error")
            return count
        if not await _was_read(connection, self._hub.topics.table_of(view)):
            return count
        self._hub.metrics.reconcile_checks.labels("topic").inc()
        if news.ops and view.subscribers:
            self._topic_drifted(view, sent, news)
            self._hub.topics.correct(view, news)
        return count

    def _topic_drifted(self, view: TopicView, sent: dict[Key, Any], news: News) -> None:
        self._hub.metrics.reconcile_drift.labels("topic").inc()
        for key, op in news.ops.items():
            rows = [each.row if isinstance(each, Upsert) else None for each in (sent[key], op)]
            ours, theirs = _differing(*rows, secret=view.definition.trusted)
            logger.error(
                "%s: topic %s, key %s: sent %s, the database has %s; it is sent again",
                DRIFT, view.name, _cut(key), ours, theirs,
            )  # fmt: skip


Prepare: TypeAlias = Callable[[], Awaitable[None]]

_TIMEOUT = f"set local statement_timeout = '{int(limits.RECONCILE_QUESTION_SECONDS * 1000)}ms'"


async def _captured(connection: Connection, oids: set[int]) -> set[int]:
    """Those of these tables whose changes are captured, as of the flush: the others are allowed to
    differ until they are enabled again."""
    cursor = await connection.execute(_ENABLED, (list(oids),))
    return {oid for (oid,) in await cursor.fetchall()}


_ENABLED = "select relid::bigint from headwater.tables where enabled and relid = any(%s::oid[])"


async def _was_read(connection: Connection, table: Table) -> bool:
    """Whether it was this table that a statement has read by its name, and not one that has taken
    the name since the snapshot. What was read is locked until the flush ends."""
    cursor = await connection.execute(_NAMED, (table.schema, table.name))
    return await cursor.fetchone() == (table.oid,)


_NAMED = "select to_regclass(format('%%I.%%I', %s::text, %s::text))::oid::bigint"


def _differing(ours: Row | None, theirs: Row | None, *, secret: bool) -> tuple[str, str]:
    """The values that differ, for the log. Those of rows that not every user may see are left out:
    only the columns are named."""
    if ours is None or theirs is None:
        return _whole(ours, secret=secret), _whole(theirs, secret=secret)
    names = [name for name in ours if _text(ours[name]) != _text(theirs.get(name))]
    if secret:
        listed = ", ".join(names)
        return f"other values of {listed}", "its own"
    return tuple(  # type: ignore[return-value]
        ", ".join(f"{name} = {_cut(row.get(name))}" for name in names) or "it elsewhere"
        for row in (ours, theirs)
    )


def _whole(row: Row | None, *, secret: bool) -> str:
    if row is None:
        return "no row"
    return "a row" if secret or not row else _cut(dict(row))


def _text(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _cut(value: Any) -> str:
    text = repr(value)
    most = limits.RECONCILE_VALUE_CHARS
    return text if len(text) <= most else f"{text[:most]}…"
