"""The bodies of requests that have no message in the protocol."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headwater.errors import InvalidQuery
from headwater.limits import MESSAGE_CONTAINERS_MAX

# A text, also one without an end, so that no part of the body is searched twice.
_TEXT = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)

LIVE_QUERY_PAGE = "docs/reference/live-query.md describes live queries."
"""A hint for a live query that cannot be read."""


def check_json_size(data: str | bytes) -> None:
    """Refuse JSON with many small lists and objects, which takes long to decode."""
    if len(data) <= 2 * MESSAGE_CONTAINERS_MAX:
        return
    text = data if isinstance(data, str) else data.decode("utf-8", "replace")
    if text.count("[") + text.count("{") <= MESSAGE_CONTAINERS_MAX:
        return
    bare = _TEXT.sub("", text)
    if bare.count("[") + bare.count("{") > MESSAGE_CONTAINERS_MAX:
        raise InvalidQuery(
            f"the JSON has more than {MESSAGE_CONTAINERS_MAX:,} lists and objects",
            hint="Send the data in several messages, or as one text.",
        )


class LiveBody(msgspec.Struct, forbid_unknown_fields=True):
    """A live query and its options, for `/v1/live`."""

    live: dict[str, Any]
    since: str | None = None
    after: str | None = None
    verify: bool = False


class ReanchorBody(msgspec.Struct, forbid_unknown_fields=True):
    """The cursor after which a window begins; null for the start. With `request`, the stream has an
    answer with that id when it is done."""

    after: list[Any] | None
    request: str | None = None
