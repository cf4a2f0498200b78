"""What all gateways over a database hear: NOTIFY on one channel.

One connection speaks, one listens. What is said while the first is busy goes out together, in one
transaction; the database gives everybody the same order. `send` tells whether it was passed on.
Nothing is kept for those who do not listen: a gateway that has lost its connection misses what is
said meanwhile, and is told when it hears again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import psycopg

from headwater.channels.notes import Heard, Note, Reader, payloads
from headwater.database import Connection, connect
from headwater.errors import HeadwaterError, LimitExceeded, Unavailable
from headwater.limits import BUS_BATCH_BYTES, BUS_QUEUE_BYTES_MAX, BUS_SECONDS
from headwater.log.follow import reconnect_pause

if TYPE_CHECKING:
    # A program that only publishes counts nothing.
    from headwater.metrics import Metrics

logger = logging.getLogger(__name__)

CHANNEL = "headwater:bus"
NOTIFY = f"select pg_notify('{CHANNEL}', payload) from unnest(%s::text[]) payload"


class _Waiting(NamedTuple):
    payloads: list[str]
    size: int
    sent: asyncio.Future[None]


class Bus:
    """Use as an async context manager; connections are opened when they are first needed."""

    def __init__(self, url: str) -> None:
        self.id = secrets.token_hex(8)
        """Our name among those who send."""
        self._url = url
        self._number = 0
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._pending: set[asyncio.Future[None]] = set()
        self._wake = asyncio.Event()
        self._connection: Connection | None = None
        self._speaking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Bus:
        self._speaking = asyncio.create_task(self._speak())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """What was said is still passed on, if that is quick."""
        assert self._speaking is not None
        if self._pending and not self._speaking.done():
            await asyncio.wait(set(self._pending), timeout=BUS_SECONDS)
        self._speaking.cancel()
        await asyncio.gather(self._speaking, return_exceptions=True)
        for sent in set(self._pending):
            sent.cancel()
        await self._hang_up()

    # -------------------------------------------------------------------- speaking

    def send(self, note: Note) -> asyncio.Future[None]:
        """Say something to everybody who listens, us too, behind what was said before. The future
        is Unavailable if the database did not pass it on."""
        if self._bytes > BUS_QUEUE_BYTES_MAX:
            raise LimitExceeded(
                "too much waits to be sent to other gateways",
                hint="Publish less, or smaller messages.",
                code="bus_busy",
            )
        self._number += 1
        texts = payloads(note, self.id, self._number)
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.add(sent)
        sent.add_done_callback(self._over)
        waiting = _Waiting(texts, sum(map(len, texts)), sent)
        self._queue.append(waiting)
        self._bytes += waiting.size
        self._wake.set()
        return sent

    def tell(self, note: Note) -> asyncio.Future[None] | None:
        """The same for what need not arrive: it is said again, or will be asked for. None where too
        much waits already."""
        try:
            return self.send(note)
        except LimitExceeded:
            return None

    def _over(self, sent: asyncio.Future[None]) -> None:
        self._pending.discard(sent)
        if not sent.cancelled():
            sent.exception()  # whoever waits has it

    async def _speak(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._send_some()

    async def _send_some(self) -> None:
        batch, size = list[_Waiting](), 0
        while self._queue and size < BUS_BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += batch[-1].size
        failure: Unavailable | None = None
        try:
            await self._notify([text for each in batch for text in each.payloads])
        except (psycopg.Error, HeadwaterError, TimeoutError) as error:
            logger.debug("a message was not passed on: %s", error)
            failure = _not_passed_on()
        finally:
            self._bytes -= size
        for each in batch:
            if each.sent.done():
                continue  # who sent it does not wait any more
            if failure is None:
                each.sent.set_result(None)
            else:
                each.sent.set_exception(failure)

    async def _notify(self, texts: list[str]) -> None:
        was_open = self._connection is not None
        try:
            await self._execute(texts)
        except (psycopg.Error, HeadwaterError, TimeoutError):
            await self._hang_up()
            if not was_open:
                raise
            # A connection that was lost while nobody spoke says so only now. Should it have been
            # passed on nevertheless, those who hear it twice know by its number.
            await self._execute(texts)

    async def _execute(self, texts: list[str]) -> None:
        async with asyncio.timeout(BUS_SECONDS):
            if self._connection is None:
                self._connection = await connect(self._url, purpose="bus")
            await self._connection.execute(NOTIFY, (texts,))

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                await connection.close()

    # -------------------------------------------------------------------- listening

    async def listen(
        self, heard: Callable[[Heard], None], connected: Callable[[], None], metrics: Metrics
    ) -> None:
        """For ever. `connected` is called when it begins to hear, and again after a loss."""
        reader, attempt = Reader(), 0
        while True:
            connection: Connection | None = None
            try:
                connection = await connect(self._url, purpose="bus listener")
                await connection.execute(f'listen "{CHANNEL}"')
                reader.reset()
                attempt = 0
                metrics.bus_up.set(1)
                connected()
                async for notice in connection.notifies():
                    _take(reader, notice.payload, heard, metrics)
            except (psycopg.Error, HeadwaterError) as error:
                level = logging.DEBUG if attempt else logging.WARNING
                logger.log(level, "other gateways are not heard, trying again: %s", error)
            finally:
                metrics.bus_up.set(0)
                if connection is not None:
                    await connection.close()
            await asyncio.sleep(reconnect_pause(attempt))
            attempt += 1


def _take(reader: Reader, payload: str, heard: Callable[[Heard], None], metrics: Metrics) -> None:
    try:
        found = reader.read(payload)
    except ValueError as error:
        metrics.bus_refused.inc()
        logger.debug("a payload on %s is none of ours: %s", CHANNEL, error)
        return
    if found is not None:
        try:
            heard(found)
        except Exception:
            # Whatever somebody sent, the others must be heard.
            logger.exception("what %s said could not be dealt with", found.sender)


def _not_passed_on() -> Unavailable:
    return Unavailable(
        "the database did not pass this on to the other gateways",
        hint="Try again in a moment.",
        code="bus",
    )
