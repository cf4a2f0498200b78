"""Which requests a gateway accepts, by token, ticket and role, over real sockets."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from functools import partial
from typing import Any

import jwt
import pytest
from websockets.asyncio.client import ClientConnection

from headwater import AccessRequest, Allow, Headwater, Identity, Position, c
from headwater.database import Connection
from headwater.live.filters.filter import canonical
from headwater.log.reading.reader import LogReader
from tests.integration.gateway.test_key_set import issuing
from tests.support.gateway_client import SECRET, Gateway, bearer, served, token
from tests.support.log_probe import run
from tests.support.tokens import jwk, rsa_key

ORDERS = json.dumps({"table": "orders"})


@pytest.fixture(autouse=True)
async def orders(connection: Connection) -> None:
    await run(
        connection,
        "create table orders (id int primary key, owner text, amount int)",
        "insert into orders values (1, 'ann', 5), (2, 'bob', 7)",
        "select headwater.enable_reactivity('orders')",
    )


async def said(socket: ClientConnection, *types: str) -> dict[str, Any]:
    """The next message of one of these types."""
    while (message := json.loads(await socket.recv()))["type"] not in types:
        pass
    return dict(message)


# ------------------------------------------------------------------------ tickets


def with_functions(hw: Headwater) -> None:
    @hw.mutation
    async def add(ctx: Any, id: int) -> int:
        await ctx.execute("insert into orders values (%s, 'x', 1)", id)
        return id

    hw.query("total", sql="select count(*) from orders")
    hw.channel("room:{id}")


NOT_STREAMS = [
    ("POST", "/v1/mutation/add", {"id": 9}),
    ("POST", "/v1/query/total", {}),
    ("POST", "/v1/query/total/subscribe", {}),
    ("POST", "/v1/live", {"table": "orders"}),
    ("POST", "/v1/tickets", {}),
    ("POST", "/v1/sessions/x/subscriptions", {"id": "a", "live": {"table": "orders"}}),
    ("GET", "/v1/admin/overview", None),
    ("GET", "/v1/admin/tables", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
]


async def test_a_ticket_opens_streams_and_nothing_else(url: str, connection: Connection) -> None:
    async with served(url, with_functions, auth_secret=SECRET) as gateway:
        ticket = await gateway.ticket(headwater_admin=True)
        for method, path, body in NOT_STREAMS:
            found = await gateway.code(method, path, params={"ticket": ticket}, json=body)
            assert found == "ticket", path
        # None of the refusals used it up.
        params = {"ticket": ticket, "q": ORDERS}
        assert await gateway.code("GET", "/v1/live", params=params) is None
        assert await gateway.code("GET", "/v1/live", params=params) == "ticket"
        for path in ("/v1/stream", "/v1/changes?tables=orders", "/v1/query/total/subscribe"):
            mark = "&" if "?" in path else "?"
            assert await gateway.code("GET", f"{path}{mark}ticket={await gateway.ticket()}") is None


CALLS: list[dict[str, Any]] = [
    {"type": "mutate", "id": "m", "name": "add", "args": {"id": 9}},
    {"type": "query", "id": "q", "name": "total", "args": {}},
    {"type": "publish", "id": "room", "data": 1, "request": "p"},
    {"type": "state", "id": "room", "state": 1, "request": "s"},
]


async def test_a_socket_that_a_ticket_opened_follows_until_its_token_comes(url: str) -> None:
    async with served(url, with_functions, auth_secret=SECRET) as gateway:
        ticket = await gateway.ticket()
        async with gateway.socket(f"?ticket={ticket}") as socket:
            await socket.send(
                json.dumps(
                    {
                        "type": "subscribe",
                        "id": "room",
                        "channel": {"name": "room:1", "present": True},
                    }
                )
            )
            await socket.send(
                json.dumps({"type": "subscribe", "id": "a", "live": {"table": "orders"}})
            )
            begun = [await said(socket, "subscribed", "error") for _ in range(2)]
            assert {message["type"] for message in begun} == {"subscribed"}, begun
            for call in CALLS:
                await socket.send(json.dumps(call))
                refused = await said(socket, "error", "answer")
                assert (refused["code"], refused["id"]) == (
                    "ticket",
                    call.get("request", call["id"]),
                )
            # A message right after the token has its rights.
            for message in ({"type": "authenticate", "token": token()}, *CALLS):
                await socket.send(json.dumps(message))
            answers = [await said(socket, "error", "answer") for _ in CALLS]
            assert {answer["type"] for answer in answers} == {"answer"}, answers


B_SETTINGS = [
    ({"auth_tenants": ("emca",)}, "token_tenant"),
    ({"auth_audience": "bank"}, "token_audience"),
    ({"auth_issuer": "https://other"}, "token_issuer"),
    ({"auth_user_claim": "email"}, "token_claims"),
    ({"auth_secret": SECRET[::-1]}, "token_signature"),
    ({"auth_algorithms": ("HS384",)}, "token_algorithm"),
    ({"auth_secret": None}, "ticket"),
]


@pytest.mark.parametrize(("settings", "code"), B_SETTINGS, ids=[code for _, code in B_SETTINGS])
async def test_another_gateway_applies_its_own_settings(
    url: str, settings: dict[str, Any], code: str
) -> None:
    async with (
        served(url, auth_secret=SECRET) as one,
        served(url, **{"auth_secret": SECRET, **settings}) as other,
    ):
        ticket = await one.ticket(tenant="acme")
        params = {"ticket": ticket, "q": ORDERS}
        assert await other.code("GET", "/v1/live", params=params) == code


async def test_another_gateway_applies_its_own_admin_claim(
    url: str, connection: Connection
) -> None:
    await run(connection, "select headwater.enable_reactivity('headwater.activity')")
    query = json.dumps({"table": "headwater.activity"})
    async with (
        served(url, auth_secret=SECRET) as one,
        served(url, auth_secret=SECRET, auth_admin_claim="root") as other,
    ):
        for gateway, code in ((one, None), (other, "admin_only")):
            ticket = await one.ticket(headwater_admin=True)
            params = {"ticket": ticket, "q": query}
            assert await gateway.code("GET", "/v1/live", params=params) == code


async def test_a_gateway_without_authentication_gives_no_tickets(url: str) -> None:
    async with served(url) as gateway:
        assert await gateway.code("POST", "/v1/tickets", headers=bearer()) == "ticket"


# ------------------------------------------------------------------------ tables


async def test_closed_tables_are_open_where_they_are_declared(
    url: str, connection: Connection
) -> None:
    await run(
        connection,
        "create table other (id int primary key)",
        "select headwater.enable_reactivity('other')",
    )
    other = {"q": json.dumps({"table": "other"})}

    def declare(hw: Headwater) -> None:
        hw.table("orders")

    async with served(url, declare, auth_secret=SECRET, gateway_tables="closed") as gateway:
        ann, admin = bearer(), bearer(headwater_admin=True)
        feeds: tuple[dict[str, str], ...] = (
            {"tables": "orders"},
            {"tables": "other"},
            {"tables": "orders,other"},
            {},
        )
        for headers, closed in ((ann, "forbidden"), (admin, None)):
            get = partial(gateway.code, "GET", headers=headers)
            assert await get("/v1/live", params={"q": ORDERS}) is None
            assert await get("/v1/live", params=other) == closed
            codes = [await get("/v1/changes", params=params) for params in feeds]
            assert codes == [None, closed, closed, closed and "invalid_query"]


async def test_tables_open_to_every_token_are_logged_at_the_start(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def hooked(hw: Headwater) -> None:
        hw.authorize(lambda identity, request: True)

    said = "may read every enabled table"
    for declare, settings in (
        (hooked, {}), (None, {"gateway_tables": "closed"}), (None, {"auth_role": "postgres"}),
        (None, {"auth_secret": None}), (None, {}),
    ):  # fmt: skip
        assert said not in caplog.text
        async with served(url, declare or (lambda hw: None), **{"auth_secret": SECRET} | settings):
            pass
    assert said in caplog.text


async def test_the_hook_is_given_the_whole_request(url: str, connection: Connection) -> None:
    asked: list[AccessRequest] = []

    def declare(hw: Headwater) -> None:
        hw.topic("order:{id}", table="orders")

        @hw.authorize
        def rule(identity: Identity, request: AccessRequest) -> bool:
            asked.append(request)
            return request.columns != ("amount",)

    query = {
        "table": "public.orders", "columns": ["owner"], "where": [["amount", ">", 3]],
        "order": [["amount", "desc"]], "limit": 7, "after": [9, 1],
    }  # fmt: skip
    async with served(url, declare, auth_secret=SECRET) as gateway:
        get = partial(gateway.code, "GET", headers=bearer())
        assert await get("/v1/live", params={"q": json.dumps(query)}) is None
        refused = json.dumps({"table": "orders", "columns": ["amount"]})
        assert await get("/v1/live", params={"q": refused}) == "forbidden"
        since = await position(gateway)
        params = {"tables": "orders", "where": "amount > 3", "since": since}
        assert await get("/v1/changes", params=params) is None
        async with gateway.socket(additional_headers=bearer()) as socket:
            await socket.send(json.dumps({"type": "subscribe", "id": "t", "topic": "order:1"}))
            await said(socket, "subscribed")
    live, _, feed, topic = asked
    assert (live.kind, live.table, live.columns, live.limit) == ("live", "orders", ("owner",), 7)
    assert (live.after, live.mode) == ((9, 1), "maintained")
    assert canonical(live.where) == (c.amount > 3)
    assert [(by.column, by.desc) for by in live.order] == [("amount", True)]
    assert (feed.kind, feed.table) == ("feed", "orders")
    assert canonical(feed.where) == (c.amount > "3")
    assert str(feed.since) == since
    assert (topic.kind, topic.table, topic.topic) == ("topic", "orders", "order:1")


# ------------------------------------------------------------------------ how far back


async def position(gateway: Gateway) -> str:
    """A position without its mark. The mark has the times of changes, which these tests alter."""
    found = (await gateway.http.get("/readyz")).json()["position"]
    return str(found).partition("~")[0]


async def age_the_log(connection: Connection, by: str) -> None:
    await run(connection, f"update headwater.log set at = at - interval '{by}'")


async def changes(gateway: Gateway, since: str, **options: Any) -> list[Any]:
    """The transactions with which a feed of orders begins."""
    params = {"tables": "orders", "since": since}
    async with gateway.http.stream("GET", "/v1/changes", params=params, **options) as stream:
        async for line in stream.aiter_lines():
            message = json.loads(line.partition("data: ")[2] or "{}")
            if message.get("type") == "changes" and message["transactions"]:
                return list(message["transactions"])
    raise AssertionError(await stream.aread())


async def test_the_reach_of_a_feed_is_limited(url: str, connection: Connection) -> None:
    """A position is a text that any client can write, also one far back."""

    def declare(hw: Headwater) -> None:
        @hw.authorize
        def rule(identity: Identity, request: AccessRequest) -> Allow:
            spans = {"none": timedelta(), "day": timedelta(days=1), "all": timedelta.max}
            return Allow(history=spans.get(identity.user or ""))

    async with served(url, declare, auth_secret=SECRET) as gateway:
        start = await position(gateway)
        await run(connection, "delete from orders where id = 1")
        crafted = f"{start.partition('-')[0]}-3:3:"
        feed = {"tables": "orders", "since": start}
        get = partial(gateway.code, "GET", "/v1/changes")
        # Within the time of a reconnect, every change comes.
        (removed,) = await changes(gateway, start, headers=bearer())
        assert removed["changes"][0]["before"]["owner"] == "ann"
        await age_the_log(connection, "11 minutes")
        assert await get(params=feed, headers=bearer()) == "resync"
        for since in (start, crafted):
            asked = {"tables": "orders", "since": since}
            assert await get(params=asked, headers=bearer()) == "resync"
            assert await get(params=asked, headers=bearer(sub="none")) == "resync"
            assert await get(params=asked, headers=bearer(sub="day")) is None
            assert await get(params=asked, headers=bearer(headwater_admin=True)) is None
        await age_the_log(connection, "2 days")
        assert await get(params=feed, headers=bearer(sub="day")) == "resync"
        assert len(await changes(gateway, start, headers=bearer(sub="all"))) == 1
        # A position with no old changes after it counts like the present one.
        now = await position(gateway)
        await run(connection, "insert into orders values (9, 'ann', 1)")
        assert len(await changes(gateway, now, headers=bearer())) == 1


async def test_a_transaction_that_was_running_counts_by_its_last_change(
    url: str, connection: Connection, other: Connection
) -> None:
    async with served(url, auth_secret=SECRET) as gateway:
        async with other.transaction():
            await run(other, "insert into orders values (9, 'ann', 1)")
            await run(connection, "insert into orders values (8, 'ann', 1)")
            since = str(await read_position(connection)).partition("~")[0]
            await run(other, "insert into orders values (10, 'ann', 1)")
        await run(connection, "update headwater.log set at = at - interval '1 h' where seq ="
                  " (select min(seq) from headwater.log where op = 'I')")  # fmt: skip
        (running,) = await changes(gateway, since, headers=bearer())
        assert len(running["changes"]) == 2


async def read_position(connection: Connection) -> Position:
    reader = await LogReader.open(connection)
    return await reader.now(connection)


async def test_a_topic_that_asks_for_older_changes_gets_a_gap(
    url: str, connection: Connection
) -> None:
    def declare(hw: Headwater) -> None:
        hw.topic("of:{owner}", table="orders")

    async with served(url, declare, auth_secret=SECRET) as gateway:
        start = await position(gateway)
        await run(connection, "delete from orders where id = 1")
        await age_the_log(connection, "11 minutes")
        async with gateway.socket(additional_headers=bearer()) as socket:
            asked = {"type": "subscribe", "id": "t", "topic": "of:ann", "since": start}
            await socket.send(json.dumps(asked))
            assert (await said(socket, "gap", "topic"))["type"] == "gap"


# ------------------------------------------------------------------------ operators


async def test_metrics_and_openapi_are_closed_where_tokens_are_verified(url: str) -> None:
    async with served(url) as gateway:
        assert await gateway.code("GET", "/metrics") is None
        assert await gateway.code("GET", "/openapi.json") is None
    scraper = {"authorization": f"Bearer {SECRET[::-1]}"}
    async with served(url, auth_secret=SECRET, gateway_metrics_token=SECRET[::-1]) as gateway:
        get = partial(gateway.code, "GET")
        for path in ("/metrics", "/openapi.json"):
            assert await get(path) == "token_missing"
            assert await get(path, headers=bearer(headwater_admin=True)) is None
        assert await get("/metrics", headers=bearer()) == "admin_only"
        assert await get("/openapi.json", headers=bearer()) is None
        assert await get("/metrics", headers=scraper) is None
        assert await get("/openapi.json", headers=scraper) == "token_malformed"
        assert await get("/v1/live", params={"q": ORDERS}, headers=scraper) == "token_malformed"
        assert [await get(path) for path in ("/healthz", "/readyz")] == [None, None]
    async with served(
        url, auth_secret=SECRET, gateway_metrics="open", gateway_openapi="open"
    ) as gateway:
        assert [await gateway.code("GET", path) for path in ("/metrics", "/openapi.json")] == [
            None,
            None,
        ]
    async with served(url, gateway_metrics="closed", gateway_openapi="closed") as gateway:
        for path in ("/metrics", "/openapi.json"):
            assert await gateway.code("GET", path) == "admin_only"


# ------------------------------------------------------------------------ key sets


async def test_unknown_keys_cause_one_fetch_on_every_transport(url: str) -> None:
    async with issuing() as issuer:
        issuer.keys = [jwk(rsa_key(), kid="first")]
        good = signed_by("first")
        settings: dict[str, Any] = {"auth_jwks": issuer.url, "auth_cookie": "session"}
        async with served(url, **settings) as gateway:
            headers = {"authorization": f"Bearer {good}"}
            made = await gateway.http.post("/v1/tickets", headers=headers)
            assert issuer.asked == 1
            for number in range(3):
                unknown = signed_by(f"unknown {number}")
                get = partial(gateway.code, "GET", "/v1/live", params={"q": ORDERS})
                for shown in (
                    {"authorization": f"Bearer {unknown}"},
                    {"cookie": f"session={unknown}"},
                ):
                    assert await get(headers=shown) == "token_signature"
                async with gateway.socket(additional_headers=headers) as socket:
                    await socket.send(json.dumps({"type": "authenticate", "token": unknown}))
                    assert (await said(socket, "error"))["code"] == "token_signature"
            # The ticket's token is verified again, by keys that are known.
            ticket = {"q": ORDERS, "ticket": made.json()["ticket"]}
            assert await gateway.code("GET", "/v1/live", params=ticket) is None
            assert issuer.asked == 1


def signed_by(name: str) -> str:
    claims = {"sub": "ann", "exp": time.time() + 3600}
    return jwt.encode(claims, rsa_key("first"), "RS256", headers={"kid": name})


# ------------------------------------------------------------------------ places of names


PLACES = [
    "1.0",
    "+1",
    " 1",
    "1 ",
    "1_0",
    "٣",
    "-0",
    "01",
    "1e3",
    "0x1",
    "9" * 60,
    "",
    "null",
    "true",
]


async def test_a_place_for_a_number_takes_one_spelling(url: str) -> None:
    """Access is decided by the number, so one room must not have two names."""

    def declare(hw: Headwater) -> None:
        @hw.topic("order:{id}", table="orders")
        async def follows(ctx: Any, id: int) -> bool:
            return True

        @hw.channel("room:{id}")
        async def joins(ctx: Any, id: int) -> bool:
            return True

    async with served(url, declare) as gateway, gateway.socket() as socket:

        async def subscribed(**asked: Any) -> bool:
            await socket.send(json.dumps({"type": "subscribe", "id": "a", **asked}))
            message = await said(socket, "subscribed", "error")
            begun = bool(message["type"] == "subscribed")
            if begun:
                await socket.send(json.dumps({"type": "unsubscribe", "id": "a"}))
                await said(socket, "unsubscribed")
            return begun

        for place in ("1", "0", "-1", "9007199254740993"):
            assert await subscribed(topic=f"order:{place}"), place
            assert await subscribed(channel={"name": f"room:{place}"}), place
        for place in PLACES:
            assert not await subscribed(topic=f"order:{place}"), place
            assert not await subscribed(channel={"name": f"room:{place}"}), place
