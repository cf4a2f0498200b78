"""Our server: where it listens, what it refuses, and how it stops."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from contextlib import suppress

import pytest
import websockets
from starlette.types import Receive, Scope, Send

from headwater.errors import ConfigError, Unavailable
from headwater.gateway.http import server
from headwater.gateway.http.server import serve
from headwater.gateway.http.transports import _SINK_LOW_BYTES
from headwater.limits import (
    DEAD_CLIENT_SECONDS,
    REQUEST_BYTES_MAX,
    REQUEST_HEAD_BYTES_MAX,
)
from tests.support.servers import FRAMES, Streams, ask, connected, large_frame, on_both_loops, ours

# Listening -------------------------------------------------------------------------------------


async def test_a_port_in_use_is_named_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: Address") as e:
            await serve(Streams(), host="127.0.0.1", port=port, drain=1)
    assert "[gateway] port" in (e.value.hint or "")


async def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on nowhere\.invalid:0") as e:
        await serve(Streams(), host="nowhere.invalid", port=0, drain=1)
    assert "[gateway] host" in (e.value.hint or "")


async def test_every_address_of_a_name() -> None:
    async with ours(Streams(), host="localhost") as port:
        for *_, address in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
            _, writer = await asyncio.open_connection(str(address[0]), port)
            writer.close()
            await writer.wait_closed()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux knows it")
def test_a_client_that_vanished_is_noticed_before_the_system_gives_up() -> None:
    (listening,) = server._listen("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            timeout = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout == DEAD_CLIENT_SECONDS * 1000


async def test_as_many_open_files_as_the_system_allows() -> None:
    async with ours(Streams()):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == hard


async def test_an_application_that_does_not_start() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no database"})

    with pytest.raises(Unavailable, match="did not start"):
        await serve(failing, host="127.0.0.1", port=0, drain=1)


# Requests --------------------------------------------------------------------------------------


@on_both_loops
async def test_says_nothing_about_the_software() -> None:
    async with ours(Streams()) as port:
        response = await ask(port, "/plain")
    assert response.body == b"ok:"
    assert "server" not in response.headers
    assert "date" in response.headers


@on_both_loops
async def test_a_head_too_large_is_refused() -> None:
    async with ours(Streams()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: t\r\nx: " + b"x" * REQUEST_HEAD_BYTES_MAX)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@on_both_loops
async def test_a_large_body_does_not_count_as_head() -> None:
    async with ours(Streams()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b"x" * 4 * REQUEST_HEAD_BYTES_MAX
        head = f"POST /plain HTTP/1.1\r\nhost: t\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"ok:" + body[-100:])
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: "])
@on_both_loops
async def test_a_client_that_does_not_ask_is_disconnected(sent: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "REQUEST_HEAD_SECONDS", 0.05)
        async with ours(Streams()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()


@on_both_loops
async def test_a_stream_may_last_longer_than_a_head() -> None:
    app = Streams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "REQUEST_HEAD_SECONDS", 0.05)
        patch.setattr(server, "KEEP_ALIVE_SECONDS", 0.05)
        async with ours(app) as port, connected(port, "/hold") as (reader, _):
            sink = await app.held.get()
            await asyncio.sleep(0.2)  # This waits for nothing: the time itself is tested.
            sink.send(FRAMES[0])
            await reader.readuntil(FRAMES[0].chunk)
            sink.close()


@on_both_loops
async def test_a_websocket_message_too_large_is_refused() -> None:
    async with ours(Streams()) as port:
        async with websockets.connect(f"ws://127.0.0.1:{port}/ws") as client:
            await client.send("x" * (REQUEST_BYTES_MAX + 1))
            await client.wait_closed()
        assert client.close_code == 1009


@pytest.mark.parametrize("deflate", [True, False])
@on_both_loops
async def test_websocket_compression_is_a_choice(deflate: bool) -> None:
    async with (
        ours(Streams(), deflate=deflate) as port,
        websockets.connect(f"ws://127.0.0.1:{port}/ws") as client,
    ):
        assert bool(client.protocol.extensions) == deflate


# Stopping --------------------------------------------------------------------------------------


@on_both_loops
async def test_streams_get_a_goodbye_when_the_server_stops() -> None:
    app = Streams()

    async def goodbye() -> None:
        sink = await app.held.get()
        sink.send(FRAMES[0])
        sink.close()

    async with ours(app, on_stopping=goodbye) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /hold HTTP/1.1\r\nhost: test\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    assert await reader.read() == FRAMES[0].chunk + b"0\r\n\r\n"
    with pytest.raises(OSError, match=r"refused|failed"):
        await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await writer.wait_closed()


@on_both_loops
async def test_a_client_that_does_not_leave_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    app = Streams()

    async def goodbye() -> None:
        raise ValueError("a bug")

    async with ours(app, drain=0.2, on_stopping=goodbye) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /hold HTTP/1.1\r\nhost: test\r\n\r\n")
        sink = await app.held.get()
        while sink.buffered < _SINK_LOW_BYTES:
            sink.send(large_frame(_SINK_LOW_BYTES))
            await asyncio.sleep(0)
    assert await app.ended.get() is sink
    # The bug is reported; a client that was cut off is not an error of the application.
    assert [record.name for record in caplog.records] == ["headwater.gateway.http.server"]
    with suppress(ConnectionResetError):
        await reader.read()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


@on_both_loops
async def test_websockets_are_closed_with_the_restart_code() -> None:
    app = Streams()

    async with ours(app) as port:
        client = await websockets.connect(f"ws://127.0.0.1:{port}/ws")
        await app.held.get()
    await client.wait_closed()
    assert client.close_code == 1012


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@on_both_loops
async def test_a_signal_stops_the_server_and_the_process_continues(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    ready = asyncio.Event()
    running = asyncio.create_task(
        serve(Streams(), host="127.0.0.1", port=0, drain=1, ready=lambda port: ready.set())
    )
    await ready.wait()
    os.kill(os.getpid(), number)
    await running
    assert signal.getsignal(number) is before


@on_both_loops
async def test_a_cancelled_server_leaves_nothing_open() -> None:
    app, port = Streams(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        serve(app, host="127.0.0.1", port=0, drain=1, ready=port.set_result)
    )
    async with connected(await port, "/hold"):
        sink = await app.held.get()
        running.cancel()
        assert await app.ended.get() is sink
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(OSError, match=r"refused|failed"):
            await asyncio.open_connection("127.0.0.1", await port)
