"""The identity of a session, from a verified token or ticket; never from what a client claims.

It decides what a session may see. The authorize hook gets its user and tenant, row-level security
its database role and claims. It also has the time when it expires.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from headwater.settings.groups import AuthSettings

Sharing: TypeAlias = Literal["user", "tenant", "everyone"]
"""Which users get the same result of a query for the same arguments."""

_OF_ONE_TOKEN = frozenset({"exp", "iat", "nbf", "jti"})
"""Claims about the token, not about its user."""


class Identity(msgspec.Struct, frozen=True):
    """The user of a session.

    `role` is the database role it reads as, None for Headwater's own. `claims` are all claims of
    the token. At `expires_at` it expires; None for an identity that does not expire.
    """

    user: str | None = None
    tenant: str | None = None
    role: str | None = None
    claims: dict[str, Any] = {}
    expires_at: datetime | None = None

    @property
    def claims_json(self) -> str:
        """The claims as policies read them from `request.jwt.claims`.

        Equal claims give equal text. Claims that differ from token to token are left out, so that
        sessions of one user share their views, also after a refresh.

        >>> Identity(claims={"sub": "ann", "exp": 1, "app": {"b": 2, "a": 1}}).claims_json
        '{"app":{"a":1,"b":2},"sub":"ann"}'
        """
        return msgspec.json.encode(_lasting(self.claims), order="deterministic").decode()

    @property
    def account(self) -> str | None:
        """The owner in quotas. Users of different tenants are different, even with the same name.

        >>> Identity(user="ann").account, Identity(user="ann", tenant="acme").account
        ('ann', '["acme","ann"]')
        """
        if self.user is None or self.tenant is None:
            return self.user
        return msgspec.json.encode([self.tenant, self.user]).decode()

    def shared(self, by: Sharing) -> Identity:
        """The part of an identity that a query with shared results may read.

        >>> ann = Identity(user="ann", tenant="acme", claims={"sub": "ann"})
        >>> ann.shared("tenant")
        Identity(user=None, tenant='acme', role=None, claims={}, expires_at=None)
        """
        match by:
            case "user":
                return Identity(self.user, self.tenant, self.role, _lasting(self.claims))
            case "tenant":
                return Identity(None, self.tenant, self.role)
            case "everyone":
                return Identity(None, None, self.role)


def _lasting(claims: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in claims.items() if name not in _OF_ONE_TOKEN}


ANONYMOUS = Identity()


def anonymous(settings: AuthSettings) -> Identity:
    """The identity of all clients at a gateway that verifies no tokens."""
    return ANONYMOUS if settings.role is None else Identity(role=settings.role)
