"""Runs capture from the write-ahead log (WAL) for tables in Headwater's own database.

It reads the slot that `headwater.installation` names and appends each transaction to the log. The
place that was reached is saved in the same transaction, so after a crash nothing is appended twice;
the slot is confirmed after the commit, which readers wait for (`headwater.log.complete`). One
process at a time does this: it holds an advisory lock over the connection that appends.

Where the slot or the publication was lost, a new one is made, and every table that is captured from
the WAL is read again. Where no table is captured from the WAL any more, both are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from headwater.capture.postgres.wal.append.appender import LogAppender
from headwater.capture.postgres.wal.append.upkeep import (
    check_slot,
    drop_slot,
    sync_tables,
)
from headwater.capture.postgres.wal.connecting import SETTINGS
from headwater.capture.postgres.wal.pgoutput import parse_lsn
from headwater.capture.postgres.wal.replication import (
    Keepalive,
    ReplicationStream,
    open_stream,
)
from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.limits import RECONNECT_SECONDS

logger = logging.getLogger(__name__)

CAPTURE_LOCK = (1752654962, 6)  # see headwater.lock_class() in 002_waking.sql

LOOK_SECONDS = 1.0
"""How often it looks whether tables are captured from the WAL, and whether no other process does
this."""

BUSY_MESSAGES = 60
BUSY_PAUSE_SECONDS = 0.02
"""After this many messages at once, it waits a little: fewer and larger appends leave writers more
of the processors."""

STEADY_SECONDS = 10.0
"""After a session this long, the pause before the next attempt is the shortest again."""


class WalCapture:
    """Call `run`, which ends after `stop`. Any number of processes may run it; one works. With
    `leaves_when_idle`, it also ends when there is nothing to do, or another process does it."""

    def __init__(self, url: str, *, leaves_when_idle: bool = False) -> None:
        self._url = url
        self._leaves_when_idle = leaves_when_idle
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End after the present transaction."""
        self._stopping.set()

    async def run(self) -> None:
        """Capture for ever; a lost connection is made again."""
        attempt = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                async with _connection(self._url) as connection:
                    await self._with(connection)
            except (psycopg.Error, HeadwaterError, OSError, ValueError) as error:
                if time.monotonic() - began > STEADY_SECONDS:
                    attempt = 0
                first, longest = RECONNECT_SECONDS
                pause = min(first * 2.0 ** min(attempt, 16), longest) * random.uniform(0.5, 1.0)
                attempt += 1
                # Without the context of the driver's errors, which may have values of rows.
                diagnosis = error.diag.message_primary if isinstance(error, psycopg.Error) else None
                logger.warning("WAL capture: %s; trying again in %.1f s", diagnosis or error, pause)
                await self._pause(pause)

    async def _with(self, connection: Connection) -> None:
        while not self._stopping.is_set():
            if await is_needed(connection) and await _take_lock(connection):
                await self._capture(connection)
            if self._leaves_when_idle:
                self.stop()
                return
            await self._pause(LOOK_SECONDS)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _capture(self, connection: Connection) -> None:
        """Append until no table is captured from the WAL."""
        slot, publication, lsn, nearby = await _begin(connection)
        stream = await open_stream(
            self._url,
            slot,
            [publication],
            parse_lsn(lsn),
            purpose="WAL capture",
            streaming=False,
            messages=True,
        )
        logger.info("WAL capture: reading slot %s from %s", slot, lsn)
        try:
            run = _Run(connection, stream, LogAppender(connection, slot, int(nearby)), slot)
            await run.until(self._stopping)
        finally:
            await stream.close()
        if not self._stopping.is_set():
            await end(connection)


