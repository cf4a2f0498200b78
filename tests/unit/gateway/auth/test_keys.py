"""Which keys of a key set are used, and for what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.gateway.auth import keys
from headwater.gateway.auth.keys import NotAKey, from_key_set
from tests.support.tokens import ec_key, ed_key, jwk, rsa_key

RSA_NAMES = {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}

USED: list[tuple[dict[str, Any], set[str]]] = [
    (jwk(rsa_key(), kid="a"), RSA_NAMES),
    (jwk(rsa_key(), kid="a", alg="PS256", use="sig"), {"PS256"}),
    (jwk(rsa_key(), kid="a", key_ops=["verify"]), RSA_NAMES),
    (jwk(rsa_key(), kid="a", key_ops=None, use=None), RSA_NAMES),
    (jwk(ec_key("P-384"), kid="a"), {"ES384"}),
    (jwk(ed_key(), kid="a"), {"EdDSA"}),
]


@pytest.mark.parametrize(("parameters", "algorithms"), USED)
def test_a_key_and_its_algorithms(parameters: dict[str, Any], algorithms: set[str]) -> None:
    (key,) = from_key_set(json.dumps({"keys": [parameters]}).encode())
    assert (key.id, set(key.algorithms)) == ("a", algorithms)


UNUSED: list[tuple[dict[str, Any], str]] = [
    ({"kty": "oct", "k": "c2VjcmV0", "kid": "a"}, "symmetric"),
    (jwk(rsa_key(), use="enc"), "encryption"),
    (jwk(rsa_key(), key_ops=["sign"]), "not for verifying"),
    (jwk(rsa_key(), kid=7), "kid is not a text"),
    (jwk(rsa_key(), alg="HS256"), "alg does not fit"),
    (jwk(rsa_key(), alg="none"), "alg does not fit"),
    (jwk(rsa_key(), alg=["RS256"]), "alg does not fit"),
    (jwk(ec_key(), alg="RS256"), "alg does not fit"),
    (jwk(rsa_key("small", 1_024)), "fewer than 2048 bits"),
    ({"kty": "RSA"}, "damaged"),
    ({"kty": "RSA", "n": 5, "e": "AQAB"}, "damaged"),
    ({"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}, "damaged"),
    ({"kty": "new"}, "unknown"),
    ({}, "unknown"),
]


@pytest.mark.parametrize(("parameters", "reason"), UNUSED)
def test_a_key_that_is_not_used(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotAKey, match=reason):
        keys.from_jwk(parameters)
    with pytest.raises(NotAKey, match="no key in it"):
        from_key_set(json.dumps({"keys": [parameters]}).encode())


def test_one_bad_key_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    listed = [{"kty": "oct", "k": "c2VjcmV0"}, jwk(rsa_key(), kid="a"), {"kty": "new"}]
    assert [key.id for key in from_key_set(json.dumps({"keys": listed}).encode())] == ["a"]
    assert "key 0 of the key set is not used: it is symmetric" in caplog.text
    assert "c2VjcmV0" not in caplog.text


def test_a_set_with_too_many_keys() -> None:
    listed = [jwk(rsa_key(), kid=str(number)) for number in range(100)]
    assert len(from_key_set(json.dumps({"keys": listed}).encode())) == 32


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": 5}', '{"keys": [5]}', "[" * 5_000])
def test_not_a_key_set(text: str) -> None:
    with pytest.raises(NotAKey, match="not a JSON object"):
        from_key_set(text.encode())
