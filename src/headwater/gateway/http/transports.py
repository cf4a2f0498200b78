"""Sends the frames of a session: over the response of a stream, or over a WebSocket.

A sink never blocks and preserves the order. It reports how much the network has not accepted yet
(`buffered`), and when that has become little again (`on_drain`). The session decides what happens
to a slow client. With our own server (`server`) a stream writes directly to the transport of its
connection: the same encoded bytes to each of N connections. With any other server it uses ASGI's
`send`. Clients see no difference.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Literal, Protocol, TypeAlias

from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from headwater.gateway.backlog import Backlog
from headwater.gateway.http.compression import Compressor, compressor
from headwater.limits import (
    SINK_BYTES_MAX,
    SINK_CLOSE_SECONDS,
)
from headwater.protocol import Frame, Shared, as_chunk

COMPRESS_BYTES_AT_ONCE = 256 * 1024
"""Bytes that are compressed in one turn of the event loop. Each part of a larger message has its
own turn."""

_SINK_LOW_BYTES = 32 * 1024
"""A sink that held more calls `on_drain` when it is down to this."""


TRANSPORT_EXTENSION = "headwater.transport"
"""The key of a `TransportConnection` among the extensions of an ASGI scope."""

ContentType: TypeAlias = Literal["text/event-stream", "application/x-ndjson"]
Header: TypeAlias = tuple[bytes, bytes]


class Sink(Protocol):
    """Written to in order, by one session. None of these calls waits, except `closed`."""

    on_drain: Callable[[], None] | None
    """Called when `buffered` has fallen to _SINK_LOW_BYTES after having been above."""

    backlog: Backlog | None
    """Counts the bytes that wait."""

    sent: int
    """The number of frames so far."""
    sent_bytes: int
    """The bytes of these frames: before WebSocket compression, after ours."""

    @property
    def buffered(self) -> int:
        """Bytes that the network has not accepted yet; may be 0 for less than _SINK_LOW_BYTES."""

    def send(self, frame: Frame) -> None:
        """Write a frame after the earlier ones. Ignored once the sink is closed or the client has
        disconnected."""

    def close(self) -> None:
        """End after the buffered frames are sent; at once if that takes longer than
        SINK_CLOSE_SECONDS."""

    def abort(self) -> None:
        """End at once; buffered frames are lost."""

    async def closed(self) -> None:
        """Return when the client has disconnected, or when the sink is closed and everything is
        sent. Awaited once, by the task that handles the request: the response ends here."""


class ConnectionListener(Protocol):
    """Receives the events of a connection."""

    def paused(self) -> None:
        """More bytes wait than the transport's high-water mark."""

    def drained(self) -> None:
        """No more bytes wait than the transport's low-water mark."""

    def lost(self) -> None:
        """The connection has ended."""


class TransportConnection(Protocol):
    """The connection of a request, which our server adds to the extensions of its scope."""

    transport: asyncio.Transport

    def attach(self, listener: ConnectionListener | None) -> None:
        """Send events to this listener from now on; None for no listener."""

    def leave_unchunked(self) -> None:
        """Make the response end with the connection, because HTTP/1.0 has no chunks. Called before
        the response starts."""


# ------------------------------------------------------------------------ streams


async def open_stream(
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    content_type: ContentType,
    headers: Iterable[Header] = (),
    encoding: str | None = None,
    marked: bool = False,
) -> Sink:
    """Start a response that continues until its sink is closed; for a HEAD request, only its head.
    If it is `marked`, events have no `id`: a `Mark` says where to resume."""
    compressor = _compressor(encoding)
    connection: TransportConnection | None = (scope.get("extensions") or {}).get(
        TRANSPORT_EXTENSION
    )
    chunked = scope.get("http_version") != "1.0"
    if connection is not None and not chunked:
        connection.leave_unchunked()
    head = {"type": "http.response.start", "status": 200}
    await send(head | {"headers": [*_stream_headers(content_type, encoding), *headers]})
    sink: Sink
    if connection is None or scope["method"] == "HEAD":
        sink = AsgiSink(receive, send, _form(content_type, marked), compressor)
    else:
        form = _wire_form(content_type, compressor, chunked, marked)
        sink = TransportSink(connection, send, form, compressor, chunked=chunked)
    if scope["method"] == "HEAD":
        sink.close()
    return sink


