"""Faults that were found by attacking a gateway; each must stay mended."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

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
