"""Idempotency keys: a client may repeat a request with the same key.

A client makes a key for each mutation and each message on a channel, and sends it again with every
repetition. The gateway stores the key with the result, in the same transaction, and answers a
repetition with the stored result. A key belongs to one user: its scope is a hash of the tenant,
user and role of the token, and keys of another scope are never read. Without tokens all clients
have one scope, so a key must be impossible to guess.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.errors import InvalidQuery
from headwater.limits import IDEMPOTENCY_KEY_CHARS_MAX

if TYPE_CHECKING:
    # Clients make keys, and need no settings.
    from headwater.identity import Identity

_KEY = re.compile(rf"[\x21-\x7e]{{1,{IDEMPOTENCY_KEY_CHARS_MAX}}}")
_RANDOM_BYTES = 16


class Request(msgspec.Struct, frozen=True):
    """A key as it is stored: the scope of its user, and the digest of the request."""

    scope: bytes
    key: str
    digest: bytes

    @classmethod
    def of(cls, identity: Identity, key: str, name: str, value: Any) -> Request:
        """The request of a user to call `name` with a JSON value."""
        scope = (identity.tenant, identity.user, identity.role)
        return cls(_hash(scope), key, _hash((name, value)))


def _hash(value: Any) -> bytes:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).digest()


def new_key() -> str:
    """A key that is impossible to guess."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def check_key(key: object) -> str:
    """The key, unchanged; InvalidQuery for one that cannot be stored.

    >>> check_key("order 7")
    Traceback (most recent call last):
    headwater.errors.InvalidQuery: idempotency_key: expected 1 to 128 visible ASCII characters
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise InvalidQuery(
            f"expected 1 to {IDEMPOTENCY_KEY_CHARS_MAX} visible ASCII characters",
            path="idempotency_key",
            hint="Make a random one for each request, such as a UUID.",
        )
    return key


def reused(what: str) -> InvalidQuery:
    """The error for a key that was used for another request of the same user."""
    error = InvalidQuery(
        f"{what}: the key was used for another request",
        path="idempotency_key",
        hint="Use a key for one request only: the same function with the same arguments.",
    )
    error.code = "idempotency_key_reused"
    return error
