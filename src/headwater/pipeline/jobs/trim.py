"""Removes old events from the lake, and snapshots that are no longer needed.

Whole days are removed, and only days whose every change is in a later snapshot of its table. The
order makes an answer right or refused at any time, also after a crash: first the new floor is
written (`retention`), then snapshots that depend on removed events are deleted, then the events.
The audit roll-ups stay.

Of older snapshots that were computed from events, one for each day and table stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
from deltalake import DeltaTable

from headwater import limits
from headwater.errors import ResyncRequired
from headwater.model import Position
from headwater.pipeline.lake import delta, retention, snapshots
from headwater.pipeline.lake.retention import RetentionFloor
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.lake import Lake

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Trimmed(msgspec.Struct, frozen=True):
    """What was removed. `since` is the first day that is left, None if nothing was ever removed.
    `held` are the tables whose older events stay because they have no later snapshot."""

    since: date | None
    days: int = 0
    snapshots: int = 0
    held: tuple[str, ...] = ()


class _Old(msgspec.Struct, frozen=True):
    """The events of a table on one day. `open` are those of their transactions that were still
    running at a snapshot of the table."""

    relation: int
    day: date
    log: str
    last_xid: int
    last_at: datetime
    open: tuple[int, ...]
    position: str

    def is_in(self, snapshot: TableSnapshot) -> bool:
        if snapshot.position.log != self.log:
            return snapshot.taken_at >= self.last_at
        was_open = set(self.open) & set(snapshot.position.xip)
        return snapshot.position.contains(self.last_xid) and not was_open


def trim(
    lake: Lake,
    keep: timedelta,
    *,
    captured: Collection[int] | None = None,
    now: datetime | None = None,
) -> Trimmed:
    """Remove events that are older than `keep`. `captured` are the captured tables, None if they
    are unknown. A table that is no longer captured, and whose state is unknown anyway, does not
    prevent removal."""
    horizon = ((now or datetime.now(UTC)) - keep).date()
    known = retention.load(lake.root)
    thinned = thin(lake, now or datetime.now(UTC))
    old = _old_events(lake, horizon)
    if not old:
        return Trimmed(None if known is None else known.day, snapshots=thinned)
    missing = _without_snapshot(lake, old, captured)
    held = {each.relation for each in missing}
    day = min((each.day for each in missing), default=horizon)
    gone = [each for each in old if each.day < day]
    forgotten = _remove(lake, day, gone, known) if gone else 0
    after = retention.load(lake.root)
    days = len({each.day for each in gone})
    labels = tuple(sorted(map(lake.label_of, held)))
    return Trimmed(None if after is None else after.day, days, thinned + forgotten, labels)


def _without_snapshot(
    lake: Lake, old: Sequence[_Old], captured: Collection[int] | None
) -> list[_Old]:
    """Old events that no snapshot of their table has, after snapshots were computed where the
    events allow it."""
    missing = _not_in_last(lake, old)
    for relation in {each.relation for each in missing}:
        try:
            reached = lake.reached()
            if reached is not None:
                lake.fold_relation(relation, reached)
        except ResyncRequired:
            # The state of the table is unknown, and no snapshot will be read from it again.
            if captured is not None and relation not in captured:
                missing = [each for each in missing if each.relation != relation]
    return _not_in_last(lake, missing)


def _not_in_last(lake: Lake, old: Iterable[_Old]) -> list[_Old]:
    last = {each.relation: each for each in snapshots.load(lake.places)}
    return [
        each for each in old if each.relation not in last or not each.is_in(last[each.relation])
    ]


def _old_events(lake: Lake, horizon: date) -> list[_Old]:
    from pyspark.sql import functions as f

    if delta.open_table(lake.events_path) is None:
        return []
    xips = {xid for each in snapshots.load(lake.places) for xid in each.position.xip}
    events: DataFrame = lake.events(last=horizon - timedelta(days=1))
    log = f.substring_index("position", "-", 1)
    was_open = f.when(f.col("xid").isin(list(xips)), f.col("xid"))
    rows = events.groupBy("relation", "day", log.alias("log")).agg(
        f.max("xid").alias("last_xid"),
        f.unix_micros(f.max("committed_at")).alias("last_at"),
        f.collect_set(was_open).alias("open"),
        f.max_by("position", f.struct(_xmax("position"), "seq")).alias("position"),
    )
    return [_old(row.asDict()) for row in rows.collect()]


def _old(row: dict[str, object]) -> _Old:
    micros = row["last_at"]
    assert isinstance(micros, int)
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
    return msgspec.convert(row | {"last_at": at}, _Old)


def _xmax(position: str) -> Column:
    from pyspark.sql import functions as f

    return f.split(position, ":")[1].cast("long")


def _remove(lake: Lake, day: date, gone: Sequence[_Old], known: RetentionFloor | None) -> int:
    """Write the new floor, then remove."""
    ends = {} if known is None else {Position.parse(p).log: p for p in known.positions}
    for each in sorted(gone, key=lambda each: Position.parse(each.position).xmax):
        ends[each.log] = _later(ends.get(each.log), each.position)
    start = max(day, known.day) if known else day
    written = RetentionFloor(start, tuple(ends.values()))
    retention.save(lake.root, written)
    useless = [each for each in snapshots.load(lake.places) if not _serves(each, gone)]
    snapshots.remove(lake.places, useless)
    table = DeltaTable(lake.events_path)
    table.delete(f"day < '{day.isoformat()}'", commit_properties=delta.carrying(table))
    return len(useless)


def _later(one: str | None, other: str) -> str:
    if one is None or Position.parse(other).covers(Position.parse(one)):
        return other
    return one


def _serves(snapshot: TableSnapshot, gone: Iterable[_Old]) -> bool:
    """Whether the snapshot can be used without the events that are removed."""
    return all(each.is_in(snapshot) for each in gone if each.relation == snapshot.relation)


def thin(lake: Lake, now: datetime) -> int:
    """Delete older snapshots that were computed from events, except the last one of each day."""
    before = (now - timedelta(days=limits.LAKE_SNAPSHOTS_DENSE_DAYS)).date()
    last: dict[tuple[int, date], TableSnapshot] = {}
    taken = snapshots.load(lake.places)
    for each in taken:
        last[each.relation, each.taken_at.date()] = each
    surplus = [
        each
        for each in taken
        if each.origin == "events"
        and each.taken_at.date() < before
        and last[each.relation, each.taken_at.date()] is not each
    ]
    snapshots.remove(lake.places, surplus)
    return len(surplus)
