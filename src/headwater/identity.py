"""Who a session is: what a verified token says, and nothing that a client merely claims.

An identity is made by the authenticator or read back from a ticket. Everything that decides what a
session may see hangs on it: the user and tenant that the authorisation hook is asked about, the
database role and claims that row-level security is asked with, and when it ends.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from headwater.settings import Settings

Sharing: TypeAlias = Literal["user", "tenant", "everyone"]
"""Who gets the same result of a query for the same arguments."""

_OF_ONE_TOKEN = frozenset({"exp", "iat", "nbf", "jti"})
"""Claims about a token rather than its user."""


class Identity(msgspec.Struct, frozen=True):
    """The user of a session.

    `role` is the database role it reads as, None for Headwater's own. `claims` are all that the
    token says. From `expires_at` on it no longer holds; None for one that does not end.
    """

    user: str | None = None
    tenant: str | None = None
    role: str | None = None
    claims: dict[str, Any] = {}
    expires_at: datetime | None = None

    @property
    def claims_json(self) -> str:
        """The claims as policies find them in `request.jwt.claims`.

        Equal claims give equal text, and what differs from token to token is left out: sessions of
        one user share their views, also after a refresh.

        >>> Identity(claims={"sub": "ann", "exp": 1, "app": {"b": 2, "a": 1}}).claims_json
        '{"app":{"a":1,"b":2},"sub":"ann"}'
        """
        return msgspec.json.encode(_lasting(self.claims), order="deterministic").decode()

    @property
    def account(self) -> str | None:
        """What quotas count by: users of two tenants are two, even if they share a name.

        >>> Identity(user="ann").account, Identity(user="ann", tenant="acme").account
        ('ann', '["acme","ann"]')
        """
        if self.user is None or self.tenant is None:
            return self.user
        return msgspec.json.encode([self.tenant, self.user]).decode()

    def shared(self, by: Sharing) -> Identity:
        """What of an identity a query may know whose results are shared.

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


def anonymous(settings: Settings) -> Identity:
    """Who everybody is at a gateway that verifies no tokens."""
    return ANONYMOUS if settings.auth_role is None else Identity(role=settings.auth_role)
