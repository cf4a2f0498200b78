"""Key sets behind a real HTTP server and in a file: rotation, outages, how often they are
fetched."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import brotli
import pytest

from headwater.errors import ConfigError, Unauthorized, Unavailable
from headwater.gateway.auth.key_set import KeySet, _fetch
from headwater.gateway.auth.tokens import Authenticator
from headwater.limits import JWKS_BYTES_MAX, JWKS_COOLDOWN_SECONDS, JWKS_REFRESH_SECONDS
from headwater.settings.groups import AuthSettings
from tests.support.tokens import NOW, SECRET, ec_key, jwk, rsa_key, token


class Issuer:
    """An identity provider: an HTTP server with a key set, which counts how often it is asked."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = []
        self.status = 200
        self.body: bytes | None = None
        self.asked = 0
        self.head = ""
        self.encoding = "identity"
        self.url = ""
        self.was_asked = asyncio.Event()
        self.answering = asyncio.Event()
        self.answering.set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked += 1
            self.was_asked.set()
            await self.answering.wait()
            body = self.body if self.body is not None else json.dumps({"keys": self.keys}).encode()
            head = (
                f"HTTP/1.1 {self.status} x\r\ncontent-length: {len(body)}\r\nlocation: {self.url}"
                f"\r\ncontent-encoding: {self.encoding}"
            )
            writer.write(f"{head}\r\nconnection: close\r\n\r\n".encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def issuing() -> AsyncIterator[Issuer]:
    issuer = Issuer()
    server = await asyncio.start_server(issuer.answer, "127.0.0.1", 0)
    issuer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys"
    async with server:
        yield issuer


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    async with issuing() as issuer:
        yield issuer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def follower(
    issuer: Issuer, clock: Callable[[], float], **settings: Any
) -> tuple[Authenticator, KeySet]:
    """An authenticator whose key set ages by the test's clock."""

    async def load() -> bytes:
        return await _fetch(issuer.url)

    key_set = KeySet(load, clock=clock)
    found = AuthSettings(jwks=issuer.url, **settings)
    return Authenticator(found, (), key_set, clock=lambda: NOW), key_set


def signed(name: str) -> str:
    return token(key=rsa_key(name), algorithm="RS256", headers={"kid": name})


async def code(verifier: Authenticator, text: str) -> str:
    with pytest.raises((Unauthorized, Unavailable)) as caught:
        await verifier.verify(text)
    return caught.value.code


async def test_a_set_behind_a_url(issuer: Issuer) -> None:
    issuer.keys = [jwk(rsa_key(), kid="first"), jwk(ec_key(), kid="second")]
    verifier = Authenticator.from_settings(AuthSettings(jwks=issuer.url), clock=lambda: NOW)
    assert verifier is not None
    assert issuer.asked == 0
    assert (await verifier.verify(signed("first"))).user == "ann"
    second = token(key=ec_key(), algorithm="ES256", headers={"kid": "second"})
    assert (await verifier.verify(second)).user == "ann"
    assert (await verifier.verify(token(key=rsa_key(), algorithm="RS256"))).user == "ann"
    assert issuer.asked == 1


async def test_a_token_is_verified_with_the_key_that_it_names(issuer: Issuer) -> None:
    issuer.keys = [jwk(rsa_key(), kid="first"), jwk(rsa_key("other"), kid="other")]
    verifier, _ = follower(issuer, Clock())
    crossed = token(key=rsa_key(), algorithm="RS256", headers={"kid": "other"})
    assert await code(verifier, crossed) == "token_signature"
    wrong_kind = token(key=ec_key(), algorithm="ES256", headers={"kid": "first"})
    assert await code(verifier, wrong_kind) == "token_algorithm"


async def test_a_new_key_is_found_and_an_old_one_forgotten(issuer: Issuer, clock: Clock) -> None:
    issuer.keys = [jwk(rsa_key(), kid="first")]
    verifier, _ = follower(issuer, clock)
    await verifier.verify(signed("first"))
    issuer.keys = [jwk(rsa_key("next"), kid="next")]
    clock.now += JWKS_COOLDOWN_SECONDS
    await verifier.verify(signed("next"))
    assert issuer.asked == 2
    assert await code(verifier, signed("first")) == "token_signature"


async def test_an_old_set_is_fetched_again(issuer: Issuer, clock: Clock) -> None:
    issuer.keys = [jwk(rsa_key(), kid="first")]
    verifier, _ = follower(issuer, clock)
    await verifier.verify(signed("first"))
    issuer.keys = [jwk(rsa_key("next"), kid="next")]
    clock.now += JWKS_REFRESH_SECONDS
    assert await code(verifier, signed("first")) == "token_signature"


INJECTED = ["../../../etc/passwd", "' or 1=1 --", "http://127.0.0.1:1/keys", "\0", "", "k" * 4_000]


async def test_unknown_key_ids_cause_no_further_fetch(issuer: Issuer, clock: Clock) -> None:
    issuer.keys = [jwk(rsa_key(), kid="first")]
    verifier, _ = follower(issuer, clock)
    for kid in INJECTED * 3:
        forged = token(key=rsa_key("mallory"), algorithm="RS256", headers={"kid": kid})
        assert await code(verifier, forged) == "token_signature"
    assert issuer.asked == 1
    await verifier.verify(signed("first"))


async def test_many_verifications_at_once_cause_one_fetch(issuer: Issuer) -> None:
    issuer.keys = [jwk(rsa_key(), kid="first")]
    verifier, _ = follower(issuer, Clock())
    found = await asyncio.gather(*(verifier.verify(signed("first")) for _ in range(50)))
    assert {identity.user for identity in found} == {"ann"}
    assert issuer.asked == 1


async def test_clients_that_leave_cause_no_further_fetch(issuer: Issuer, clock: Clock) -> None:
    """Each of them names an unknown key, and does not wait for the answer."""
    issuer.keys = [jwk(rsa_key(), kid="first")]
    verifier, _ = follower(issuer, clock)
    await verifier.verify(signed("first"))
    clock.now += JWKS_COOLDOWN_SECONDS
    issuer.answering.clear()
    for number in range(5):
        leaving = asyncio.create_task(verifier.verify(signed(f"unknown {number}")))
        await until_asked(issuer, 2)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    issuer.answering.set()
    assert await code(verifier, signed("unknown")) == "token_signature"
    assert issuer.asked == 2


async def until_asked(issuer: Issuer, times: int) -> None:
    while issuer.asked < times:
        issuer.was_asked.clear()
        await issuer.was_asked.wait()


COMPRESSED = {"br": brotli.compress, "gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("encoding", COMPRESSED)
async def test_an_answer_that_unpacks_to_gigabytes(encoding: str, issuer: Issuer) -> None:
    """Nothing is unpacked: a compressed answer was not requested, and is refused."""
    issuer.keys = [jwk(rsa_key(), kid="first")]
    issuer.encoding = encoding
    issuer.body = COMPRESSED[encoding](b" " * 2**26)
    verifier, _ = follower(issuer, Clock())
    tracemalloc.start()
    try:
        assert await code(verifier, signed("first")) == "unavailable"
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert "accept-encoding: identity" in issuer.head.lower()


async def test_a_client_that_leaves_does_not_fail_the_next(issuer: Issuer) -> None:
    issuer.keys = [jwk(rsa_key(), kid="first")]
    issuer.answering.clear()
    verifier, _ = follower(issuer, Clock())
    leaving = asyncio.create_task(verifier.verify(signed("first")))
    await issuer.was_asked.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    issuer.answering.set()
    await verifier.verify(signed("first"))


FAILURES: list[tuple[int, bytes | None]] = [
    (500, None),
    (302, None),
    (404, b"{}"),
    (200, b"<html>"),
    (200, b'{"keys": []}'),
    (200, b" " * (JWKS_BYTES_MAX + 1)),
    (200, b'{"keys": [{"kid": "\xff"}]}'),
    (200, b"[" * 100_000),
]


@pytest.mark.parametrize(("status", "body"), FAILURES)
async def test_a_failed_fetch_is_not_the_clients_fault(
    status: int, body: bytes | None, issuer: Issuer, clock: Clock
) -> None:
    issuer.keys = [jwk(rsa_key(), kid="first")]
    issuer.status, issuer.body = status, body
    verifier, _ = follower(issuer, clock)
    assert await code(verifier, signed("first")) == "unavailable"
    assert await code(verifier, signed("first")) == "unavailable"
    assert issuer.asked == 1
    issuer.status, issuer.body = 200, None
    clock.now += JWKS_COOLDOWN_SECONDS
    await verifier.verify(signed("first"))


async def test_an_outage_leaves_the_keys_we_have(issuer: Issuer, clock: Clock) -> None:
    issuer.keys = [jwk(rsa_key(), kid="first")]
    verifier, _ = follower(issuer, clock)
    await verifier.verify(signed("first"))
    issuer.status = 503
    clock.now += JWKS_REFRESH_SECONDS
    await verifier.verify(signed("first"))
    assert issuer.asked == 2
    # An unknown key may be a new one: this cannot be decided now.
    assert await code(verifier, signed("next")) == "unavailable"


async def test_tokens_that_need_no_key_set_do_not_wait_for_one(issuer: Issuer) -> None:
    issuer.status = 500
    found = AuthSettings(jwks=issuer.url, secret=SECRET)
    verifier = Authenticator.from_settings(found, clock=lambda: NOW)
    assert verifier is not None
    await verifier.verify(token())
    assert await code(verifier, token(key=SECRET + "!")) == "token_signature"
    assert await code(verifier, token(headers={"alg": "none"})) == "token_algorithm"
    assert issuer.asked == 0


async def test_an_issuer_that_cannot_be_reached() -> None:
    async with issuing() as issuer:
        pass
    verifier, _ = follower(issuer, Clock())
    assert await code(verifier, signed("first")) == "unavailable"


async def test_a_set_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [jwk(rsa_key(), kid="first")]}))
    verifier = Authenticator.from_settings(AuthSettings(jwks=str(path)), clock=lambda: NOW)
    assert verifier is not None
    await verifier.verify(signed("first"))
    path.write_text(json.dumps({"keys": [jwk(rsa_key("next"), kid="next")]}))
    await verifier.verify(signed("next"))


@pytest.mark.parametrize(
    "text", ["", "{}", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "c2U"}]}']
)
def test_a_file_that_is_no_set(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(ConfigError, match=r"\[auth\] jwks: .* is not a key set"):
        Authenticator.from_settings(AuthSettings(jwks=str(tmp_path / "keys.json")))
