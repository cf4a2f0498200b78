"""The links that tests cut: closing one ends all of its connections."""

from __future__ import annotations

import asyncio

import pytest

from headwater.testing.proxies import Cutter, cutting


async def test_a_connection_that_is_being_made_ends_with_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connecting, may_connect, connect = asyncio.Event(), asyncio.Event(), Cutter._connect

    async def late(cutter: Cutter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connecting.set()
        await may_connect.wait()
        return await connect(cutter)

    monkeypatch.setattr(Cutter, "_connect", late)
    target = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    writers = list[asyncio.StreamWriter]()
    port = target.sockets[0].getsockname()[1]
    async with target, asyncio.timeout(10):
        async with cutting(f"http://127.0.0.1:{port}") as cutter:
            address = cutter.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(*address)
            await connecting.wait()
        may_connect.set()
        assert await reader.read() == b""
        writer.close()
    assert writers == []
