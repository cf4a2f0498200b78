"""Subscriptions that end before they have begun, in the gateway over a real hub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest

from headwater.database import Connection
from headwater.errors import Forbidden, NotFound, Unavailable
from headwater.gateway.auth.authorize_hook import AccessRequest
from headwater.gateway.connection import GatewayConnection as Client
from headwater.gateway.gateway import Gateway
from headwater.gateway.session import SessionFeed
from headwater.hub.feeds.view import FeedQuery
from headwater.hub.hub import Hub
from headwater.hub.reading.tables import KnownTable
from headwater.identity import ANONYMOUS, Identity
from headwater.protocol import ChangesQuery, Frame, Snapshot, Subscribe, type_of
from headwater.settings import Settings
from tests.support.applications.shop import open_shop, until
from tests.support.log_probe import run

LIVE = {"table": "orders", "limit": 3}


class Sink:
    """Records every frame."""

    def __init__(self) -> None:
        self.on_drain: Any = None
        self.backlog: Any = None
        self.sent = self.sent_bytes = 0
        self.buffered = 0
        self.got: list[Any] = []

    def send(self, frame: Frame) -> None:
        self.got.append(frame.message)

    def close(self) -> None: ...

    def abort(self) -> None: ...

    async def closed(self) -> None: ...

    @property
    def names(self) -> list[str]:
        return [type_of(message) for message in self.got]


class Gate:
    """An authorize hook that waits until the test lets it continue."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.asked = 0

    async def __call__(self, identity: Identity, request: AccessRequest) -> bool:
        self.asked += 1
        await self.open.wait()
        return True


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def gateway(url: str, connection: Connection, gate: Gate) -> AsyncIterator[Gateway]:
    await open_shop(connection, rows=20)
    async with Hub(url) as hub, Gateway(hub, Settings(), url=url, authorize=gate) as gateway:
        yield gateway


@asynccontextmanager
async def client(gateway: Gateway) -> AsyncIterator[tuple[Client, Sink]]:
    it = gateway.open(ANONYMOUS, address="192.0.2.1", transport="sse")
    sink = Sink()
    it.attach(sink)
    yield it, sink
    gateway.release(it)


REQUESTS = {
    "live": Subscribe("a", live=LIVE),
    "streamed": Subscribe("a", live={"table": "orders", "mode": "streamed"}),
    "changes": Subscribe("a", changes=ChangesQuery(("orders",))),
}


def held(gateway: Gateway) -> int:
    """Subscriptions that the hub or the quotas still count."""
    views = sum(view.followers for view in gateway.hub.live_views)
    feeds = sum(len(feed.subscribers) for feed in gateway.hub.feeds)
    return views + feeds + sum(gateway.quotas._subscriptions.values())


@pytest.mark.parametrize("subscribe", REQUESTS.values(), ids=REQUESTS)
async def test_unsubscribed_while_opening(
    gateway: Gateway, gate: Gate, subscribe: Subscribe
) -> None:
    """It was opened nevertheless, sent frames to no client, and was never closed."""
    async with client(gateway) as (it, sink):
        opening = asyncio.create_task(gateway.subscribe(it, subscribe))
        await until(lambda: gate.asked)
        it.session.remove("a")
        await opening
        gate.open.set()
        await gateway.subscribe(it, Subscribe("b", live=LIVE))
        assert [message.id for message in sink.got if hasattr(message, "id")] == ["a", "b"]
        assert held(gateway) == 2
    assert held(gateway) == 0


async def test_subscribed_again_under_the_same_id(gateway: Gateway, gate: Gate) -> None:
    """The end of the first subscription ended the second."""
    async with client(gateway) as (it, sink):
        first = asyncio.create_task(gateway.subscribe(it, REQUESTS["live"]))
        await until(lambda: gate.asked == 1)
        it.session.remove("a")
        second = asyncio.create_task(gateway.subscribe(it, REQUESTS["live"]))
        await until(lambda: gate.asked == 2)
        gate.open.set()
        await asyncio.gather(first, second)
        assert sink.names == ["hello", "unsubscribed", "subscribed", "snapshot"]
        assert list(it.session.subscriptions) == ["a"]
        assert held(gateway) == 2


@pytest.mark.parametrize("subscribe", REQUESTS.values(), ids=REQUESTS)
async def test_the_connection_ends_while_opening(
    gateway: Gateway, gate: Gate, subscribe: Subscribe
) -> None:
    """With a request beside the stream: the subscription was not ended, and stayed in the hub."""
    async with client(gateway) as (it, _):
        opening = asyncio.create_task(gateway.subscribe(it, subscribe))
        await until(lambda: gate.asked)
    await opening
    gate.open.set()
    assert held(gateway) == 0


