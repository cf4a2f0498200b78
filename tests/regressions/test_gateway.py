"""Defects that were found by attacking a gateway; each must stay fixed."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt
import pytest
from starlette.requests import Request
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from headwater.database import Connection
from headwater.embedded import EmbeddedPostgres
from headwater.errors import LimitExceeded
from headwater.gateway.http import requests
from headwater.gateway.http.app import refusal
from headwater.testing.gateway_process import Served, serving
from tests.support.applications.shop import open_shop, shop_served


@pytest.fixture(scope="module")
def steady(postgres: EmbeddedPostgres) -> Iterator[Served]:
    """A gateway for the tests that do not change it."""
    with shop_served(postgres.url, rows=20) as served:
        yield served


@pytest.fixture
async def gateway(url: str, connection: Connection, tmp_path: Path) -> Any:
    await open_shop(connection, rows=20)
    with serving(url, tmp_path) as served:
        yield served


def messages(stream: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in stream.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


# ------------------------------------------------------------------------ running and stopping


async def test_serve_runs_one_hub(gateway: Served, connection: Connection) -> None:
    """It ran two: its own, and that of the application's lifespan."""
    cursor = await connection.execute(
        "select count(*) from pg_stat_activity where application_name = 'headwater reader'"
        " and datname = current_database()"
    )
    assert await cursor.fetchone() == (1,)


async def test_a_stopping_gateway_says_goodbye(gateway: Served) -> None:
    """The goodbye went to the other gateway of the two, and streams were cut off after the drain
    period."""
    with httpx.stream("GET", f"{gateway.url}/v1/stream", timeout=30, trust_env=False) as stream:
        following = messages(stream)
        assert next(following)["type"] == "hello"
        gateway.process.send_signal(signal.SIGTERM)
        assert [message["code"] for message in following] == ["stopping"]
    assert gateway.process.wait(30) == 0
    assert gateway.log.read_text() == ""


# ------------------------------------------------------------------------ pages of other origins

SECRET = "a secret that is long enough for SHA-256 and more"


async def handshake_status(gateway: Served, path: str = "/v1/ws", **headers: str) -> int:
    """The status with which a WebSocket is refused, 101 if it is accepted."""
    try:
        async with connect(
            gateway.url.replace("http", "ws") + path, additional_headers=headers, proxy=None
        ):
            return 101
    except InvalidStatus as error:
        return error.response.status_code


@pytest.mark.parametrize("path", ["/v1/ws", "/v1/ws?ticket=any"])
async def test_no_page_of_another_origin_reads_an_open_gateway(steady: Served, path: str) -> None:
    """Any ticket was accepted as a proof, at a gateway that does not check tickets."""
    assert await handshake_status(steady, path, origin="http://elsewhere.example") == 403
    bearer = {"authorization": "Bearer any"}
    assert await handshake_status(steady, path, origin="http://elsewhere.example", **bearer) == 403
    own = 401 if "ticket" in path else 101  # a ticket proves nothing here, and is refused
    assert await handshake_status(steady, path, origin=steady.url) == own
    assert await handshake_status(steady, path) == own


@pytest.mark.parametrize("origin", ["http://[", "null", "", "://", "http://[::1"])
async def test_an_invalid_origin(steady: Served, origin: str) -> None:
    assert await handshake_status(steady, origin=origin) == 403
    answer = steady.get("/v1/stream", headers={"origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin")
    assert "Traceback" not in steady.log.read_text()


async def test_a_cookie_is_not_for_all_origins(url: str, tmp_path: Path) -> None:
    """`*` let every page act for the user of the browser."""
    token = jwt.encode({"sub": "ann", "exp": time.time() + 600}, SECRET, "HS256")
    there = "https://elsewhere.example"
    with serving(
        url, tmp_path, auth_secret=SECRET, auth_cookie="token", gateway_origins="*"
    ) as gateway:
        assert await handshake_status(gateway, origin=there, cookie=f"token={token}") == 403
        assert await handshake_status(gateway, origin=gateway.url, cookie=f"token={token}") == 101
        assert await handshake_status(gateway, origin=there, authorization=f"Bearer {token}") == 101
    with serving(
        url, tmp_path, auth_secret=SECRET, auth_cookie="token", gateway_origins=there
    ) as gateway:
        assert await handshake_status(gateway, origin=there, cookie=f"token={token}") == 101


# ------------------------------------------------------------------------ requests


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "path"),
        ("PUT", "/v1/live", 405, "method"),
        ("GET", "/v1/ws", 404, "path"),
        ("DELETE", "/healthz", 405, "method"),
    ],
)
async def test_an_unknown_route_is_an_error_like_any_other(
    steady: Served, method: str, path: str, status: int, code: str
) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.request(method, steady.url + path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("allow" in answer.headers) == (status == 405)


async def test_a_client_that_leaves_in_the_middle_of_its_body(gateway: Served) -> None:
    """It is not an error, and was logged as one."""
    parts = urlsplit(gateway.url)
    for _ in range(3):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(b"POST /v1/live HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n")
        writer.write(b"expect: 100-continue\r\n\r\n{")
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"  # the body is being read
        writer.close()
        await writer.wait_closed()
    assert gateway.get("/healthz").status_code == 200
    gateway.stop()
    assert gateway.log.read_text() == ""


async def test_a_body_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway waited without limit, also for clients without a token."""
    monkeypatch.setattr(requests, "REQUEST_BODY_SECONDS", 0.01)
    scope = {"type": "http", "method": "POST", "headers": []}
    with pytest.raises(LimitExceeded) as refused:
        await requests.read_json(Request(scope, asyncio.Event().wait), dict)  # type: ignore[arg-type]
    answer = refusal(refused.value)
    assert (answer.status_code, answer.headers["connection"]) == (408, "close")


async def test_a_client_that_reads_no_answers_is_not_read(gateway: Served) -> None:
    """Answers piled up to 64 MiB."""
    # Without pings: the client does not read, and would take the gateway for dead.
    async with connect(
        gateway.url.replace("http", "ws") + "/v1/ws",
        proxy=None,
        compression=None,
        ping_interval=None,
    ) as socket:

        async def flood() -> None:
            while True:
                await socket.send("nonsense")

        flooding = asyncio.create_task(flood())
        stalled: list[float] = []
        while len([size for size in stalled if size > 2**19]) < 20:
            assert not flooding.done()
            stalled.append(await asyncio.to_thread(gateway.metric, "headwater_stalled_bytes"))
        flooding.cancel()
        assert max(stalled) < 2**21
        socket.transport.abort()


async def test_a_refused_handshake_is_counted_and_no_error(gateway: Served) -> None:
    assert await handshake_status(gateway, origin="http://elsewhere.example") == 403
    assert gateway.metric("headwater_refused_total", code="origin") == 1
    gateway.stop()
    assert gateway.log.read_text() == ""


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403)],
)
def test_a_foreign_host_name_that_points_here_is_refused(
    steady: Served, host: str, status: int
) -> None:
    """A page whose host name points to this machine would have the gateway's own origin."""
    assert steady.get("/healthz", headers={"host": host}).status_code == status
    handshake = {
        "host": host,
        "origin": f"http://{host}",
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "sec-websocket-version": "13",
    }
    with httpx.stream("GET", f"{steady.url}/v1/ws", headers=handshake, trust_env=False) as answer:
        assert answer.status_code == (101 if status == 200 else 403)
