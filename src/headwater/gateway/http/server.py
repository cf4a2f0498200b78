"""`headwater serve`: uvicorn, which passes the transport of each connection to its requests.

uvicorn parses requests, keeps connections alive and speaks WebSocket. This module adds what a
gateway for streams needs: the extension of the ASGI scope with which `transports` writes to the
transport, bounds on the head of a request, and a shutdown in which streams get a last message
before they end. The two protocol classes use parts of uvicorn that are not documented;
tests/contract/test_uvicorn.py tests them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from headwater.errors import ConfigError, Unavailable
from headwater.gateway.http.transports import (
    COMPRESS_BYTES_AT_ONCE,
    TRANSPORT_EXTENSION,
    ConnectionListener,
)
from headwater.limits import (
    ACCEPT_BACKLOG,
    DEAD_CLIENT_SECONDS,
    KEEP_ALIVE_SECONDS,
    REQUEST_BYTES_MAX,
    REQUEST_HEAD_BYTES_MAX,
    REQUEST_HEAD_SECONDS,
    SINK_CLOSE_SECONDS,
    SOCKET_PING_SECONDS,
)

_UNSENT_BYTES_MAX = 128 * 1024
"""Unsent bytes in the operating system's buffer of a connection. Further bytes wait in the sink,
where they are counted and can be replaced by newer state."""


logger = logging.getLogger(__name__)


async def serve(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    drain: float,
    on_stopping: Callable[[], Awaitable[None]] | None = None,
    ready: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
    deflate: bool = True,
) -> None:
    """Serve until SIGINT, SIGTERM or `stop`; then return after about `drain` seconds at most. When
    cancelled, end all connections at once.

    `ready` is called with the port once connections are accepted. When stopping, no new connection
    is accepted and `on_stopping` ends the streams; a client that has not read all of its messages
    after `drain` seconds is disconnected. `deflate` allows WebSocket messages to be compressed.
    """
    _raise_open_files_limit()
    sockets = _listen(host, port)
    config = uvicorn.Config(
        app,
        http=StreamingProtocol,
        ws=SocketProtocol,
        ws_max_size=REQUEST_BYTES_MAX,
        ws_ping_interval=SOCKET_PING_SECONDS,
        ws_ping_timeout=SOCKET_PING_SECONDS,
        ws_per_message_deflate=deflate,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPT_BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(drain + SINK_CLOSE_SECONDS),
    )
    server = _Server(config, drain, on_stopping, ready, stop)
    try:
        await server.serve(sockets)
    except asyncio.CancelledError:
        await server.stop_at_once(sockets)
        raise
    finally:
        for listening in sockets:
            listening.close()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The fastest available event loop, for `asyncio.Runner(loop_factory=new_event_loop)`."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class StreamingProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, which adds itself to the extensions of each request's scope: it
    is the `TransportConnection` of `gateway/http/transports.py`."""

    # More attributes than uvicorn's own would make the dict of each connection larger.
    __slots__ = ("_extensions", "_head_bytes", "_head_timer", "_listener")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listener: ConnectionListener | None = None
        self._extensions = {TRANSPORT_EXTENSION: self}
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    # For the sinks.

    def attach(self, listener: ConnectionListener | None) -> None:
        self._listener = listener

    def leave_unchunked(self) -> None:
        # uvicorn also sends chunks to HTTP/1.0 clients, unless it has an expected length.
        self.cycle.chunked_encoding = False

    # Events of the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_arrived()
        if self._listener is not None:
            self._listener.lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._listener is not None:
            self._listener.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._listener is not None:
            self._listener.drained()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > REQUEST_HEAD_BYTES_MAX:
                self._refuse_head()

    # Events of the parser.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        super().on_headers_complete()

    # The bounds on a head.

    def _await_head(self) -> None:
        self._head_arrived()
        self._head_timer = self.loop.call_later(REQUEST_HEAD_SECONDS, self._head_is_late)

    def _head_arrived(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.pipeline:  # We have stopped reading; it is not the client who is slow.
            self._await_head()
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        self._head_arrived()
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete:
            self.transport.write(_HEAD_TOO_LARGE)
        self.transport.close()


class SocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, with two corrections. uvicorn treats a refused handshake as one without
    a response, and logs an error for each client without a token. It also compresses a message of
    any size in one step."""

    async def send(self, message: Any) -> None:
        text = message.get("text") if message["type"] == "websocket.send" else None
        if text is not None and len(text) > COMPRESS_BYTES_AT_ONCE and self.conn.extensions:
            await self._send_in_parts(text.encode())
            return
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True

    async def _send_in_parts(self, data: bytes) -> None:
        """Send a text in frames, each compressed in its own turn of the event loop."""
        for start in range(0, len(data), COMPRESS_BYTES_AT_ONCE):
            await self.writable.wait()
            if self.disconnected or self.close_sent:
                raise ClientDisconnected
            send = self.conn.send_continuation if start else self.conn.send_text
            end = start + COMPRESS_BYTES_AT_ONCE
            try:
                send(data[start:end], fin=end >= len(data))
            except InvalidState as error:
                raise ClientDisconnected from error
            self.transport.write(b"".join(self.conn.data_to_send()))
            await asyncio.sleep(0)


_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        drain: float,
        on_stopping: Callable[[], Awaitable[None]] | None,
        ready: Callable[[int], None] | None,
        stop: asyncio.Event | None,
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._on_stopping = on_stopping
        self._ready = ready
        self._stop = stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as error:
            raise Unavailable(
                "the application did not start",
                hint="Its lifespan failed to start. The application's log above has the error.",
            ) from error
        if self._ready is not None and sockets:
            self._ready(sockets[0].getsockname()[1])

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or (self._stop is not None and self._stop.is_set())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        timer = asyncio.get_running_loop().call_later(self._drain, self.cut_off)
        await self._end_streams()
        await super().shutdown(sockets)
        timer.cancel()

    async def _end_streams(self) -> None:
        if self._on_stopping is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain):
                try:
                    await self._on_stopping()
                except Exception:
                    logger.exception(
                        "the streams could not be ended in order; their connections are closed"
                    )

    async def stop_at_once(self, sockets: list[socket.socket]) -> None:
        """Close the connections of a cancelled server, without last messages."""
        if self.started:
            self._drain, self._on_stopping = 0.0, None
            await self.shutdown(sockets)

    def cut_off(self) -> None:
        """End every open connection."""
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, does not raise the signal again at the end, because the caller has to
        clean up. A SIGTERM handler that was set before is not called."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        # A handler that is set on the loop would also be called.
        had_handler = loop.remove_signal_handler(signal.SIGTERM)
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if had_handler:
                loop.add_signal_handler(signal.SIGTERM, _do_nothing)


def _do_nothing() -> None:
    pass


# ------------------------------------------------------------------------ listening


def _listen(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of the host, all on one port."""
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sockets.append(_listen_at(family, (address[0], port, *address[2:])))
            port = sockets[0].getsockname()[1]  # For 0, the one that the first was given.
    except OSError as error:
        for listening in sockets:
            listening.close()
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", hint=_hint(error)) from error
    return sockets


def _listen_at(family: int, address: tuple[Any, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Connections inherit it.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Notices a client that disappeared.
            timeout = round(DEAD_CLIENT_SECONDS * 1000)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
        listening.setblocking(False)
        listening.bind(address)
        # Connections are accepted later, but a port that is in use is an error now.
        listening.listen(ACCEPT_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _hint(error: OSError) -> str:
    match error:
        case socket.gaierror():
            return "The setting [gateway] host must be an address or a name of this machine."
        case PermissionError():
            return "Ports below 1024 need a privilege; choose another with [gateway] port."
    return (
        "Another program may use the port: choose another with the setting [gateway] port, or 0"
        " for any that is free. The setting [gateway] host must be an address of this machine."
    )


def _raise_open_files_limit() -> None:
    """Each connection is an open file, and the usual limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # Some systems allow less than they say.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
