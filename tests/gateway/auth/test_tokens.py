"""Tokens as clients see them: a refusal comes before the stream opens, and a session ends with its
token."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import websockets
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket

from headwater.embedded import EmbeddedPostgres
from headwater.testing.gateway_process import Served, serving
from tests.support.applications.shop import shop_served

SECRET = "a secret that is long enough for SHA-256 and more"
QUERY = json.dumps({"table": "orders", "limit": 1})


def claims(**changed: Any) -> dict[str, Any]:
    whole = {"sub": "ann", "aud": "shop", "tenant": "acme", "exp": time.time() + 3600, **changed}
    return {name: value for name, value in whole.items() if value is not None}


def token(**changed: Any) -> str:
    return jwt.encode(claims(**changed), SECRET, "HS256")


@pytest.fixture(scope="module")
def gateway(postgres: EmbeddedPostgres) -> Iterator[Served]:
    with shop_served(
        postgres.url,
        rows=5,
        auth_secret=SECRET,
        auth_audience="shop",
        auth_tenants=["acme", "emca"],
        auth_leeway="1 second",
        auth_cookie="session",
    ) as served:
        yield served


def unsigned() -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none', 'typ': 'JWT'})}.{part(claims())}."


REFUSED = [
    ("missing", None, 401, "token_missing"),
    ("malformed", "abc", 401, "token_malformed"),
    ("two parts", "abc.def", 401, "token_malformed"),
    ("expired", token(exp=time.time() - 60), 401, "token_expired"),
    ("without expiry", token(exp=None), 401, "token_claims"),
    ("alg none", unsigned(), 401, "token_algorithm"),
    ("another key", jwt.encode(claims(), SECRET[::-1], "HS256"), 401, "token_signature"),
    ("wrong audience", token(aud="bank"), 401, "token_audience"),
    ("wrong tenant", token(tenant="umbrella"), 403, "token_tenant"),
    ("no user", token(sub=None), 401, "token_claims"),
]


@pytest.mark.parametrize(("why", "text", "status", "code"), REFUSED, ids=[r[0] for r in REFUSED])
async def test_refused_before_the_stream_opens(
    gateway: Served, why: str, text: str | None, status: int, code: str
) -> None:
    headers = {} if text is None else {"authorization": f"Bearer {text}"}
    answer = gateway.get("/v1/live", params={"q": QUERY}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert text is None or text not in answer.text
    with pytest.raises(websockets.InvalidStatus) as refused:
        await connect_websocket(
            f"{gateway.url.replace('http', 'ws')}/v1/ws", additional_headers=headers
        )
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["error"]["code"] == code


def test_an_rsa_key_is_not_an_hmac_secret(url: str, tmp_path: Path) -> None:
    private = rsa.generate_private_key(65537, 2048)
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (tmp_path / "key.pem").write_bytes(public)
    with serving(url, tmp_path, auth_public_key=str(tmp_path / "key.pem")) as gateway:
        honest = jwt.encode(claims(), private, "RS256")
        parts = honest.split(".")
        header = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=").decode()
        forged = _sign_hs256(f"{header}.{parts[1]}", public)
        for text, code in ((honest, None), (forged, "token_algorithm")):
            answer = gateway.get(
                "/v1/live",
                params={"q": '{"table": "nothing"}'},
                headers={"authorization": f"Bearer {text}"},
            )
            found = answer.json()["error"]["code"]
            assert found == (code or "capture")


def _sign_hs256(message: str, key: bytes) -> str:
    signature = hmac.new(key, message.encode(), hashlib.sha256).digest()
    return f"{message}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_connection_ends_with_its_token(gateway: Served) -> None:
    short = {"authorization": f"Bearer {token(exp=time.time() + 2)}"}
    with httpx.stream(
        "GET", f"{gateway.url}/v1/live", params={"q": QUERY}, headers=short, timeout=30,
        trust_env=False,
    ) as stream:  # fmt: skip
        got = list(events(stream.iter_lines()))
    assert [message["type"] for message in got] == ["hello", "subscribed", "snapshot", "error"]
    assert got[-1]["code"] == "token_expired"
    assert gateway.metric("headwater_sessions_closed_total", reason="token_expired") == 1


def test_a_refreshed_token_keeps_the_connection_open(gateway: Served) -> None:
    short = {"authorization": f"Bearer {token(exp=time.time() + 3)}"}
    with httpx.stream(
        "GET", f"{gateway.url}/v1/live", params={"q": QUERY}, headers=short, timeout=30,
        trust_env=False,
    ) as stream:  # fmt: skip
        messages = events(stream.iter_lines())
        session = next(messages)["session"]
        path = f"{gateway.url}/v1/sessions/{session}/token"

        def refresh(**changed: Any) -> httpx.Response:
            return httpx.post(path, json={"token": token(**changed)}, trust_env=False)

        assert refresh(sub="bob").status_code == 404
        assert refresh(exp=time.time() - 60).json()["error"]["code"] == "token_expired"
        until = time.time() + 6
        answer = refresh(exp=until)
        assert answer.status_code == 200
        assert answer.json()["type"] == "authenticated"
        got = [*messages]
    assert time.time() >= until - 1
    assert got[-1]["code"] == "token_expired"


async def receive(socket: ClientConnection) -> dict[str, Any]:
    """The next message that is not a keepalive."""
    while (message := json.loads(await socket.recv()))["type"] == "keepalive":
        pass
    return dict(message)


async def test_refreshed_over_websocket(gateway: Served) -> None:
    headers = {"authorization": f"Bearer {token(exp=time.time() + 3)}"}
    where = f"{gateway.url.replace('http', 'ws')}/v1/ws"
    async with connect_websocket(where, additional_headers=headers) as socket:
        assert (await receive(socket))["type"] == "hello"
        await socket.send(json.dumps({"type": "authenticate", "token": token(sub="bob")}))
        assert (await receive(socket))["code"] == "token_user"
        fresh = token(exp=time.time() + 5)
        await socket.send(json.dumps({"type": "authenticate", "token": fresh}))
        assert (await receive(socket))["type"] == "authenticated"
        assert (await receive(socket))["code"] == "token_expired"
        with pytest.raises(websockets.ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 4401


def test_a_ticket_opens_one_stream(gateway: Served) -> None:
    headers = {"authorization": f"Bearer {token()}"}
    made = httpx.post(f"{gateway.url}/v1/tickets", headers=headers, trust_env=False).json()
    for attempt in range(2):
        with httpx.stream(
            "GET",
            f"{gateway.url}/v1/live",
            params={"q": QUERY, "ticket": made["ticket"]},
            trust_env=False,
        ) as stream:
            assert stream.status_code == (401 if attempt else 200)


def test_a_cookie_counts_only_for_our_own_pages(gateway: Served) -> None:
    cookie = {"cookie": f"session={token()}"}
    for origin, status in ((gateway.url, 200), ("https://evil.example", 403), (None, 200)):
        headers = cookie | ({} if origin is None else {"origin": origin})
        with httpx.stream(
            "GET", f"{gateway.url}/v1/live", params={"q": QUERY}, headers=headers, trust_env=False
        ) as stream:
            assert stream.status_code == status


def test_a_token_in_the_url_is_not_accepted(gateway: Served) -> None:
    answer = gateway.get("/v1/live", params={"q": QUERY, "token": token()})
    assert answer.json()["error"]["code"] == "token_missing"
