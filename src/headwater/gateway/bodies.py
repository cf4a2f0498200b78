"""The bodies of requests that are no message of the protocol."""

from __future__ import annotations

from typing import Any

import msgspec


class LiveBody(msgspec.Struct, forbid_unknown_fields=True):
    """A live query with options around it, for `/v1/live`."""

    live: dict[str, Any]
    since: str | None = None
    after: str | None = None
    batch: bool = True
    verify: bool = False


class ReanchorBody(msgspec.Struct, forbid_unknown_fields=True):
    """The cursor behind which a window begins; null for the start. With `request`, the stream says
    by that id when it is done."""

    after: list[Any] | None
    request: str | None = None
