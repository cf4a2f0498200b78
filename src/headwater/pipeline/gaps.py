"""Gaps: what the lake misses, where the log did not reach back to it any more.

The log was trimmed past a stream, or the database restored. After that the lake begins anew at the
present position, and a gap says so: from the position it had come to, to the one it goes on from.
Nothing is carried across a gap, in neither direction, and a moment inside it is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import write_deltalake

from headwater.model import Position
from headwater.pipeline import delta
from headwater.pipeline.snapshots import Snapshot
from headwater.pipeline.state import Moment, Way

_UTC = pa.timestamp("us", tz="UTC")

GAPS = pa.schema(
    [
        pa.field("since", pa.string(), nullable=False),
        pa.field("until", pa.string(), nullable=False),
        pa.field("since_at", _UTC, nullable=False),
        pa.field("until_at", _UTC, nullable=False),
    ]
)
"""`since` is the last position that the lake has everything up to, `until` the one that it goes on
from; the two times are those of the last event before, and of `until`."""


class Gap(msgspec.Struct, frozen=True):
    """What lies between two positions and is not in the lake."""

    since: Position
    until: Position
    since_at: datetime
    until_at: datetime

    def is_before(self, when: Moment) -> bool:
        """Whether the lake knew everything of the moment before the gap.

        >>> early, late = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC)
        >>> gap = Gap(Position("a", 5, 5), Position("a", 9, 9), early, late)
        >>> gap.is_before(Position("a", 5, 5)), gap.is_before(Position("a", 6, 6))
        (True, False)
        """
        if isinstance(when, Position):
            return self.since.log == when.log and self.since.covers(when)
        return when <= self.since_at

    def is_after(self, when: Moment) -> bool:
        """Whether the moment has everything that the gap swallowed, too."""
        if isinstance(when, Position):
            return self.until.log == when.log and when.covers(self.until)
        return when >= self.until_at


def load(path: str) -> list[Gap]:
    """The gaps of a lake, the oldest first."""
    table = delta.open_table(path)
    if table is None:
        return []
    rows = table.to_pyarrow_table().to_pylist()
    return sorted(map(_gap, rows), key=lambda gap: gap.until_at)


def _gap(row: dict[str, Any]) -> Gap:
    since_at, until_at = (row[name].astimezone(UTC) for name in ("since_at", "until_at"))
    return Gap(Position.parse(row["since"]), Position.parse(row["until"]), since_at, until_at)


def add(path: str, gap: Gap) -> None:
    delta.create(path, GAPS)
    row = {
        "since": str(gap.since),
        "until": str(gap.until),
        "since_at": gap.since_at,
        "until_at": gap.until_at,
    }
    write_deltalake(path, pa.Table.from_pylist([row], GAPS), mode="append")


def checked(found: Way, gaps: Iterable[Gap], when: Moment) -> Way:
    """The way, with an obstacle where it leads into a gap or across one."""
    for gap in gaps:
        if not _same_side(gap, found.snapshot, when):
            obstacle = (
                f"the lake misses what happened between {gap.since_at:%Y-%m-%d %H:%M:%S} and"
                f" {gap.until_at:%Y-%m-%d %H:%M:%S} UTC"
            )
            return msgspec.structs.replace(found, obstacle=obstacle)
    return found


def _same_side(gap: Gap, snapshot: Snapshot, when: Moment) -> bool:
    if gap.is_before(when):
        return gap.is_before(snapshot.position)
    return gap.is_after(when) and gap.is_after(snapshot.position)
