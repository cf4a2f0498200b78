"""Verifies tokens, which a trusted issuer signed, and reads the identity of the client from them.

A token is refused unless all checks succeed, and each reason has its own code. The algorithm must
be one of the key's (see `keys`), the signature is checked before any claim is used, and `exp` is
required, so that every session ends. Messages name the reason and never the token or a part of it,
because messages are logged.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import jwt
import msgspec

from headwater.errors import ConfigError, Forbidden, Unauthorized
from headwater.gateway.auth import keys
from headwater.gateway.auth.key_set import KeySet
from headwater.gateway.auth.keys import Key
from headwater.identity import Identity
from headwater.limits import CLAIM_BYTES_MAX, ROLE_BYTES_MAX, TOKEN_BYTES_MAX
from headwater.settings.groups import ALGORITHMS, AuthSettings

# ------------------------------------------------------------------------ finding


class Credentials(msgspec.Struct, frozen=True):
    """The token or ticket of a request. Browsers send a cookie with every request, also with one
    that a page of another site made: with `from_cookie`, check the `Origin`."""

    token: str | None = None
    ticket: str | None = None
    from_cookie: bool = False


def find_token(
    headers: Mapping[str, str],
    query: Mapping[str, str],
    cookies: Mapping[str, str],
    settings: AuthSettings,
) -> Credentials:
    """The token of a request: `Authorization: Bearer …`, else the cookie; and the `?ticket=`.

    A token in the URL is not accepted: URLs are logged by every proxy on the way. Header names are
    in lower case.
    """
    ticket = query.get("ticket") or None
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return Credentials(value.strip(), ticket)
    if settings.cookie is not None and (value := cookies.get(settings.cookie, "")):
        return Credentials(value, ticket, from_cookie=True)
    if ticket is None and ("token" in query or "access_token" in query):
        raise Unauthorized(
            "a token in the URL is not accepted: URLs are logged",
            hint="Send Authorization: Bearer …, or get a one-time ticket for EventSource.",
            code="token_missing",
        )
    return Credentials(None, ticket)


def missing() -> Unauthorized:
    """The error for a request without a token at a gateway that requires one."""
    return Unauthorized(
        "a token is needed", hint="Send Authorization: Bearer …", code="token_missing"
    )


# ------------------------------------------------------------------------ verifying


class Authenticator:
    """Verifies the tokens of one issuer, or of several that share the settings.

    `clock` returns the time of day, by which tokens begin and expire.
    """

    def __init__(
        self,
        settings: AuthSettings,
        own: Sequence[Key],
        key_set: KeySet | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._own = own
        self._key_set = key_set
        self._clock = clock
        self._leeway = settings.leeway_period.total_seconds()

    @classmethod
    def from_settings(
        cls, settings: AuthSettings, *, clock: Callable[[], float] = time.time
    ) -> Authenticator | None:
        """None if no key is configured: all clients are anonymous. ConfigError for a key that
        cannot be used."""
        if not settings.has_key:
            return None
        given = _own_keys(settings)
        own = keys.restricted(given, settings.algorithms)
        for before, after in zip(given, own, strict=True):
            if not after.algorithms:
                raise ConfigError(
                    f"[auth] algorithms: none of them fits the key, which is good for"
                    f" {', '.join(sorted(before.algorithms))}",
                    hint="Leave [auth] algorithms out, or use another key. A shared secret must be"
                    " as long as the hash: 48 bytes for HS384, 64 for HS512.",
                )
        return cls(settings, own, KeySet.from_settings(settings), clock=clock)

    async def close(self) -> None:
        if self._key_set is not None:
            await self._key_set.close()

    async def verify(self, token: str) -> Identity:
        """The identity in the token; Unauthorized or Forbidden with the reason as its code."""
        header = _read_header(token)
        payload = await self._verified_payload(token, header)
        claims = _read_claims(payload)
        expires_at = self._check_times(claims)
        self._check_origin(claims)
        return self._identity(claims, expires_at)

    async def renew(self, token: str, present: Identity) -> Identity:
        """The identity of a session with a new token: it must be the same user and tenant."""
        identity = await self.verify(token)
        if (identity.user, identity.tenant) != (present.user, present.tenant):
            raise Forbidden(
                "the new token is of another user or tenant",
                hint="Open another connection for another user.",
                code="token_user",
            )
        return identity

    async def _verified_payload(self, token: str, header: _Header) -> bytes:
        if header.alg not in (self._settings.algorithms or ALGORITHMS):
            raise self._wrong_algorithm()
        own = [key for key in self._own if key.fits(header.alg, header.kid)]
        payload = _payload(token, header.alg, own)
        # Used second: tokens that need no key set are accepted while it cannot be fetched.
        if payload is None and self._key_set is not None:
            found = await self._key_set.fitting(header.alg, header.kid)
            payload = _payload(token, header.alg, found)
        if payload is not None:
            return payload
        if header.alg not in self._accepted:
            raise self._wrong_algorithm()
        raise Unauthorized(
            "the token's signature is not valid, or its key is unknown",
            hint="Check that the token comes from the issuer whose key this gateway has.",
            code="token_signature",
        )

    @property
    def _accepted(self) -> set[str]:
        known = [*self._own, *(self._key_set.known if self._key_set else ())]
        return {name for key in known for name in key.algorithms}

    def _wrong_algorithm(self) -> Unauthorized:
        return Unauthorized(
            "the token is signed with an algorithm that is not accepted",
            hint=f"Accepted are: {', '.join(sorted(self._accepted)) or 'those of the key set'}.",
            code="token_algorithm",
        )

    def _check_times(self, claims: Mapping[str, Any]) -> datetime:
        now = self._clock()
        if "exp" not in claims:
            raise _wrong_claim("exp", "missing", "Tokens must expire: the issuer must set exp.")
        ends, expires_at = _time(claims, "exp")
        if now >= ends + self._leeway:
            raise Unauthorized(
                "the token has expired", hint="Get a new token.", code="token_expired"
            )
        for name in ("nbf", "iat"):
            if name in claims and _time(claims, name)[0] > now + self._leeway:
                raise Unauthorized(
                    f"the token is not valid yet ({name})",
                    hint="Compare the clocks of issuer and gateway; see [auth] leeway.",
                    code="token_not_yet_valid",
                )
        return expires_at

    def _check_origin(self, claims: Mapping[str, Any]) -> None:
        wanted = self._settings.audience
        audience = claims.get("aud")
        if wanted is not None and wanted not in (
            audience if isinstance(audience, list) else [audience]
        ):
            raise Unauthorized(
                "the token is for another audience",
                hint=f"Its aud must contain {wanted!r}, the setting [auth] audience.",
                code="token_audience",
            )
        issuer = self._settings.issuer
        if issuer is not None and claims.get("iss") != issuer:
            raise Unauthorized(
                "the token is from another issuer",
                hint=f"Its iss must be {issuer!r}, the setting [auth] issuer.",
                code="token_issuer",
            )

    def _identity(self, claims: dict[str, Any], expires_at: datetime) -> Identity:
        settings = self._settings
        user = _name(claims, settings.user_claim, CLAIM_BYTES_MAX)
        if user is None:
            raise _wrong_claim(
                settings.user_claim,
                "missing, so there is no user",
                "See the setting [auth] user_claim.",
            )
        tenant = _name(claims, settings.tenant_claim, CLAIM_BYTES_MAX)
        if settings.tenants and tenant not in settings.tenants:
            raise Forbidden(
                "this gateway does not serve the token's tenant",
                hint=f"It is read from the claim {settings.tenant_claim!r}; the setting"
                " [auth] tenants lists those that are served.",
                code="token_tenant",
            )
        role = _name(claims, settings.role_claim, ROLE_BYTES_MAX)
        if role not in (None, settings.role, *settings.roles):
            raise _wrong_claim(
                settings.role_claim,
                "a database role that tokens may not name here",
                "The setting [auth] roles lists those that they may.",
            )
        return Identity(user, tenant, role or settings.role, claims, expires_at)


def _own_keys(settings: AuthSettings) -> list[Key]:
    found = []
    if settings.secret is not None:
        found.append(keys.from_secret(settings.secret))
    if (text := settings.public_key_text) is not None:
        found.append(keys.from_pem(text))
    return found


# ------------------------------------------------------------------------ reading a token


class _Header(msgspec.Struct, frozen=True):
    """The fields of a token's header that are used. Keys and URLs in it are ignored."""

    alg: str
    kid: str | None = None
    crit: Any = None


