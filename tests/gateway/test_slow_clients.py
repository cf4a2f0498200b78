"""Clients that do not read, read very slowly, or come and go: bounded, and without effect on
others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import pytest

from headwater import connect, model
from headwater.client.state.replica import Replica
from headwater.database import Connection
from headwater.protocol import Deltas, ResetMessage, ServerMessage, Snapshot
from headwater.testing.gateway_process import Served, serving
from tests.gateway.test_oracle import LENIENT, quick
from tests.support.applications.shop import Truth, until

MIB = 1024 * 1024
WINDOW = {"table": "pages", "order": [["id", "asc"]], "limit": 100}


@pytest.fixture
async def pages(connection: Connection) -> None:
    """Rows of 10 kB, so that a few flushes are more than a connection holds."""
    await connection.execute("create table pages (id int primary key, version int, text text)")
    await connection.execute(
        "insert into pages select i, 0, repeat('x', 10000) from generate_series(1, 100) i"
    )
    await connection.execute("select headwater.enable_reactivity('pages')")


async def turn_pages(connection: Connection, times: int) -> None:
    for _ in range(times):
        await connection.execute("update pages set version = version + 1")


@asynccontextmanager
async def raw(gateway: Served, path: str) -> AsyncIterator[asyncio.StreamReader]:
    """A connection that has requested a stream, and reads only when the test reads."""
    parts = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    await writer.drain()
    try:
        yield reader
    finally:
        writer.transport.abort()


def live_path(query: dict[str, object]) -> str:
    return f"/v1/live?q={quote(json.dumps(query))}"


async def test_slow_clients_are_bounded_and_do_not_disturb_others(
    url: str, connection: Connection, pages: None, tmp_path: Path
) -> None:
    truth = await Truth.of(connection, "pages")
    with serving(url, tmp_path, **LENIENT) as gateway:
        async with AsyncExitStack() as stack:
            hw = await stack.enter_async_context(connect(gateway.url, backoff=quick))
            good = await stack.enter_async_context(hw.live(WINDOW, verify=True))

            async def turn_and_compare(times: int) -> None:
                for _ in range(times):
                    await turn_pages(connection, 5)
                    rows = await truth.rows(WINDOW)
                    await until(lambda rows=rows: good.rows == rows)

            await turn_and_compare(8)
            before = gateway.memory()
            stalled = [
                await stack.enter_async_context(raw(gateway, live_path(WINDOW))) for _ in range(10)
            ]
            feeds = [
                await stack.enter_async_context(raw(gateway, f"/v1/changes?tables=pages{more}"))
                for more in ("", "&overflow=drop")
            ]
            trickling = asyncio.create_task(_read_slowly(stalled[0]))
            # 40 MB for each of them, if it were all stored.
            await turn_and_compare(8)
            # A stream that began late has not got as much yet.
            for policy, count in (("conflate", 10), ("pause", 1), ("drop", 1)):
                while gateway.metric("headwater_overflows_total", policy=policy) < count:
                    await turn_and_compare(1)
            assert gateway.metric("headwater_stalled_bytes") > 0
            # Each may hold a queue and one frame, which are about a mebibyte each here. The memory
            # of a process has more: free space between objects, and pages that it shared before.
            grown = gateway.memory() - before
            print(f"{len(stalled) + len(feeds)} slow clients take {grown / MIB:.0f} MiB")
            assert grown < (len(stalled) + len(feeds)) * 6 * MIB + 32 * MIB
            assert hw.diverged == 0
            assert hw.reconnects == 0
            trickling.cancel()
            await asyncio.gather(trickling, return_exceptions=True)


async def _read_slowly(reader: asyncio.StreamReader) -> None:
    """A byte a second."""
    while True:
        byte, _ = await asyncio.gather(reader.read(1), asyncio.sleep(1))
        if not byte:
            return


async def test_a_client_that_reads_again_gets_the_present_state(
    url: str, connection: Connection, pages: None, tmp_path: Path
) -> None:
    with serving(url, tmp_path, **LENIENT) as gateway:
        async with raw(gateway, live_path(WINDOW)) as reader:
            await until(lambda: gateway.metric("headwater_subscriptions", kind="live") == 1)
            while gateway.metric("headwater_overflows_total", policy="conflate") == 0:
                await turn_pages(connection, 5)
            await turn_pages(connection, 1)
            cursor = await connection.execute("select max(version) from pages")
            last = (await cursor.fetchone() or (0,))[0]
            replica, reset = Replica(), False
            async with asyncio.timeout(60):
                async for message in _events(reader):
                    reset = reset or message.get("reason") == "overflow"
                    _fold(replica, message)
                    if {row["version"] for row in replica.rows} == {last}:
                        break
            assert reset


def _fold(replica: Replica, message: dict[str, Any]) -> None:
    match msgspec.convert(message, ServerMessage):
        case Snapshot(rows=rows) | ResetMessage(rows=rows):
            replica.apply([model.Reset(rows)])  # type: ignore[arg-type]
        case Deltas(deltas=deltas):
            replica.apply(deltas)


async def test_a_thousand_clients_come_and_go(
    url: str, connection: Connection, pages: None, tmp_path: Path
) -> None:
    small = {"table": "pages", "columns": ["version"], "limit": 5}
    with serving(url, tmp_path, **LENIENT) as gateway:
        async with connect(gateway.url, backoff=quick) as hw, hw.live(small) as good:
            await _come_and_go(gateway, live_path(small), 100)
            before = gateway.memory()
            await _come_and_go(gateway, live_path(small), 1000)
            await turn_pages(connection, 1)
            await until(lambda: {row["version"] for row in good.rows} == {1})
            await until(lambda: gateway.metric("headwater_sessions", transport="sse") == 0)
            assert gateway.metric("headwater_sessions_opened_total", transport="sse") >= 1000
            assert gateway.metric("headwater_subscriptions") == 1
            assert gateway.memory() - before < 32 * MIB


async def _come_and_go(gateway: Served, path: str, times: int) -> None:
    """Half leave at once, half when the stream has begun."""

    async def visit(number: int) -> None:
        async with raw(gateway, path) as reader:
            if number % 2:
                await reader.read(100)

    for first in range(0, times, 50):
        await asyncio.gather(*(visit(number) for number in range(first, first + 50)))


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The messages of a stream, whose chunks may be cut anywhere between lines."""
    rest = b""
    while data := await reader.read(65536):
        rest += data
        while b"\n\n" in rest:
            event, rest = rest.split(b"\n\n", 1)
            for line in event.split(b"\n"):
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))


async def test_a_paused_feed_misses_nothing(
    url: str, connection: Connection, pages: None, tmp_path: Path
) -> None:
    """The frame that did not fit any more is also sent later."""
    with serving(url, tmp_path, **LENIENT) as gateway:
        async with raw(gateway, "/v1/changes?tables=pages&overflow=pause") as reader:
            events = _events(reader)
            while (await anext(events))["type"] != "subscribed":
                pass
            while gateway.metric("headwater_overflows_total", policy="pause") == 0:
                await turn_pages(connection, 1)
            await turn_pages(connection, 1)
            cursor = await connection.execute("select max(version) from pages")
            last = (await cursor.fetchone() or (0,))[0]
            versions: dict[int, int] = {}
            async with asyncio.timeout(60):
                async for message in events:
                    for transaction in message.get("transactions", ()):
                        for change in transaction["changes"]:
                            version = change["after"]["version"]
                            versions[version] = versions.get(version, 0) + 1
                    if last in versions:
                        break
            assert versions == dict.fromkeys(range(1, last + 1), 100)
