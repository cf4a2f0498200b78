"""How far a stream has come: a position of the log, or a cut between two positions. Pure.

A batch reads the changes between two offsets, and the same two always mean the same rows. Where
there are more changes than a batch may have, the changes between two positions are read in several
batches, cut by `seq`: no change is in two of them, and the changes of a row stay in order.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.model import Position


class Offset(msgspec.Struct, frozen=True):
    """Everything up to `position` was read; with `until`, also the changes between the two with
    numbers up to `seq`.

    >>> offset = Offset(Position.parse("9f3a61c2-748:748:"))
    >>> Offset.from_dict(offset.to_dict()) == offset
    True
    """

    position: Position
    until: Position | None = None
    seq: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As Spark stores it in a checkpoint."""
        return {
            "snap": str(self.position),
            "open": "" if self.until is None else str(self.until),
            "seq": self.seq,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Offset:
        """Read what `to_dict` made. Raises ValueError for anything else."""
        try:
            until = Position.parse(fields["open"]) if fields["open"] else None
            return cls(Position.parse(fields["snap"]), until, int(fields["seq"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{fields!r} is not an offset of the log") from error


class Range(msgspec.Struct, frozen=True):
    """The rows of a batch: between two positions, with numbers above `after` and up to `upto`
    (None for all)."""

    since: Position
    until: Position
    after: int = 0
    upto: int | None = None


def range_between(start: Offset, end: Offset) -> Range | None:
    """The rows between two offsets; None for two equal ones. ValueError where `end` does not follow
    `start`.

    >>> one, two = Position.parse("a-5:5:"), Position.parse("a-9:9:")
    >>> range_between(Offset(one), Offset(one, two, 70)).upto
    70
    >>> range_between(Offset(one, two, 70), Offset(two)).after
    70
    """
    if start == end:
        return None
    if end.until is None:
        if start.until is not None and start.until != end.position:
            raise ValueError(f"{end} does not follow {start}")
        return Range(start.position, end.position, start.seq if start.until else 0)
    same_pair = start.position == end.position and start.until in (None, end.until)
    if not same_pair or start.seq > end.seq:
        raise ValueError(f"{end} does not follow {start}")
    return Range(end.position, end.until, start.seq if start.until else 0, end.seq)
