"""The bodies of requests."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.protocol import ChangesQuery, Overflow


class LiveBody(msgspec.Struct, forbid_unknown_fields=True):
    """A live query with options around it, for `/v1/live`."""

    live: dict[str, Any]
    since: str | None = None
    batch: bool = True
    verify: bool = False


class SubscribeBody(msgspec.Struct, forbid_unknown_fields=True):
    """A subscription to add to a session: the message `subscribe` without its type."""

    id: str
    live: dict[str, Any] | None = None
    changes: ChangesQuery | None = None
    since: str | None = None
    batch: bool = True
    overflow: Overflow | None = None
    verify: bool = False


class ReanchorBody(msgspec.Struct, forbid_unknown_fields=True):
    """The cursor behind which a window begins; null for the start."""

    after: list[Any] | None


class TokenBody(msgspec.Struct, forbid_unknown_fields=True):
    """A new token for an open session."""

    token: str
