"""Removes old events from the lake, and snapshots that are no longer needed.

Whole days are removed, and only days whose every change is in a later snapshot of its table, up to
which the lake has every change itself: one beyond that may follow a gap that is not recorded yet.
Only files that were looked at are removed: a stream that is behind writes others of the same days.
The order makes an answer right or refused at any time, also after a crash: first the new floor is
written (`retention`), then snapshots that depend on removed events are deleted, then the events.
The audit roll-ups stay.

Of older snapshots that were computed from events, one for each day and table stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from deltalake import DeltaTable

from headwater import limits
from headwater.errors import ResyncRequired, Unavailable
from headwater.model import Position
from headwater.pipeline.lake import delta, gaps, retention, snapshots
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.retention import RetentionFloor
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.lake.stored_files import exchange, stored_files
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.offsets import Offset

if TYPE_CHECKING:
    from pyspark.sql import Column


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
    lake = Lake(lake.root, lake.spark)  # without the log
    old = _old_events(lake, horizon)
    unknown = _fold(lake, old.missing) if old is not None else set()
    if old is not None and old.missing:
        old = _old_events(lake, horizon)
    if old is None or not old.events:
        return Trimmed(None if known is None else known.day, snapshots=thinned)
    # No snapshot will be read again from a table that is no longer captured.
    lost = set() if captured is None else unknown.difference(captured)
    missing = [each for each in old.missing if each.relation not in lost]
    held = {each.relation for each in missing}
    day = min((each.day for each in missing), default=horizon)
    gone = [each for each in old.events if each.day < day]
    forgotten = _remove(lake, old.table, day, gone, known) if gone else 0
    after = retention.load(lake.root)
    days = len({each.day for each in gone})
    labels = tuple(sorted(map(lake.label_of, held)))
    return Trimmed(None if after is None else after.day, days, thinned + forgotten, labels)


class _OldEvents(NamedTuple):
    """The old events of the version that `table` is at. `missing` are those that are in no snapshot
    of their table up to which the lake has every change."""

    table: DeltaTable
    events: list[_Old]
    missing: list[_Old]


def _old_events(lake: Lake, horizon: date) -> _OldEvents | None:
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.types import from_arrow_schema

    table = delta.open_table(lake.events_path)
    if table is None:
        return None
    last = _last(lake, table)
    xips = {xid for each in last.values() for xid in each.position.xip}
    where = f"day < '{horizon.isoformat()}'"
    schema = from_arrow_schema(STORED_EVENTS)
    events = delta.read(lake.spark, lake.events_path, schema, where, table=table)
    log = f.substring_index("position", "-", 1)
    was_open = f.when(f.col("xid").isin(list(xips)), f.col("xid"))
    rows = events.groupBy("relation", "day", log.alias("log")).agg(
        f.max("xid").alias("last_xid"),
        f.unix_micros(f.max("committed_at")).alias("last_at"),
        f.collect_set(was_open).alias("open"),
        f.max_by("position", f.struct(_xmax("position"), "seq")).alias("position"),
    )
    old = [_old(row.asDict()) for row in rows.collect()]
    missing = [
        each for each in old if each.relation not in last or not each.is_in(last[each.relation])
    ]
    return _OldEvents(table, old, missing)


def _last(lake: Lake, events: DeltaTable) -> dict[int, TableSnapshot]:
    """The last snapshot of each table up to which the lake has every change, also after a restore
    of the database: then the gap before it is recorded."""
    text = delta.offset_of(events)
    if text is None:
        return {}
    reached = Offset.from_dict(msgspec.json.decode(text)).position
    ended = {gap.since.log for gap in gaps.load(lake.gaps_path)} - {reached.log}
    return {
        each.relation: each
        for each in snapshots.load(lake.places)
        if each.position.log in ended or reached.covers(each.position)
    }


def _fold(lake: Lake, missing: Iterable[_Old]) -> set[int]:
    """Compute snapshots of tables from the events. Returns the tables whose state is unknown."""
    reached, unknown = lake.reached(), set()
    for relation in {each.relation for each in missing} if reached is not None else ():
        assert reached is not None
        try:
            lake.fold_relation(relation, reached)
        except ResyncRequired:
            unknown.add(relation)
        except Unavailable:  # the lake has not come to the first snapshot of the table yet
            continue
    return unknown


def _old(row: dict[str, object]) -> _Old:
    micros = row["last_at"]
    assert isinstance(micros, int)
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
    return msgspec.convert(row | {"last_at": at}, _Old)


def _xmax(position: str) -> Column:
    from pyspark.sql import functions as f

    return f.split(position, ":")[1].cast("long")


def _remove(
    lake: Lake, table: DeltaTable, day: date, gone: Sequence[_Old], known: RetentionFloor | None
) -> int:
    """Write the new floor, then remove."""
    files = [each for each in stored_files(table) if each.day is not None and each.day < day]
    ends = {} if known is None else {Position.parse(p).log: p for p in known.positions}
    for each in sorted(gone, key=lambda each: Position.parse(each.position).xmax):
        ends[each.log] = _later(ends.get(each.log), each.position)
    start = max(day, known.day) if known else day
    written = RetentionFloor(start, tuple(ends.values()))
    retention.save(lake.root, written)
    useless = [each for each in snapshots.load(lake.places) if not _serves(each, gone)]
    snapshots.remove(lake.places, useless)
    exchange(table, files, (), "removed")
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
