"""The JavaScript client in Node, under random faults of its connection."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headwater.database import Connection
from tests.javascript.test_client import CLIENT
from tests.support.generators.faults import FAULTS, judge, staged, storm
from tests.support.node import node

EXIT_SECONDS = 20
"""A closed client keeps no process alive; this leaves room for a busy machine."""


@pytest.mark.timeout(300 + 10 * FAULTS)
async def test_each_mutation_happens_once(url: str, connection: Connection, tmp_path: Path) -> None:
    async with staged(url, connection, tmp_path) as (gateways, proxy):
        clients = {name: await begin(proxy.url, name) for name in ("ws", "sse")}
        await storm(proxy, gateways, connection, list(clients))
        reports = [await end(client) for client in clients.values()]
    await judge(connection, reports)


async def begin(
    url: str | list[str], transport: str, *, writes: bool = True
) -> asyncio.subprocess.Process:
    """A client that runs; all of its subscriptions have begun."""
    options = {"url": url, "transport": transport, "name": transport, "writes": writes}
    client = await asyncio.create_subprocess_exec(
        str(node()),
        "--experimental-websocket",
        "--no-warnings",
        str(CLIENT / "tests" / "faults.main.js"),
        json.dumps(options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert client.stdout is not None
    assert await client.stdout.readline() == b"ready\n"
    return client


async def end(client: asyncio.subprocess.Process) -> dict[str, Any]:
    """Ask it to stop; returns its report. It must end by itself."""
    try:
        async with asyncio.timeout(20 + EXIT_SECONDS):
            out, complaints = await client.communicate(b"")
    except TimeoutError:
        client.kill()
        out, complaints = await client.communicate()
        raise AssertionError(f"the client did not end: {out[-2000:]!r} {complaints!r}") from None
    assert (client.returncode, complaints) == (0, b"")
    report: dict[str, Any] = json.loads(out)
    return report