def _stream_headers(content_type: ContentType, encoding: str | None) -> list[Header]:
    charset = b"; charset=utf-8" if content_type == "text/event-stream" else b""
    headers = [
        (b"content-type", content_type.encode() + charset),
        # Proxies must not cache, compress or buffer the stream.
        (b"cache-control", b"no-cache, no-transform"),
        (b"x-accel-buffering", b"no"),
        (b"vary", b"accept-encoding"),
    ]
    return headers if encoding is None else [*headers, (b"content-encoding", encoding.encode())]


def _compressor(encoding: str | None) -> Compressor | None:
    return None if encoding is None else compressor(encoding)


_FORMS = {
    ("text/event-stream", False): ("sse", "chunk"),
    ("text/event-stream", True): ("event", "event_chunk"),
    ("application/x-ndjson", False): ("line", "line_chunk"),
}
"""The attributes of a frame with its bytes, plain and as a chunk; by content type and whether the
stream is marked."""


def _form(content_type: ContentType, marked: bool) -> Callable[[Frame], bytes]:
    return attrgetter(_FORMS[content_type, marked][0])


def _wire_form(
    content_type: ContentType, compressor: Compressor | None, chunked: bool, marked: bool
) -> Callable[[Frame], bytes]:
    """How a frame is written to a transport: as bytes that all connections share, or as bytes to
    compress."""
    return attrgetter(_FORMS[content_type, marked][compressor is None and chunked])


