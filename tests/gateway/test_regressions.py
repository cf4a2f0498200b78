"""Faults that were found by attacking a gateway; each must stay mended."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from headwater.database import Connection
from headwater.testing.served import Served, serving
from tests.gateway.shop import open_shop


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


# ------------------------------------------------------------------------ other people's pages

SECRET = "a secret that is long enough for SHA-256 and more"


async def knock(gateway: Served, path: str = "/v1/ws", **headers: str) -> int:
    """The status with which a WebSocket is refused, 101 for one that is let in."""
    try:
        async with connect(
            gateway.url.replace("http", "ws") + path, additional_headers=headers, proxy=None
        ):
            return 101
    except InvalidStatus as error:
        return error.response.status_code


@pytest.mark.parametrize("path", ["/v1/ws", "/v1/ws?ticket=any"])
async def test_no_page_of_others_reads_an_open_gateway(gateway: Served, path: str) -> None:
    """Any ticket passed for a proof, at a gateway that looks at none."""
    assert await knock(gateway, path, origin="http://elsewhere.example") == 403
    bearer = {"authorization": "Bearer any"}
    assert await knock(gateway, path, origin="http://elsewhere.example", **bearer) == 403
    assert await knock(gateway, path, origin=gateway.url) == 101
    assert await knock(gateway, path) == 101


@pytest.mark.parametrize("origin", ["http://[", "null", "", "://", "http://[::1"])
async def test_an_origin_that_is_none(gateway: Served, origin: str) -> None:
    assert await knock(gateway, origin=origin) == 403
    answer = gateway.get("/v1/stream", headers={"origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin")
    assert "Traceback" not in gateway.log.read_text()


async def test_a_cookie_is_not_for_all_origins(url: str, tmp_path: Path) -> None:
    """`*` let every page act for the user whose browser it was shown in."""
    token = jwt.encode({"sub": "ann", "exp": time.time() + 600}, SECRET, "HS256")
    there = "https://elsewhere.example"
    with serving(url, tmp_path, auth_secret=SECRET, auth_cookie="token", origins="*") as gateway:
        assert await knock(gateway, origin=there, cookie=f"token={token}") == 403
        assert await knock(gateway, origin=gateway.url, cookie=f"token={token}") == 101
        assert await knock(gateway, origin=there, authorization=f"Bearer {token}") == 101
    with serving(url, tmp_path, auth_secret=SECRET, auth_cookie="token", origins=there) as gateway:
        assert await knock(gateway, origin=there, cookie=f"token={token}") == 101
