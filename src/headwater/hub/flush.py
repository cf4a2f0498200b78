"""One flush: brings the new changes of the log to every part of the hub, in one database snapshot.

It reads the log, calls `prepare` of every part, then `send` of every part, and commits. All calls
of `send` are one step: no client can join between them, so it never has a state of another position
than it was sent.

When a step fails, each part has either sent its changes or reads them again. A flush that fails
before its step, by an error that is not the database's, would fail again: the next flush skips the
same changes, as it skips a backlog.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime

import msgspec
import psycopg
from opentelemetry import trace

from headwater.database import Connection
from headwater.errors import HeadwaterError
from headwater.hub.flush_state import FlushState
from headwater.hub.part import Flush, Part, call_each
from headwater.hub.reading.snapshot_queries import allow_any_plan
from headwater.log.complete import StillBehind
from headwater.log.reading.progress import flush as flush_wal
from headwater.log.reading.reader import LogBatch, LogReader
from headwater.log.reconnect import is_lost
from headwater.log.signals import is_signals
from headwater.metrics import Metrics
from headwater.model import Position, Table, Transaction

logger = logging.getLogger(__name__)
tracer = trace.get_tracer("headwater")


class Flusher:
    """Flushes over one connection. `recovered` is called when a flush succeeds after the log could
    not be followed."""

    def __init__(
        self,
        parts: Sequence[Part],
        state: FlushState,
        metrics: Metrics,
        connection: Connection,
        reader: LogReader,
        recovered: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._state = state
        self._metrics = metrics
        self._connection = connection
        self._reader = reader
        self._recovered = recovered

    async def flush(self) -> bool:
        """Returns whether the log has changes since the last flush."""
        self._state.begun += 1
        since = self._state.progress.position
        await self._connection.execute("begin isolation level repeatable read, read only")
        try:
            return await self._flush(since)
        except StillBehind:
            # Capture appends a large transaction. A snapshot that is held has the server keep rows.
            await self._connection.execute("rollback")
            self._state.wake()
            return True
        except Exception as error:
            if not _is_foreseen(error):
                self._state.faulted_at = since
            raise

    async def _flush(self, since: Position) -> bool:
        started = time.perf_counter()
        batch = await self._read(since)
        if batch.backlog:
            await self._connection.execute("rollback")
            await self._skip(since, batch.position)
            return True
        flush = _Flush(self._connection, batch, since, self._state.progress.undelivered(batch))
        await self._take(flush, batch, started)
        for part in self._parts:
            await part.check(flush)
        await self._connection.execute("commit")
        return batch.has_changes

    async def _read(self, since: Position) -> LogBatch:
        try:
            if since != self._state.faulted_at:
                return await self._reader.read(self._connection, since)
        except psycopg.errors.InFailedSqlTransaction:
            # The rows were too large for one answer of the server: this is a backlog, too.
            await self._connection.execute("rollback")
        now = await self._reader.now(self._connection)
        return LogBatch((), now, 0, 0, has_changes=True, backlog=True)

    async def _take(self, flush: _Flush, batch: LogBatch, started: float) -> None:
        state = self._state
        for part in self._parts:
            await part.prepare(flush)
        state.durable_before = state.durable
        state.progress.advance(batch)
        if state.begin_step(batch.position):
            self._recovered()
        flush.number = state.number
        try:
            for part in self._parts:
                await part.send(flush)
        except BaseException:
            call_each(self._parts, lambda part: part.unsent(flush))
            raise
        finally:
            state.end_step()
            call_each(self._parts, lambda part: part.ended(flush))
        if flush.transactions:
            self._measure(flush, time.perf_counter() - started)

    # -------------------------------------------------------------------- more than a flush takes

    async def _skip(self, since: Position, until: Position) -> None:
        """Continue from a later position. Parts read again what depends on the changed tables."""
        await flush_wal(self._connection)
        tables = await self._reader.tables_since(self._connection, since)
        if tables is not None:
            for part in self._parts:
                await part.prepare_skip(tables)
        self._skip_to(since, until, tables)

    def _skip_to(self, since: Position, until: Position, tables: Collection[Table] | None) -> None:
        """The position moves only after every part was called. If that fails, the next flush skips
        the same changes again."""
        for part in self._parts:
            try:
                part.skipped(since, until, tables)
            except Exception:
                logger.exception("a backlog could not be skipped: everything is read again")
                part.skip_failed()
        self._state.skip_to(until)
        self._state.wake()  # parts read in the snapshot of the next flush

    # -------------------------------------------------------------------- metrics

    def _measure(self, flush: _Flush, took: float) -> None:
        metrics, now = self._metrics, time.time()
        written: datetime = flush.transactions[-1].at
        # Changes of Headwater's own tables do not count.
        changes = sum(not each.table.is_system for one in flush.changes for each in one.changes)
        metrics.flushes.inc()
        metrics.changes.inc(changes)
        metrics.flush_seconds.observe(took)
        metrics.lag_seconds.observe(max(0.0, now - written.timestamp()))
        attributes = {"headwater.changes": changes, "headwater.views": flush.touched}
        began = int((now - took) * 1e9)
        tracer.start_span("headwater.flush", attributes=attributes, start_time=began).end()


class _Flush(Flush):
    """One flush over a connection. `Flush` has the promises to parts."""

    def __init__(
        self,
        connection: Connection,
        batch: LogBatch,
        since: Position,
        transactions: Sequence[Transaction],
    ) -> None:
        self.number = 0
        self.since = since
        self.position = batch.position
        self.written = batch.written
        self.transactions = transactions
        self.changes = list(_changes_of(transactions))
        self.touched = 0
        self.connection = connection
        self._any_plan = False
        self._snapshot: str | None = None

    async def export(self) -> str:
        if self._snapshot is None:
            cursor = await self.connection.execute("select pg_catalog.pg_export_snapshot()")
            row = await cursor.fetchone()
            assert row is not None
            self._snapshot = str(row[0])
        return self._snapshot

    async def allow_any_plan(self) -> None:
        if not self._any_plan:
            self._any_plan = True
            await allow_any_plan(self.connection)


def _changes_of(transactions: Iterable[Transaction]) -> Iterator[Transaction]:
    """Without the signals, which only topics use."""
    for transaction in transactions:
        if not any(is_signals(change.table) for change in transaction.changes):
            yield transaction
            continue
        changes = tuple(each for each in transaction.changes if not is_signals(each.table))
        if changes:
            yield msgspec.structs.replace(transaction, changes=changes)


def _is_foreseen(error: Exception) -> bool:
    """Whether to try the same flush again: the database may answer then."""
    if isinstance(error, psycopg.Error):
        return is_lost(error)
    return isinstance(error, HeadwaterError)
