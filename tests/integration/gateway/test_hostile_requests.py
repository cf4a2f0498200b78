"""Requests that no client of ours makes: any bytes in any place, over a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from headwater import Headwater
from headwater.database import Connection
from headwater.gateway.http.app import LocalOnly
from tests.support.gateway_client import SECRET, served, token
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import run
from tests.support.servers import ours

PLACE = b"@@"
"""Where a request below is spoilt."""

QUERY = json.dumps({"table": "orders", "where": [["owner", "=", "@@"]], "limit": 1}).encode()
HEADERS = (
    b"authorization", b"cookie", b"last-event-id", b"traceparent", b"content-type",
    b"idempotency-key", b"x-forwarded-for", b"origin", b"accept-encoding", b"accept", b"x-@@",
    b"content-length", b"transfer-encoding", b"connection", b"host",
)  # fmt: skip


def request(method: bytes, target: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    lines = [method + b" " + target + b" HTTP/1.1", *headers]
    if not any(line.startswith(b"host:") for line in headers):
        lines.append(b"host: 127.0.0.1")
    if body:
        lines.append(b"content-length: %d" % (len(body)))
    return b"\r\n".join([*lines, b"", body])


BEARER = f"authorization: Bearer {token()}".encode()
GETS = (
    b"/@@", b"/v1/@@", b"/v1/live?q=@@", b"/v1/live?@@=1", b"/v1/changes?tables=@@",
    b"/v1/changes?tables=orders&where=@@", b"/v1/changes?since=@@", b"/v1/changes?format=@@",
    b"/v1/stream?topics=@@", b"/v1/stream?since=@@", b"/v1/live?ticket=@@", b"/v1/live?token=@@",
    b"/v1/query/@@/subscribe", b"/v1/query/total/subscribe?args=@@", b"/v1/admin/log?text=@@",
    b"/v1/admin/log?key=@@", b"/v1/admin/history/@@/1", b"/v1/admin/history/orders/@@",
    b"/v1/admin/explain?q=@@", b"/client/@@", b"/console/@@", b"/metrics?@@", b"/healthz@@",
)  # fmt: skip
POSTS = (
    (b"/v1/live", QUERY), (b"/v1/live", b"@@"), (b"/v1/query/total", b'{"@@": 1}'),
    (b"/v1/query/@@", b"{}"), (b"/v1/mutation/add", b'{"name": "@@"}'),
    (b"/v1/mutation/@@", b"{}"), (b"/v1/tickets", b"@@"),
    (b"/v1/sessions/@@/subscriptions", b"{}"), (b"/v1/sessions/x/token", b'{"token": "@@"}'),
    (b"/v1/sessions/x/publish", b'{"id": "@@"}'),
)  # fmt: skip
REQUESTS = [
    *(request(b"GET", target, BEARER) for target in GETS),
    *(request(b"POST", target, BEARER, body=body) for target, body in POSTS),
    *(request(b"GET", b"/v1/live?q={}", BEARER, name + b": @@") for name in HEADERS),
    *(request(b"POST", b"/v1/mutation/add", name + b": @@", body=b"{}") for name in HEADERS),
    request(b"GET", b"/v1/live?q={}", b"authorization: Bearer @@"),
    request(b"GET", b"/v1/live?q={}", b"authorization: Bearer eyJhbGciOiJIUzI1NiJ9.@@.x"),
    request(b"GET", b"/v1/live?q={}", b"cookie: session=@@"),
    request(b"@@", b"/v1/live", BEARER),
]
HANDSHAKE = (
    b"connection: Upgrade", b"upgrade: websocket", b"sec-websocket-version: 13",
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)  # fmt: skip
FRAMES = (
    b"@@", b'{"type": "@@"}', b'{"type": "subscribe", "id": "@@", "live": {"table": "orders"}}',
    b'{"type": "subscribe", "id": "a", "live": {"table": "@@"}}',
    b'{"type": "subscribe", "id": "a", "topic": "of:@@"}',
    b'{"type": "subscribe", "id": "a", "channel": {"name": "room:@@"}}',
    b'{"type": "subscribe", "id": "a", "changes": {"tables": ["orders"], "since": "@@"}}',
    b'{"type": "query", "id": "a", "name": "@@"}', b'{"type": "authenticate", "token": "@@"}',
    b'{"type": "mutate", "id": "a", "name": "add", "args": {"name": "@@"}}',
    b'{"type": "mutate", "id": "a", "name": "add", "idempotency_key": "@@"}',
    b'{"type": "wait", "id": "a", "position": "@@"}',
)  # fmt: skip

SPOILS: tuple[Callable[[random.Random], bytes], ...] = (
    lambda chance: chance.randbytes(chance.choice((1, 2, 3, 8, 40))),
    lambda chance: chance.choice(
        (
            b"\xff",
            b"\xc3\x28",
            b"\xed\xa0\x80",
            b"\xf4\x90\x80\x80",
            b"\x80",
            b"\xc0\xaf",
            b"\0",
            b"\\ud800",
            b"\\udc00\\ud800",
            b"\\u0000",
            b"\xe2\x80\xa8",
            "é".encode(),
            b"\\xff",
        )
    ),
    lambda chance: b"".join(b"%%%02x" % byte for byte in chance.randbytes(chance.choice((1, 4)))),
    lambda chance: chance.choice((b"%ff", b"%c3%28", b"%ed%a0%80", b"%", b"%0", b"%00", b"%zz")),
    lambda chance: bytes(
        chance.choice(b'[]{}",:;=&?#%@/\\ \t') for _ in range(chance.randrange(6))
    ),
)


def spoilt(chance: random.Random, template: bytes) -> bytes:
    return template.replace(PLACE, chance.choice(SPOILS)(chance))


async def exchange(port: int, sent: bytes) -> tuple[int | None, bytes]:
    """The status and body of the answer; None if the connection was only closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        writer.write_eof()
        status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        return status, await reader.read(2000) if status >= 500 else b""
    except (asyncio.IncompleteReadError, ConnectionError):
        return None, b""
    finally:
        writer.close()


