"""Metrics that are read from the database: sources and cursors. Every gateway reports the same.

They are read when a client asks for the metrics, and not more often than every few seconds. While
the database is away there are none: an alert on a value that is missing says so.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import get_args

import psycopg

from headwater.admin.sources import SourceReport, reports
from headwater.capture.mirror.registry import State
from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.limits import ADMIN_SECONDS_MAX, METRICS_SECONDS_MIN
from headwater.log import cursors
from headwater.log.cursors import SavedCursor
from headwater.metrics import Metrics, Totals


class DatabaseMetrics:
    """Sets the metrics of sources and cursors."""

    def __init__(self, url: str, metrics: Metrics) -> None:
        self._url = url
        self._metrics = metrics
        self._changes = Totals(metrics.source_changes)
        self._transactions = Totals(metrics.source_transactions)
        self._lock = asyncio.Lock()
        self._measured_at = -METRICS_SECONDS_MIN

    async def measure(self) -> None:
        """Read the database, unless that was done a moment ago."""
        async with self._lock:
            if time.monotonic() - self._measured_at < METRICS_SECONDS_MIN:
                return
            try:
                async with asyncio.timeout(ADMIN_SECONDS_MAX):
                    await self._read()
            except (psycopg.Error, HeadwaterError, TimeoutError):
                self._show([], [], timedelta())
            self._measured_at = time.monotonic()

    async def _read(self) -> None:
        connection = await connect(self._url, purpose="metrics")
        try:
            found = await reports(connection)
            saved = await cursors.list_all(connection)
            retention = await _retention(connection)
        finally:
            await connection.close()
        self._show(found, saved, retention)

    def _show(
        self, found: list[SourceReport], saved: list[SavedCursor], retention: timedelta
    ) -> None:
        metrics = self._metrics
        for gauge in (
            metrics.source_state,
            metrics.source_lag_seconds,
            metrics.source_lag_bytes,
            metrics.source_up,
            metrics.source_copied_rows,
            metrics.source_estimated_rows,
            metrics.source_tables_copying,
            metrics.cursor_lag_seconds,
            metrics.cursor_left_seconds,
            metrics.cursor_lost,
        ):
            gauge.clear()
        for source in found:
            self._show_source(source)
        self._changes.set({source.name: source.changes for source in found})
        self._transactions.set({source.name: source.transactions for source in found})
        for cursor in saved:
            self._show_cursor(cursor, retention)

    def _show_source(self, source: SourceReport) -> None:
        metrics, name = self._metrics, source.name
        metrics.source_up.labels(name).set(source.is_run)
        for state in get_args(State):  # alerts need the value 0 to see an increase
            metrics.source_state.labels(name, state).set(state == source.state)
        if source.lag is not None:
            metrics.source_lag_seconds.labels(name).set(source.lag)
        if source.lag_bytes is not None:
            metrics.source_lag_bytes.labels(name).set(source.lag_bytes)
        tables = source.tables
        copying = sum(table.state in ("copying", "recopying") for table in tables)
        metrics.source_tables_copying.labels(name).set(copying)
        metrics.source_copied_rows.labels(name).set(sum(table.copied for table in tables))
        estimate = sum(table.estimate or 0 for table in tables)
        metrics.source_estimated_rows.labels(name).set(estimate)

    def _show_cursor(self, cursor: SavedCursor, retention: timedelta) -> None:
        metrics, name = self._metrics, cursor.name
        lag = cursor.lag or timedelta()
        left = retention if cursor.left is None else cursor.left
        metrics.cursor_lag_seconds.labels(name).set(lag.total_seconds())
        metrics.cursor_left_seconds.labels(name).set(left.total_seconds())
        metrics.cursor_lost.labels(name).set(cursor.lost)


async def _retention(connection: Connection) -> timedelta:
    cursor = await connection.execute("select retention from headwater.installation")
    row = await cursor.fetchone()
    return row[0] if row else timedelta()
