"""Users behind a proxy: nginx as docs/howto/serve.md configures it, and clients of many addresses.

Clients connect from addresses of the loopback that are not trusted themselves; nginx calls the
gateway from 127.0.0.1, the only trusted one.
"""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt
import pytest

from headwater.testing.gateway_process import serving
from tests.support.paths import ROOT

SECRET = "a secret that is long enough for SHA-256 and more"
PAGE = ROOT / "docs/howto/serve.md"
OFFICE, CAFE, HOME = "127.0.1.1", "127.0.2.1", "127.0.2.2"


def program() -> str:
    found = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(found).exists():
        pytest.skip("nginx is not installed (Debian: apt-get install nginx)")
    return found


@contextmanager
def documented_nginx(gateway: str, folder: Path) -> Iterator[int]:
    """nginx with what the page shows; only the two ports are others."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (shown,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "listen 80;" in shown
    assert "http://127.0.0.1:8484;" in shown
    shown = shown.replace("listen 80;", f"listen 127.0.0.1:{port};")
    shown = shown.replace("127.0.0.1:8484", urlsplit(gateway).netloc)
    temporary = "\n".join(
        f"{name}_temp_path {folder}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{shown} }}"
    )
    process = subprocess.Popen(
        [program(), "-p", str(folder), "-c", f"{folder}/nginx.conf", "-e", f"{folder}/error.log"]
    )
    try:
        while process.poll() is None:
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
        assert process.poll() is None, (folder / "error.log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def behind(url: str, tmp_path: Path) -> Any:
    """A gateway behind nginx; gives the port of nginx."""

    @contextmanager
    def started(**settings: Any) -> Iterator[int]:
        with (
            serving(url, tmp_path, gateway_trusted_proxies=["127.0.0.1"], **settings) as gateway,
            documented_nginx(gateway.url, tmp_path) as port,
        ):
            yield port

    return started


@asynccontextmanager
async def asked(
    port: int, address: str, path: str = "/v1/stream", **headers: str
) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """The status of an answer, and the rest of it, on a connection that stays open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    lines = [f"GET {path} HTTP/1.1", f"host: 127.0.0.1:{port}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        yield int(head.split()[1]), reader
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def bearer(user: str) -> str:
    token = jwt.encode({"sub": user, "exp": time.time() + 600}, SECRET, "HS256")
    return f"Bearer {token}"


async def test_a_hundred_users_of_one_address(behind: Any) -> None:
    with behind(auth_secret=SECRET) as port:
        async with AsyncExitStack() as open_, asyncio.timeout(60):
            for number in range(100):
                one = asked(port, OFFICE, authorization=bearer(f"user {number}"))
                status, stream = await open_.enter_async_context(one)
                assert status == 200, f"user {number}: {await stream.read(500)!r}"
                await stream.readuntil(b"event: hello\n")
            # A user's own sessions are counted, from any address.
            for address in [OFFICE, HOME] * 4:
                one = asked(port, address, authorization=bearer("ann"))
                assert (await open_.enter_async_context(one))[0] == 200
            ninth = asked(port, CAFE, authorization=bearer("ann"))
            status, stream = await open_.enter_async_context(ninth)
            assert status == 429
            await stream.readuntil(b"sessions_per_user")
            # WebSockets come through, too.
            upgrade = {
                "connection": "Upgrade",
                "upgrade": "websocket",
                "sec_websocket_version": "13",
                "sec_websocket_key": base64.b64encode(bytes(16)).decode(),
            }
            one = asked(port, OFFICE, "/v1/ws", authorization=bearer("bob"), **upgrade)
            status, stream = await open_.enter_async_context(one)
            assert status == 101
            await stream.readuntil(b'"type":"hello"')
            # Without a user there is no session that an address could hold.
            assert (await open_.enter_async_context(asked(port, OFFICE)))[0] == 401
            one = asked(port, OFFICE, "/v1/ws", **upgrade)
            assert (await open_.enter_async_context(one))[0] in (401, 403)


async def test_the_thirty_third_without_a_user(behind: Any) -> None:
    with behind() as port:
        async with AsyncExitStack() as open_, asyncio.timeout(60):

            async def status_of(address: str, **headers: str) -> tuple[int, bytes]:
                status, stream = await open_.enter_async_context(asked(port, address, **headers))
                return status, await stream.readuntil(b"hello" if status == 200 else b'"code"')

            for _ in range(32):
                assert (await status_of(CAFE))[0] == 200
            assert (await status_of(CAFE))[0] == 429
            # A header that a client writes itself does not change its address.
            for forged in ("9.9.9.9", HOME, "127.0.0.1", f"{HOME}, 127.0.0.1"):
                assert (await status_of(CAFE, x_forwarded_for=forged))[0] == 429
            assert (await status_of(HOME))[0] == 200
            assert (await status_of(HOME, x_forwarded_for=CAFE))[0] == 200
