"""Positions across gateways and subscriptions: a client never sees older data than before, at any
gateway, and a wait ends only when every subscription has what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import quote

import pytest

from headwater import Backoff, connect
from headwater.database import Connection
from headwater.gateway import gateway as gateway_module
from headwater.log.reading import reader as reader_module
from headwater.model import Position
from headwater.testing.proxies import Holder, holding
from headwater.topics.definitions import TopicDefinition
from tests.support.applications.query_functions import Site, Socket, running
from tests.support.log_probe import run

KINDS: dict[str, dict[str, Any]] = {
    "live": {"live": {"table": "orders", "order": [["id", "desc"]], "limit": 3}},
    "streamed": {"live": {"table": "orders", "mode": "streamed"}},
    "query": {"query": {"name": "whole"}},
    "deltas": {"query": {"name": "open_orders", "args": {"region": 1}, "delta": True}},
    "topic": {"topic": "region:1"},
    "changes": {"changes": {"tables": ["orders"]}},
}
STREAMS = {
    "live": '/v1/live?q={"table":"orders"}&after=',
    "query": "/v1/query/whole/subscribe?after=",
    "changes": "/v1/changes?tables=orders&after=",
}


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(
        connection,
        "create table orders (id int primary key, region int, amount numeric, status text)",
        "insert into orders select i, 1, i, 'new' from generate_series(1, 5) i",
        "select headwater.enable_reactivity('orders')",
    )
    return connection


@asynccontextmanager
async def site_of(url: str, **settings: Any) -> AsyncIterator[Site]:
    async with running(url, **settings) as site:
        topic = TopicDefinition("region:{region}", table="orders")
        site.gateway._topics.add(topic)
        yield site


@asynccontextmanager
async def behind(url: str) -> AsyncIterator[tuple[Site, Holder]]:
    """A gateway whose views are followed, and whose link to the database can be held up."""
    async with holding(url) as holder, site_of(holder.url) as site, site.socket() as socket:
        await follow_all(socket)
        yield site, holder
        holder.release()


async def follow_all(socket: Socket) -> None:
    await socket.receive_type("hello")
    for id, request in KINDS.items():
        await socket.send(type="subscribe", id=id, **request)
    for _ in KINDS:
        await socket.receive_type("subscribed")


async def write(connection: Connection, id: int) -> str:
    """Write an order; returns a position that contains it."""
    await run(connection, f"insert into orders values ({id}, 1, {id}, 'new')")
    cursor = await connection.execute("select headwater.log_id() || '-' || pg_current_snapshot()")
    ((text,),) = await cursor.fetchall()
    return str(text)


def ids(message: dict[str, Any]) -> set[int]:
    """The ids of the orders in a message."""
    match message["type"]:
        case "snapshot" | "reset":
            return {row["row"]["id"] for row in message["rows"]}
        case "deltas":
            return {delta["key"][0] for delta in message["deltas"]}
        case "result":
            return {row["id"] for row in message["value"]}
        case "topic":
            return {op["key"][0] for op in message["ops"]}
        case "changes":
            changes = [each for t in message["transactions"] for each in t["changes"]]
            return {change["key"]["id"] for change in changes}
    return set()


# ------------------------------------------------------------------------ a gateway behind


@pytest.mark.parametrize("kind", KINDS)
async def test_a_gateway_that_is_behind_catches_up_first(
    url: str, orders: Connection, kind: str
) -> None:
    async with behind(url) as (site, holder), site.socket() as socket:
        await socket.receive_type("hello")
        holder.hold()
        after = await write(orders, 99)
        await socket.send(type="subscribe", id="s", after=after, **KINDS[kind])
        await socket.send(type="unsubscribe", id="nothing")
        assert (await socket.receive())["type"] == "error"  # the only message
        holder.release()
        assert "lost" not in await socket.receive_type("subscribed")
        first = await socket.receive()
        reached = site.gateway.hub.position
        assert reached is not None
        assert reached.covers(Position.parse(after))
        if kind not in ("topic", "changes"):  # those begin with changes since the position
            assert Position.parse(first["position"]).covers(Position.parse(after))
            assert 99 in ids(first)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_gateway_that_stays_behind_refuses(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(gateway_module, "BEHIND_SECONDS_MAX", 0.2)
    async with behind(url) as (site, holder), site.socket() as socket:
        await socket.receive_type("hello")
        holder.hold()
        after = await write(orders, 99)
        await socket.send(type="subscribe", id="s", after=after, **KINDS[kind])
        error = await socket.receive()
        assert (error["code"], error["id"], error["retryable"]) == ("behind", "s", True)
        assert error["retry_after_secs"] == 1.0
        if kind in STREAMS:
            answer = await site.http.get(STREAMS[kind] + quote(after))
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "behind"


async def test_since_implies_after(url: str, orders: Connection) -> None:
    async with behind(url) as (site, holder), site.socket() as socket:
        await socket.receive_type("hello")
        holder.hold()
        since = await write(orders, 99)
        await socket.send(type="subscribe", id="s", since=since, **KINDS["live"])
        holder.release()
        resumed = (await socket.receive_type("subscribed")).get("resumed", False)
        # The next flush of the gateway may end at exactly this position.
        assert resumed or 99 in ids(await socket.receive())
        reached = site.gateway.hub.position
        assert reached is not None
        assert reached.covers(Position.parse(since))


async def test_a_position_that_the_database_lost_is_not_waited_for(
    url: str, orders: Connection
) -> None:
    async with behind(url) as (site, _), site.socket() as socket:
        await socket.receive_type("hello")
        now = site.gateway.hub.position
        assert now is not None
        ahead = str(Position(now.log, now.xmax + 1000, now.xmax + 1000))
        for number, after in enumerate((ahead, "0123abcd-5:5:")):
            for kind in ("live", "query", "streamed", "topic"):
                await socket.send(
                    type="subscribe", id=f"{kind}{number}", after=after, **KINDS[kind]
                )
                assert (await socket.receive_type("subscribed"))["lost"] is True
        await socket.send(type="subscribe", id="x", after="yesterday", **KINDS["live"])
        assert (await socket.receive_type("error"))["code"] == "invalid_query"


async def test_a_client_leaves_a_gateway_that_is_behind_for_another(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has seen 99 at the second gateway and comes to the first, which has not."""
    monkeypatch.setattr(gateway_module, "BEHIND_SECONDS_MAX", 0.2)
    async with AsyncExitStack() as stack:
        slow, holder = await stack.enter_async_context(behind(url))
        quick = await stack.enter_async_context(site_of(url))
        backoff = lambda: Backoff((0.02, 0.2), failures_max=100)  # noqa: E731
        hw = await stack.enter_async_context(connect([quick.url, slow.url], backoff=backoff))
        live = await stack.enter_async_context(hw.live("orders", order="id desc", limit=3))
        count = await stack.enter_async_context(hw.subscribe("count"))
        holder.hold()
        placed = await hw.mutate("place", id=99)
        await hw.wait_for(placed.position)
        assert (live.rows[0]["id"], count.value) == (99, 6)
        seen = [(live.rows[0]["id"], count.value)]
        for connection in list(quick.gateway._connections.values()):
            connection.abort("gone")
        async with asyncio.timeout(30):
            while hw.reconnects < 2:
                await asyncio.sleep(0.01)
                seen.append((live.rows[0]["id"], count.value))
            await hw.wait_for(placed.position)
        seen.append((live.rows[0]["id"], count.value))
        assert set(seen) == {(99, 6)}
        assert len(quick.gateway._connections) == 1


