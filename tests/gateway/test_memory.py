"""Memory of one user: bounded, reported to the client, and other users lose nothing. Real sockets,
and a gateway in a process of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import quote, urlsplit

import jwt
import pytest
from websockets.asyncio.client import connect as connect_socket

from headwater.database import Connection, connect
from headwater.embedded import EmbeddedPostgres
from headwater.limits import SESSION_CHANNEL_SUBSCRIPTIONS_MAX
from headwater.testing.gateway_process import Served, serving
from tests.support.applications.shop import until
from tests.support.databases import finish, fresh_database
from tests.support.log_probe import enable, run

MIB = 1024 * 1024
SECRET = "a secret that is long enough for SHA-256 and more"
PROGRAM = """
from headwater import Headwater

hw = Headwater()
hw.channel("room:{id}", history=20)
"""


async def fill(url: str) -> None:
    """Four mebibytes in rows of 20 kB."""
    connection = await connect(url, purpose="test", application_path=True)
    await run(
        connection,
        "create table pages (id int primary key, text text)",
        "insert into pages select i, repeat('x', 20000) from generate_series(1, 200) i",
    )
    await enable(connection, "pages")
    await connection.close()


@pytest.fixture(scope="module")
def database(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres.url, installed=True) as url:
        finish(fill(url))
        yield url


@pytest.fixture
async def pages(database: str) -> AsyncIterator[Connection]:
    connection = await connect(database, purpose="test", application_path=True)
    yield connection
    await connection.close()


@pytest.fixture(scope="module")
def gateway(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One gateway for all tests: each test has users of its own."""
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "chat.py").write_text(PROGRAM)
    with serving(
        database,
        folder,
        program="chat:hw",
        auth_secret=SECRET,
        limits_bytes_per_user=8 * MIB,
        limits_sessions_per_user=40,
        limits_requests_per_second=5_000,
    ) as served:
        yield served


def bearer(user: str) -> str:
    return "Bearer " + jwt.encode({"sub": user, "exp": time.time() + 600}, SECRET, "HS256")


class Socket:
    """A WebSocket of a user, which is read all the time."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.messages: list[dict[str, Any]] = []
        self.bytes = 0

    async def read(self) -> None:
        async for text in self.socket:
            self.bytes += len(text)
            self.messages.append(json.loads(text))

    async def send(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))

    def named(self, type: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == type]


@asynccontextmanager
async def socket_of(gateway: Served, user: str) -> AsyncIterator[Socket]:
    address = gateway.url.replace("http", "ws") + "/v1/ws"
    headers = {"authorization": bearer(user)}
    async with connect_socket(address, additional_headers=headers, max_size=None) as socket:
        found = Socket(socket)
        reading = asyncio.create_task(found.read())
        yield found
        reading.cancel()


async def test_live_queries_above_the_limit_are_refused(gateway: Served, pages: Connection) -> None:
    async with socket_of(gateway, "ann") as ann, socket_of(gateway, "bob") as bob:
        for number in range(40):  # each a mebibyte
            query = {"table": "pages", "order": [["id", "asc"]], "limit": 40 + number}
            await ann.send(type="subscribe", id=str(number), live=query)
        await until(lambda: len(ann.named("subscribed")) + len(ann.named("error")) == 40)
        refused = ann.named("error")
        assert {error["code"] for error in refused} == {"bytes_per_user"}
        assert all(error["retryable"] and error["hint"] for error in refused)
        assert 4 <= len(ann.named("subscribed")) <= 8
        assert gateway.metric("headwater_memory_largest_bytes") <= 8 * MIB
        assert gateway.metric("headwater_memory_shed_total", code="bytes_per_user") >= len(refused)
        # Another user may use as much, and the subscriptions of ann continue.
        small = {"table": "pages", "order": [["id", "asc"]], "limit": 100}
        await bob.send(type="subscribe", id="b", live=small)
        await until(lambda: bool(bob.named("snapshot")))
        await pages.execute("update pages set text = 'new' where id = 1")
        await until(lambda: bool(bob.named("deltas")))
        await until(lambda: len(ann.named("deltas")) == len(ann.named("subscribed")))
        # There is room again when one of hers has ended.
        for message in ann.named("subscribed"):
            await ann.send(type="unsubscribe", id=message["id"])
        await until(lambda: bool(ann.named("unsubscribed")))
        await ann.send(type="subscribe", id="again", live=query)
        await until(lambda: ann.named("subscribed")[-1]["id"] == "again")


@asynccontextmanager
async def stalled(gateway: Served, user: str, query: dict[str, Any]) -> AsyncIterator[None]:
    """A stream that is opened and not read."""
    parts = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1)
    path = f"/v1/live?q={quote(json.dumps(query))}"
    head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: {bearer(user)}\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()
    try:
        await reader.read(1)
        yield
    finally:
        writer.transport.abort()


async def test_clients_that_do_not_read_are_disconnected(
    gateway: Served, pages: Connection
) -> None:
    # The same query for all, so that not the live queries are too large.
    query = {"table": "pages", "order": [["id", "asc"]], "limit": 150}
    async with socket_of(gateway, "cid") as cid, AsyncExitStack() as open_:
        await cid.send(type="subscribe", id="b", live=query | {"limit": 1})
        await until(lambda: bool(cid.named("snapshot")))
        for _ in range(20):  # three mebibytes wait for each
            await open_.enter_async_context(stalled(gateway, "eve", query))
        await until(lambda: gateway.metric("headwater_sessions_closed_total", reason="memory") > 10)
        assert gateway.metric("headwater_stalled_bytes") <= 8 * MIB
        # Their query and its frame are in memory once, beside the queries of other tests.
        assert gateway.metric("headwater_memory_bytes") <= 4 * 8 * MIB
        await pages.execute("update pages set text = 'newer' where id = 1")
        await until(lambda: bool(cid.named("deltas")))
        assert cid.named("error") == []
    await until(lambda: gateway.metric("headwater_stalled_bytes") == 0)


async def test_a_channel_that_a_session_follows_many_times(gateway: Served) -> None:
    most = SESSION_CHANNEL_SUBSCRIPTIONS_MAX
    async with socket_of(gateway, "dot") as dot:
        for number in range(100):
            await dot.send(type="subscribe", id=str(number), channel={"name": "room:1"})
        await until(lambda: len(dot.named("subscribed")) + len(dot.named("error")) == 100)
        assert len(dot.named("subscribed")) == most
        assert {each["code"] for each in dot.named("error")} == {"subscriptions_per_channel"}
        await dot.send(type="subscribe", id="other", channel={"name": "room:2"})
        await until(lambda: len(dot.named("subscribed")) == most + 1)
        dot.bytes = 0
        await dot.send(type="publish", id="0", data="x" * 60_000)
        await until(lambda: len(dot.named("message")) == most)
        assert dot.bytes < (most + 1) * 61_000
        await dot.send(type="unsubscribe", id="0")
        await dot.send(type="subscribe", id="more", channel={"name": "room:1"})
        await until(lambda: dot.named("subscribed")[-1]["id"] == "more")