class _Run:
    """Appends what one stream brings."""

    def __init__(
        self, connection: Connection, stream: ReplicationStream, appender: LogAppender, slot: str
    ) -> None:
        self._connection = connection
        self._slot = slot
        self._stream = stream
        self._appender = appender
        self._idle_lsn = 0
        self._looked = self._written = time.monotonic()
        self._received = 0
        self._ends_at: int | None = None

    async def until(self, stopping: asyncio.Event) -> None:
        """Return when `stopping` is set, or when no table is captured from the WAL and everything
        from before that is in the log."""
        appender = self._appender
        while not (stopping.is_set() and appender.is_between):
            items = await self._stream.receive()
            for item in items:
                if isinstance(item, Keepalive):
                    if appender.is_between:
                        self._idle_lsn = item.end_lsn
                else:
                    appender.take(item.payload)
            if appender.is_full or (appender.is_between and self._is_due(len(items))):
                await self._write()
                if len(items) < BUSY_MESSAGES <= self._received and appender.is_between:
                    await asyncio.sleep(BUSY_PAUSE_SECONDS)
                self._received, self._written = 0, time.monotonic()
            if appender.is_between and await self._is_over():
                return

    def _is_due(self, received: int) -> bool:
        """Whether to write now: no more messages wait, or those that came first wait for long."""
        self._received += received
        return received < BUSY_MESSAGES or time.monotonic() > self._written + BUSY_PAUSE_SECONDS

    async def _write(self) -> None:
        appender = self._appender
        reached = await appender.write() if appender.has_work else 0
        if reached is not None and appender.is_between:
            self._stream.confirm(max(reached, self._idle_lsn), at_once=True)

    async def _is_over(self) -> bool:
        """Whether no table is captured any more. Looked up once in a while: while the server has
        nothing to send, it still answers once a second."""
        if time.monotonic() < self._looked + LOOK_SECONDS or self._appender.has_work:
            return False
        self._looked = time.monotonic()
        if self._ends_at is None:
            found = await _one(self._connection, _HAS_TABLES)
            if found[0]:
                await check_slot(self._connection, self._slot)
                await sync_tables(self._connection)
                return False
            self._ends_at = int(found[1])
        return self._stream.confirmed >= self._ends_at


async def is_needed(connection: Connection) -> bool:
    """Whether tables are captured from the WAL, or were until a moment ago."""
    return bool((await _one(connection, _IS_NEEDED))[0])


async def is_free(connection: Connection) -> bool:
    """Whether tables are captured from the WAL, and no process does it."""
    return bool((await _one(connection, _IS_FREE))[0])


async def end(connection: Connection) -> bool:
    """Drop the slot and the publication if no table is captured from the WAL any more."""
    (slot,) = await _one(connection, "select headwater.end_wal_capture()")
    if slot is not None:
        await drop_slot(connection, slot)
    return slot is not None


@asynccontextmanager
async def _connection(url: str) -> AsyncIterator[Connection]:
    """Commits wait for this server's disk, whatever the role's default is: the slot is confirmed
    next. Values that the server writes are printed as triggers would."""
    settings = {**SETTINGS, "synchronous_commit": "local", "jit": "off"}
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    connection = await connect(url, purpose="WAL capture", options=options)
    try:
        yield connection
    finally:
        await connection.close()


async def _take_lock(connection: Connection) -> bool:
    return bool((await _one(connection, "select pg_try_advisory_lock(%s, %s)", CAPTURE_LOCK))[0])


async def _begin(connection: Connection) -> tuple[Any, ...]:
    """The slot, the publication, the place from which to read, and an id of about now. Where the
    slot is lost, the tables are captured again with a new one."""
    await connection.execute("select headwater.make_wal_publication()")
    (slot,) = await _one(connection, "select headwater.make_wal_slot()")
    await connection.execute("select headwater.use_wal_slot(%s)", (slot,))
    await connection.execute("select headwater.drop_wal_slot(%s)", (slot,))  # if not in use
    await sync_tables(connection)
    return await _one(connection, _BEGIN)


async def _one(connection: Connection, statement: str, values: Any = None) -> tuple[Any, ...]:
    cursor = await connection.execute(statement.encode(), values)
    row = await cursor.fetchone()
    assert row is not None
    return row


_IS_NEEDED = "select exists (select from headwater.installation where wal_slot is not null)"

_IS_FREE = """
    select exists (
      select from headwater.installation i
      left join pg_replication_slots s on s.slot_name = i.wal_slot
      where i.wal_slot is not null and s.active is not true)
    and (select pg_has_role(nspowner, 'MEMBER') from pg_namespace where nspname = 'headwater')
"""

_HAS_TABLES = """
    select exists (select from headwater.tables where enabled and capture = 'wal'),
           pg_current_wal_insert_lsn() - '0/0'
"""

_BEGIN = """
    select slot, headwater.wal_publication(), lsn::text,
           pg_snapshot_xmax(pg_current_snapshot())::text
    from headwater.wal_capture
"""
