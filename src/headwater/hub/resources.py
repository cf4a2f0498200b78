"""What all parts of the hub share: the database's address, tables, memory, metrics, tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from headwater.database import Connection, connect
from headwater.hub.reading.tables import Tables
from headwater.log.reading.reader import LogReader
from headwater.memory import Memory
from headwater.metrics import Metrics
from headwater.model import Table

_FEED_CATCH_UPS_MAX = 16
"""Change feeds that catch up from the log at the same time. The others wait."""


class Resources:
    """`question_url` is the login for statements that run as a user's role, if there is one."""

    def __init__(
        self, url: str, question_url: str | None, tables: Tables, memory: Memory, metrics: Metrics
    ) -> None:
        self.url = url
        self.question_url = question_url
        self.tables = tables
        self.memory = memory
        self.metrics = metrics
        self.catch_ups = asyncio.Semaphore(_FEED_CATCH_UPS_MAX)
        """Bounds how many subscriptions read the log at the same time."""
        self._ids = count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def next_id(self) -> int:
        """The number of a new view of any kind."""
        return next(self._ids)

    @asynccontextmanager
    async def log_reader(
        self, wants: Callable[[Table], bool] | None = None
    ) -> AsyncIterator[tuple[Connection, LogReader]]:
        """Reads the log beside the flushes, over a connection of its own."""
        connection = await connect(self.url, purpose="catch-up")
        try:
            yield connection, await LogReader.open(connection, wants)
        finally:
            await connection.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task until the hub stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
