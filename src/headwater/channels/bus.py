"""The bus between all gateways of a database: NOTIFY on one channel.

One connection sends, one listens. Messages that arrive while the sender is busy go out together, in
one transaction. The database gives all gateways the same order. The future of `send` says whether a
message was delivered. Nothing is stored: a gateway that lost its connection misses the messages of
that time, and `listen` calls `connected` when it receives again.
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

from headwater.channels.bus_messages import (
    BusMessage,
    PayloadReader,
    Received,
    opened,
    payloads,
    signed,
)
from headwater.database import Connection, connect, translated
from headwater.errors import HeadwaterError, LimitExceeded, PermissionMissing, Unavailable
from headwater.idempotency import Request, reused
from headwater.limits import (
    BUS_QUEUE_BYTES_MAX,
    BUS_SECONDS,
    PUBLISH_KEY_SECONDS,
)
from headwater.log.reconnect import reconnect_pause

if TYPE_CHECKING:
    # A program that only publishes needs no metrics.
    from headwater.metrics import Metrics

_BUS_BATCH_BYTES = 256 * 1024
"""Bytes that a gateway sends to the others in one transaction, beside the message that exceeds
it."""


logger = logging.getLogger(__name__)

CHANNEL = "headwater:bus"
NOTIFY = (
    f"select pg_catalog.pg_notify('{CHANNEL}', payload)"
    " from pg_catalog.unnest(%s::pg_catalog.text[]) payload"
)
_KEY = "select key from headwater.secret"

PUBLISH_ONCE = "select headwater.publish_once(%s::bytea[], %s, %s::bytea[], %s, %s::int[], %s)"


class _QueuedMessage(NamedTuple):
    payloads: list[str]
    size: int
    sent: asyncio.Future[None]
    request: Request | None


class Bus:
    """Use as an async context manager; connections are opened when they are first needed."""

    def __init__(self, url: str) -> None:
        self.id = secrets.token_hex(8)
        """The id of this gateway as a sender."""
        self._url = url
        self._number = 0
        self._queue: deque[_QueuedMessage] = deque()
        self._bytes = 0
        self._pending: set[asyncio.Future[None]] = set()
        self._wake = asyncio.Event()
        self._connection: Connection | None = None
        self._key: bytes | None = None
        self._sender: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Bus:
        self._sender = asyncio.create_task(self._send_queued())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Wait a short time for queued messages to be delivered."""
        assert self._sender is not None
        if self._pending and not self._sender.done():
            await asyncio.wait(set(self._pending), timeout=BUS_SECONDS)
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)
        for sent in set(self._pending):
            sent.cancel()
        await self._disconnect()

    # -------------------------------------------------------------------- sending

    def send(self, message: BusMessage, request: Request | None = None) -> asyncio.Future[None]:
        """Send a message to all gateways, this one too, in order. A `request` that was sent before
        is not sent again. The future is Unavailable if the database did not deliver the message."""
        if self._bytes > BUS_QUEUE_BYTES_MAX:
            raise LimitExceeded(
                "too many bytes wait to be sent to the other gateways",
                hint="Publish less, or smaller messages.",
                code="bus_busy",
            )
        self._number += 1
        texts = payloads(message, self.id, self._number)
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.add(sent)
        sent.add_done_callback(self._over)
        waiting = _QueuedMessage(texts, sum(map(len, texts)), sent, request)
        self._queue.append(waiting)
        self._bytes += waiting.size
        self._wake.set()
        return sent

    async def signed(self, message: BusMessage) -> list[str]:
        """The signed payloads of a message that the caller sends itself, once."""
        if self._key is None:
            async with asyncio.timeout(BUS_SECONDS):
                connection = await connect(self._url, purpose="bus")
                try:
                    self._key = await _key(connection)
                finally:
                    await connection.close()
        key = self._key
        return [signed(text, key) for text in payloads(message, secrets.token_hex(8), 1)]

    def post(self, message: BusMessage) -> asyncio.Future[None] | None:
        """Send a message that may get lost: it is repeated, or requested again. None where too many
        bytes wait already."""
        try:
            return self.send(message)
        except LimitExceeded:
            return None

    def _over(self, sent: asyncio.Future[None]) -> None:
        self._pending.discard(sent)
        if not sent.cancelled():
            sent.exception()  # the caller has it

    async def _send_queued(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._send_some()

    async def _send_some(self) -> None:
        batch, size = list[_QueuedMessage](), 0
        while self._queue and size < _BUS_BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += batch[-1].size
        failures: list[HeadwaterError | None]
        try:
            failures = [None if ok else reused("publish") for ok in await self._notify(batch)]
        except (psycopg.Error, HeadwaterError, TimeoutError) as error:
            logger.debug("a message was not sent to the other gateways: %s", error)
            failures = [_not_delivered() for _ in batch]
        finally:
            self._bytes -= size
        for each, failure in zip(batch, failures, strict=True):
            if each.sent.done():
                continue  # the caller does not wait any more
            if failure is None:
                each.sent.set_result(None)
            else:
                each.sent.set_exception(failure)

    async def _notify(self, batch: list[_QueuedMessage]) -> list[bool]:
        """Whether each message was delivered; False for a key that belongs to another message."""
        was_open = self._connection is not None
        try:
            return await self._execute(batch)
        except (psycopg.Error, HeadwaterError, TimeoutError):
            await self._disconnect()
            if not was_open:
                raise
            # A connection that was lost while idle fails only now. Should the batch have been
            # delivered nevertheless, receivers discard the repetition by its number.
            return await self._execute(batch)

    async def _execute(self, batch: list[_QueuedMessage]) -> list[bool]:
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

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                await connection.close()

    # -------------------------------------------------------------------- listening

    async def listen(
        self, received: Callable[[Received], None], connected: Callable[[], None], metrics: Metrics
    ) -> None:
        """Runs for ever. Calls `connected` when it starts to listen, and again after a lost
        connection."""
        reader, attempt = PayloadReader(), 0
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
                    _take(reader, notice.payload, key, received, metrics)
            except (psycopg.Error, HeadwaterError) as error:
                level = logging.DEBUG if attempt else logging.WARNING
                logger.log(level, "cannot listen to the other gateways, trying again: %s", error)
            finally:
                metrics.bus_up.set(0)
                if connection is not None:
                    await connection.close()
            await asyncio.sleep(reconnect_pause(attempt))
            attempt += 1


def _once(batch: list[_QueuedMessage]) -> tuple[Any, ...]:
    """The arguments of `headwater.publish_once`."""
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
    """The key that gateways sign with. A role that can read it can send."""
    with translated():
        row = await (await connection.execute(_KEY)).fetchone()
    if row is None:  # row-level security shows it to the owner of the schema alone
        raise PermissionMissing(
            "this role may not read headwater.secret, with which gateways sign their messages",
            hint="Run the gateway as the role that owns the schema headwater.",
        )
    return bytes(row[0])


def _signed(waiting: _QueuedMessage, key: bytes) -> _QueuedMessage:
    return waiting._replace(payloads=[signed(text, key) for text in waiting.payloads])


def _take(
    reader: PayloadReader,
    payload: str,
    key: bytes,
    received: Callable[[Received], None],
    metrics: Metrics,
) -> None:
    try:
        found = reader.read(opened(payload, key))
    except ValueError as error:
        metrics.bus_refused.inc()
        logger.debug("ignored a payload on %s that no gateway sent: %s", CHANNEL, error)
        return
    if found is not None:
        try:
            received(found)
        except Exception:
            # One bad message must not stop the messages of the other gateways.
            logger.exception("a message of gateway %s could not be handled", found.sender)


def _not_delivered() -> Unavailable:
    return Unavailable(
        "the database did not deliver this to the other gateways",
        hint="Try again in a moment.",
        code="bus",
    )
