"""Repairs a table in the lake: records that its changes are not complete, and reads it again.

No event is invented. A gap of the table says that its state is unknown between the last position at
which it was known to be right, and the one at which it was compared. A new snapshot has its rows
from then on. Snapshots that were computed from events meanwhile are removed, because they have the
wrong rows. Views that read the table are built again.
"""

from __future__ import annotations

from datetime import datetime

from headwater.model import Position
from headwater.pipeline.lake import gaps, snapshots
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reconcile import drift
from headwater.pipeline.snapshots import dependent_views
from headwater.pipeline.snapshots.unfinished import UnfinishedSnapshots

REASON = "reconcile found rows that differ from the table"


def repair(lake: Lake, url: str, relation: int, at: tuple[Position, datetime]) -> TableSnapshot:
    """Repair a table that was found to differ at a position. The gap is written first: after a
    crash the state of the table is unknown, not wrong."""
    since = _last_right(lake, relation, at[0])
    if since is not None:
        gaps.add(lake.gaps_path, LakeGap(since[0], at[0], since[1], at[1], relation, REASON))
    return read_again(lake, url, relation, at[0])


def read_again(lake: Lake, url: str, relation: int, position: Position) -> TableSnapshot:
    """Make a snapshot of a table from the database, and forget later ones that are not."""
    # Parts of it that an interrupted snapshot has read lack what was changed since without the log.
    UnfinishedSnapshots(lake.places.unfinished).forget([relation])
    # First: after a crash in between the table is known not to be right, later it is not.
    dependent_views.rebuild(url, relation)
    taken = lake.snapshot(url, relation)
    later = [
        each
        for each in snapshots.load(lake.places, relation)
        if each.origin == "events" and not position.covers(each.position)
    ]
    if later:
        snapshots.remove(lake.places, later)
    return taken


def _last_right(lake: Lake, relation: int, before: Position) -> tuple[Position, datetime] | None:
    """The last position up to which the lake had the rows of the table: at which they were read
    from it, or compared and found equal."""
    taken = [s for s in snapshots.load(lake.places, relation) if before.covers(s.position)]
    read = [each for each in taken if each.origin == "table"]
    known = [(each.position, each.taken_at) for each in read[-1:] or taken[:1]]
    equal = drift.last_equal(lake.drift_path, relation, before.log)
    return max([*known, *((equal,) if equal else ())], key=lambda each: each[0].xmax, default=None)
