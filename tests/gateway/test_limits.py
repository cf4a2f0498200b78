"""Quotas and bounds: refused with a code, and the process stays healthy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest

from headwater.database import Connection
from headwater.embedded import EmbeddedPostgres
from headwater.testing.gateway_process import Served, serving
from tests.support.applications.shop import open_shop, shop_served

SECRET = "a secret that is long enough for SHA-256 and more"
QUERY = json.dumps({"table": "orders", "limit": 1})


def bearer(user: str) -> dict[str, str]:
    token = jwt.encode({"sub": user, "exp": time.time() + 600}, SECRET, "HS256")
    return {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def steady(postgres: EmbeddedPostgres) -> Iterator[Served]:
    """A gateway for the tests that do not change it."""
    with shop_served(
        postgres.url, rows=5, auth_secret=SECRET, limits_requests_per_second=5000
    ) as served:
        yield served


@pytest.fixture
async def gateway(url: str, connection: Connection, tmp_path: Path) -> Any:
    await open_shop(connection, rows=5)
    with serving(url, tmp_path, auth_secret=SECRET, limits_requests_per_second=5000) as served:
        yield served


@contextmanager
def session(
    gateway: Served, user: str, *, peer: str = "127.0.0.1", path: str = "/v1/stream", **more: str
) -> Iterator[httpx.Response]:
    """An open stream, from one of the loopback's addresses."""
    with (
        httpx.Client(transport=httpx.HTTPTransport(local_address=peer), timeout=30) as client,
        client.stream("GET", gateway.url + path, headers=bearer(user) | more) as stream,
    ):
        yield stream


def refusal(stream: httpx.Response) -> tuple[int, str]:
    stream.read()
    error = stream.json()["error"]
    if stream.status_code == 429:
        assert error["retry_after_secs"] > 0
        assert int(stream.headers["retry-after"]) > 0
    return stream.status_code, error["code"]


def test_the_ninth_session_of_a_user(gateway: Served) -> None:
    with ExitStack() as open_:
        for _ in range(8):
            assert open_.enter_context(session(gateway, "ann")).status_code == 200
        ninth = open_.enter_context(session(gateway, "ann"))
        assert refusal(ninth) == (429, "sessions_per_user")
        assert open_.enter_context(session(gateway, "bob")).status_code == 200
    assert gateway.metric("headwater_refused_total", code="sessions_per_user") == 1


def messages(stream: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in stream.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_the_five_hundred_and_first_subscription(gateway: Served) -> None:
    with session(gateway, "ann") as stream, httpx.Client(headers=bearer("ann")) as client:
        following = messages(stream)  # needed: without its iterator a stream is closed
        id = next(following)["session"]
        path = f"{gateway.url}/v1/sessions/{id}/subscriptions"
        for number in range(501):
            body = {"id": str(number), "live": {"table": "orders", "limit": 1 + number % 3}}
            answer = client.post(path, json=body)
            if number < 500:
                assert answer.status_code == 201, answer.text
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            429,
            "subscriptions_per_user",
        )
        assert client.delete(f"{path}/7").status_code == 204
        assert client.post(path, json=body).status_code == 201


def nested(depth: int) -> str:
    return '{"not": ' * depth + '["region", "=", 1]' + "}" * depth


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"x" * 2_000_000, 413, "too_large"),
        (b'{"table": "orders", "where": ' + nested(1000).encode() + b"}", 400, "invalid_query"),
        (b'{"table": "orders", "where": ' + b"[" * 500_000, 400, "invalid_query"),
        (b"not json", 400, "invalid_query"),
        (b"[]", 400, "invalid_query"),
        (b'{"table": "nothing"}', 404, "capture"),
        (b'{"table": "orders", "limit": 100000}', 400, "invalid_query"),
        (b'{"table": "orders", "offset": 5}', 400, "invalid_query"),
        (b'{"live": {"table": "orders"}, "colour": 1}', 400, "invalid_query"),
        (b"\xff\xfe", 400, "invalid_query"),
    ],
    ids=["2 MB", "nested", "deeper", "text", "list", "table", "limit", "field", "option", "bytes"],
)
def test_invalid_bodies(steady: Served, body: bytes, status: int, code: str) -> None:
    answer = httpx.post(f"{steady.url}/v1/live", content=body, headers=bearer("ann"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert steady.get("/healthz").status_code == 200


def test_the_error_for_a_table_without_capture_has_a_hint(steady: Served) -> None:
    answer = steady.get("/v1/live", params={"q": '{"table": "customers"}'}, headers=bearer("ann"))
    assert "headwater enable" in answer.json()["error"]["hint"]


def test_too_many_requests(url: str, connection: Connection, tmp_path: Path) -> None:
    with (
        serving(url, tmp_path, auth_secret=SECRET, limits_requests_per_second=5) as gateway,
        httpx.Client(base_url=gateway.url) as client,
    ):

        def codes(headers: Iterable[dict[str, str]]) -> set[str]:
            answers = [client.post("/v1/live", content=b"{}", headers=each) for each in headers]
            return {answer.json()["error"]["code"] for answer in answers}

        assert codes([bearer("ann")] * 100) == {"invalid_query", "rate"}
        # Users with the same address have their own count …
        assert codes(bearer(f"user {number}") for number in range(30)) == {"invalid_query"}
        # … and so have requests without a user, all together.
        wrong = {"authorization": "Bearer x.y.z"}
        assert codes([wrong] * 100) == {"token_malformed", "rate"}
        assert codes([bearer("bob")]) == {"invalid_query"}
        assert gateway.get("/healthz").status_code == 200
