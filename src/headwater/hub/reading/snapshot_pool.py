"""Connections that import the snapshot of a flush and read in it, beside the flush.

First results, reactive queries and the background queries of live views use it. A pool knows its
connections and which of them are idle. Its user decides how many there should be, what is read, and
when a connection is free again. A connection counts from the start of opening it until it is
dropped, and is dropped once: so errors never leave a wrong count.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import psycopg

from headwater import limits
from headwater.database import Connection, connect
from headwater.errors import HeadwaterError

_IDLE_SECONDS = 60.0
"""A connection that was not used for this long is closed. One stays open."""


logger = logging.getLogger(__name__)

Export: TypeAlias = Callable[[], Awaitable[str]]
"""Returns the id of the snapshot of a flush, which is valid until the flush ends."""

Open: TypeAlias = Callable[[], Awaitable[Connection]]


class SnapshotPool:
    """Connections to one URL, opened by `open`. `changed` is called when one is free. If one cannot
    be opened, `unreachable` is called if it is given; else it counts for a pause, in which no other
    is opened in its place, and then `changed` is called. A connection that is not `usable` is
    dropped when it is free. `purpose` is its name in the gateway's log."""

    def __init__(
        self,
        url: str,
        open: Open,
        changed: Callable[[], None],
        *,
        purpose: str,
        unreachable: Callable[[HeadwaterError], None] | None = None,
        usable: Callable[[Connection], bool] = lambda _: True,
    ) -> None:
        self._url = url
        self._open = open
        self._changed = changed
        self._purpose = purpose
        self._unreachable = unreachable
        self._usable = usable
        self._idle: list[tuple[Connection, float]] = []
        self._pids: dict[Connection, int] = {}
        """Every open connection, with the id of its server process."""
        self._connecting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def size(self) -> int:
        """Connections that are idle, in use, or being opened."""
        return len(self._pids) + self._connecting

    @property
    def in_use(self) -> int:
        return len(self._pids) - len(self._idle)

    # -------------------------------------------------------------------- opening and closing

    def want(self, idle: int, most: int) -> None:
        """Open connections until this many are idle, and at most `most` are open."""
        self.open_more(min(idle - len(self._idle) - self._connecting, most - self.size))

    def grow(self, wanted: int, most: int) -> None:
        """At most double the number of connections, and open no more than are wanted."""
        opened = len(self._pids)
        self.open_more(min(most - opened, max(1, opened), wanted) - self._connecting)

    def open_more(self, count: int) -> None:
        for _ in range(count):
            self._connecting += 1
            _spawn(self._connect(), self._tasks)

    async def _connect(self) -> None:
        try:
            connection = await self._open()
        except HeadwaterError as error:
            if self._unreachable is not None:
                self._connecting -= 1
                self._unreachable(error)
                return
            logger.warning("cannot connect for %s: %s", self._purpose, error)
            await asyncio.sleep(limits.RECONNECT_SECONDS[1])
            self._connecting -= 1
            self._changed()
            return
        self._connecting -= 1
        self.add(connection)

    def add(self, connection: Connection) -> None:
        """Add a free connection that was opened elsewhere."""
        self._pids[connection] = connection.info.backend_pid
        self.free(connection)

    def drop(self, connection: Connection, *, end: bool = False) -> None:
        """Close it. With `end`, it is still busy, and the server is asked to end it."""
        pid = self._pids.pop(connection, None)
        if pid is not None:  # otherwise it was dropped before
            _spawn(self._close(connection, pid if end else None), self._closing)

    async def _close(self, connection: Connection, pid: int | None) -> None:
        await connection.close()
        if pid is not None:
            with suppress(psycopg.Error, HeadwaterError):
                async with await connect(self._url, purpose=self._purpose) as other:
                    await other.execute("select pg_catalog.pg_terminate_backend(%s)", (pid,))

    def close_idle(self) -> None:
        """Close connections that were idle for long. One stays open."""
        before = time.monotonic() - _IDLE_SECONDS
        while len(self._idle) > 1 and self._idle[0][1] < before:
            self.drop(self._idle.pop(0)[0])

    def close_unusable(self) -> None:
        """Close the idle ones. Those in use are dropped when they are free."""
        for each in [each for each in self._idle if not self._usable(each[0])]:
            self._idle.remove(each)
            self.drop(each[0])

    def restart(self) -> None:
        """Forget all connections. Tasks that use one close it themselves."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        idle, self._idle = self._idle, []
        self._pids.clear()
        self._connecting = 0
        for connection, _ in idle:
            _spawn(connection.close(), self._closing)

    async def close(self) -> None:
        tasks = list(self._tasks)
        self.restart()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)

    # -------------------------------------------------------------------- using them

    def take(self, count: int) -> list[Connection]:
        """Take up to this many idle connections, those used last."""
        count = min(count, len(self._idle))
        taken = [connection for connection, _ in self._idle[len(self._idle) - count :]]
        del self._idle[len(self._idle) - count :]
        return taken

    async def begin(
        self, connections: Sequence[Connection], export: Export, seconds: Sequence[float] = ()
    ) -> list[Connection | None]:
        """Begin a transaction in the snapshot on each of them, with these statement timeouts if any
        are given. None for a connection that failed, which is dropped. If this raises, all of them
        are dropped."""
        settings = [f"; set local statement_timeout = '{int(each * 1000)}ms'" for each in seconds]
        settings = settings or [""] * len(connections)
        try:
            snapshot = await export()
            begun = (
                self._begin(connection, snapshot, its)
                for connection, its in zip(connections, settings, strict=True)
            )
            return list(await asyncio.gather(*begun))
        except BaseException:
            for connection in connections:
                self.drop(connection)
            raise

    async def _begin(
        self, connection: Connection, snapshot: str, settings: str
    ) -> Connection | None:
        try:
            async with asyncio.timeout(limits.FLUSH_QUESTION_SECONDS):
                # One message, because a pipeline takes several times as long.
                await connection.execute(
                    "begin isolation level repeatable read, read only;"
                    f" set transaction snapshot '{snapshot}'{settings}".encode()
                )
        except (psycopg.Error, TimeoutError) as error:
            logger.warning("a connection for %s cannot read: %s", self._purpose, error)
            self.drop(connection)
            return None
        return connection

    def free(self, connection: Connection) -> None:
        """Its transaction has ended, and its session has no changed settings."""
        if self._usable(connection):
            self._idle.append((connection, time.monotonic()))
        else:
            self.drop(connection)
        self._changed()

    def clean(self, connection: Connection, statements: Sequence[str]) -> None:
        """Run these statements in a task; then it is free."""
        _spawn(self._clean(connection, statements), self._tasks)

    async def _clean(self, connection: Connection, statements: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(limits.FLUSH_QUESTION_SECONDS):
                for statement in statements:
                    await connection.execute(statement.encode())
        except (psycopg.Error, TimeoutError) as error:
            logger.warning("a connection for %s was lost: %s", self._purpose, error)
            self.drop(connection)
            self._changed()
            return
        except asyncio.CancelledError:
            await connection.close()
            raise
        self.free(connection)

    @contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Close the connection if this takes longer. Cancelling the task is not enough: the driver
        would wait until the server has ended the statement."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self.hang_up, connection)
        try:
            yield
        finally:
            timer.cancel()

    def hang_up(self, connection: Connection) -> None:
        """Close it. The task that waits for an answer gets the error of a lost connection."""
        _spawn(connection.close(), self._closing)


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
