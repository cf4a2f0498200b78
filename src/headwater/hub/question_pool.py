"""Connections that ask in the snapshot of a flush, beside it.

Over `question_url` their login role owns nothing and may read nothing: the code of a policy that
leaves the role it was asked as finds itself with no rights. A connection is lent with the snapshot
imported, for one transaction. Taken back, it is rolled back and everything that such code could
leave in a session is discarded: settings, locks, prepared statements. A connection that does not
answer is ended at the server too, since that code can refuse to be cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from headwater import limits
from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.hub.tables import FORMATS

logger = logging.getLogger(__name__)

_OPTIONS = f"{FORMATS} -c jit=off"


class QuestionPool:
    """Up to `limits.QUESTION_CONNECTIONS` to one URL. `changed` is called when one is free. With
    `scoped`, they ask as users' roles: policies find names as the application's sessions do."""

    def __init__(self, url: str, changed: Callable[[], None], *, scoped: bool) -> None:
        self._url = url
        self._scoped = scoped
        self._changed = changed
        self._idle: list[tuple[Connection, float]] = []
        self._open = 0
        """Those that are idle, lent, being cleaned or being opened."""
        self._connecting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._pids: dict[Connection, int] = {}

    @property
    def idle(self) -> int:
        return len(self._idle)

    def want(self, count: int) -> None:
        """Have this many idle, as far as the bound allows."""
        missing = count - len(self._idle) - self._connecting
        for _ in range(min(missing, limits.QUESTION_CONNECTIONS - self._open)):
            self._open += 1
            self._connecting += 1
            _spawn(self._connect(), self._tasks)

    async def lend(
        self, seconds: list[float], export: Callable[[], Awaitable[str]]
    ) -> list[Connection | None]:
        """A connection in the snapshot of a flush for each of these statement timeouts; None where
        one could not import it. No more than are idle."""
        taken = [connection for connection, _ in self._idle[-len(seconds) :]]
        assert len(taken) == len(seconds)
        del self._idle[-len(seconds) :]
        self.want(1)  # the next flush may come before these are back
        try:
            snapshot = await export()
            return list(
                await asyncio.gather(
                    *(self._import(*each, snapshot) for each in zip(taken, seconds, strict=True))
                )
            )
        except BaseException:
            for connection in taken:
                self.drop(connection)
            raise

    def take_back(self, connection: Connection) -> None:
        """Its transaction is over. It is free once nothing is left of it."""
        _spawn(self._clean(connection), self._tasks)

    def drop(self, connection: Connection, *, end: bool = False) -> None:
        """It is not used again; with `end`, it is still busy and the server is to end it."""
        pid = self._pids.pop(connection, None)
        if pid is not None:  # otherwise it was dropped before
            self._open -= 1
            _spawn(self._close(connection, pid if end else None), self._closing)

    @contextmanager
    def bounded(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Hang up on one that takes longer: it is lost then. To be cancelled is not enough, since
        the driver would wait until the server has given up the statement."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self.hang_up, connection)
        try:
            yield
        finally:
            timer.cancel()

    def hang_up(self, connection: Connection) -> None:
        """The task that waits for its answer meets a lost connection."""
        _spawn(connection.close(), self._closing)

    def sweep(self) -> None:
        """Close what was not needed for a while; one stays."""
        before = time.monotonic() - limits.QUESTION_IDLE_SECONDS
        while len(self._idle) > 1 and self._idle[0][1] < before:
            self.drop(self._idle.pop(0)[0])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        idle, self._idle = self._idle, []
        for connection, _ in idle:
            await connection.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    # -------------------------------------------------------------------- connections

    async def _connect(self) -> None:
        try:
            # What the driver prepares would be discarded, and it would not know.
            connection = await connect(
                self._url,
                purpose="questions",
                options=_OPTIONS if self._scoped else f"{_OPTIONS} -c row_security=off",
                prepares=False,
                application_path=self._scoped,
            )
        except HeadwaterError as error:
            logger.warning("cannot ask for live queries: %s", error)
            await asyncio.sleep(limits.RECONNECT_SECONDS[1])
            self._open -= 1
            self._connecting -= 1
            self._changed()
            return
        self._connecting -= 1
        self._pids[connection] = connection.info.backend_pid
        self._free(connection)

    def _free(self, connection: Connection) -> None:
        self._idle.append((connection, time.monotonic()))
        self._changed()

    async def _import(
        self, connection: Connection, seconds: float, snapshot: str
    ) -> Connection | None:
        try:
            async with asyncio.timeout(limits.FLUSH_QUESTION_SECONDS):
                # All as one message: a pipeline costs several times that.
                await connection.execute(
                    "begin isolation level repeatable read, read only;"
                    f" set transaction snapshot '{snapshot}';"
                    f" set local statement_timeout = '{int(seconds * 1000)}ms'".encode()
                )
        except (psycopg.Error, TimeoutError) as error:
            logger.warning("a connection cannot ask for live queries: %s", error)
            self.drop(connection)
            return None
        return connection

    async def _clean(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(limits.FLUSH_QUESTION_SECONDS):
                await connection.execute("rollback")
                if self._scoped:
                    await connection.execute("discard all")
        except (psycopg.Error, TimeoutError) as error:
            logger.warning("a connection for questions was lost: %s", error)
            self.drop(connection)
            self._changed()
            return
        except asyncio.CancelledError:
            await connection.close()
            raise
        self._free(connection)

    async def _close(self, connection: Connection, pid: int | None) -> None:
        await connection.close()
        if pid is not None:
            with suppress(psycopg.Error, HeadwaterError):
                async with await connect(self._url, purpose="questions") as other:
                    await other.execute("select pg_catalog.pg_terminate_backend(%s)", (pid,))


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
