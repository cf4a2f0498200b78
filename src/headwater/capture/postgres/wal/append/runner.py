"""Runs capture from the write-ahead log (WAL) for tables in Headwater's own database.

It reads the slot that `headwater.installation` names and appends each transaction to the log. The
place that was reached is saved in the same transaction, so after a crash nothing is appended twice;
the slot is confirmed after the commit, which readers wait for (`headwater.log.complete`). One
process at a time does this: a slot has one reader, and an append fails where another process has
appended since. No advisory lock is needed, which every role could take.

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

from headwater.capture.postgres.wal.append.appender import NEXT_BATCH, LogAppender
from headwater.capture.postgres.wal.append.upkeep import (
    check_slot,
    drop_slot,
    sync_tables,
)
from headwater.capture.postgres.wal.catalog.checks import MAY_REPLICATE
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
        self._unreadable: str | None = None

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
            if await is_free(connection):
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
            appender = LogAppender(connection, slot, parse_lsn(lsn), int(nearby))
            await _Run(connection, stream, appender, slot).until(self._stopping)
        except HeadwaterError as error:
            await stream.close()
            if isinstance(error.__cause__, _UNREADABLE):
                await self._give_up(connection, slot)
            raise
        finally:
            await stream.close()
        if not self._stopping.is_set():
            await end(connection)

    async def _give_up(self, connection: Connection, slot: str) -> None:
        """The server cannot read its WAL: a row has more than 1 GB, before and after its change. If
        that was so at the last attempt, too, the slot is dropped, so that a new one is made."""
        if self._unreadable != slot:
            self._unreadable = slot
            return
        logger.warning("WAL capture: slot %s cannot be read, every table is read again", slot)
        await connection.execute("rollback")
        await connection.execute(_DROP, (slot,))


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
        has_tables, written = await _one(self._connection, _HAS_TABLES)
        if has_tables:
            self._ends_at = None
            await check_slot(self._connection, self._slot)
            await sync_tables(self._connection)
            return False
        if self._ends_at is None:
            self._ends_at = int(written)
        return self._stream.confirmed >= self._ends_at


async def is_free(connection: Connection) -> bool:
    """Whether tables are captured from the WAL, or were until a moment ago, no process does it, and
    this role may."""
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


async def _begin(connection: Connection) -> tuple[Any, ...]:
    """The slot, the publication, the place from which to read, and an id of about now. Where the
    slot is lost, the tables are captured again with a new one."""
    await connection.execute("select headwater.make_wal_publication()")
    (made,) = await _one(connection, "select headwater.make_wal_slot()")
    await connection.execute("select headwater.use_wal_slot(%s)", (made,))
    await sync_tables(connection)
    await connection.execute(NEXT_BATCH)
    found = await _one(connection, _BEGIN)
    if found[0] != made:  # another process was first
        await connection.execute("select headwater.drop_wal_slot(%s)", (made,))
    return found


async def _one(connection: Connection, statement: str, values: Any = None) -> tuple[Any, ...]:
    cursor = await connection.execute(statement.encode(), values)
    row = await cursor.fetchone()
    assert row is not None
    return row


_UNREADABLE = (psycopg.errors.ProgramLimitExceeded, psycopg.errors.InternalError_)

_DROP = """
    select pg_drop_replication_slot(slot_name) from pg_replication_slots
    where slot_name = %s and not active
"""

_IS_FREE = f"""
    select exists (
      select from headwater.installation i
      left join pg_replication_slots s on s.slot_name = i.wal_slot
      where i.wal_slot is not null and s.active is not true)
    and (select pg_has_role(nspowner, 'MEMBER') from pg_namespace where nspname = 'headwater')
    and ({MAY_REPLICATE})
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
