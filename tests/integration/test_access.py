"""What a gateway lets in, by token, ticket and role, over real sockets."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jwt
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket

from headwater import Headwater
from headwater.database import Connection
from tests.serving import ours
from tests.support import run

SECRET = "a secret that is long enough for SHA-256 and more"
ORDERS = json.dumps({"table": "orders"})


def token(*, secret: str = SECRET, **claims: Any) -> str:
    return jwt.encode({"sub": "ann", "exp": time.time() + 3600, **claims}, secret, "HS256")


def bearer(**claims: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {token(**claims)}"}


class Gateway:
    """A gateway in this process, and clients of it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False)

    async def ticket(self, **claims: Any) -> str:
        answer = await self.http.post("/v1/tickets", headers=bearer(**claims))
        return str(answer.raise_for_status().json()["ticket"])

    async def code(self, method: str, path: str, **options: Any) -> str | None:
        """The code of what a request is refused with; None where it is not."""
        async with self.http.stream(method, path, **options) as response:
            if response.is_success:
                return None
            error = json.loads(await response.aread())["error"]
            assert error["message"]
            return str(error["code"])

    def socket(self, path: str = "", **options: Any) -> connect_websocket:
        return connect_websocket(f"ws://127.0.0.1:{self.port}/v1/ws{path}", **options)


@asynccontextmanager
async def served(
    url: str, declare: Callable[[Headwater], object] = lambda hw: None, **settings: Any
) -> AsyncIterator[Gateway]:
    hw = Headwater(url, **settings)
    declare(hw)
    app = hw.asgi()
    async with hw, ours(app) as port:
        gateway = Gateway(port)
        async with gateway.http:
            yield gateway


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


CALLS = [
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
                json.dumps({"type": "subscribe", "id": "room", "channel": {"name": "room:1"}})
            )
            await socket.send(
                json.dumps({"type": "subscribe", "id": "a", "live": {"table": "orders"}})
            )
            assert (await said(socket, "snapshot", "error"))["type"] == "snapshot"
            for call in CALLS:
                await socket.send(json.dumps(call))
                refused = await said(socket, "error", "answer")
                assert (refused["code"], refused["id"]) == (
                    "ticket",
                    call.get("request", call["id"]),
                )
            # What is sent right behind the token has it.
            for message in ({"type": "authenticate", "token": token()}, *CALLS):
                await socket.send(json.dumps(message))
            answers = [await said(socket, "error", "answer") for _ in CALLS]
            assert {answer["type"] for answer in answers} == {"answer"}


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
        served(url, auth_secret=SECRET, admin_claim="root") as other,
    ):
        for gateway, code in ((one, None), (other, "admin_only")):
            ticket = await one.ticket(headwater_admin=True)
            params = {"ticket": ticket, "q": query}
            assert await gateway.code("GET", "/v1/live", params=params) == code


async def test_a_gateway_without_authentication_gives_no_tickets(url: str) -> None:
    async with served(url) as gateway:
        assert await gateway.code("POST", "/v1/tickets", headers=bearer()) == "ticket"