async def test_the_connection_has_ended(gateway: Gateway, gate: Gate) -> None:
    """A request that found the session, and whose body arrived after its end."""
    gate.open.set()
    async with AsyncExitStack() as stack:
        it, _ = await stack.enter_async_context(client(gateway))
    with pytest.raises(NotFound):
        await gateway.subscribe(it, REQUESTS["live"])
    assert held(gateway) == 0


async def test_a_hook_that_fails_in_a_new_way_allows_nothing(
    url: str, gateway: Gateway, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the task that checks rights, and no rights were checked again."""
    gate.open.set()
    async with client(gateway) as (it, sink), client(gateway) as (other, others):
        await gateway.subscribe(it, REQUESTS["live"])
        await gateway.subscribe(other, REQUESTS["live"])

        async def fails(identity: Identity, tables: list[str]) -> Any:
            if it.session.subscriptions:
                raise LookupError("not foreseen")
            raise Forbidden("no more")

        monkeypatch.setattr(gateway._authorization, "of", fails)
        assert await gateway._authorization.recheck(it)
        assert await gateway._authorization.recheck(other)
        assert [sink.got[-1].code, others.got[-1].code] == ["forbidden", "forbidden"]
        assert held(gateway) == 0


async def test_clients_do_not_learn_the_address_of_the_database(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """/readyz and every refusal named the address of the database to clients."""
    url = "postgresql://keeper@127.0.0.1:1/vault"
    async with Hub(url) as hub, Gateway(hub, Settings(), url=url) as gateway:
        assert (
            gateway.not_ready_reason
            == "the database does not answer; the gateway's log has the reason"
        )
        with pytest.raises(Unavailable) as refused:
            await hub.feed(FeedQuery(("orders",)), SessionFeed(None, "a", "pause"))  # type: ignore[arg-type]
        assert "vault" not in str(refused.value)
    assert "keeper@127.0.0.1:1/vault" in caplog.text


async def test_a_token_that_arrives_while_opening_decides(gateway: Gateway, gate: Gate) -> None:
    """The decision for the old token stayed as long as the connection."""
    async with client(gateway) as (it, sink):
        opening = asyncio.create_task(gateway.subscribe(it, REQUESTS["live"]))
        await until(lambda: gate.asked)
        it.session.identity = Identity(role="unknown_role")
        gate.open.set()
        await opening
        await until(lambda: sink.names[-1] == "error")
        assert isinstance(sink.got[-1].code, str)
        assert not it.session.subscriptions
        assert held(gateway) == 0


@pytest.mark.parametrize("subscribe", REQUESTS.values(), ids=REQUESTS)
async def test_a_table_is_looked_up_once(
    url: str, connection: Connection, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no hook decides, between the lookup and the first result."""
    await open_shop(connection, rows=20)
    found = list[str]()

    async def counted(name: str, *, captured: bool = True) -> KnownTable:
        found.append(name)
        return await find(name, captured=captured)

    async with Hub(url) as hub, Gateway(hub, Settings(), url=url) as gateway:
        find = hub.tables.find
        monkeypatch.setattr(hub.tables, "find", counted)
        async with client(gateway) as (it, _):
            await gateway.subscribe(it, subscribe)
    assert found == ["orders"]


HIDDEN = [
    # Row-level security without a policy hides every row from a role.
    ["alter table orders enable row level security"],
    # Another table takes the name, and the role has no right on it.
    [
        "create table hidden (like orders including all)",
        "insert into hidden select * from orders",
        "alter table orders rename to shown",
        "alter table hidden rename to orders",
        "select headwater.enable_reactivity('orders')",
    ],
]


@pytest.mark.parametrize("subscribe", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("statements", HIDDEN, ids=["guarded", "replaced"])
async def test_a_table_that_is_closed_while_the_hook_decides(
    gateway: Gateway,
    gate: Gate,
    connection: Connection,
    subscribe: Subscribe,
    statements: list[str],
) -> None:
    role = f"reader_{uuid4().hex}"
    await run(connection, f"create role {role}", f"grant select on orders to {role}")
    async with client(gateway) as (it, sink):
        it.session.identity = Identity(role=role)
        opening = asyncio.create_task(gateway.subscribe(it, subscribe))
        await until(lambda: gate.asked)
        await run(connection, *statements)
        gate.open.set()
        with suppress(Forbidden):
            await opening
        await run(connection, "insert into orders (id) values (77)")
        await gateway.hub.flushes.next_flush()
        rows = [row for each in sink.got if isinstance(each, Snapshot) for row in each.rows]
        assert rows == []
        assert "changes" not in sink.names
    await run(connection, f"drop owned by {role}", f"drop role {role}")
