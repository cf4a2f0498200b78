"""Decides how a typed table comes up to date. Pure.

The history consists of eras. An era begins with a snapshot, whose rows are versions with the `_op`
snapshot, and continues with events. It ends where rows may have changed without changes in the log:
at a reset, at a schema change, at a gap. All its versions end there. The next era begins with the
first snapshot after it. What lies between the two is unknown, and the history says so with a row
whose `_op` is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TypeAlias

import msgspec

from headwater import limits
from headwater.errors import ResyncRequired
from headwater.model import Position
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.lake.retention import RetentionFloor
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.tables.layout import Progress


class End(msgspec.Struct, frozen=True):
    """What ends versions: a change, a truncate, or the end of an era."""

    op: str
    seq: int | None
    xid: int | None
    at: datetime
    user_id: str | None = None
    function_name: str | None = None
    trace_id: str | None = None


class Changes(msgspec.Struct, frozen=True):
    """The changes of a table between two positions, in short: how many, their bytes, the shapes
    with their first change, the truncates and the first reset."""

    count: int = 0
    bytes: int = 0
    last_at: datetime | None = None
    shapes: tuple[tuple[int, End], ...] = ()
    truncates: tuple[End, ...] = ()
    reset: End | None = None


class Window(msgspec.Struct, frozen=True):
    """The changes to look at: up to `until`. `end` is that of the era, where it ends there."""

    until: Position
    end: End | None = None
    after: Position | None = None
    """The next era begins after this position."""


class Merge(msgspec.Struct, frozen=True):
    """Apply the changes up to `until`; there is no obstacle."""

    until: Position
    at: datetime
    changes: Changes

    @property
    def is_empty(self) -> bool:
        return not self.changes.count and not self.changes.truncates

    @property
    def is_small(self) -> bool:
        """Whether the driver can merge them. A truncate ends all versions, which Spark writes."""
        return (
            not self.changes.truncates
            and self.changes.count <= limits.TABLES_MERGE_CHANGES_MAX
            and self.changes.bytes <= limits.TABLES_MERGE_BYTES_MAX
        )


class Rebase(msgspec.Struct, frozen=True):
    """Begin an era with a snapshot; `end` is that of the era before, None for the first."""

    base: TableSnapshot
    end: End | None
    window: Window | None


class Wait(msgspec.Struct, frozen=True):
    """A snapshot is needed, which the pipeline makes."""

    reason: str


Step: TypeAlias = Merge | Rebase | Wait


def window(
    known: Progress,
    reached: Position,
    gaps: Iterable[LakeGap],
    floor: RetentionFloor | None,
    taken: Sequence[TableSnapshot],
) -> Window | None:
    """The changes that the table lacks; None if it lacks none."""
    here = known.position
    for gap in gaps:
        if _is_ahead(gap, known):
            until = gap.since if gap.since.log == here.log and gap.since.covers(here) else here
            at = max(gap.since_at, datetime.min.replace(tzinfo=gap.since_at.tzinfo))
            return Window(until, End("gap", None, until.xmax, at), gap.until)
    if reached.log != here.log:
        return Window(here, End("restored", None, here.xmax, known.at))
    if not _is_stored(floor, here):
        return Window(here, End("trimmed", None, here.xmax, known.at))
    altered = _altered(known, reached, taken)
    if altered is not None:
        position = altered.position
        return Window(position, End("altered", None, position.xmax, altered.taken_at), position)
    return None if here.covers(reached) else Window(reached)


def _is_ahead(gap: LakeGap, known: Progress) -> bool:
    """Whether the table does not have the changes after the gap yet."""
    if gap.until.log == known.position.log:
        return not known.position.covers(gap.until)
    return gap.until_at > known.at


def _is_stored(floor: RetentionFloor | None, position: Position) -> bool:
    try:
        if floor is not None:
            floor.check(position)
    except ResyncRequired:
        return False
    return True


def _altered(
    known: Progress, reached: Position, taken: Sequence[TableSnapshot]
) -> TableSnapshot | None:
    """A later snapshot of another shape: it may be known before the first change under it."""
    for each in taken:
        later = each.position.log == reached.log and not known.position.covers(each.position)
        if later and each.shape != known.shape and reached.covers(each.position):
            return each
    return None


def step(
    known: Progress,
    found: Window,
    changes: Changes,
    taken: Sequence[TableSnapshot],
    floor: RetentionFloor | None,
) -> Step:
    """What to do about the changes of the window."""
    end, shape = _first_obstacle(known, changes)
    end = end or found.end
    if end is None:
        at = max(known.at, changes.last_at or known.at)
        return Merge(found.until, at, changes)
    for base in taken:
        if _follows(base, known, end, shape, found) and _is_stored(floor, base.position):
            return Rebase(base, end, found)
    return Wait(f"a snapshot is needed after the end of the era ({end.op})")


def _first_obstacle(known: Progress, changes: Changes) -> tuple[End | None, int | None]:
    """The first reset or change under another shape; and that shape."""
    others = [(end, shape) for shape, end in changes.shapes if shape != known.shape]
    ends: list[tuple[End, int | None]] = [*others]
    if changes.reset is not None:
        ends.append((changes.reset, None))
    return min(ends, key=lambda each: each[0].seq or 0, default=(None, None))


def _follows(
    base: TableSnapshot, known: Progress, end: End, shape: int | None, found: Window
) -> bool:
    """Whether an era can begin with this snapshot after the end of the present one."""
    position = base.position
    if position.log != known.position.log:
        return base.taken_at > max(end.at, known.at)
    if known.position.covers(position):
        return False
    if end.seq is None:  # not a change, but a gap or another snapshot
        return found.after is None or position.covers(found.after)
    assert end.xid is not None
    return position.contains(end.xid) or base.shape == shape


def first(taken: Sequence[TableSnapshot], floor: RetentionFloor | None, *, last: bool) -> Step:
    """How a table is filled: from the first snapshot that events continue, or the last."""
    usable = [each for each in taken if _is_stored(floor, each.position)]
    if not usable:
        return Wait("the lake has no snapshot of it yet")
    return Rebase(usable[-1 if last else 0], None, None)
