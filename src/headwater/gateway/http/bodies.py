"""The bodies of requests that are no message of the protocol."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headwater.errors import InvalidQuery
from headwater.limits import MESSAGE_CONTAINERS_MAX

# Also one that does not end, so that no text is looked at twice.
_TEXT = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)


def check_json_size(data: str | bytes) -> None:
    """Refuse JSON that takes long to decode: of many small lists and objects."""
    if len(data) <= 2 * MESSAGE_CONTAINERS_MAX:
        return
    text = data if isinstance(data, str) else data.decode("utf-8", "replace")
    if text.count("[") + text.count("{") <= MESSAGE_CONTAINERS_MAX:
        return
    bare = _TEXT.sub("", text)
    if bare.count("[") + bare.count("{") > MESSAGE_CONTAINERS_MAX:
        raise InvalidQuery(
            f"more than {MESSAGE_CONTAINERS_MAX:,} lists and objects",
            hint="Send it in several messages, or as one text.",
        )


class LiveBody(msgspec.Struct, forbid_unknown_fields=True):
    """A live query with options around it, for `/v1/live`."""

    live: dict[str, Any]
    since: str | None = None
    after: str | None = None
    verify: bool = False


class ReanchorBody(msgspec.Struct, forbid_unknown_fields=True):
    """The cursor behind which a window begins; null for the start. With `request`, the stream says
    by that id when it is done."""

    after: list[Any] | None
    request: str | None = None
