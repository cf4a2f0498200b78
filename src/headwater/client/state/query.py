"""The state of a reactive query with whole results: the value, its position, the last error.

Pure. A result replaces the one before. After a failed execution the value stays, together with the
error, until the next result.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.errors import HeadwaterError
from headwater.protocol import QueryCall, Result, Subscribe, Subscribed


class QueryState:
    """A reactive query as the client knows it."""

    def __init__(self, call: QueryCall) -> None:
        self.name = call.name
        self.wire_id = ""
        self.view: int | None = None
        self.position: str | None = None
        self.shown: str | None = None
        """The position of the latest result that a program has seen."""
        self.value: Any = None
        self.error: HeadwaterError | None = None
        """Why the value may be out of date."""
        self._call = call
        self._waiting = True

    @property
    def is_due(self) -> bool:
        """It was requested, and there is no result yet."""
        return self.view is None or self._waiting

    def subscribe(self, wire_id: str, *, resume: bool) -> Subscribe:
        """The request for it. If it is resumed, the gateway sends a result only if it differs."""
        self.wire_id, self.view, self._waiting = wire_id, None, True
        return Subscribe(wire_id, query=self._call, since=self.position if resume else None)

    def subscribed(self, message: Subscribed) -> None:
        self.view, self._waiting = message.view, not message.resumed
        if message.resumed:
            self.error = None

    def receive(self, message: Result) -> bool:
        """Store a result. Returns whether it differs from the one before: after a reconnect or a
        failure it often does not, and then the program is not notified."""
        before = None if self.position is None else (self.value,)
        self.value, self.position = message.value, message.position
        self.shown = message.position
        self._waiting, self.error = False, None
        return before is None or not _same(before[0], self.value)


_encode = msgspec.json.Encoder(order="sorted").encode


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON. To Python, 1 and true are equal.

    >>> _same({"a": 1, "b": 2}, {"b": 2, "a": 1}), _same([1], [True])
    (True, False)
    """
    return bool(one == other) and _encode(one) == _encode(other)