def _read_header(token: str) -> _Header:
    """The header, before the signature is verified."""
    if not token:
        raise missing()
    # Characters are counted first, so that megabytes are never encoded.
    if len(token) > TOKEN_BYTES_MAX or not token.isascii():
        raise _malformed(f"it has more than {TOKEN_BYTES_MAX} bytes or is not ASCII")
    if token.count(".") != 2:
        raise _malformed("it does not have three parts")
    try:
        header = msgspec.json.decode(_decoded(token.partition(".")[0]), type=_Header)
    except (ValueError, RecursionError):
        # Not `from` the error, whose text may quote the token.
        raise _malformed("its header cannot be read") from None
    if header.crit is not None:
        raise _malformed("it asks for extensions that are not supported (crit)")
    return header


def _decoded(part: str) -> bytes:
    return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)


def _payload(token: str, algorithm: str, fitting: Sequence[Key]) -> bytes | None:
    """The signed part, if its signature is valid for one of the keys."""
    for key in fitting:
        try:
            found = _JWS.decode_complete(token, key.material, algorithms=[algorithm])
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            continue
        payload: bytes = found["payload"]
        return payload
    return None


_JWS = jwt.PyJWS()


def _read_claims(payload: bytes) -> dict[str, Any]:
    try:
        claims = msgspec.json.decode(payload, type=dict[str, Any])
    except (ValueError, RecursionError):
        raise _malformed("its claims are not a JSON object") from None
    if _NUL.search(payload):
        # PostgreSQL cannot read such JSON: every policy that uses the claims would fail.
        raise Unauthorized(
            "a claim of the token contains a NUL character, which PostgreSQL cannot read",
            code="token_claims",
            hint="Correct the claim at the issuer of the token.",
        )
    return claims


_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class _Time(NamedTuple):
    seconds: float
    at: datetime


def _time(claims: Mapping[str, Any], name: str) -> _Time:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_claim(name, "not a number of seconds")
    try:
        return _Time(float(value), datetime.fromtimestamp(value, UTC))
    except (OverflowError, ValueError, OSError):
        raise _wrong_claim(name, "not a time") from None


def _name(claims: Mapping[str, Any], claim: str, longest: int) -> str | None:
    """The name in a claim; None if the token has no such claim, or the setting names none."""
    value = claims.get(claim) if claim else None
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong_claim(claim, "not a text")
    if not value or len(value.encode()) > longest:
        raise _wrong_claim(claim, f"empty or longer than {longest} bytes")
    return value


def _wrong_claim(name: str, reason: str, hint: str | None = None) -> Unauthorized:
    return Unauthorized(f"the token's claim {name!r} is {reason}", hint=hint, code="token_claims")


def _malformed(reason: str) -> Unauthorized:
    return Unauthorized(
        f"the token is malformed: {reason}",
        hint="A token is three parts of base64url text with dots between: xxx.yyy.zzz",
        code="token_malformed",
    )
