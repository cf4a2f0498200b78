"""The position of a source: which server, which history of it, and how far in its log.

A log sequence number alone means nothing on another server, or on one that continued from a backup
or from a standby. So the system identifier and the timeline are part of the text.
"""

from __future__ import annotations

import msgspec

from headwater.capture.postgres.wal.pgoutput import parse_lsn, print_lsn
from headwater.errors import PositionLost


class Position(msgspec.Struct, frozen=True):
    """Everything that committed up to `lsn`.

    >>> position = parse_position("7412345678901234567/1/0/16B3748")
    >>> position.timeline, str(position.at(position.lsn + 8))
    (1, '7412345678901234567/1/0/16B3750')
    """

    system: str
    timeline: int
    lsn: int

    def __str__(self) -> str:
        return f"{self.system}/{self.timeline}/{print_lsn(self.lsn)}"

    def at(self, lsn: int) -> Position:
        return Position(self.system, self.timeline, lsn)


def parse_position(text: str) -> Position:
    """`PositionLost` for a text that is none: it cannot be continued from."""
    parts = text.split("/", 2)
    try:
        system, timeline, lsn = parts
        return Position(system, int(timeline), parse_lsn(lsn))
    except ValueError:
        raise PositionLost(
            f"{text[:80]!r} is not a position of a PostgreSQL source",
            hint="Copy the tables again: headwater source resnapshot NAME",
        ) from None


def switch_lsn(history: str, timeline: int) -> int | None:
    """Where a server left that timeline, according to the history file of its own; None if it was
    never on it.

    >>> hex(switch_lsn("1\\t0/3000148\\tno recovery target specified\\n", 1))
    '0x3000148'
    """
    for line in history.splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[0] == str(timeline):
            return parse_lsn(fields[1])
    return None
