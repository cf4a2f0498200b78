"""Mutations and messages that clients repeat with their idempotency key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect as connect_websocket

from headwater.database import Connection
from headwater.testing.gateway_process import serving
from tests.gateway.auth.test_tokens import SECRET, token
from tests.support.applications.query_functions import Site, running
from tests.support.applications.shop import open_shop, until


@pytest.fixture
async def site(url: str, connection: Connection) -> AsyncIterator[Site]:
    await open_shop(connection, rows=0)
    async with running(url) as site:
        yield site


async def orders(connection: Connection) -> list[int]:
    cursor = await connection.execute("select id from orders order by id")
    return [id for (id,) in await cursor.fetchall()]


def key(text: str) -> dict[str, str]:
    return {"Idempotency-Key": text}


async def test_over_http(site: Site, connection: Connection) -> None:
    for _ in range(3):
        answer = await site.post("/v1/mutation/place", {"id": 7}, headers=key("k"))
        assert answer.status_code == 200, answer.text
        assert answer.json()["value"] == 7
    assert await orders(connection) == [7]
    answer = await site.post("/v1/mutation/place", {"id": 8}, headers=key("k"))
    assert answer.status_code == 422
    refusal = answer.json()["error"]
    assert refusal["code"] == "idempotency_key_reused"
    assert not refusal["retryable"]
    assert await orders(connection) == [7]


async def test_a_subscription_is_added_once(site: Site) -> None:
    """A browser repeats a request by itself when its connection was cut before the answer."""
    async with site.events("/v1/stream") as stream:
        session = (await stream.receive())["session"]
        path = f"/v1/sessions/{session}/subscriptions"
        request = {"id": "a", "live": {"table": "orders"}}
        answers = await asyncio.gather(*(site.post(path, request) for _ in range(3)))
        answers.append(await site.post(path, request))
        assert [answer.status_code for answer in answers] == [201] * 4
        (view,) = {answer.json()["view"] for answer in answers}
        assert (await stream.receive_type("snapshot"))["view"] == view
        other = await site.post(path, {"id": "a", "live": {"table": "orders", "limit": 3}})
        assert (other.status_code, other.json()["error"]["code"]) == (400, "invalid_query")
        wrong = {"id": "b", "live": {"table": "nowhere"}}
        refused = await asyncio.gather(*(site.post(path, wrong) for _ in range(3)))
        assert len({(answer.status_code, answer.text) for answer in refused}) == 1
        assert refused[0].status_code == 404
        await site.place(1, region=1)
        assert (await stream.receive())["type"] == "deltas"


async def test_over_websocket(site: Site, connection: Connection) -> None:
    call = {"type": "mutate", "name": "place", "args": {"id": 7}, "idempotency_key": "k"}
    answers = []
    for number in range(2):
        async with site.socket() as socket:
            await socket.send(id=f"r{number}", **call)
            answers.append(await socket.receive_type("answer"))
    assert [answer["value"] for answer in answers] == [7, 7]
    answer = await site.post("/v1/mutation/place", {"id": 7}, headers=key("k"))
    assert answer.json()["value"] == 7
    assert await orders(connection) == [7]
    async with site.socket() as socket:
        await socket.send(id="r9", **(call | {"args": {"id": 9}}))
        error = await socket.receive_type("error")
    assert (error["id"], error["code"]) == ("r9", "idempotency_key_reused")


async def test_a_client_that_has_gone_meanwhile(site: Site, connection: Connection) -> None:
    """The first request is still running when it is repeated."""
    first = asyncio.create_task(site.post("/v1/mutation/place_gated", {"id": 7}, headers=key("k")))
    await until(lambda: site.application.waiting == 1)
    first.cancel()
    async with site.socket() as socket:
        await socket.send(
            type="mutate", id="r1", name="place_gated", args={"id": 7}, idempotency_key="k"
        )
        await until(lambda: _waits(connection))
        site.application.gate.set()
        answer = await socket.receive_type("answer")
    assert answer["value"] == 7
    assert site.application.waiting == 1
    assert await orders(connection) == [7]


async def _waits(connection: Connection) -> bool:
    cursor = await connection.execute("select 1 from pg_locks where not granted")
    return await cursor.fetchone() is not None


async def test_keys_that_are_refused(site: Site, connection: Connection) -> None:
    for headers in ([("idempotency-key", "a b")], [("idempotency-key", "x" * 129)],
                    [("idempotency-key", "a"), ("idempotency-key", "b")],
                    [("idempotency-key", "")]):  # fmt: skip
        answer = await site.post("/v1/mutation/place", {"id": 7}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_query")
        assert answer.json()["error"]["message"].startswith("idempotency_key: ")
    for wrong in ("", "a b", "x" * 129, "ä", 7):
        async with site.socket() as socket:
            await socket.send(
                type="mutate", id="r1", name="place", args={"id": 7}, idempotency_key=wrong
            )
            error = await socket.receive_type("error")
            assert (error["id"], error["code"]) == ("r1", "invalid_query")
    assert await orders(connection) == []


async def test_a_failure_is_not_stored(site: Site, connection: Connection) -> None:
    for _ in range(2):
        answer = await site.post("/v1/mutation/closed", {}, headers=key("k"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "closed")
    cursor = await connection.execute("select count(*) from headwater.requests")
    assert await cursor.fetchone() == (0,)


# ------------------------------------------------------------------------ users and messages

PROGRAM = """
from headwater import Headwater

