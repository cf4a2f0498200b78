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
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from headwater.channels.notes import Heard, Note, Reader, opened, payloads, signed
from headwater.database import Connection, connect, translated
from headwater.errors import HeadwaterError, LimitExceeded, PermissionMissing, Unavailable
from headwater.idempotency import Request, reused
from headwater.limits import (
    BUS_BATCH_BYTES,
    BUS_QUEUE_BYTES_MAX,
    BUS_SECONDS,
    PUBLISH_KEY_SECONDS,
)
from headwater.log.follow import reconnect_pause

if TYPE_CHECKING:
    # A program that only publishes counts nothing.
    from headwater.metrics import Metrics

logger = logging.getLogger(__name__)

CHANNEL = "headwater:bus"
NOTIFY = (
    f"select pg_catalog.pg_notify('{CHANNEL}', payload)"
    " from pg_catalog.unnest(%s::pg_catalog.text[]) payload"
)
_KEY = "select key from headwater.secret"

PUBLISH_ONCE = "select headwater.publish_once(%s::bytea[], %s, %s::bytea[], %s, %s::int[], %s)"


class _Waiting(NamedTuple):
    payloads: list[str]
    size: int
    sent: asyncio.Future[None]
    request: Request | None


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
        self._key: bytes | None = None
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

    def send(self, note: Note, request: Request | None = None) -> asyncio.Future[None]:
        """Say something to everybody who listens, us too, behind what was said before; a `request`
        that was said before is not said again. The future is Unavailable if the database did not
        pass it on."""
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
        waiting = _Waiting(texts, sum(map(len, texts)), sent, request)
        self._queue.append(waiting)
        self._bytes += waiting.size
        self._wake.set()
        return sent

    async def signed(self, note: Note) -> list[str]:
        """The payloads of a note that somebody else sends, once."""
        if self._key is None:
            async with asyncio.timeout(BUS_SECONDS):
                connection = await connect(self._url, purpose="bus")
                try:
                    self._key = await _key(connection)
                finally:
                    await connection.close()
        key = self._key
        return [signed(text, key) for text in payloads(note, secrets.token_hex(8), 1)]

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
        failures: list[HeadwaterError | None]
        try:
            failures = [None if ok else reused("publish") for ok in await self._notify(batch)]
        except (psycopg.Error, HeadwaterError, TimeoutError) as error:
            logger.debug("a message was not passed on: %s", error)
            failures = [_not_passed_on() for _ in batch]
        finally:
            self._bytes -= size
        for each, failure in zip(batch, failures, strict=True):
            if each.sent.done():
                continue  # who sent it does not wait any more
            if failure is None:
                each.sent.set_result(None)
            else:
                each.sent.set_exception(failure)

    async def _notify(self, batch: list[_Waiting]) -> list[bool]:
        """Of each whether it was passed on; False for a key that stands for another message."""
        was_open = self._connection is not None
        try:
            return await self._execute(batch)
        except (psycopg.Error, HeadwaterError, TimeoutError):
            await self._hang_up()
            if not was_open:
                raise
            # A connection that was lost while nobody spoke says so only now. Should it have been
            # passed on nevertheless, those who hear it twice know by its number.
            return await self._execute(batch)

    async def _execute(self, batch: list[_Waiting]) -> list[bool]:
        async with asyncio.timeout(BUS_SECONDS):
            if self._connection is None:
                self._connection = await connect(self._url, purpose="bus")
                self._key = await _key(self._connection)
            assert self._key is not None
            batch = [_signed(each, self._key) for each in batch]
            if not any(each.request for each in batch):
                texts = [text for each in batch for text in each.payloads]
                await self._connection.execute(NOTIFY, (texts,))
                return [True] * len(batch)
            cursor = await self._connection.execute(PUBLISH_ONCE, _once(batch))
            row = await cursor.fetchone()
            assert row is not None
            return list(row[0])

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
                key = await _key(connection)
                await connection.execute(f'listen "{CHANNEL}"')
                reader.reset()
                attempt = 0
                metrics.bus_up.set(1)
                connected()
                async for notice in connection.notifies():
                    _take(reader, notice.payload, key, heard, metrics)
            except (psycopg.Error, HeadwaterError) as error:
                level = logging.DEBUG if attempt else logging.WARNING
                logger.log(level, "other gateways are not heard, trying again: %s", error)
            finally:
                metrics.bus_up.set(0)
                if connection is not None:
                    await connection.close()
            await asyncio.sleep(reconnect_pause(attempt))
            attempt += 1


def _once(batch: list[_Waiting]) -> tuple[Any, ...]:
    """What `headwater.publish_once` is given."""
    requests = [each.request for each in batch]
    return (
        [request and request.scope for request in requests],
        [request and request.key for request in requests],
        [request and request.digest for request in requests],
        timedelta(seconds=PUBLISH_KEY_SECONDS),
        [number for number, each in enumerate(batch, 1) for _ in each.payloads],
        [text for each in batch for text in each.payloads],
    )


async def _key(connection: Connection) -> bytes:
    """What gateways sign with: who can read it may send."""
    with translated():
        row = await (await connection.execute(_KEY)).fetchone()
    if row is None:  # row-level security shows it to the owner of the schema alone
        raise PermissionMissing(
            "this role may not read headwater.secret, with which gateways sign their messages",
            hint="Run the gateway as the role that owns the schema headwater.",
        )
    return bytes(row[0])


def _signed(waiting: _Waiting, key: bytes) -> _Waiting:
    return waiting._replace(payloads=[signed(text, key) for text in waiting.payloads])


def _take(
    reader: Reader,
    payload: str,
    key: bytes,
    heard: Callable[[Heard], None],
    metrics: Metrics,
) -> None:
    try:
        found = reader.read(opened(payload, key))
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
