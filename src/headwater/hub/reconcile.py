"""Compares live queries and topics with the database, and repairs differences.

A view that differs from its table would stay wrong until the row changes again. So every view is
compared once in an interval: a few in each flush, in the snapshot of that flush and after its
changes were applied. Both sides are as of one position, so any difference is a defect. It is
repaired (a `reset` with the reason `drift`, or the rows of a topic again), counted and logged.

A window is read as its first result is. A streamed query has no rows in memory, so its members are
compared. A query that takes too long for a flush, or has too many rows, is read beside the flushes
as a first result is, one at a time. Of a topic that is derived from a table, the rows that were
sent last are read again; other topics are not compared. Reactive queries have their own sweep.
Under row-level security, rows may appear and disappear without a change in the log. So only a row
with other values counts as drift there; `recheck` does the rest.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any, TypeAlias

import psycopg

from headwater import limits
from headwater.database import Connection
from headwater.hub.drift import DRIFT, cut, differing
from headwater.hub.live_views.part import LivePart
from headwater.hub.live_views.view import LiveView
from headwater.hub.part import Flush, Part
from headwater.hub.reading.snapshot_queries import SnapshotQuery, ask_in_flush, lost
from headwater.hub.topics.registry import TopicRegistry
from headwater.hub.topics.subscription import TopicSubscription
from headwater.hub.topics.topic import TopicUpdate, TopicView
from headwater.live.state.comparison import ResultState
from headwater.live.view import new_state
from headwater.metrics import Metrics
from headwater.model import Key, Table
from headwater.protocol import Upsert

_RECONCILE_VIEWS_MAX = 100
"""Live queries and topics compared with the database in one flush. The others wait for the next."""

_RECONCILE_QUESTION_SECONDS = 0.05
"""How long a flush may take to read one live query for a comparison. A slower one is read beside
the flushes, and nothing is compared for `FLUSH_BUDGET_PAUSE_SECONDS`."""


logger = logging.getLogger(__name__)

Served: TypeAlias = LiveView | TopicView[TopicSubscription]


class Reconciler(Part):
    """Compares a few views in every flush. `seconds` is the interval: None for never, 0 for as many
    as possible in each flush."""

    def __init__(
        self, live: LivePart, topics: TopicRegistry, metrics: Metrics, seconds: float | None
    ) -> None:
        self._views = live.views
        self._background = live.background
        self._topics = topics
        self._metrics = metrics
        self.seconds = seconds
        self._round: deque[Served] = deque()
        """Those that were not compared in this interval yet."""
        self._share = 0.0
        """How many of them are due now, with the fraction left over from the last flush."""
        self._at = time.monotonic()
        self._paused_until = 0.0
        """After a slow query nothing is compared for a while, so that flushes are not delayed."""
        self._slow: set[int] = set()
        """Views that did not fit into a flush."""
        self._beside: LiveView | None = None
        """The view that is being read beside the flushes."""

    async def check(self, flush: Flush) -> None:
        """Compare what is due."""
        if time.monotonic() < self._paused_until:
            return
        due = self._due()
        if not due:
            return
        await flush.allow_any_plan()
        await flush.connection.execute(_TIMEOUT)
        seconds = _RECONCILE_QUESTION_SECONDS
        if any(isinstance(each, LiveView) and each.scope is not None for each in due):
            async with self._background.scoped_connection(flush.export, seconds) as scoped:
                await self._compare_all(due, flush.connection, scoped)
        else:
            await self._compare_all(due, flush.connection, None)

    async def _compare_all(
        self, due: deque[Served], connection: Connection, scoped: Connection | None
    ) -> None:
        """`scoped` reads as users' roles. Without it, their views wait for another flush."""
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
                elif not self._background.is_slow(served):
                    # `recheck` reads the slow ones beside the flushes.
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

    def _oid(self, served: Served) -> int:
        """The oid of its table; 0 for a topic that is not derived from a table."""
        if isinstance(served, LiveView):
            return served.known.table.oid
        return self._topics.table_of(served).oid if served.definition.table else 0

    # -------------------------------------------------------------------- what is due

    def _due(self) -> deque[Served]:
        """The next ones. Each is due once in an interval."""
        if self.seconds is None:
            return deque()
        count = len(self._views.views) + len(self._topics)
        now = time.monotonic()
        passed, self._at = now - self._at, now
        self._share += count if not self.seconds else passed * count / self.seconds
        self._share = min(self._share, count, _RECONCILE_VIEWS_MAX)
        due: deque[Served] = deque()
        while self._share >= 1.0:
            if not self._round:
                if due:
                    break  # none twice
                self._begin_round()
            self._share -= 1.0
            if not self._round:
                break
            due.append(self._round.popleft())
        return due

    def _begin_round(self) -> None:
        self._round.extend(self._views)
        self._round.extend(self._topics)
        self._slow &= {served.id for served in self._round}

    # -------------------------------------------------------------------- live queries

    async def _compare_view(
        self, connection: Connection, asking: Connection, view: LiveView
    ) -> int:
        """Read it and compare. Returns the number of rows that were read."""
        if not view.live or view.removed or view.lag is not None or view.state.needs:
            return 0  # it is being read, lags, or has no subscribers
        if view.id in self._slow or view.held > limits.RECONCILE_ROWS_MAX:
            self._read_beside(view)
            return 0
        state, rows = new_state(view.query), 0
        while needs := state.needs:
            question = SnapshotQuery.of_need(view.known, view.query, needs[0], view.scope)
            (answer,) = await ask_in_flush(asking, [question])
            self._metrics.questions.labels("reconcile").inc()
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

    def _compare(self, view: LiveView, state: ResultState) -> None:
        # Since then its subscribers may have left, or it may lag.
        if view.live and not view.removed and view.lag is None:
            self._metrics.reconcile_checks.labels("live").inc()
            self._views.compare(view, state)

    def _failed(self, view: LiveView, error: Exception) -> None:
        """A view that took too long is read beside the flushes. Changed rights and tables are
        noticed elsewhere."""
        if isinstance(error, psycopg.errors.QueryCanceled):
            self._paused_until = time.monotonic() + limits.FLUSH_BUDGET_PAUSE_SECONDS
            if view.scope is not None:
                self._background.was_slow(view)
                return
            self._slow.add(view.id)
            self._read_beside(view)
        else:
            self._skip("error")

    def _read_beside(self, view: LiveView) -> None:
        """Read it as a first result, and compare that when it has arrived. One at a time."""
        if view.held > limits.RECONCILE_STREAMED_ROWS_MAX:
            self._skip("large")
        elif self._beside is not None and any(each.quiet for each in self._beside.snapshots):
            self._round.append(view)
        else:
            self._beside = view
            self._metrics.reconcile_checks.labels("live").inc()
            self._views.open(view, quiet=True)

    def _skip(self, reason: str) -> None:
        self._metrics.reconcile_skipped.labels(reason).inc()

    # -------------------------------------------------------------------- topics

    async def _compare_topic(
        self, connection: Connection, view: TopicView[TopicSubscription]
    ) -> int:
        if not view.sent or view.pending is not None:
            return 0
        count = len(view.sent)
        sent = dict(view.sent)
        update = await self._topics.compare(connection, view)
        if update is None:
            self._skip("error")
            return count
        if not await _was_read(connection, self._topics.table_of(view)):
            return count
        self._metrics.reconcile_checks.labels("topic").inc()
        if update.ops and view.subscribers:
            self._topic_drifted(view, sent, update)
            self._topics.correct(view, update)
        return count

    def _topic_drifted(
        self, view: TopicView[TopicSubscription], sent: dict[Key, Any], update: TopicUpdate
    ) -> None:
        self._metrics.reconcile_drift.labels("topic").inc()
        for key, op in update.ops.items():
            rows = [each.row if isinstance(each, Upsert) else None for each in (sent[key], op)]
            ours, theirs = differing(*rows, secret=view.definition.trusted)
            logger.error(
                "%s: topic %s, key %s: sent %s, the database has %s; it is sent again",
                DRIFT, view.name, cut(key), ours, theirs,
            )  # fmt: skip


_TIMEOUT = f"set local statement_timeout = '{int(_RECONCILE_QUESTION_SECONDS * 1000)}ms'"


async def _captured(connection: Connection, oids: set[int]) -> set[int]:
    """The tables whose changes were captured as of the flush. The others may differ until they are
    enabled again."""
    cursor = await connection.execute(_ENABLED, (list(oids),))
    return {oid for (oid,) in await cursor.fetchall()}


_ENABLED = "select relid::bigint from headwater.tables where enabled and relid = any(%s::oid[])"


async def _was_read(connection: Connection, table: Table) -> bool:
    """Whether the statement has read this table, and not another one that got its name after the
    snapshot. A table that was read is locked until the flush ends."""
    cursor = await connection.execute(_NAMED, (table.schema, table.name))
    return await cursor.fetchone() == (table.oid,)


_NAMED = "select to_regclass(format('%%I.%%I', %s::text, %s::text))::oid::bigint"
