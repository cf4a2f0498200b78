"""Reactive queries and mutations as clients use them: over HTTP, SSE, WebSocket and sessions."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from headwater.database import Connection
from headwater.errors import NotFound
from headwater.gateway import calls
from headwater.identity import ANONYMOUS
from headwater.limits import SESSION_QUEUE_BYTES_MAX, SESSION_REQUESTS_MAX
from headwater.protocol import Ask, Error, Mutate, QueryCall, Subscribe, Wait
from headwater.testing.gateway_process import serving
from tests.gateway.auth.test_tokens import SECRET, token
from tests.gateway.test_operations import TRACED
from tests.gateway.test_subscriptions import Sink
from tests.support.applications.query_functions import EventStream, Site, running
from tests.support.applications.shop import open_shop, until

AHEAD = "ffffffff-1:1:"


@pytest.fixture
async def site(url: str, connection: Connection) -> AsyncIterator[Site]:
    await open_shop(connection, rows=10)  # regions 0 to 4, two orders in each
    async with running(url) as site:
        yield site


def types(messages: list[dict[str, Any]]) -> list[str]:
    return [message["type"] for message in messages]


# ------------------------------------------------------------------------ single calls


async def test_a_query_answers_with_its_result_and_a_position(site: Site) -> None:
    answer = await site.post("/v1/query/open_orders", {"region": 1})
    assert answer.status_code == 200
    assert answer.json()["value"] == [{"id": 1, "amount": 4}, {"id": 6, "amount": 22}]
    assert answer.json()["position"] == str(site.gateway.hub.position)
    assert (await site.post("/v1/query/count")).json()["value"] == 10
    assert (await site.post("/v1/query/count", {})).json()["value"] == 10


async def test_a_client_reads_its_own_writes(site: Site) -> None:
    await site.post("/v1/query/count")  # so that its result is cached
    for number in range(20):
        position = await site.place(100 + number)
        answer = await site.post(f"/v1/query/count?after={quote(position)}")
        assert answer.json()["value"] == 11 + number


async def test_a_mutation_answers_with_its_result(site: Site, connection: Connection) -> None:
    answer = await site.post("/v1/mutation/place", {"id": 77, "region": 3})
    assert answer.status_code == 200
    assert answer.json()["value"] == 77
    cursor = await connection.execute("select region from orders where id = 77")
    assert await cursor.fetchone() == (3,)


REFUSED: list[tuple[str, str, Any, int, str]] = [
    ("an unknown query", "/v1/query/nothing", {}, 404, "query_unknown"),
    ("an unknown mutation", "/v1/mutation/count", {}, 404, "mutation_unknown"),
    ("a query that is a mutation", "/v1/query/place", {}, 404, "query_unknown"),
    ("an argument missing", "/v1/query/open_orders", None, 400, "invalid_query"),
    ("an argument too many", "/v1/query/count", {"x": 1}, 400, "invalid_query"),
    ("a wrong argument", "/v1/mutation/place", {"id": "x"}, 400, "invalid_query"),
    ("no object", "/v1/query/count", [1], 400, "invalid_query"),
    ("no position", "/v1/query/count?after=yesterday", {}, 400, "invalid_query"),
    ("another log", f"/v1/query/count?after={AHEAD}", {}, 410, "resync"),
    ("too large", "/v1/query/count", {"x": "x" * 2**20}, 413, "too_large"),
    ("a refusal", "/v1/query/closed", {}, 422, "closed"),
    ("a refused mutation", "/v1/mutation/closed", {}, 422, "closed"),
    ("a fault", "/v1/query/crash", {}, 500, "function_failed"),
    ("a fault in a mutation", "/v1/mutation/crash", {}, 500, "function_failed"),
    ("an odd result", "/v1/query/odd", {}, 500, "result"),
    ("an odd result of a mutation", "/v1/mutation/odd", {}, 500, "result"),
    ("too slow", "/v1/query/slow", {}, 504, "timed_out"),
    ("by GET", "/v1/query/count", "GET", 405, "method"),
    ("delta without a key", "/v1/query/count/subscribe?delta=true", {}, 400, "invalid_query"),
    ("delta of what", "/v1/query/count/subscribe?delta=yes", {}, 400, "invalid_query"),
    ("a stream of nothing", "/v1/query/nothing/subscribe", {}, 404, "query_unknown"),
    ("a stream of a fault", "/v1/query/crash/subscribe", {}, 500, "function_failed"),
    ("a stream of a refusal", "/v1/query/closed/subscribe", {}, 422, "closed"),
    ("arguments of a stream", "/v1/query/open_orders/subscribe", {}, 400, "invalid_query"),
    ("args that are none", "/v1/query/count/subscribe?args=[1]", "GET", 400, "invalid_query"),
]


@pytest.mark.parametrize(
    ("why", "path", "body", "status", "code"), REFUSED, ids=[each[0] for each in REFUSED]
)
async def test_refused(
    site: Site, caplog: pytest.LogCaptureFixture, why: str, path: str, body: Any, status: int,
    code: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.CRITICAL)
    answer = await (site.http.get(path) if body == "GET" else site.post(path, body))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "secret" not in answer.text
    assert site.metric("headwater_refused_total", code=code) == (code != "method")
    assert site.metric("headwater_sessions_opened_total", transport="sse") == (
        "subscribe" in path and "yes" not in path and "[" not in path
    )


async def test_the_error_for_an_unknown_name_lists_no_known_names(site: Site) -> None:
    answer = await site.post("/v1/query/nothing")
    assert "'nothing'" in answer.json()["error"]["message"]
    assert "open_orders" not in answer.text


async def test_a_refused_mutation_leaves_nothing(site: Site, connection: Connection) -> None:
    await site.post("/v1/mutation/closed")
    cursor = await connection.execute("select count(*) from orders where id = 999")
    assert await cursor.fetchone() == (0,)


async def test_a_call_belongs_to_the_trace_that_it_names(
    site: Site, connection: Connection
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    assert (await site.post("/v1/query/trace", headers=headers)).json()["value"] == trace
    assert (await site.post("/v1/mutation/place", {"id": 50}, headers=headers)).is_success
    cursor = await connection.execute(
        "select distinct trace_id from headwater.changes where trace_id is not null"
    )
    assert await cursor.fetchall() == [(trace,)]
    odd = {"traceparent": "00-00000000000000000000000000000000-b7ad6b7169203331-01"}
    assert (await site.post("/v1/query/count", headers=odd)).status_code == 200


# ------------------------------------------------------------------------ subscriptions


async def test_a_stream_of_results(site: Site) -> None:
    path = "/v1/query/open_orders/subscribe"
    async with site.events(path, "POST", json={"region": 1}) as stream:
        first = [await stream.receive() for _ in range(3)]
        assert types(first) == ["hello", "subscribed", "result"]
        assert [row["id"] for row in first[2]["value"]] == [1, 6]
        assert stream.ids == [None, None, first[2]["position"]]
        await site.place(60, region=1)
        second = await stream.receive()
        assert [row["id"] for row in second["value"]] == [1, 6, 60]
        assert site.metric("headwater_subscriptions", kind="query") == 0
        await site.gateway.measure()
        assert site.metric("headwater_subscriptions", kind="query") == 1
    await until(lambda: not sum(site.gateway.quotas._subscriptions.values()))


async def test_for_event_source(site: Site) -> None:
    path = f"/v1/query/open_orders/subscribe?args={quote(json.dumps({'region': 1}))}"
    async with site.events(path) as stream:
        result = await stream.receive_type("result")
        assert len(result["value"]) == 2
        headers = {"last-event-id": result["position"]}
        async with site.events(path, headers=headers) as resumed:
            assert (await resumed.receive_type("subscribed"))["resumed"] is True
            await site.place(60, region=1)
            assert len((await resumed.receive())["value"]) == 3
    answer = await site.http.head("/v1/query/count/subscribe")
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_a_stream_is_resumed_from_positions_of_what_it_began_with(site: Site) -> None:
    """A subscription that was added to it later may have a newer position when it is cut off."""
    async with site.events("/v1/query/count/subscribe") as stream:
        session = (await stream.receive())["session"]
        position = (await stream.receive_type("result"))["position"]
        added = {"id": "added", "live": {"table": "orders"}}
        answer = await site.post(f"/v1/sessions/{session}/subscriptions", added)
        assert answer.status_code == 201
        assert (await stream.receive_type("snapshot"))["position"]
        assert [id for id in stream.ids if id is not None] == [position]


async def test_rows_by_their_key(site: Site) -> None:
    async with site.events(
        "/v1/query/open_orders/subscribe", "POST", params={"delta": "true"}, json={"region": 1}
    ) as stream:
        assert (await stream.receive_type("subscribed"))["key"] == ["id"]
        snapshot = await stream.receive()
        assert [row["key"] for row in snapshot["rows"]] == [[1], [6]]
        await site.place(60, region=1)
        (delta,) = (await stream.receive())["deltas"]
        assert (delta["key"], delta["index"]) == ([60], 2)


async def test_a_query_fails_and_recovers(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with site.events("/v1/query/count/subscribe", "POST") as stream:
        assert (await stream.receive_type("result"))["value"] == 10
        site.application.broken = True
        await site.place(60)
        failed = await stream.receive()
        assert (failed["type"], failed["code"]) == ("failed", "function_failed")
        assert "secret" not in json.dumps(failed)
        assert stream.ids[-1] is None
        site.application.broken = False
        assert (await stream.receive())["value"] == 11


# ------------------------------------------------------------------------ in a session


async def test_asked_over_websocket(site: Site) -> None:
    async with site.socket() as socket:
        await socket.receive_type("hello")
        await socket.send(type="query", id="q", name="open_orders", args={"region": 1})
        answer = await socket.receive()
        assert (answer["type"], answer["id"], len(answer["value"])) == ("answer", "q", 2)
        await socket.send(type="mutate", id="m", name="place", args={"id": 60, "region": 1})
        placed = await socket.receive()
        assert (placed["id"], placed["value"]) == ("m", 60)
        await socket.send(
            type="query", id="q", name="open_orders", args={"region": 1}, after=placed["position"]
        )
        assert len((await socket.receive())["value"]) == 3


OVER_WEBSOCKET: list[tuple[str, dict[str, Any], str]] = [
    ("unknown query", {"type": "query", "name": "nothing"}, "query_unknown"),
    ("unknown mutation", {"type": "mutate", "name": "nothing"}, "mutation_unknown"),
    ("arguments", {"type": "query", "name": "open_orders"}, "invalid_query"),
    ("refusal", {"type": "query", "name": "closed"}, "closed"),
    ("refused mutation", {"type": "mutate", "name": "closed"}, "closed"),
    ("fault", {"type": "mutate", "name": "crash"}, "function_failed"),
    ("too slow", {"type": "query", "name": "slow"}, "timed_out"),
    ("no position", {"type": "wait", "position": "yesterday"}, "invalid_query"),
    ("another log", {"type": "wait", "position": AHEAD}, "resync"),
    ("after what", {"type": "query", "name": "count", "after": "x"}, "invalid_query"),
    ("subscribed to nothing", {"type": "subscribe", "query": {"name": "x"}}, "query_unknown"),
    ("no key", {"type": "subscribe", "query": {"name": "count", "delta": True}}, "invalid_query"),
    ("paused", {"type": "subscribe", "query": {"name": "count"}, "overflow": "pause"},
     "invalid_query"),
    ("verified", {"type": "subscribe", "query": {"name": "count"}, "verify": True},
     "invalid_query"),
    ("no arguments", {"type": "mutate", "name": "place", "args": None}, "invalid_query"),
    ("a list", {"type": "query", "name": "count", "args": [1]}, "invalid_query"),
    ("no name", {"type": "subscribe", "topic": 42}, "invalid_query"),
    ("a field too many", {"type": "subscribe", "changes": {"table": "orders"}}, "invalid_query"),
    ("nothing to wait for", {"type": "wait"}, "invalid_query"),
    ("no cursor", {"type": "reanchor", "request": "it", "after": 5}, "invalid_query"),
    ("nothing said", {"type": "publish", "request": "it"}, "invalid_query"),
    ("slid what", {"type": "reanchor", "request": "it"}, "subscription_unknown"),
    ("two things", {"type": "subscribe", "query": {"name": "count"}, "live": {"table": "orders"}},
     "invalid_query"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("why", "message", "code"), OVER_WEBSOCKET, ids=[each[0] for each in OVER_WEBSOCKET]
)
async def test_refused_over_websocket(
    site: Site,
    caplog: pytest.LogCaptureFixture,
    why: str,
    message: dict[str, Any],
    code: str,
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with site.socket() as socket:
        await socket.receive_type("hello")
        await socket.send(id="it", **message)
        error = await socket.receive()
        assert (error["type"], error["id"], error["code"]) == ("error", "it", code)
        assert "secret" not in json.dumps(error)
        await socket.send(type="query", id="it", name="count")
        assert (await socket.receive())["value"] == 10


async def test_websocket_and_sse_send_the_same(site: Site) -> None:
    """The same requests: a query, one with deltas, one that fails; a write, and a wait for it."""
    requests: list[dict[str, Any]] = [
        {"id": "whole", "query": {"name": "open_orders", "args": {"region": 1}}},
        {"id": "rows", "query": {"name": "open_orders", "args": {"region": 1}, "delta": True}},
        {"id": "count", "query": {"name": "count"}},
    ]
    async with site.events("/v1/stream") as stream:
        session = (await stream.receive())["session"]
        by_sse = []
        for request in requests:
            answer = await site.post(f"/v1/sessions/{session}/subscriptions", request)
            assert answer.status_code == 201
            by_sse += [await stream.receive(), await stream.receive()]
            assert answer.json()["view"] == by_sse[-1]["view"]
        position = await site.place(60, region=1)
        wait = {"id": "wait", "position": position}
        assert (await site.post(f"/v1/sessions/{session}/wait", wait)).status_code == 202
        by_sse += [await stream.receive() for _ in range(4)]
    async with site.socket() as socket:
        await socket.receive_type("hello")
        by_websocket = []
        for request in requests:
            await socket.send(type="subscribe", **request)
            by_websocket += [await socket.receive(), await socket.receive()]
        position = await site.place(61, region=1)
        await socket.send(type="wait", id="wait", position=position)
        by_websocket += [await socket.receive() for _ in range(4)]
    assert sorted(map(shape, by_websocket)) == sorted(map(shape, by_sse))
    assert types(by_sse)[-1] == types(by_websocket)[-1] == "answer"


def shape(message: dict[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """The message without what differs from run to run."""
    return message["type"], str(message.get("id")), tuple(sorted(message))


async def test_the_answer_to_a_wait_comes_after_the_data(site: Site) -> None:
    async with site.socket() as socket:
        await socket.receive_type("hello")
        for number in range(5):
            call = {"name": "open_orders", "args": {"region": number}}
            await socket.send(type="subscribe", id=f"s{number}", query=call)
        live = {"table": "orders", "where": [["region", "=", 1]]}
        await socket.send(type="subscribe", id="live", live=live)
        views: dict[int, str] = {}
        while len(views) < 6:
            message = await socket.receive_type("subscribed")
            views[message["view"]] = message["id"]
        await socket.send(type="wait", id="begun", position=await site.place(99))
        await socket.receive_type("answer")
        for number in range(20):
            position = await site.place(100 + number, region=number % 5)
            await socket.send(type="wait", id="w", position=position)
            notified: set[str] = set()
            while (message := await socket.receive())["type"] != "answer":
                notified.add(views[message["view"]])
            assert message == {"type": "answer", "id": "w", "position": position}
            assert f"s{number % 5}" in notified
            assert ("live" in notified) == (number % 5 == 1)


async def test_a_wait_covers_subscriptions_that_are_opening(site: Site) -> None:
    async with site.socket() as socket:
        await socket.receive_type("hello")
        await socket.send(type="subscribe", id="s", query={"name": "gated"})
        await until(lambda: site.application.waiting)
        await socket.send(type="wait", id="w", position=await site.place(60))
        await socket.send(type="query", id="q", name="count")
        assert (await socket.receive())["id"] == "q"
        site.application.gate.set()
        received = [await socket.receive() for _ in range(3)]
        assert types(received) == ["subscribed", "result", "answer"]


async def test_a_wait_that_takes_too_long(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "WAIT_SECONDS_MAX", 0.01)
    async with site.socket() as socket:
        await socket.receive_type("hello")
        await socket.send(type="subscribe", id="s", query={"name": "gated"})
        await until(lambda: site.application.waiting)
        await socket.send(type="wait", id="w", position=await site.place(60))
        error = await socket.receive()
        assert (error["id"], error["code"], error["retryable"]) == ("w", "timed_out", True)


async def test_waits_of_a_session_over_sse(site: Site) -> None:
    async with site.events("/v1/stream") as stream:
        path = f"/v1/sessions/{(await stream.receive())['session']}/wait"
        refused = (("yesterday", 400, "invalid_query"), (AHEAD, 410, "resync"))
        for position, status, code in refused:
            answer = await site.post(path, {"id": "w", "position": position})
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        answer = await site.post(path, {"id": "", "position": await site.place(60)})
        assert answer.status_code == 400
    answer = await site.post("/v1/sessions/unknown/wait", {"id": "w", "position": AHEAD})
    assert answer.json()["error"]["code"] == "session_unknown"


# ------------------------------------------------------------------------ ids and bounds


async def test_subscriptions_and_requests_share_their_ids(site: Site) -> None:
    async with site.socket() as socket:
        await socket.receive_type("hello")
        await socket.send(type="subscribe", id="a", query={"name": "count"})
        await socket.receive_type("result")
        await socket.send(type="query", id="g", name="gated")
        await until(lambda: site.application.waiting)
        for message in (
            {"type": "query", "id": "a", "name": "count"},
            {"type": "mutate", "id": "g", "name": "place", "args": {"id": 60}},
            {"type": "subscribe", "id": "g", "query": {"name": "count"}},
            {"type": "subscribe", "id": "a", "query": {"name": "count"}},
        ):
            await socket.send(**message)
            error = await socket.receive()
            # With an id it would end the subscription that has that id.
            assert (error["code"], "id" in error) == ("invalid_query", False)
        site.application.gate.set()
        assert (await socket.receive())["id"] == "g"
        await socket.send(type="query", id="g", name="count")
        assert (await socket.receive())["value"] == 10


async def test_requests_under_way_are_bounded(site: Site) -> None:
    async with site.socket() as socket:
        await socket.receive_type("hello")
        for number in range(SESSION_REQUESTS_MAX + 1):
            await socket.send(type="query", id=str(number), name="gated", args={"number": 0})
        error = await socket.receive()
        assert error["code"] == "requests_per_session"
        assert (error["id"], error["retryable"]) == (str(SESSION_REQUESTS_MAX), True)
        site.application.gate.set()
        answered = {(await socket.receive())["id"] for _ in range(SESSION_REQUESTS_MAX)}
        assert answered == {str(number) for number in range(SESSION_REQUESTS_MAX)}
        await socket.send(type="query", id="again", name="count")
        assert (await socket.receive())["id"] == "again"


async def test_query_subscriptions_count(url: str, connection: Connection) -> None:
    await open_shop(connection, rows=1)
    async with running(url, limits_subscriptions_per_user=1) as site, site.socket() as socket:
        await socket.receive_type("hello")
        await socket.send(type="subscribe", id="a", query={"name": "count"})
        await socket.receive_type("result")
        await socket.send(type="subscribe", id="b", query={"name": "count"})
        assert (await socket.receive())["code"] == "subscriptions_per_user"
        await socket.send(type="unsubscribe", id="a")
        assert (await socket.receive())["type"] == "unsubscribed"
        await socket.send(type="subscribe", id="b", query={"name": "count"})
        assert (await socket.receive())["type"] == "subscribed"


async def test_a_mutation_is_run_to_its_end(site: Site, connection: Connection) -> None:
    async with site.socket() as socket:
        await socket.receive_type("hello")
        await socket.send(type="mutate", id="m", name="place_gated", args={"id": 60})
        await until(lambda: site.application.waiting)
    await until(lambda: not site.gateway._connections)
    site.application.gate.set()

    async def placed() -> bool:
        cursor = await connection.execute("select count(*) from orders where id = 60")
        return await cursor.fetchone() == (1,)

    await until(placed)


# ------------------------------------------------------------------------ slow clients


async def test_a_client_that_does_not_read(site: Site) -> None:
    """Its queue is bounded. When it reads again it gets the present result, and then its answer."""
    gateway = site.gateway
    client = gateway.open(ANONYMOUS, address="192.0.2.1", transport="sse")
    sink = Sink()
    client.attach(sink)
    await gateway.subscribe(client, Subscribe("s", query=QueryCall("count")))
    sink.buffered = SESSION_QUEUE_BYTES_MAX + 1
    for number in range(3):
        position = await site.place(60 + number)
        await site.post(f"/v1/query/count?after={quote(position)}")
    await until(lambda: site.metric("headwater_overflows_total", policy="conflate"))
    assert sink.names == ["hello", "subscribed", "result"]
    client.start(gateway.calls.begin(client, Wait("w", position)))
    client.start(gateway.calls.begin(client, Ask("q", "count")))
    other = await site.post("/v1/query/count")
    assert other.json()["value"] == 13
    assert sink.names[3:] == []
    sink.buffered = 0
    sink.on_drain()
    await until(lambda: len(sink.got) == 6)
    assert sink.names[3] == "result"
    assert json.loads(bytes(sink.got[3].value)) == 13
    assert {message.id for message in sink.got[4:]} == {"w", "q"}
    assert site.metric("headwater_overflows_total", policy="conflate") == 1
    gateway.release(client)


# ------------------------------------------------------------------------ tokens


@pytest.fixture
async def guarded(url: str, connection: Connection) -> AsyncIterator[Site]:
    await open_shop(connection, rows=10)
    options = {"auth_secret": SECRET, "auth_audience": "shop", "auth_cookie": "session"}
    async with running(url, **options) as site:
        yield site


async def test_the_identity_of_the_caller(guarded: Site) -> None:
    for path in ("/v1/query/caller", "/v1/mutation/caller", "/v1/query/caller/subscribe"):
        answer = await guarded.post(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "token_missing")
    headers = {"authorization": f"Bearer {token(plan='free')}"}
    for path in ("/v1/query/caller", "/v1/mutation/caller"):
        answer = await guarded.post(path, headers=headers)
        assert answer.json()["value"] == {"user": "ann", "tenant": "acme", "plan": "free"}


async def test_a_new_token_takes_effect(guarded: Site) -> None:
    """For open subscriptions, and for later requests."""
    async with guarded.socket(authorization=f"Bearer {token(plan='free')}") as socket:
        await socket.receive_type("hello")
        await socket.send(type="subscribe", id="s", query={"name": "caller"})
        assert (await socket.receive_type("result"))["value"]["plan"] == "free"
        await socket.send(type="authenticate", token=token(plan="gold"))
        received = [await socket.receive() for _ in range(3)]
        assert sorted(types(received)) == ["authenticated", "result", "subscribed"]
        (result,) = [message for message in received if message["type"] == "result"]
        assert result["value"]["plan"] == "gold"
        for type in ("query", "mutate"):
            await socket.send(type=type, id="x", name="caller")
            assert (await socket.receive())["value"]["plan"] == "gold"


async def test_a_new_token_while_a_subscription_is_opening(guarded: Site) -> None:
    async with guarded.socket(authorization=f"Bearer {token(plan='free')}") as socket:
        await socket.receive_type("hello")
        await socket.send(type="subscribe", id="s", query={"name": "gated"})
        await until(lambda: guarded.application.waiting == 1)
        await socket.send(type="authenticate", token=token(plan="gold"))
        await socket.receive_type("authenticated")
        guarded.application.gate.set()
        await socket.receive_type("result")
        await until(lambda: guarded.application.waiting == 2)
        assert (await socket.receive_type("result"))["value"] == "open"


async def test_nothing_is_done_for_an_expired_token(guarded: Site, connection: Connection) -> None:
    gateway = guarded.gateway
    client = gateway.open(ANONYMOUS, address="192.0.2.1", transport="websocket")
    client.attach(Sink())
    gateway._expire(client)
    for request in (Mutate("m", "place", {"id": 60}), Ask("q", "count")):
        with pytest.raises(NotFound):
            await gateway.calls.begin(client, request)
    gateway.release(client)


async def test_a_form_of_another_site_runs_no_mutation(
    guarded: Site, connection: Connection
) -> None:
    cookie = {"cookie": f"session={token()}"}
    json_type = {"content-type": "application/json"}
    cases = [
        (cookie | {"content-type": "text/plain"}, 403, "content_type"),
        (cookie, 403, "content_type"),
        (cookie | json_type | {"origin": "https://evil.example"}, 403, "origin"),
        (cookie | json_type | {"origin": guarded.url}, 200, None),
        ({"authorization": f"Bearer {token()}", "content-type": "text/plain"}, 200, None),
    ]
    for number, (headers, status, code) in enumerate(cases):
        body = json.dumps({"id": 100 + number}).encode()
        answer = await guarded.http.post("/v1/mutation/place", content=body, headers=headers)
        assert (answer.status_code, answer.json().get("error", {}).get("code")) == (status, code)
    cursor = await connection.execute("select id from orders where id >= 100 order by id")
    assert await cursor.fetchall() == [(103,), (104,)]


# ------------------------------------------------------------------------ served by itself


PROGRAM = (
    textwrap.dedent(TRACED)
    + """
