"""Decides how a typed table comes up to date. Pure.

The history consists of eras. An era begins with a snapshot, whose rows are versions with the `_op`
snapshot, and continues with events. It ends where rows may have changed without changes in the log:
at a reset, at a schema change, at a gap. All its versions end there. The next era begins with the
first snapshot after it. What lies between the two is unknown, and the history says so with a row
whose `_op` is unknown.

A gap and a new shape may be found late, when the table is past them already. So whether they have
ended an era depends on where it began, not on how far the table is.
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
    ends_later: bool = False
    """Whether the era ends at a position that the lake has not reached yet."""


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
    position: Position | None = None
    """Where the era begins, if later than the snapshot: with the changes up to this position, which
    the table has already."""


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
        if _is_missing(gap, known):
            since = gap.since if gap.since.log == here.log else here
            until = since if since.covers(here) else here
            if until.log == reached.log and not reached.covers(until):
                return Window(reached, ends_later=True)
            at = max(gap.since_at, datetime.min.replace(tzinfo=gap.since_at.tzinfo))
            return Window(until, End("gap", None, since.xmax, at), gap.until)
    if reached.log != here.log:
        return Window(here, End("restored", None, here.xmax, known.at))
    if not _is_stored(floor, here):
        return Window(here, End("trimmed", None, here.xmax, known.at))
    altered = _altered(known, taken)
    if altered is not None:
        position = altered.position
        if not reached.covers(position):
            return Window(reached, ends_later=True)
        return Window(position, End("altered", None, position.xmax, altered.taken_at), position)
    return None if here.covers(reached) else Window(reached)


def is_over(
    known: Progress,
    reached: Position,
    gaps: Iterable[LakeGap],
    floor: RetentionFloor | None,
    taken: Sequence[TableSnapshot],
) -> bool:
    """Whether the era of the table ends for a reason that is not among its changes."""
    found = window(known, reached, gaps, floor, taken)
    return found is not None and (found.end is not None or found.ends_later)


def _is_missing(gap: LakeGap, known: Progress) -> bool:
    """Whether the present era began before the end of the gap, so that its rows may be wrong."""
    if gap.until.log == known.position.log:
        return not known.begun.covers(gap.until)
    return gap.until_at > known.at


def _is_stored(floor: RetentionFloor | None, position: Position) -> bool:
    try:
        if floor is not None:
            floor.check(position)
    except ResyncRequired:
        return False
    return True


def _altered(known: Progress, taken: Sequence[TableSnapshot]) -> TableSnapshot | None:
    """A later snapshot of another shape: it may be known before the first change under it."""
    for each in taken:
        later = each.position.log == known.begun.log and not known.begun.covers(each.position)
        if later and each.shape != known.shape:
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
        merge = Merge(found.until, at, changes)
        if merge.is_empty and found.ends_later:
            return Wait("the lake has not reached the end of the era")
        return merge
    usable = [each for each in taken if _is_stored(floor, each.position)]
    for base in usable:
        if _follows(base, known, end, shape, found, taken):
            return Rebase(base, end, found)
    if end.seq is None and found.after is not None:
        for base in reversed(usable):
            is_before = known.position.covers(base.position)
            if is_before and _is_after(found.after, base, taken):
                return Rebase(base, end, found, known.position)
    return Wait(f"a snapshot is needed after the end of the era ({end.op})")


def _first_obstacle(known: Progress, changes: Changes) -> tuple[End | None, int | None]:
    """The first reset or change under another shape; and that shape."""
    others = [(end, shape) for shape, end in changes.shapes if shape != known.shape]
    ends: list[tuple[End, int | None]] = [*others]
    if changes.reset is not None:
        ends.append((changes.reset, None))
    return min(ends, key=lambda each: each[0].seq or 0, default=(None, None))


def _follows(
    base: TableSnapshot,
    known: Progress,
    end: End,
    shape: int | None,
    found: Window,
    taken: Sequence[TableSnapshot],
) -> bool:
    """Whether an era can begin with this snapshot after the end of the present one."""
    position = base.position
    if position.log != known.position.log:
        return base.taken_at > max(end.at, known.at)
    if known.position.covers(position):
        return False
    if end.seq is None:  # not a change, but a gap or another snapshot
        return found.after is None or _is_after(found.after, base, taken)
    assert end.xid is not None
    return position.contains(end.xid) or base.shape == shape


def _is_after(position: Position, base: TableSnapshot, taken: Sequence[TableSnapshot]) -> bool:
    """Whether a snapshot was read from the table after the position, or computed from one that was.
    One that was computed from an earlier one lacks what is not in the log."""
    read = [each for each in taken[: taken.index(base) + 1] if each.origin != "events"]
    first = read[-1] if read else taken[0]
    return base.position.covers(position) and first.position.covers(position)


def first(taken: Sequence[TableSnapshot], floor: RetentionFloor | None, *, last: bool) -> Step:
    """How a table is filled: from the first snapshot that events continue, or the last."""
    usable = [each for each in taken if _is_stored(floor, each.position)]
    if not usable:
        return Wait("the lake has no snapshot of it yet")
    return Rebase(usable[-1 if last else 0], None, None)
