"""The same frames arrive over every transport; a sink knows what its client has not read."""

from __future__ import annotations

import asyncio
import json
import zlib
from contextlib import suppress
from typing import Any

import pytest
import websockets
from websockets.extensions.permessage_deflate import PerMessageDeflate

from headwater.gateway.http import transports
from headwater.gateway.http.compression import _Gzip
from headwater.gateway.http.transports import (
    _SINK_LOW_BYTES,
    COMPRESS_BYTES_AT_ONCE,
    AsgiSink,
    Sink,
    TransportSink,
    WebSocketSink,
)
from headwater.model import Enter
from headwater.protocol import Frame, Snapshot, read_server
from tests.support.servers import (
    FRAMES,
    SERVERS,
    Streams,
    ask,
    connected,
    dechunked,
    large_frame,
    on_both_loops,
    ours,
)

every_server = pytest.mark.parametrize("server", SERVERS)


@every_server
@on_both_loops
async def test_the_same_bytes_on_every_server(server: str) -> None:
    async with SERVERS[server](Streams()) as port:
        events, lines = await ask(port, "/events"), await ask(port, "/lines")
    assert events.status == 200
    assert events.body == b"".join(frame.sse for frame in FRAMES)
    assert events.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events.headers["cache-control"] == "no-cache, no-transform"
    assert events.headers["x-accel-buffering"] == "no"
    assert events.headers["x-test"] == "yes"
    assert "content-length" not in events.headers
    assert lines.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line) for line in lines.body.splitlines()] == [
        json.loads(frame.json) for frame in FRAMES
    ]


@every_server
@on_both_loops
async def test_the_head_alone(server: str) -> None:
    app = Streams()
    async with SERVERS[server](app) as port:
        response = await ask(port, "/hold", method="HEAD")
        await app.ended.get()
    assert response.status == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.raw == b""


@on_both_loops
async def test_http_1_0_gets_no_chunks() -> None:
    app = Streams()
    async with ours(app) as port:
        response = await ask(port, "/events", version="1.0")
        assert isinstance(await app.ended.get(), TransportSink)
    assert "transfer-encoding" not in response.headers
    assert response.raw == b"".join(frame.sse for frame in FRAMES)


@every_server
@on_both_loops
async def test_a_frame_arrives_at_once(server: str) -> None:
    app = Streams()
    async with SERVERS[server](app) as port, connected(port, "/hold") as (reader, _):
        sink = await app.held.get()
        assert isinstance(sink, TransportSink if server == "ours" else AsgiSink)
        for frame in FRAMES:
            sink.send(frame)
            await reader.readuntil(frame.sse)
        assert sink.buffered == 0
        sink.close()
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"0\r\n\r\n")
        assert await app.ended.get() is sink
        sink.send(FRAMES[0])  # Too late, which is not an error.