@hw.query
async def open_orders(ctx, region: int) -> list[dict]:
    return await ctx.fetch("select id from orders where region = %s", region)

@hw.mutation
async def place(ctx, id: int, region: int) -> int:
    await ctx.execute("insert into orders (id, region) values (%s, %s)", id, region)
    return id
"""
)


async def test_by_headwater_serve(url: str, connection: Connection, tmp_path: Path) -> None:
    await open_shop(connection, rows=10)
    (tmp_path / "program.py").write_text(PROGRAM)
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    with serving(url, tmp_path, program="program:hw") as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=60) as http:
            path = "/v1/query/open_orders"
            async with http.stream("POST", f"{path}/subscribe", json={"region": 1}) as response:
                stream = EventStream(response)
                assert len((await stream.receive_type("result"))["value"]) == 2
                assert gateway.metric("headwater_subscriptions", kind="query") == 1
                body = {"id": 60, "region": 1}
                placed = await http.post("/v1/mutation/place", json=body, headers=headers)
                assert len((await stream.receive())["value"]) == 3
            params = {"after": placed.json()["position"]}
            answer = await http.post(path, params=params, json={"region": 1}, headers=headers)
            assert len(answer.json()["value"]) == 3
    spans = [json.loads(line) for line in (tmp_path / "spans.json").read_text().splitlines()]
    calls = {
        span["name"]: (span["attributes"], span["context"]["trace_id"])
        for span in spans
        if "headwater.function" in span["attributes"]
    }
    assert calls["headwater.query"] == ({"headwater.function": "open_orders"}, f"0x{trace}")
    assert calls["headwater.mutation"] == ({"headwater.function": "place"}, f"0x{trace}")
    attributes, own = calls["headwater.subscribe"]
    assert attributes == {"headwater.kind": "query", "headwater.function": "open_orders"}
    assert own != f"0x{trace}"


# ------------------------------------------------------------------------ described


async def test_the_document_has_the_functions(site: Site) -> None:
    document = (await site.http.get("/openapi.json")).json()
    paths = document["paths"]
    assert {"/v1/query/open_orders", "/v1/query/open_orders/subscribe", "/v1/mutation/place"} <= (
        paths.keys()
    )
    body = paths["/v1/mutation/place"]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    assert document["components"]["schemas"][name]["required"] == ["id"]
    answer = paths["/v1/mutation/place"]["post"]["responses"]["200"]["content"]["application/json"]
    assert answer["schema"]["properties"]["value"] == {"type": "integer"}
    for ref in _refs(document):
        assert ref.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def _refs(value: Any) -> list[str]:
    match value:
        case {"$ref": str(ref)}:
            return [ref]
        case dict():
            return [ref for each in value.values() for ref in _refs(each)]
        case list():
            return [ref for each in value for ref in _refs(each)]
    return []


async def test_errors_of_requests_have_their_id(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also unforeseen errors."""
    client = site.gateway.open(ANONYMOUS, address="192.0.2.1", transport="sse")
    sink = Sink()
    client.attach(sink)

    async def fails(*_: object) -> Any:
        raise LookupError("not foreseen")

    monkeypatch.setattr(site.gateway.calls, "wait", fails)
    await site.gateway.calls.begin(client, Wait("w", str(site.gateway.hub.position)))
    error = sink.got[-1]
    assert isinstance(error, Error)
    assert (error.id, error.code) == ("w", "internal")
    site.gateway.release(client)
