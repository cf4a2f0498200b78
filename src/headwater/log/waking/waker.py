"""Wakes a reader when there may be changes to read; the I/O around `pace.Pace`.

One connection listens. When the pace says to poll, a second connection requests the lock that makes
writers skip NOTIFY. The request blocks: under load some writer always holds the shared form, so a
request that does not wait would never succeed, and a request that waits already has the effect. The
polling reader wakes the other readers with a NOTIFY of its own, once a read.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import psycopg

from headwater import limits
from headwater.database import Connection, connect
from headwater.errors import DatabaseError
from headwater.log.waking.pace import Pace
from headwater.model import Position

CHANNEL = "headwater"
WAKE_LOCK = (1752654962, 1)  # see headwater.readers_sleep() in 002_waking.sql
FROM_POLLER = "v1:poll"

_FAST_LOSS_DETECTION = (
    "-c client_connection_check_interval=1s -c tcp_keepalives_idle=10"
    " -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
)


class Waker:
    """Use as an async context manager. Call `wait` before a read, and `have_read` after it."""

    def __init__(self, url: str) -> None:
        self.pace = Pace()
        self._url = url
        self._event = asyncio.Event()
        self._read_at_once = False
        self._woken = True
        self._listening: asyncio.Task[None] | None = None
        self._lock: _PollerLock | None = None

    async def __aenter__(self) -> Waker:
        connection = await connect(self._url, purpose="listener")
        try:
            await connection.execute(f"listen {CHANNEL}")
            cursor = await connection.execute("select current_setting('max_prepared_transactions')")
            if await cursor.fetchone() != ("0",):
                # Writers send no NOTIFY there: a transaction with a NOTIFY cannot be prepared.
                self.pace.never_sleep()
        except BaseException:
            await connection.close()
            raise
        self._listening = asyncio.create_task(self._listen(connection))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._listening is not None
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        if self._lock is not None:
            await self._lock.drop()

    async def wait(self) -> None:
        """Return when it is time to read. Raises the driver's error when the listener was lost."""
        assert self._listening is not None
        self._woken = True
        if self.pace.mode == "asleep":
            try:
                async with asyncio.timeout(self.pace.pause):
                    await self._event.wait()
            except TimeoutError:
                self._woken = self._event.is_set()
        else:
            await asyncio.sleep(self.pace.pause)
        self._event.clear()
        if self._listening.done():
            self._listening.result()

    def notified(self) -> None:
        """A writer sent NOTIFY on another channel, which a `NotifyListener` received."""
        self.pace.woken(time.monotonic())
        self._event.set()

    def wake(self) -> None:
        """Have a sleeping reader read at once."""
        self._read_at_once = True
        self._event.set()

    async def settle(self, quiet: float, maximum: float) -> None:
        """Wait until no NOTIFY has arrived for the quiet time, at most the maximum. While polling,
        no NOTIFY arrives, so wait for the maximum. After `wake`, do not wait."""
        until = time.monotonic() + maximum
        while not self._read_at_once and (left := until - time.monotonic()) > 0:
            pause = left if self.pace.mode != "asleep" else min(quiet, left)
            try:
                async with asyncio.timeout(pause):
                    await self._event.wait()
            except TimeoutError:
                break
            self._event.clear()
        self._read_at_once = False

    async def have_read(self, *, has_changes: bool, position: Position) -> None:
        """A read has ended at this position; `has_changes` says whether it found any."""
        if self._lock is not None and self._lock.lost:
            self.pace.lock_lost()
        if has_changes and not (self._woken or self._event.is_set()):
            self.pace.unannounced(time.monotonic())
        self.pace.have_read(time.monotonic(), has_changes=has_changes, position=position)
        await self._set_lock(self.pace.mode == "polling")
        if has_changes and self._lock is not None:
            self._lock.announce()

    async def _listen(self, connection: Connection) -> None:
        try:
            async for notice in connection.notifies():
                if notice.payload != FROM_POLLER:
                    self.pace.woken(time.monotonic())
                self._event.set()
        finally:
            self._event.set()
            await connection.close()

    async def _set_lock(self, wanted: bool) -> None:
        if wanted and self._lock is None:
            self._lock = _PollerLock(self._url)
        elif not wanted and self._lock is not None:
            lock, self._lock = self._lock, None
            await lock.release()


class _PollerLock:
    """The exclusive form of the lock, requested at once and held until released."""

    def __init__(self, url: str) -> None:
        self._connection: Connection | None = None
        self._held = False
        self._task = asyncio.create_task(self._acquire(url))
        self._announcement: asyncio.Task[object] | None = None

    @property
    def lost(self) -> bool:
        """The connection failed, and the lock or the request for it with it."""
        failed = self._task.done() and not self._task.cancelled() and self._task.exception()
        return bool(failed) or (self._connection is not None and self._connection.broken)

    async def _acquire(self, url: str) -> None:
        # The server must notice soon when this process ends, or the lock stays held.
        self._connection = await connect(url, purpose="poller", options=_FAST_LOSS_DETECTION)
        await self._connection.execute("select pg_advisory_lock(%s, %s)", WAKE_LOCK)
        self._held = True

    def announce(self) -> None:
        """Wake the readers that sleep, unless a NOTIFY to them is under way."""
        connection = self._connection
        busy = self._announcement is not None and not self._announcement.done()
        if self._held and connection is not None and not busy:
            self._announcement = asyncio.create_task(self._notify(connection))

    async def _notify(self, connection: Connection) -> None:
        with suppress(psycopg.Error):
            await connection.execute("select pg_notify(%s, %s)", (CHANNEL, FROM_POLLER))

    async def release(self) -> None:
        """Once this returns, writers send NOTIFY again."""
        try:
            async with asyncio.timeout(limits.FLUSH_SECONDS_MAX):
                if self._held and self._connection is not None:
                    with suppress(psycopg.Error):
                        await self._connection.execute("select pg_advisory_unlock_all()")
        except TimeoutError as error:
            raise DatabaseError(
                f"the database did not answer for {limits.FLUSH_SECONDS_MAX:.0f} seconds"
            ) from error
        finally:
            await self.drop()

    async def drop(self) -> None:
        """Close the connection, whether or not the server answers. The driver cancels a request
        that waits; closing the socket alone would leave it in the server's queue."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()
        if self._announcement is not None:
            await asyncio.gather(self._announcement, return_exceptions=True)