class TransportSink:
    """A stream that writes to the transport of its connection. Has no task and copies no bytes.

    With compression, a large message is compressed in parts, each in its own turn of the event
    loop, and later messages wait behind it."""

    __slots__ = (
        "_behind", "_chunked", "_compressor", "_connection", "_form", "_is_lost", "_is_open",
        "_parts", "_parts_bytes", "_send", "_transport", "_waiter", "_write", "backlog", "on_drain",
        "sent",
        "sent_bytes",
    )  # fmt: skip

    def __init__(
        self,
        connection: TransportConnection,
        send: Send,
        form: Callable[[Frame], bytes],
        compressor: Compressor | None,
        *,
        chunked: bool,
    ) -> None:
        self.on_drain: Callable[[], None] | None = None
        self.backlog: Backlog | None = None
        self.sent = self.sent_bytes = 0
        self._connection = connection
        self._transport = connection.transport
        self._write = connection.transport.write
        self._send = send
        self._form = form
        self._compressor = compressor
        self._chunked = chunked
        self._parts: deque[bytes] | None = None
        self._parts_bytes = 0
        self._behind = False
        self._is_open = True
        self._is_lost = self._transport.is_closing()
        self._waiter: asyncio.Future[None] | None = None
        if self._is_lost:
            self._is_open = False
        else:
            connection.attach(self)
            self._transport.set_write_buffer_limits(high=_SINK_LOW_BYTES, low=_SINK_LOW_BYTES)

    @property
    def buffered(self) -> int:
        # Bytes below the mark are being sent, and asking the transport costs as much as writing.
        if not self._behind:
            return 0
        return self._transport.get_write_buffer_size() + self._parts_bytes

    def send(self, frame: Frame) -> None:
        # Bytes that are not compressed yet do not mean that the client is slow.
        if self._behind and self._transport.get_write_buffer_size() > SINK_BYTES_MAX:
            self.abort()
        if self._is_open:
            data = self._form(frame)
            self.sent += 1
            if self._compressor is None:
                self._write(data)
                self.sent_bytes += len(data)
            elif self._parts or len(data) > COMPRESS_BYTES_AT_ONCE:
                self._write_in_parts(data)
            else:
                self._write_compressed(data)
            if self._behind and self.backlog is not None:
                own = self._compressor is not None
                self.backlog.add(Shared(len(data)) if own else frame.shared, self.buffered)

    def _write_compressed(self, data: bytes) -> None:
        assert self._compressor is not None
        compressed = self._compressor.add(data)
        if self._chunked:
            compressed = as_chunk(compressed)
        self._write(compressed)
        self.sent_bytes += len(compressed)

    def _write_in_parts(self, data: bytes) -> None:
        if not self._parts:
            self._parts = self._parts or deque()
            asyncio.get_running_loop().call_soon(self._write_part)
        starts = range(0, len(data), COMPRESS_BYTES_AT_ONCE)
        self._parts += (data[start : start + COMPRESS_BYTES_AT_ONCE] for start in starts)
        self._parts_bytes += len(data)
        self._behind = True

    def _write_part(self) -> None:
        """Compress one part, and schedule the next part after other work of the event loop."""
        if self._is_lost or not self._parts:
            self._drop_parts()
            return
        part = self._parts.popleft()
        self._parts_bytes -= len(part)
        self._write_compressed(part)
        if self._parts:
            asyncio.get_running_loop().call_soon(self._write_part)
        elif not self._is_open or self._transport.get_write_buffer_size() <= _SINK_LOW_BYTES:
            self.drained()

    def _drop_parts(self) -> None:
        self._parts, self._parts_bytes = None, 0

    def close(self) -> None:
        self._is_open = False
        self._wake()

    def abort(self) -> None:
        self._drop_parts()
        self.close()
        self._transport.abort()

    async def closed(self) -> None:
        try:
            while self._is_open and not self._is_lost:
                await self._wait()
            if not self._is_lost:
                await self._finish()
        finally:
            self._is_open = False
            self._connection.attach(None)

    async def _finish(self) -> None:
        try:
            async with asyncio.timeout(SINK_CLOSE_SECONDS):
                while self._parts and not self._is_lost:
                    await self._wait()
                if self._compressor is not None:
                    rest = self._compressor.finish()
                    self._transport.write(as_chunk(rest) if self._chunked else rest)
                await self._flush()
                if self._chunked:
                    await self._send(_END)  # Nothing if the client has disconnected meanwhile.
                else:
                    self._transport.close()
                    await self._until_lost()
        except TimeoutError:
            self._transport.abort()
            await self._until_lost()

    async def _flush(self) -> None:
        """Wait until nothing is buffered."""
        self._transport.set_write_buffer_limits(high=0)
        while not self._is_lost and self._transport.get_write_buffer_size():
            await self._wait()
        if not self._is_lost:  # uvloop raises an error for a closed transport.
            self._transport.set_write_buffer_limits()

    async def _until_lost(self) -> None:
        while not self._is_lost:
            await self._wait()

    async def _wait(self) -> None:
        """Wait until the connection is drained or lost, or the sink is closed."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Events of the connection.

    def paused(self) -> None:
        self._behind = True

    def drained(self) -> None:
        if not self._is_open:
            self._wake()
        elif self._behind and not self._parts:
            self._behind = False
            if self.backlog is not None:
                self.backlog.settle(0)
            if self.on_drain is not None:
                self.on_drain()

    def lost(self) -> None:
        self._is_lost = True
        self._is_open = False
        self._drop_parts()
        self._wake()


_END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class _QueuedSink(ABC):
    """A sink over ASGI: messages are queued, and a task of the sink passes them to `send`."""

    _takes_turns = False
    """Whether encoding a message may take long, so that other tasks run before the next one."""

    def __init__(self, send: Send) -> None:
        self.on_drain: Callable[[], None] | None = None
        self.backlog: Backlog | None = None
        self.sent = self.sent_bytes = 0
        self._send = send
        self._queue = deque[Frame]()
        self._bytes = 0
        self._is_open = True
        self._wake = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._writer = asyncio.create_task(self._write())
        self._writer.add_done_callback(self._written)

    @property
    def buffered(self) -> int:
        return self._bytes

    def send(self, frame: Frame) -> None:
        if self._bytes > SINK_BYTES_MAX:
            self.abort()
        if self._is_open:
            self._queue.append(frame)
            self._bytes += frame.size
            self.sent += 1
            self.sent_bytes += frame.size
            if self._bytes > _SINK_LOW_BYTES and self.backlog is not None:
                self.backlog.add(frame.shared, self._bytes)
            self._wake.set()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._wake.set()
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(SINK_CLOSE_SECONDS, self.abort)

    def abort(self) -> None:
        self._is_open = False
        self._writer.cancel()

    def _written(self, _: object) -> None:
        self._is_open = False
        self._queue.clear()
        self._bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()

    async def _write(self) -> None:
        try:
            while self._is_open or self._queue:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    await self._write_some()
            await self._end()
        except (OSError, RuntimeError, WebSocketDisconnect):
            pass  # The client has disconnected; servers raise different errors for that.

    async def _write_some(self) -> None:
        """Send what is queued now."""
        frames = tuple(self._queue)
        self._queue.clear()
        before = self._bytes
        for message in self._messages(frames):
            await self._send(message)
            if self._takes_turns:
                await asyncio.sleep(0)
        self._bytes -= sum(frame.size for frame in frames)
        if self.backlog is not None:
            self.backlog.settle(self._bytes)
        if before > _SINK_LOW_BYTES >= self._bytes and self._is_open and self.on_drain is not None:
            self.on_drain()

    @abstractmethod
    def _messages(self, frames: tuple[Frame, ...]) -> Iterable[Message]: ...

    @abstractmethod
    async def _end(self) -> None: ...


class AsgiSink(_QueuedSink):
    """A stream over ASGI. Messages that were queued while the server was busy are sent as one
    body."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        form: Callable[[Frame], bytes],
        compressor: Compressor | None,
    ) -> None:
        super().__init__(send)
        self._receive = receive
        self._form = form
        self._compressor = compressor
        self._takes_turns = compressor is not None

    async def closed(self) -> None:
        leaving = asyncio.create_task(self._client_leaves())
        try:
            await asyncio.wait({leaving, self._writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.abort()
            leaving.cancel()
            await asyncio.gather(leaving, self._writer, return_exceptions=True)

    async def _client_leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _messages(self, frames: tuple[Frame, ...]) -> Iterable[Message]:
        body = b"".join(map(self._form, frames))
        if self._compressor is None:
            yield {"type": "http.response.body", "body": body, "more_body": True}
            return
        for start in range(0, len(body), COMPRESS_BYTES_AT_ONCE):
            part = self._compressor.add(body[start : start + COMPRESS_BYTES_AT_ONCE])
            yield {"type": "http.response.body", "body": part, "more_body": True}

    async def _end(self) -> None:
        rest = b"" if self._compressor is None else self._compressor.finish()
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})


class WebSocketSink(_QueuedSink):
    """Text frames over an accepted WebSocket. Give it the `send` of ASGI or of Starlette's
    WebSocket. The task that receives from the socket notices a disconnect, and calls `abort`."""

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._closing: Message = {"type": "websocket.close", "code": 1000, "reason": ""}

    def close(self, code: int = 1000, reason: str = "") -> None:
        self._closing = {"type": "websocket.close", "code": code, "reason": reason}
        super().close()

    async def closed(self) -> None:
        try:
            await asyncio.wait({self._writer})
        finally:
            self.abort()

    def _messages(self, frames: tuple[Frame, ...]) -> Iterable[Message]:
        return ({"type": "websocket.send", "text": frame.text} for frame in frames)

    async def _end(self) -> None:
        await self._send(self._closing)
