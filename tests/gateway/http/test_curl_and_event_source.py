"""Clients of other authors: EventSource and curl, also through nginx with its defaults."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from headwater.database import Connection
from headwater.testing.gateway_process import Served, serving
from headwater.testing.proxies import Cutter, cutting
from tests.support.applications.shop import open_shop
from tests.support.node import node

QUERY = {"table": "orders", "where": [["region", "=", 1]], "order": [["id", "desc"]], "limit": 3}
PATH = f"/v1/live?q={quote(json.dumps(QUERY))}"


@contextmanager
def nginx(target_url: str, folder: Path) -> Iterator[str]:
    """nginx in front of a gateway, with its defaults: only the address of the gateway is set."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    target = urlsplit(target_url).netloc
    (folder / "nginx.conf").write_text(f"""
        daemon off;
        pid {folder}/nginx.pid;
        error_log {folder}/error.log;
        events {{}}
        http {{
            access_log off;
            client_body_temp_path {folder}/body;
            proxy_temp_path {folder}/proxy;
            fastcgi_temp_path {folder}/fastcgi;
            uwsgi_temp_path {folder}/uwsgi;
            scgi_temp_path {folder}/scgi;
            server {{
                listen 127.0.0.1:{port};
                location / {{ proxy_pass http://{target}; }}
            }}
        }}
    """)
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    process = subprocess.Popen(
        [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", f"{folder}/error.log"]
    )
    try:
        _wait_until_it_listens(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def _wait_until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
    raise AssertionError("nginx did not start")


@pytest.fixture
async def gateway(url: str, connection: Connection, tmp_path: Path) -> Any:
    await open_shop(connection, rows=20)
    with serving(url, tmp_path) as served:
        yield served


@pytest.fixture
async def link(gateway: Served) -> AsyncIterator[Cutter]:
    async with cutting(gateway.url) as cutter:
        yield cutter


@pytest.fixture(params=["direct", "nginx"])
def address(request: pytest.FixtureRequest, link: Cutter, tmp_path: Path) -> Iterator[str]:
    if request.param == "direct":
        yield link.url
    elif shutil.which("nginx") is None and not Path("/usr/sbin/nginx").exists():
        pytest.skip("nginx is not installed (Debian: apt-get install nginx)")
    else:
        with nginx(link.url, tmp_path) as proxied:
            yield proxied


async def test_curl(address: str, connection: Connection) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    process = await asyncio.create_subprocess_exec(
        "curl", "-sN", "--noproxy", "*", f"{address}/v1/live", "-d", json.dumps(QUERY),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    names = []
    async with asyncio.timeout(30):
        while line := (await process.stdout.readline()).decode():
            if line.startswith("event: "):
                names.append(line.split()[1])
            if names == ["hello", "subscribed", "snapshot"] and not line.strip():
                await connection.execute("update orders set note = 'new' where id = 16")
            if names[-1:] == ["deltas"]:
                break
    assert names == ["hello", "subscribed", "snapshot", "deltas"]
    process.kill()
    await process.wait()


FOLLOW = """
const source = new EventSource(process.argv[1]);
for (const name of ["snapshot", "deltas", "reset"]) {
  source.addEventListener(name, event => {
    console.log(JSON.stringify({ name, id: event.lastEventId, data: JSON.parse(event.data) }));
  });
}
source.onerror = () => console.log(JSON.stringify({ name: "reconnecting" }));
setInterval(() => {}, 1000);  // an EventSource that waits does not keep Node alive
"""


async def test_an_event_source_resumes_by_itself(
    address: str, link: Cutter, connection: Connection
) -> None:
    """Node's EventSource is cut off, comes back with Last-Event-ID, and gets what it missed."""
    process = await asyncio.create_subprocess_exec(
        node(), "--experimental-eventsource", "--no-warnings", "-e", FOLLOW,
        f"{address}{PATH}",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None

    async def received(name: str) -> dict[str, Any]:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            while line := await process.stdout.readline():
                event: dict[str, Any] = json.loads(line)
                if event["name"] != "reconnecting":
                    assert event["name"] == name, event
                    return event
        raise AssertionError("the stream has ended")

    try:
        snapshot = await received("snapshot")
        assert [row["row"]["id"] for row in snapshot["data"]["rows"]] == [16, 11, 6]
        await connection.execute("update orders set note = 'seen' where id = 16")
        deltas = await received("deltas")
        assert deltas["id"] == deltas["data"]["position"]
        link.cut_some(random.Random(0), 1.1)
        await connection.execute("update orders set note = 'missed' where id = 16")
        missed = await received("deltas")
        assert missed["data"]["deltas"][0]["row"]["note"] == "missed"
    finally:
        process.kill()
        await process.wait()