# ------------------------------------------------------------------------ waits


@pytest.mark.parametrize("window", ["adaptive", "200 ms"])
async def test_after_a_backlog_every_subscription_is_current_before_the_answer(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch, window: str
) -> None:
    """More changes than a flush takes: everything is read again outside of it."""
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 50)
    async with site_of(url, live_topic_window=window) as site, site.socket() as socket:
        await follow_all(socket)
        views: dict[str, int] = {
            each.id: each.view for c in site.gateway._connections.values()
            for each in c.session.subscriptions.values()
        }  # fmt: skip
        for number in range(1, 9):
            last = 1000 * number + 99
            await run(
                orders,
                "insert into orders select i, 1, i, 'new' from generate_series"
                f"({1000 * number}, {last}) i",
            )
            position = await write(orders, last + 1)
            await socket.send(type="wait", id="w", position=position)
            shown: set[int] = set()
            while (message := await socket.receive())["type"] != "answer":
                assert message["type"] != "error", message
                if last + 1 in ids(message):
                    shown.add(message["view"])
            assert shown == set(views.values()), (number, views)


async def test_a_wait_covers_a_view_that_is_read_again(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed question the view is read outside the flushes: the wait ends after that."""
    async with site_of(url) as site, site.socket() as socket:
        await socket.receive_type("hello")
        await socket.send(type="subscribe", id="s", **KINDS["live"])
        await socket.receive_type("snapshot")
        lives = site.gateway.hub.live_views
        opened = lives.snapshots._read
        gate = asyncio.Event()

        async def gated(*arguments: Any) -> None:
            await gate.wait()
            await opened(*arguments)

        monkeypatch.setattr(lives.snapshots, "_read", gated)
        (view,) = lives
        lives.read_again(view, "resync")
        position = await write(orders, 99)
        await socket.send(type="wait", id="w", position=position)
        await socket.send(type="query", id="q", name="count", after=position)
        assert (await socket.receive())["id"] == "q"
        gate.set()
        reset, answer = await socket.receive(), await socket.receive()
        assert (reset["type"], 99 in ids(reset), answer["id"]) == ("reset", True, "w")
