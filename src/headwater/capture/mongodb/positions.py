"""Positions in a change stream, as text.

A position is a cluster time and, where the stream itself gave it, its resume token. A position
without a token means everything up to and including that time. The text ends its time with `-`
where more events of the same time may follow, as they do in a sharded cluster.

    >>> str(Position((1700000000, 3)))
    '1700000000.3'
    >>> token = {"_data": "826553F10000000003" + "2B042C0100296E04"}
    >>> str(Position.of_token(token, complete=False))  # doctest: +ELLIPSIS
    '1700000000.3-:8265...296E04'

Tokens are opaque except for two things that MongoDB has guaranteed since 4.0.7, and that its own
routers rely on: they are hexadecimal texts that order as the events do, and they begin with the
cluster time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from headwater.errors import PositionLost, SourceRefused

ClusterTime: TypeAlias = tuple[int, int]
"""Seconds, and the number of the operation in that second."""

_TEXT = re.compile(
    r"(?P<seconds>\d{1,10})\.(?P<number>\d{1,10})"
    r"(?P<open>-?)(:(?P<token>[0-9A-Fa-f]+)(,(?P<bits>[0-9A-Fa-f]*))?)?"
)
_TIMESTAMP = 0x82
"""The byte before a timestamp in a token."""


class Position(msgspec.Struct, frozen=True):
    """`complete` says that every event of `time` lies before it."""

    time: ClusterTime
    token: str | None = None
    type_bits: str | None = None
    complete: bool = True

    @classmethod
    def of_token(cls, token: Mapping[str, Any], *, complete: bool) -> Position:
        data, bits = token.get("_data"), token.get("_typeBits")
        if not isinstance(data, str):
            raise SourceRefused(
                "the server's resume tokens are not those of MongoDB 6.0 or later",
                hint="Servers that only resemble MongoDB cannot be a source.",
            )
        type_bits = None if bits is None else bytes(bits).hex()
        return cls(token_time(data), data.upper(), type_bits, complete)

    @classmethod
    def before(cls, token: Mapping[str, Any]) -> Position:
        """Of a token that stands for a time rather than for an event: it precedes every event of
        its time, so all events of the time before that are included.

        >>> str(Position.before({"_data": "826553F10000000003" + "2B0429296E1404"}))
        '1700000000.2:826553F100000000032B0429296E1404'
        """
        at = cls.of_token(token, complete=True)
        return cls(_preceding(at.time), at.token, at.type_bits)

    @classmethod
    def parse(cls, text: str) -> Position:
        """
        >>> Position.parse("5.1-:82AB,00").type_bits
        '00'
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PositionLost(
                f"{text!r:.200} is not a position of a MongoDB source",
                hint="Copy the tables again: headwater source resnapshot NAME",
            )
        time = int(match["seconds"]), int(match["number"])
        return cls(time, match["token"], match["bits"], not match["open"])

    def __str__(self) -> str:
        text = f"{self.time[0]}.{self.time[1]}{'' if self.complete else '-'}"
        if self.token is None:
            return text
        return f"{text}:{self.token}" + (f",{self.type_bits}" if self.type_bits is not None else "")

    def resume_token(self) -> dict[str, Any]:
        assert self.token is not None
        if self.type_bits is None:
            return {"_data": self.token}
        return {"_data": self.token, "_typeBits": bytes.fromhex(self.type_bits)}

    def contains(self, mark: Position) -> bool:
        """Whether everything up to `mark` is also up to here.

        >>> early, late = Position((5, 1), "8201"), Position((5, 1), "8202", complete=False)
        >>> late.contains(early), late.contains(Position((5, 1))), early.contains(late)
        (True, False, True)
        """
        if self.time != mark.time:
            return self.time > mark.time
        if self.complete:
            return True
        return self.token is not None and mark.token is not None and self.token >= mark.token

    def next_time(self) -> ClusterTime:
        """The first time that is not included."""
        return following(self.time) if self.complete else self.time


def _preceding(time: ClusterTime) -> ClusterTime:
    seconds, number = time
    return (seconds, number - 1) if number else (seconds - 1, 2**32 - 1)


def following(time: ClusterTime) -> ClusterTime:
    return time[0], time[1] + 1


def token_time(data: str) -> ClusterTime:
    """The cluster time at the beginning of a resume token."""
    try:
        start = bytes.fromhex(data[:18])
    except ValueError:
        start = b""
    if len(start) < 9 or start[0] != _TIMESTAMP:
        raise SourceRefused(
            f"a resume token of the server has an unknown form: {data[:40]!r}",
            hint="Only MongoDB 6.0 and later are supported.",
        )
    return int.from_bytes(start[1:5], "big"), int.from_bytes(start[5:9], "big")