hw = Headwater()
hw.channel("room:{id}")

@hw.mutation
async def place(ctx) -> dict:
    id = await ctx.fetch_value(
        "insert into placed (name) values (%s) returning id", ctx.user or "anonymous")
    return {"id": id, "user": ctx.user}
"""


@pytest.fixture
async def folder(connection: Connection, tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(PROGRAM)
    await connection.execute(
        "create table placed (id int generated always as identity primary key, name text)"
    )
    return tmp_path


async def test_a_key_of_another_user_is_never_answered(
    url: str, connection: Connection, folder: Path
) -> None:
    users: list[dict[str, Any]] = [
        {"sub": "ann"}, {"sub": "bob"}, {"sub": "ann", "tenant": "emca"},
        {"sub": "ann", "tenant": None}, {"sub": "ann", "role": "postgres"},
    ]  # fmt: skip
    with serving(
        url, folder, program="shop:hw", auth_secret=SECRET, auth_roles="postgres"
    ) as served:
        async with httpx.AsyncClient(base_url=served.url, trust_env=False) as http:
            answers = []
            for user in [*users, *users]:
                headers = key("the-same") | {"Authorization": f"Bearer {token(**user, aud=None)}"}
                answer = await http.post("/v1/mutation/place", headers=headers)
                assert answer.status_code == 200, answer.text
                answers.append(answer.json()["value"])
            refused = await http.post("/v1/mutation/place", headers=key("the-same"))
    assert refused.status_code == 401
    assert [answer["id"] for answer in answers] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    assert [answer["user"] for answer in answers[:2]] == ["ann", "bob"]
    cursor = await connection.execute("select count(*) from placed")
    assert await cursor.fetchone() == (5,)


async def test_a_message_is_published_once(url: str, folder: Path) -> None:
    """Over HTTP and WebSocket, at two gateways."""
    with (
        serving(url, folder, program="shop:hw") as one,
        serving(url, folder, program="shop:hw") as other,
    ):
        wheres = [f"{each.url.replace('http', 'ws')}/v1/ws" for each in (one, other)]
        async with connect_websocket(wheres[0]) as first, connect_websocket(wheres[1]) as second:
            received: list[Any] = []
            for socket in (first, second):
                channel = {"type": "subscribe", "id": "c", "channel": {"name": "room:1"}}
                await socket.send(json.dumps(channel))
                while json.loads(await socket.recv())["type"] != "presence":
                    pass

            async def publish(socket: Any, data: Any, key: str | None = None) -> dict[str, Any]:
                message = {"type": "publish", "id": "c", "data": data, "request": "p"}
                await socket.send(json.dumps(message | {"idempotency_key": key}))
                while (said := json.loads(await socket.recv())).get("id") != "p":
                    if said["type"] == "message" and socket is second:
                        received.append(said["data"])
                return dict(said)

            for socket in (first, second, first):
                assert (await publish(socket, "hello", "k"))["type"] == "answer"
            assert (await publish(second, "other", "k"))["code"] == "idempotency_key_reused"
            assert (await publish(second, "bad", "a b"))["code"] == "invalid_query"
            await publish(second, "no key")
            await publish(second, "no key")
            await publish(second, "last", "k2")
            while received[-1:] != ["last"]:
                received.append(json.loads(await second.recv()).get("data"))
            assert received == ["hello", "no key", "no key", "last"]


async def test_pages_of_other_origins_may_send_the_header(url: str, folder: Path) -> None:
    with serving(url, folder, program="shop:hw", gateway_origins=["https://app.example"]) as served:
        async with httpx.AsyncClient(base_url=served.url, trust_env=False) as http:
            answer = await http.options(
                "/v1/mutation/place",
                headers={
                    "Origin": "https://app.example",
                    "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": "content-type, idempotency-key",
                },
            )
    assert answer.status_code == 200
    assert "idempotency-key" in answer.headers["access-control-allow-headers"]