def framed(payload: bytes, opcode: int) -> bytes:
    mask = os.urandom(4)
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else bytes([0x80 | 126]) + size.to_bytes(2, "big")
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return bytes([0x80 | opcode]) + length + mask + masked


async def converse(port: int, frames: list[bytes], headers: tuple[bytes, ...]) -> bytes:
    """All answers of a gateway to these frames; it closes the connection after them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(b"GET", b"/v1/ws", *HANDSHAKE, *headers))
    try:
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"".join(frames) + b"\x88\x80" + os.urandom(4))
        return await asyncio.wait_for(reader.read(-1), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def declare(hw: Headwater) -> None:
    hw.query("total", sql="select count(*) from orders")
    hw.topic("of:{owner}", table="orders")
    hw.channel("room:{id}")

    @hw.mutation
    async def add(ctx: Any, name: str = "x") -> str:
        return name


OPEN: dict[str, Any] = {
    "limits_requests_per_second": 1_000_000,
    "limits_sessions_per_ip": 10_000,
    "limits_sessions_per_user": 10_000,
    "limits_subscriptions_per_user": 10_000,
}


@pytest.mark.parametrize("settings", [{}, {"auth_secret": SECRET, "auth_cookie": "session"}])
async def test_any_bytes_in_any_place(
    url: str,
    connection: Connection,
    settings: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await run(
        connection,
        "create table orders (id int primary key, owner text)",
        "select headwater.enable_reactivity('orders')",
    )
    seed = first_seed(31)
    chance = random.Random(seed)
    async with served(url, declare, **OPEN, **settings) as gateway:
        for template in REQUESTS * size("hostile_requests", 3, large=200):
            sent = spoilt(chance, template)
            status, body = await exchange(gateway.port, sent)
            assert status is None or status < 500, (seed, sent, body)
            assert not caplog.records or "request failed" not in caplog.text, (seed, sent)
        for template in FRAMES * size("hostile_frames", 3, large=200):
            frames = [framed(spoilt(chance, template), opcode) for opcode in (1, 1, 2)]
            answers = await converse(gateway.port, frames, (BEARER,))
            assert b'"internal"' not in answers, (seed, frames, answers)
        # Other clients are still served.
        assert await gateway.code("GET", "/healthz") is None
        headers = {"authorization": f"Bearer {token()}"}
        answer = await gateway.http.post("/v1/query/total", json={}, headers=headers)
        assert answer.status_code == 200
    assert "request failed" not in caplog.text


# ------------------------------------------------------------------------ hosts

LOCAL = (
    "127.0.0.1",
    "127.0.0.1:8484",
    "localhost",
    "LOCALHOST:1",
    "[::1]",
    "[::1]:8484",
    "10.1.2.3",
)
FOREIGN = (
    "evil.example", "[", "", "[::1", "::1", "user@127.0.0.1", "@localhost", "[]", "[localhost]",
    "localhost@evil.example", "localhost:", "localhost:x", "127.0.0.1/x", "127.0.0.1?", "\xff",
    "127.0.0.1#", "127.0.0.1\\", "localhost, evil.example", "127.0.0.1:1:2", "127.1", "2130706433",
    "[fe80::1%25eth0]", "localhost.", "l\xf6calhost", "localhost:999999", "127.0.0.1 x",
)  # fmt: skip


async def test_a_host_that_cannot_be_read_is_foreign() -> None:
    """A gateway that verifies no tokens accepts only its own address and localhost as host."""

    async def status(*lines: str) -> int | None:
        head = "".join(f"Host: {host}\r\n" for host in lines)
        return (await exchange(port, f"GET / HTTP/1.1\r\n{head}\r\n".encode("latin-1")))[0]

    async with ours(LocalOnly(PlainTextResponse("ok"))) as port:
        for host in LOCAL:
            assert await status(host) == 200, host
        for host in FOREIGN:
            assert await status(host) in (400, 403), host
        for hosts in ((), ("127.0.0.1", "127.0.0.1"), ("evil.example", "localhost")):
            assert await status(*hosts) in (400, 403), hosts
