"""A small app of streams, and the servers it runs on: ours, plain uvicorn and hypercorn."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import hypercorn.asyncio
import hypercorn.config
import pytest
import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.gateway.http.server import serve
from headwater.gateway.http.transports import Sink, WebSocketSink, open_stream
from headwater.model import Enter
from headwater.protocol import Changes, Frame, Keepalive, Snapshot, WireTransaction

FRAMES = [
    Frame(Snapshot(1, "7:7:", (Enter((1,), {"id": 1, "name": "Zoë"}, 0, (1,)),))),
    Frame(Keepalive()),
    Frame(Changes(1, "8:8:", (WireTransaction(7, datetime(2026, 1, 1, tzinfo=UTC), ()),))),
]


def large_frame(size: int) -> Frame:
    return Frame(Snapshot(1, "7:7:", (Enter((1,), {"text": "x" * size}, 0, (1,)),)))


class Streams:
    """`/events` and `/lines` send FRAMES and end. `/hold` is left to the test, which finds its sink
    in `held`; `/late` is like it, once its client has gone, and `/ws` is a WebSocket held likewise.
    Anything else answers with the body it got."""

    def __init__(self, encoding: str | None = None) -> None:
        self._encoding = encoding
        self.held: asyncio.Queue[Sink] = asyncio.Queue()
        self.ended: asyncio.Queue[Sink] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"], scope.get("path"):
            case "http", "/events":
                await self._send_all(await self._open(scope, receive, send, "text/event-stream"))
            case "http", "/lines":
                await self._send_all(await self._open(scope, receive, send, "application/x-ndjson"))
            case "http", "/hold":
                await self._hold(await self._open(scope, receive, send, "text/event-stream"))
            case "http", "/late":
                while (await receive())["type"] != "http.disconnect":
                    pass
                await self._hold(await self._open(scope, receive, send, "text/event-stream"))
            case "http", _:
                await _plain(receive, send)
            case "websocket", _:
                await receive()
                await send({"type": "websocket.accept"})
                await self._hold_websocket(receive, send)
            case "lifespan", _:
                await _lifespan(receive, send)

    async def _open(self, scope: Scope, receive: Receive, send: Send, type_: Any) -> Sink:
        headers = [(b"x-test", b"yes")]
        return await open_stream(
            scope, receive, send, content_type=type_, headers=headers, encoding=self._encoding
        )

    async def _send_all(self, sink: Sink) -> None:
        for frame in FRAMES:
            sink.send(frame)
        sink.close()
        await sink.closed()
        self.ended.put_nowait(sink)

    async def _hold(self, sink: Sink) -> None:
        self.held.put_nowait(sink)
        await sink.closed()
        self.ended.put_nowait(sink)

    async def _hold_websocket(self, receive: Receive, send: Send) -> None:
        sink = WebSocketSink(send)
        holding = asyncio.create_task(self._hold(sink))
        while (await receive())["type"] != "websocket.disconnect":
            pass
        sink.abort()
        await holding


async def _plain(receive: Receive, send: Send) -> None:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [(b"content-length", str(len(body) + 3).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok:" + body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


# ------------------------------------------------------------------------ servers


@asynccontextmanager
async def ours(app: ASGIApp, **options: Any) -> AsyncIterator[int]:
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    arguments: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "drain": 5.0} | options
    task = asyncio.create_task(serve(app, ready=port.set_result, stop=stop, **arguments))
    await asyncio.wait({task, port}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield port.result()
    finally:
        stop.set()
        await task


@asynccontextmanager
async def plain_uvicorn(app: ASGIApp) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = suppress  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def plain_hypercorn(app: ASGIApp) -> AsyncIterator[int]:
    config = hypercorn.config.Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    config.graceful_timeout = 1.0
    (listening,) = (sockets := config.create_sockets()).insecure_sockets
    listening.listen()
    config.create_sockets = lambda: sockets  # type: ignore[method-assign]
    stop = asyncio.Event()
    running: Any = hypercorn.asyncio.serve
    task = asyncio.create_task(running(app, config, shutdown_trigger=stop.wait))
    try:
        yield listening.getsockname()[1]
    finally:
        stop.set()
        await task


SERVERS = {"ours": ours, "uvicorn": plain_uvicorn, "hypercorn": plain_hypercorn}
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on asyncio's own event loop and on uvloop, whose transports differ."""

    def run(loop: str, **arguments: Any) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(_within_a_minute(test(**arguments)))

    functools.update_wrapper(run, test)
    del run.__wrapped__  # type: ignore[attr-defined]
    run.__signature__ = _with_loop(test)  # type: ignore[attr-defined]
    mark: Callable[..., None] = pytest.mark.parametrize("loop", LOOPS)(run)
    return mark


def _with_loop(test: Callable[..., Any]) -> Any:
    signature = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    return signature.replace(parameters=[*signature.parameters.values(), loop])


async def _within_a_minute(test: Awaitable[None]) -> None:
    async with asyncio.timeout(60):
        await test


# ------------------------------------------------------------------------ a client


class Response:
    """A response as it came over the wire."""

    def __init__(self, head: bytes, body: bytes) -> None:
        lines = head.decode().split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
        self.raw = body

    @property
    def body(self) -> bytes:
        return dechunked(self.raw) if "transfer-encoding" in self.headers else self.raw


def dechunked(data: bytes) -> bytes:
    body = b""
    while match := re.match(rb"([0-9a-f]+)\r\n", data):
        size = int(match[1], 16)
        body += data[match.end() : match.end() + size]
        data = data[match.end() + size + 2 :]
    assert data == b"", data
    return body


async def ask(port: int, path: str, *, method: str = "GET", version: str = "1.1") -> Response:
    """Ask on a connection of its own, which the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    close = "connection: close\r\n" if version == "1.1" else ""
    writer.write(f"{method} {path} HTTP/{version}\r\nhost: test\r\n{close}\r\n".encode())
    head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return Response(head, body)


@asynccontextmanager
async def connected(
    port: int, path: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request for a stream whose head has been read, on a connection that stays open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: test\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
