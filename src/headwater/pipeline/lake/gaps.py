"""Gaps: changes that the lake lacks because the log was trimmed before they were read, because the
database was restored, or, of one table, because rows were changed without changes in the log.

The lake then continues at the present position. A gap records the last position before and the
first position after. No state is computed across a gap, in either direction, and a moment inside a
gap is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
from deltalake import write_deltalake

from headwater.model import Position
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.moments import Moment

_UTC = pa.timestamp("us", tz="UTC")

GAPS = pa.schema(
    [
        pa.field("since", pa.string(), nullable=False),
        pa.field("until", pa.string(), nullable=False),
        pa.field("since_at", _UTC, nullable=False),
        pa.field("until_at", _UTC, nullable=False),
        pa.field("relation", pa.int64()),
        pa.field("reason", pa.string()),
    ]
)
"""`since` is the last position up to which the lake has every change, `until` the position it
continues from. The two times are the time of the last event before the gap, and the time of
`until`. `relation` is NULL where the changes of every table are missing."""


class LakeGap(msgspec.Struct, frozen=True):
    """The changes between two positions, which the lake lacks."""

    since: Position
    until: Position
    since_at: datetime
    until_at: datetime
    relation: int | None = None
    """The table; None for all tables."""
    reason: str | None = None

    def __str__(self) -> str:
        times = f"{self.since_at:%Y-%m-%d %H:%M:%S} and {self.until_at:%Y-%m-%d %H:%M:%S} UTC"
        reason = f" ({self.reason})" if self.reason else ""
        return f"the lake lacks the changes between {times}{reason}"

    def is_before(self, when: Moment) -> bool:
        """Whether the moment lies entirely before the gap.

        >>> early, late = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC)
        >>> gap = LakeGap(Position("a", 5, 5), Position("a", 9, 9), early, late)
        >>> gap.is_before(Position("a", 5, 5)), gap.is_before(Position("a", 6, 6))
        (True, False)
        """
        if isinstance(when, Position):
            return self.since.log == when.log and self.since.covers(when)
        return when <= self.since_at

    def is_after(self, when: Moment) -> bool:
        """Whether the moment lies entirely after the gap."""
        if isinstance(when, Position):
            return self.until.log == when.log and when.covers(self.until)
        return when >= self.until_at


def load(path: str, relation: int | None = None) -> list[LakeGap]:
    """The gaps of all tables, and those of one table, the oldest first."""
    return _in_order(row for row in _rows(path) if row["relation"] in (None, relation))


def every(path: str) -> list[LakeGap]:
    """The gaps of all tables, and those of each table, the oldest first."""
    return _in_order(_rows(path))


def _rows(path: str) -> list[dict[str, Any]]:
    table = delta.open_table(path)
    return [] if table is None else delta.rows_of_table(table, GAPS)


def _in_order(rows: Iterable[dict[str, Any]]) -> list[LakeGap]:
    return sorted(map(_gap, rows), key=lambda gap: gap.until_at)


def _gap(row: dict[str, Any]) -> LakeGap:
    positions = {name: Position.parse(row[name]) for name in ("since", "until")}
    times = {name: row[name].astimezone(UTC) for name in ("since_at", "until_at")}
    return LakeGap(**(row | positions | times))


def add(path: str, gap: LakeGap) -> None:
    delta.create(path, GAPS)
    row = msgspec.structs.asdict(gap) | {"since": str(gap.since), "until": str(gap.until)}
    write_deltalake(path, pa.Table.from_pylist([row], GAPS), mode="append")
