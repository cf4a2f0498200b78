"""Runs every source of a database: starts a runner for each that is declared, and brings it what is
requested. It listens for notifications, and looks at the table every few seconds in case one was
lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress

import psycopg

from headwater.capture.kinds import open_source
from headwater.capture.mirror import registry
from headwater.capture.postgres import triggers
from headwater.capture.running.runner import OpenSource, Runner
from headwater.capture.running.status import StatusWriter
from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.limits import SOURCE_CHUNK_ROWS, SOURCE_POLL_SECONDS, SOURCE_STOP_SECONDS

logger = logging.getLogger(__name__)


class Supervisor:
    """Runs the sources of one database."""

    def __init__(
        self,
        url: str,
        *,
        open_source: OpenSource = open_source,
        chunk_rows: int = SOURCE_CHUNK_ROWS,
        retry_seconds: float = 0.5,
        poll_seconds: float = SOURCE_POLL_SECONDS,
    ) -> None:
        self._url = url
        self._open_source = open_source
        self._chunk_rows = chunk_rows
        self._retry_seconds = retry_seconds
        self._poll_seconds = poll_seconds
        self._statuses = StatusWriter(url)
        self._runners: dict[str, tuple[Runner, asyncio.Task[None]]] = {}
        self._stop = asyncio.Event()

    async def run(self, names: Collection[str] | None = None) -> None:
        """Until `stop`. Sources that are declared later are started, too; only those of these names
        if names are given."""
        writing = asyncio.create_task(self._statuses.run())
        try:
            while not self._stop.is_set():
                try:
                    await self._supervise(names)
                except (psycopg.Error, HeadwaterError) as error:
                    logger.warning("cannot read the sources, trying again: %s", error)
                    await self._pause(min(1.0, self._poll_seconds))
        finally:
            await self._end_runners()
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await writing
            await self._statuses.close()

    async def stop(self) -> None:
        """End `run`, after every source has finished its transaction at hand."""
        self._stop.set()

    async def _supervise(self, names: Collection[str] | None) -> None:
        connection = await connect(self._url, purpose="sources")
        try:
            await self._enable(connection)
            await connection.execute(f'listen "{registry.CHANNEL}"'.encode())
            while not self._stop.is_set():
                await self._look(connection, names)
                await self._wait(connection)
        finally:
            await connection.close()

    async def _enable(self, connection: Connection) -> None:
        """The table of sources is reactive, unless an admin has disabled it."""
        cursor = await connection.execute(
            "select from headwater.tables where relid = 'headwater.sources'::regclass"
        )
        if await cursor.fetchone() is not None:
            return
        try:
            await triggers.enable(connection, "headwater.sources")
        except HeadwaterError as error:
            logger.warning("headwater.sources cannot be followed: %s", error)

    async def _look(self, connection: Connection, names: Collection[str] | None) -> None:
        declared = {d.definition.name: d for d in await registry.definitions(connection)}
        for name, one in declared.items():
            if names is not None and name not in names:
                continue
            if name in self._runners:
                self._runners[name][0].update(one)
            else:
                self._start(one)
        for name, (_, task) in list(self._runners.items()):
            if task.done() or name not in declared:
                await self._end(name)

    def _start(self, declared: registry.DeclaredSource) -> None:
        runner = Runner(
            self._url, declared, self._statuses, open_source=self._open_source,
            chunk_rows=self._chunk_rows, retry_seconds=self._retry_seconds,
        )  # fmt: skip
        self._runners[runner.name] = runner, asyncio.create_task(runner.run())

    async def _end(self, name: str) -> None:
        runner, task = self._runners.pop(name)
        await runner.stop()
        await asyncio.wait({task}, timeout=SOURCE_STOP_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._statuses.remove(name)

    async def _end_runners(self) -> None:
        await asyncio.gather(*(self._end(name) for name in list(self._runners)))

    async def _wait(self, connection: Connection) -> None:
        """Until a notification comes or it is time to look again."""
        notices = asyncio.create_task(_notified(connection, self._poll_seconds))
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({notices, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if not notices.done():
                notices.cancel()
                with suppress(asyncio.CancelledError, psycopg.Error):
                    await notices
        if notices.done() and not notices.cancelled():
            notices.result()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()


async def _notified(connection: Connection, seconds: float) -> None:
    async for _ in connection.notifies(timeout=seconds, stop_after=1):
        return
