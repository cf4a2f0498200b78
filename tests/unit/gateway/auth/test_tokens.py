"""Which tokens are accepted, and the error of each of the others."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headwater.errors import ConfigError, Forbidden, Unauthorized
from headwater.gateway.auth.tokens import Authenticator, Credentials, find_token
from headwater.identity import Identity
from headwater.limits import TOKEN_BYTES_MAX
from headwater.settings.groups import AuthSettings
from tests.support.tokens import (
    CLAIMS,
    NOW,
    SECRET,
    ec_key,
    ed_key,
    forged,
    private_pem,
    public_pem,
    rsa_key,
    token,
    unsigned,
)


def authenticator(**settings: Any) -> Authenticator:
    found = Authenticator.from_settings(AuthSettings(**settings), clock=lambda: NOW)
    assert found is not None
    return found


def with_secret(**settings: Any) -> Authenticator:
    return authenticator(secret=SECRET, **settings)


async def refusal(verifier: Authenticator, text: str) -> str:
    """The code of the refusal, which must not quote the token."""
    with pytest.raises((Unauthorized, Forbidden)) as caught:
        await verifier.verify(text)
    error = caught.value
    message = f"{error} {error.hint}"
    for part in text.split("."):
        assert len(part) < 8 or part not in message
    assert error.__cause__ is None
    assert not error.retryable
    return error.code


def test_without_a_key_there_is_no_authenticator() -> None:
    assert Authenticator.from_settings(AuthSettings()) is None


SIGNED = [
    ({"secret": SECRET}, SECRET, "HS256"),
    ({"secret": SECRET}, SECRET, "HS384"),
    ({"secret": SECRET}, SECRET, "HS512"),
    ({"public_key": public_pem(rsa_key())}, rsa_key(), "RS256"),
    ({"public_key": public_pem(rsa_key())}, rsa_key(), "PS512"),
    ({"public_key": public_pem(ec_key())}, ec_key(), "ES256"),
    ({"public_key": public_pem(ec_key("P-384"))}, ec_key("P-384"), "ES384"),
    ({"public_key": public_pem(ec_key("P-521"))}, ec_key("P-521"), "ES512"),
    ({"public_key": public_pem(ed_key())}, ed_key(), "EdDSA"),
    ({"public_key": public_pem(ec_key()), "secret": SECRET}, SECRET, "HS256"),
    ({"public_key": public_pem(ec_key()), "secret": SECRET}, ec_key(), "ES256"),
]


@pytest.mark.parametrize(("settings", "key", "algorithm"), SIGNED)
async def test_a_good_token(settings: dict[str, Any], key: Any, algorithm: str) -> None:
    found = await authenticator(**settings).verify(token(key=key, algorithm=algorithm))
    assert found == Identity("ann", None, None, CLAIMS, datetime.fromtimestamp(NOW + 600, UTC))


async def test_the_identity_in_a_token() -> None:
    verifier = with_secret(
        user_claim="email", tenant_claim="org", role_claim="db",
        role="web", roles=("clerk",),
    )  # fmt: skip
    found = await verifier.verify(token(email="ann@a.example", org="acme", db="clerk", role="no"))
    assert (found.user, found.tenant, found.role) == ("ann@a.example", "acme", "clerk")
    assert found.claims["role"] == "no"
    assert (await verifier.verify(token(email="bob@a.example"))).role == "web"


async def test_only_listed_roles_may_be_named() -> None:
    """A role that Headwater is a member of may own tables."""
    assert await refusal(with_secret(), token(role="owner")) == "token_claims"
    listed = with_secret(roles=("clerk", "boss"), role="web")
    for role in ("clerk", "boss", "web"):
        assert (await listed.verify(token(role=role))).role == role
    with pytest.raises(Unauthorized) as caught:
        await listed.verify(token(role="owner"))
    assert "[auth] roles" in str(caught.value.hint)
    assert "owner" not in str(caught.value)


async def test_a_text_about_a_nul_is_not_one() -> None:
    assert (await with_secret().verify(token(note=r"\u0000"))).claims["note"] == r"\u0000"


async def test_claims_that_the_settings_leave_out() -> None:
    verifier = with_secret(tenant_claim="", role_claim="")
    found = await verifier.verify(token({**CLAIMS, "tenant": "acme", "role": "postgres", "": "no"}))
    assert (found.tenant, found.role) == (None, None)


REFUSED = [
    ("", "token_missing"),
    ("x", "token_malformed"),
    ("..", "token_malformed"),
    ("a.b.c.d", "token_malformed"),
    ("éé.éé.éé", "token_malformed"),
    (token() + "é", "token_malformed"),
    (forged([], CLAIMS), "token_malformed"),
    (forged({}, CLAIMS), "token_malformed"),
    (forged({"alg": 5}, CLAIMS), "token_malformed"),
    (forged({"alg": "HS256", "kid": {"a": 1}}, CLAIMS), "token_malformed"),
    (forged({"alg": "HS256", "crit": ["b64"], "b64": False}, CLAIMS), "token_malformed"),
    (forged(b'{"alg": "HS256"', CLAIMS), "token_malformed"),
    (forged(b"[" * 3_000, CLAIMS), "token_malformed"),
    (forged({"alg": "HS256"}, b"[" * 3_000), "token_malformed"),
    (forged({"alg": "HS256"}, b"\xff\xfe"), "token_malformed"),
    (forged({"alg": "HS256"}, b"NaN"), "token_malformed"),
    (forged({"alg": "HS256"}, [1]), "token_malformed"),
    (forged({"alg": "HS256"}, "ann"), "token_malformed"),
    (token(note="x" * TOKEN_BYTES_MAX), "token_malformed"),
    (token(exp=NOW - 6), "token_expired"),
    (token(exp=NOW - 5), "token_expired"),
    (token(exp=0), "token_expired"),
    (token(exp=-1e9), "token_expired"),
    (token(nbf=NOW + 6), "token_not_yet_valid"),
    (token(iat=NOW + 6), "token_not_yet_valid"),
    (token(key=SECRET + "!"), "token_signature"),
    (token()[:-4] + "AAAA", "token_signature"),
    (".".join([*token().split(".")[:2], ""]), "token_signature"),
    (token().replace(token().split(".")[1], token(sub="eve").split(".")[1]), "token_signature"),
    (unsigned({"alg": "none"}, CLAIMS), "token_algorithm"),
    (unsigned({"alg": "None"}, CLAIMS), "token_algorithm"),
    (unsigned({"alg": ""}, CLAIMS), "token_algorithm"),
    (forged({"alg": "none"}, CLAIMS), "token_algorithm"),
    (forged({"alg": "hs256"}, CLAIMS), "token_algorithm"),
    (token(key=rsa_key(), algorithm="RS256"), "token_algorithm"),
    (token(exp=None), "token_claims"),
    (token(exp="1800000600"), "token_claims"),
    (token(exp=True), "token_claims"),
    (token(exp=[]), "token_claims"),
    (token(exp=1e300), "token_claims"),
    (token(exp=10**400), "token_claims"),
    (token(nbf="soon"), "token_claims"),
    (token(iat={}), "token_claims"),
    (token(sub=None), "token_claims"),
    (token(sub=""), "token_claims"),
    (token(sub=7), "token_claims"),
    (token(sub=["ann"]), "token_claims"),
    (token(sub="a\0b"), "token_claims"),
    (token(app={"note": ["\0"]}), "token_claims"),
    (token(app={"note": "\\\\\0"}), "token_claims"),
    (token({**CLAIMS, "\0": 1}), "token_claims"),
    (token(sub="é" * 129), "token_claims"),
    (token(tenant=7), "token_claims"),
    (token(role={"name": "postgres"}), "token_claims"),
    (token(role="r" * 64), "token_claims"),
]


@pytest.mark.parametrize(("text", "code"), REFUSED)
async def test_a_token_that_is_refused(text: str, code: str) -> None:
    assert await refusal(with_secret(), text) == code


async def test_clocks_may_differ_by_the_leeway() -> None:
    verifier = with_secret(leeway="5 seconds")
    await verifier.verify(token(exp=NOW - 4.5))
    await verifier.verify(token(nbf=NOW + 5, iat=NOW + 5))
    assert await refusal(with_secret(leeway="0s"), token(exp=NOW)) == "token_expired"


AUDIENCES = [
    (None, "token_audience"),
    ("other", "token_audience"),
    ("shopping", "token_audience"),
    ([], "token_audience"),
    ([["shop"]], "token_audience"),
    ({"shop": 1}, "token_audience"),
    (7, "token_audience"),
    ("shop", None),
    (["other", "shop"], None),
]


@pytest.mark.parametrize(("audience", "code"), AUDIENCES)
async def test_audience(audience: Any, code: str | None) -> None:
    verifier, text = with_secret(audience="shop"), token(aud=audience)
    if code is None:
        await verifier.verify(text)
    else:
        assert await refusal(verifier, text) == code


@pytest.mark.parametrize("issuer", [None, "https://other.example", ["https://id.example"], 7])
async def test_issuer(issuer: Any) -> None:
    verifier = with_secret(issuer="https://id.example")
    await verifier.verify(token(iss="https://id.example"))
    assert await refusal(verifier, token(iss=issuer)) == "token_issuer"


@pytest.mark.parametrize("tenant", [None, "other", "ACME"])
async def test_tenants_that_are_not_served(tenant: str | None) -> None:
    verifier = with_secret(tenants=("acme", "bolt"))
    assert (await verifier.verify(token(tenant="bolt"))).tenant == "bolt"
    with pytest.raises(Forbidden) as caught:
        await verifier.verify(token(tenant=tenant))
    assert caught.value.code == "token_tenant"


async def test_a_session_continues_with_a_new_token_of_the_same_user() -> None:
    verifier = with_secret(roles=("clerk",))
    present = await verifier.verify(token(tenant="acme", exp=NOW + 5))
    renewed = await verifier.renew(token(tenant="acme", exp=NOW + 900, role="clerk"), present)
    assert renewed.expires_at == datetime.fromtimestamp(NOW + 900, UTC)
    assert renewed.role == "clerk"
    for other in (token(sub="eve", tenant="acme"), token(tenant="other"), token()):
        with pytest.raises(Forbidden, match="another user") as caught:
            await verifier.renew(other, present)
        assert caught.value.code == "token_user"
    with pytest.raises(Unauthorized) as expired:
        await verifier.renew(token(tenant="acme", exp=NOW - 60), present)
    assert expired.value.code == "token_expired"


# ------------------------------------------------------------------------ confusion


async def test_a_public_key_does_not_pass_for_a_secret() -> None:
    """HS256 with the text of the public key, which everybody has."""
    pem = public_pem(rsa_key())
    text = forged({"alg": "HS256"}, CLAIMS, pem.encode())
    only_public = authenticator(public_key=pem)
    assert await refusal(only_public, text) == "token_algorithm"
    both = authenticator(public_key=pem, secret=SECRET)
    assert await refusal(both, text) == "token_signature"


async def test_keys_that_a_token_brings_along_do_not_count() -> None:
    own, text = rsa_key("mallory"), "https://mallory.example/keys"
    headers = {"jwk": {"kty": "RSA"}, "jku": text, "x5u": text, "x5c": ["x"], "kid": "../../etc"}
    verifier = authenticator(public_key=public_pem(rsa_key()))
    assert await refusal(verifier, token(key=own, algorithm="RS256", headers=headers)) == (
        "token_signature"
    )


async def test_another_curve_is_another_algorithm() -> None:
    verifier = authenticator(public_key=public_pem(ec_key("P-256")))
    text = token(key=ec_key("P-384"), algorithm="ES384")
    assert await refusal(verifier, text) == "token_algorithm"


async def test_algorithms_that_the_setting_leaves_out() -> None:
    verifier = with_secret(algorithms=("HS512",))
    await verifier.verify(token(algorithm="HS512"))
    assert await refusal(verifier, token(algorithm="HS256")) == "token_algorithm"


async def test_a_secret_is_good_for_hashes_no_longer_than_itself() -> None:
    short = SECRET[:32]
    verifier = authenticator(secret=short)
    await verifier.verify(token(key=short))
    text = forged({"alg": "HS512"}, CLAIMS, short.encode())
    assert await refusal(verifier, text) == "token_algorithm"


UNUSABLE = [
    ({"secret": "short"}, r"\[auth\] secret: shorter than 32 bytes"),
    ({"audience": "shop"}, r"\[auth\] audience: set, but there is no key"),
    ({"secret": SECRET[:32], "algorithms": ("HS512",)}, r"\[auth\] algorithms: none of them"),
    ({"secret": SECRET, "algorithms": ("RS256",)}, r"\[auth\] algorithms: none of them"),
    ({"secret": public_pem(rsa_key())}, r"\[auth\] secret: this is a public key"),
    ({"public_key": private_pem(rsa_key())}, r"\[auth\] public_key: this is a private key"),
    ({"public_key": "-----BEGIN PUBLIC KEY-----"}, r"\[auth\] public_key: not a public key"),
    ({"public_key": public_pem(rsa_key("small", 1_024))}, "fewer than 2048 bits"),
]


@pytest.mark.parametrize(("settings", "message"), UNUSABLE)
def test_an_unusable_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        authenticator(**settings)


# ------------------------------------------------------------------------ finding

COOKIE = AuthSettings(secret=SECRET, cookie="session")

FOUND: list[tuple[dict[str, str], dict[str, str], dict[str, str], Credentials]] = [
    ({}, {}, {}, Credentials()),
    ({"authorization": "Bearer abc"}, {}, {}, Credentials("abc")),
    ({"authorization": "bearer  abc "}, {}, {}, Credentials("abc")),
    ({"authorization": "Bearer abc"}, {}, {"session": "def"}, Credentials("abc")),
    ({"authorization": "Basic abc"}, {}, {}, Credentials()),
    ({"authorization": "Bearer"}, {}, {}, Credentials()),
    ({"authorization": "Basic abc"}, {}, {"session": "def"}, Credentials("def", None, True)),
    ({}, {"ticket": "t"}, {}, Credentials(None, "t")),
    ({}, {"ticket": "t", "token": "x"}, {}, Credentials(None, "t")),
    ({}, {"ticket": ""}, {}, Credentials()),
    ({}, {}, {"other": "def"}, Credentials()),
]


@pytest.mark.parametrize(("headers", "query", "cookies", "found"), FOUND)
def test_where_a_token_may_be(
    headers: dict[str, str], query: dict[str, str], cookies: dict[str, str], found: Credentials
) -> None:
    assert find_token(headers, query, cookies, COOKIE) == found


def test_a_cookie_counts_only_where_the_setting_names_it() -> None:
    assert find_token({}, {}, {"session": "def"}, AuthSettings(secret=SECRET)) == Credentials()


@pytest.mark.parametrize("name", ["token", "access_token"])
def test_a_token_in_the_url_is_refused(name: str) -> None:
    with pytest.raises(Unauthorized, match="URLs are logged") as caught:
        find_token({}, {name: "abc"}, {}, COOKIE)
    assert caught.value.code == "token_missing"
