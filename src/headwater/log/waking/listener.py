"""Listens to a set of NOTIFY channels that changes, on a connection of its own.

A notification only wakes a reader; the content is in the log. So a lost connection loses nothing: a
new one listens to all channels of the set, and then wakes the reader once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import psycopg

from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.log.reconnect import reconnect_pause

logger = logging.getLogger(__name__)


class NotifyListener:
    """`run` listens until it is cancelled. `notified` is called for every notification, and after
    every new connection."""

    def __init__(self, url: str, notified: Callable[[], None]) -> None:
        self._url = url
        self._notified = notified
        self._wanted: Counter[str] = Counter()
        self._listening: set[str] = set()
        self._connection: Connection | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._requests: list[asyncio.Future[set[str]]] = []

    def want(self, channel: str) -> None:
        """Listen to a channel for one more subscriber."""
        self._wanted[channel] += 1
        if self._wanted[channel] == 1:
            self._change()

    def leave(self, channel: str) -> None:
        """One subscriber of the channel has left."""
        self._wanted[channel] -= 1
        if self._wanted[channel] <= 0:
            del self._wanted[channel]
            self._change()

    async def settled(self) -> None:
        """Wait until the server listens to the present set, unless it cannot be reached."""
        await self._settled.wait()

    async def channels(self) -> set[str]:
        """The channels that the server listens to for this connection."""
        question: asyncio.Future[set[str]] = asyncio.get_running_loop().create_future()
        self._requests.append(question)
        self._change()
        return await question

    def _change(self) -> None:
        self._settled.clear()
        self._changed.set()
        if self._waiting is not None:
            self._waiting.cancel()

    async def run(self) -> None:
        """Listen for ever; a lost connection is made again."""
        attempt = 0
        try:
            while True:
                await self._until_needed()
                try:
                    self._connection = await connect(self._url, purpose="topics")
                    await self._listen(self._connection)
                except (psycopg.Error, HeadwaterError) as error:
                    logger.log(
                        logging.DEBUG if attempt else logging.WARNING,
                        "cannot listen to topics, they are polled until it works again: %s", error,
                    )  # fmt: skip
                finally:
                    attempt = 0 if self._listening else attempt + 1
                    await self._disconnect()
                await asyncio.sleep(reconnect_pause(attempt))
        finally:
            for question in self._requests:
                question.cancel()

    async def _until_needed(self) -> None:
        """Without a channel there is no need for a connection."""
        while not self._wanted and not self._requests:
            self._settled.set()
            self._changed.clear()
            await self._changed.wait()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._listening.clear()
        self._settled.set()
        if connection is not None:
            await connection.close()

    async def _listen(self, connection: Connection) -> None:
        while True:
            self._changed.clear()
            await self._update_server(connection)
            if self._changed.is_set():
                continue
            self._settled.set()
            self._waiting = asyncio.create_task(self._wait(connection))
            try:
                await asyncio.wait({self._waiting})
                if not self._waiting.cancelled():
                    self._waiting.result()
            finally:
                self._waiting.cancel()
                with suppress(asyncio.CancelledError, psycopg.Error):
                    await self._waiting
                self._waiting = None

    async def _update_server(self, connection: Connection) -> None:
        wanted = set(self._wanted)
        statements = [f'listen "{channel}"' for channel in wanted - self._listening]
        statements += [f'unlisten "{channel}"' for channel in self._listening - wanted]
        if statements:
            fresh = not self._listening
            await connection.execute("; ".join(statements).encode())
            self._listening = wanted
            if fresh:
                self._notified()
        if self._requests:
            cursor = await connection.execute("select pg_listening_channels()")
            found = {str(channel) for (channel,) in await cursor.fetchall()}
            questions, self._requests = self._requests, []
            for question in questions:
                if not question.done():
                    question.set_result(found)

    async def _wait(self, connection: Connection) -> None:
        """Wait for notifications until cancelled, which loses none, or until the connection is
        lost."""
        async for _ in connection.notifies():
            self._notified()
