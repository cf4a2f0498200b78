"""Which snapshots are compared with what the lake computes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from headwater.model import Position
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.snapshots import continuity
from headwater.pipeline.snapshots.continuity import LakeReads

AT = datetime(2026, 1, 1, tzinfo=UTC)


class OpenedError(Exception):
    """The lake was opened: that takes a connection to the database."""


def taken(log: str, xid: int) -> TableSnapshot:
    at = AT + timedelta(hours=xid)
    return TableSnapshot(7, xid, Position(log, xid, xid), at, 1, 0, "table", "mark", 1)


def open_lake() -> LakeReads:
    raise OpenedError


def rebuild_views(relation: int) -> None:
    raise AssertionError("nothing is known to be wrong")


@pytest.mark.parametrize("listed", [[], [taken("b", 3)], [taken("a", 12), taken("b", 3)]])
def test_a_first_snapshot_is_compared_with_nothing(listed: list[TableSnapshot]) -> None:
    now = taken("a", 9)
    assert continuity.examined(listed, open_lake, now, {}, (), rebuild_views) == now


def test_a_later_snapshot_is_compared_with_the_lake() -> None:
    with pytest.raises(OpenedError):
        continuity.examined([taken("a", 3)], open_lake, taken("a", 9), {}, (), rebuild_views)
