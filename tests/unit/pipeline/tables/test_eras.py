"""What is due for a typed table: merges, new eras, and what they wait for."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import msgspec
import pytest

from headwater.model import Position
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.lake.retention import RetentionFloor
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.tables import eras
from headwater.pipeline.tables.eras import Changes, End, Merge, Rebase, Wait
from headwater.pipeline.tables.layout import Progress

START = datetime(2026, 11, 1, tzinfo=UTC)


def at(xid: int, log: str = "a") -> Position:
    return Position(log, xid, xid)


def when(xid: int) -> datetime:
    return START + timedelta(minutes=xid)


def taken(xid: int, shape: int = 1, log: str = "a") -> TableSnapshot:
    return TableSnapshot(7, xid, at(xid, log), when(xid), shape, 5, "table")


def folded(xid: int) -> TableSnapshot:
    return msgspec.structs.replace(taken(xid), origin="events")


def change(op: str, xid: int) -> End:
    return End(op, xid * 10, xid, when(xid))


KNOWN = Progress(at(10), when(10), 7, 1, str(at(5)), "")

ALL_LOGS = LakeGap(at(20), at(30, "b"), when(20), when(30))
OWN_ROWS = LakeGap(at(8), at(30), when(8), when(30), 7, "reconcile")
LATER_ROWS = LakeGap(at(18), at(30), when(18), when(30), 7, "reconcile")

NOTHING = Changes()
ROWS = Changes(3, 90, when(19), ((1, change("altered", 12)),))
RESET = Changes(3, 90, when(19), ((1, change("altered", 12)),), (), change("reset", 15))
ALTERED = Changes(3, 90, when(19), ((1, change("altered", 12)), (2, change("altered", 15))))


@pytest.mark.parametrize(
    ("reached", "gaps", "floor", "snapshots", "changes", "expected"),
    [
        (at(10), [], None, [], NOTHING, None),
        (at(20), [], None, [], ROWS, "merge to 20"),
        (at(20), [], None, [taken(5), taken(15)], ROWS, "merge to 20"),
        (at(20), [], None, [taken(5)], RESET, "wait: reset"),
        (at(20), [], None, [taken(5), taken(15)], RESET, "wait: reset"),  # without the reset
        (at(20), [], None, [taken(5), taken(16), taken(19)], RESET, "era of 16 after reset"),
        (at(20), [], None, [taken(5)], ALTERED, "wait: altered"),
        (at(20), [], None, [taken(5), taken(18, 2)], ALTERED, "era of 18 after altered"),
        (at(20), [], None, [taken(5), taken(13, 2)], ALTERED, "era of 13 after altered"),
        (at(20), [], None, [taken(13, 2)], NOTHING, "era of 13 after altered"),
        (at(40, "b"), [ALL_LOGS], None, [taken(5), taken(29)], ROWS, "wait: gap"),
        (at(40, "b"), [ALL_LOGS], None, [taken(35, 1, "b")], ROWS, "era of 35 after gap"),
        (at(40, "b"), [], None, [taken(35, 1, "b")], NOTHING, "era of 35 after restored"),
        (at(40), [OWN_ROWS], None, [taken(29)], NOTHING, "wait: gap"),
        (at(40), [OWN_ROWS], None, [taken(30)], NOTHING, "era of 30 after gap"),
        (at(40), [OWN_ROWS], None, [taken(5), folded(33)], NOTHING, "wait: gap"),  # has old rows
        (at(40), [OWN_ROWS], None, [folded(33), taken(35)], NOTHING, "era of 33 after gap"),
        (at(40), [OWN_ROWS], None, [taken(5), folded(33), taken(35), folded(36)], NOTHING,
         "era of 35 after gap"),
        (at(15), [LATER_ROWS], None, [taken(30)], ROWS, "merge to 15"),
        (at(15), [LATER_ROWS], None, [taken(30)], NOTHING, "wait: not reached"),
        (at(12), [], None, [taken(13, 2)], NOTHING, "wait: not reached"),
        (at(20), [], at(12), [], NOTHING, "wait: trimmed"),
        (at(20), [], at(12), [taken(11), taken(14)], NOTHING, "era of 14 after trimmed"),
        (at(20), [], at(9), [], ROWS, "merge to 20"),
    ],
)  # fmt: skip
def test_what_is_due(
    reached: Position,
    gaps: list[LakeGap],
    floor: Position | None,
    snapshots: list[TableSnapshot],
    changes: Changes,
    expected: str | None,
) -> None:
    trimmed = None if floor is None else RetentionFloor(date(2026, 11, 1), (str(floor),))
    window = eras.window(KNOWN, reached, gaps, trimmed, snapshots)
    found = None if window is None else eras.step(KNOWN, window, changes, snapshots, trimmed)
    match found:
        case Merge():
            assert expected == f"merge to {found.until.xmax}"
        case Rebase():
            assert found.end is not None
            assert expected == f"era of {found.base.snapshot} after {found.end.op}"
        case Wait():
            assert expected is not None
            assert expected.startswith("wait: ")
            reason = expected.removeprefix("wait: ")
            assert reason.removeprefix("not ") in found.reason
        case None:
            assert expected is None


@pytest.mark.parametrize(
    ("gaps", "snapshots", "expected"),
    [
        ([], [taken(5)], None),
        ([OWN_ROWS], [taken(5)], "wait"),
        ([OWN_ROWS], [taken(5), taken(29)], "wait"),
        ([OWN_ROWS], [taken(5), taken(31)], "31 from 40, unknown since 8"),
        ([OWN_ROWS], [taken(5), taken(31), taken(45)], "45 from 45, unknown since 8"),
        ([OWN_ROWS], [taken(5), taken(31), folded(34)], "34 from 40, unknown since 8"),
        ([OWN_ROWS], [taken(5), folded(31)], "wait"),
        ([], [taken(5), taken(31, 2)], "31 from 40, unknown since 31"),
    ],
)  # fmt: skip
def test_what_is_found_late(
    gaps: list[LakeGap], snapshots: list[TableSnapshot], expected: str | None
) -> None:
    """The table is past the gap, or the other shape, when the lake learns of it."""
    known = msgspec.structs.replace(KNOWN, position=at(40), at=when(40))
    window = eras.window(known, at(50), gaps, None, snapshots)
    assert window is not None
    assert eras.is_over(known, at(50), gaps, None, snapshots) == bool(expected)
    match eras.step(known, window, NOTHING, snapshots, None):
        case Rebase(base, End(xid=since), _, position):
            begun = position or base.position
            assert expected == f"{base.snapshot} from {begun.xmax}, unknown since {since}"
            # It has ended once.
            after = msgspec.structs.replace(
                known, position=begun, snapshot=str(begun), shape=base.shape
            )
            assert not eras.is_over(after, at(50), gaps, None, snapshots)
        case Wait():
            assert expected == "wait"
        case Merge(until):
            assert (expected, until) == (None, at(50))


def test_a_table_is_filled_from_the_first_snapshot_that_events_continue() -> None:
    snapshots = [taken(5), taken(15), taken(25)]
    floor = RetentionFloor(date(2026, 11, 1), (str(at(12)),))
    history = eras.first(snapshots, floor, last=False)
    current = eras.first(snapshots, floor, last=True)
    assert isinstance(history, Rebase)
    assert isinstance(current, Rebase)
    assert (history.base.snapshot, current.base.snapshot) == (15, 25)
    assert isinstance(eras.first(snapshots[:1], floor, last=False), Wait)