@every_server
@on_both_loops
async def test_a_large_message_is_compressed_in_parts(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two parts the event loop runs other tasks; the order does not change."""
    sizes, turns, drained = list[int](), list[int](), asyncio.Event()
    add = _Gzip.add

    def counted(self: _Gzip, data: bytes) -> bytes:
        sizes.append(len(data))
        return add(self, data)

    async def others() -> None:
        while True:
            turns.append(len(sizes))
            await asyncio.sleep(0)

    monkeypatch.setattr(_Gzip, "add", counted)
    app, large = Streams("gzip"), large_frame(4 * COMPRESS_BYTES_AT_ONCE)
    async with SERVERS[server](app) as port, connected(port, "/hold") as (reader, _):
        sink = await app.held.get()
        sink.on_drain = drained.set
        sink.send(FRAMES[0])
        beside = asyncio.create_task(others())
        for frame in (large, *FRAMES):
            sink.send(frame)
        assert sink.buffered > 4 * COMPRESS_BYTES_AT_ONCE
        await drained.wait()
        beside.cancel()
        assert sink.buffered <= _SINK_LOW_BYTES
        sink.send(large)
        sink.close()  # waiting messages are sent first
        body = b""
        while not body.endswith(b"0\r\n\r\n"):
            body += await reader.read(2**20)
    frames = (FRAMES[0], large, *FRAMES, large)
    assert zlib.decompress(dechunked(body), 31) == b"".join(frame.sse for frame in frames)
    assert max(sizes) <= COMPRESS_BYTES_AT_ONCE
    assert len(set(turns)) >= 5


@on_both_loops
async def test_a_large_websocket_message_is_compressed_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, encode = list[int](), PerMessageDeflate.encode

    def counted(self: PerMessageDeflate, frame: Any) -> Any:
        sizes.append(len(frame.data))
        return encode(self, frame)

    monkeypatch.setattr(PerMessageDeflate, "encode", counted)
    # Characters of several bytes are cut in two.
    large = Frame(Snapshot(1, "7:7:", (Enter((1,), {"text": "xé😀" * 200_000}, 0, (1,)),)))
    app = Streams()
    async with ours(app) as port:
        where = f"ws://127.0.0.1:{port}/ws"
        async with websockets.connect(where, max_size=None) as client:
            sink = await app.held.get()
            for frame in (FRAMES[0], large, *FRAMES):
                sink.send(frame)
            for frame in (FRAMES[0], large, *FRAMES):
                assert await client.recv() == frame.text
    assert max(sizes) <= COMPRESS_BYTES_AT_ONCE
    assert sum(size == COMPRESS_BYTES_AT_ONCE for size in sizes) == large.size // max(sizes)


async def stall(sink: Sink) -> int:
    """Send until the network takes no more."""
    sent = 0
    while sink.buffered < 4 * _SINK_LOW_BYTES:
        sink.send(large_frame(_SINK_LOW_BYTES))
        sent += 1
        await asyncio.sleep(0)
    return sent


@every_server
@on_both_loops
async def test_a_client_that_stops_reading_is_seen_and_catches_up(server: str) -> None:
    app, drained = Streams(), asyncio.Event()
    async with SERVERS[server](app) as port, connected(port, "/hold") as (reader, _):
        sink = await app.held.get()
        sink.on_drain = drained.set
        sent = await stall(sink)
        drained.clear()
        assert sink.buffered > _SINK_LOW_BYTES
        body = b""
        while not drained.is_set():
            body += await reader.read(2**20)
        assert sink.buffered <= _SINK_LOW_BYTES
        sink.close()
        while not body.endswith(b"0\r\n\r\n"):
            body += await reader.read(2**20)
        assert dechunked(body) == large_frame(_SINK_LOW_BYTES).sse * sent


@every_server
@on_both_loops
async def test_a_client_that_leaves_is_noticed(server: str) -> None:
    app = Streams()
    async with SERVERS[server](app) as port:
        async with connected(port, "/hold"):
            sink = await app.held.get()
        assert await app.ended.get() is sink
        sink.send(FRAMES[0])
        sink.close()


@on_both_loops
async def test_a_client_that_left_before_its_stream_opened() -> None:
    app = Streams()
    async with ours(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /late HTTP/1.1\r\nhost: test\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        sink = await app.held.get()
        sink.send(FRAMES[0])
        assert await app.ended.get() is sink


@every_server
@on_both_loops
async def test_a_stalled_client_that_leaves_is_noticed(server: str) -> None:
    app = Streams()
    async with SERVERS[server](app) as port:
        async with connected(port, "/hold") as (_, writer):
            sink = await app.held.get()
            await stall(sink)
            writer.transport.abort()
        assert await app.ended.get() is sink


@on_both_loops
async def test_a_closed_sink_waits_for_its_client_for_a_limited_time() -> None:
    app = Streams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "SINK_CLOSE_SECONDS", 0.1)
        async with ours(app) as port, connected(port, "/hold") as (reader, _):
            sink = await app.held.get()
            await stall(sink)
            sink.close()
            assert await app.ended.get() is sink
            with suppress(ConnectionResetError):
                assert not (await reader.read(-1)).endswith(b"0\r\n\r\n")


@on_both_loops
async def test_a_sink_is_cut_off_when_too_many_bytes_wait() -> None:
    app = Streams()
    async with ours(app) as port, connected(port, "/hold"):
        sink = await app.held.get()
        await stall(sink)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transports, "SINK_BYTES_MAX", 3 * _SINK_LOW_BYTES)
            sink.send(FRAMES[0])
        assert await app.ended.get() is sink


@on_both_loops
async def test_an_aborted_stream_is_cut_off() -> None:
    app = Streams()
    async with ours(app) as port, connected(port, "/hold") as (reader, _):
        sink = await app.held.get()
        sink.abort()
        assert await app.ended.get() is sink
        with suppress(ConnectionResetError):
            assert await reader.read(-1) == b""


@on_both_loops
async def test_a_connection_is_reused_after_a_stream() -> None:
    app = Streams()
    async with ours(app) as port, connected(port, "/hold") as (reader, writer):
        sink = await app.held.get()
        sink.send(FRAMES[0])
        sink.close()
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"POST /plain HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\n\r\nabc")
        assert await reader.readuntil(b"ok:abc")
        # And a request that came while a stream was open waits for its end.
        writer.write(b"GET /hold HTTP/1.1\r\nhost: t\r\n\r\nGET /plain HTTP/1.1\r\nhost: t\r\n\r\n")
        sink = await app.held.get()
        sink.send(FRAMES[0])
        await reader.readuntil(FRAMES[0].chunk)
        sink.close()
        assert (await reader.readuntil(b"ok:")).startswith(b"0\r\n\r\nHTTP/1.1 200 OK")


# ------------------------------------------------------------------------ WebSocket


@every_server
@on_both_loops
async def test_websocket(server: str) -> None:
    app = Streams()
    async with SERVERS[server](app) as port:
        async with websockets.connect(f"ws://127.0.0.1:{port}/ws") as client:
            sink = await app.held.get()
            assert isinstance(sink, WebSocketSink)
            for frame in FRAMES:
                sink.send(frame)
                assert read_server(await client.recv()) == frame.message
            sink.close(4401, "the token has expired")
            await client.wait_closed()
        assert (client.close_code, client.close_reason) == (4401, "the token has expired")
        assert await app.ended.get() is sink


@every_server
@on_both_loops
async def test_a_websocket_that_stops_reading_is_seen(server: str) -> None:
    app = Streams()
    async with SERVERS[server](app) as port:
        async with websockets.connect(
            f"ws://127.0.0.1:{port}/ws", max_queue=1, compression=None
        ) as client:
            sink = await app.held.get()
            await stall(sink)
            client.transport.abort()
        assert await app.ended.get() is sink
