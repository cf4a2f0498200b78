"""How long the lake keeps events, and which snapshots it needs no more.

Whole days are removed, and only those whose every change is in a later snapshot of its table: what
comes after can be worked out without them. What was removed is written down first, then the
snapshots that lead through it are forgotten, then the events go: so an answer is right or refused,
whenever somebody asks and wherever a crash comes. The roll-ups of the audit stay.

Snapshots made from events could be made again: of older ones, one for each day stays.
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
from headwater.pipeline import delta, snapshots
from headwater.pipeline.files import Place
from headwater.pipeline.snapshots import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from headwater.pipeline.lake import Lake
    from headwater.pipeline.state import Moment

_FILE = "_retention"


class Floor(msgspec.Struct, frozen=True):
    """Events before this day may be gone. Every one of them is in these positions, one for each
    log."""

    day: date
    positions: tuple[str, ...]

    def check(self, when: Moment) -> None:
        """ResyncRequired for a moment that events may be missing for."""
        start = datetime.combine(self.day, datetime.min.time(), UTC)
        if isinstance(when, datetime):
            kept = when >= start
        else:
            ends = map(Position.parse, self.positions)
            kept = all(when.covers(end) for end in ends if end.log == when.log)
        if not kept:
            raise ResyncRequired(
                f"the lake's retention is over for {when}: the earliest moment that it knows is"
                f" {start:%Y-%m-%d %H:%M} UTC",
                hint="A longer lake_retention keeps more from now on.",
            )


def floor(root: str) -> Floor | None:
    """How far back the lake goes; None for a lake that was never trimmed."""
    place = Place.of(root)
    return msgspec.json.decode(place.read(_FILE), type=Floor) if place.exists(_FILE) else None


class Trimmed(msgspec.Struct, frozen=True):
    """What was removed. `since` is the first day that is left, None if nothing was ever removed;
    `held` are tables that keep older days, because no snapshot of them is later."""

    since: date | None
    days: int = 0
    snapshots: int = 0
    held: tuple[str, ...] = ()


class _Old(msgspec.Struct, frozen=True):
    """The events of a table in a day: `open` are those of their transactions that were open at one
    of its snapshots."""

    relation: int
    day: date
    log: str
    last_xid: int
    last_at: datetime
    open: tuple[int, ...]
    position: str

    def is_in(self, snapshot: Snapshot) -> bool:
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
    """Remove what is older. A table that is not among those `captured` (None for not known) and
    whose state is not known anyway holds nothing back."""
    horizon = ((now or datetime.now(UTC)) - keep).date()
    known = floor(lake.root)
    thinned = thin(lake, now or datetime.now(UTC))
    old = _old_events(lake, horizon)
    if not old:
        return Trimmed(None if known is None else known.day, snapshots=thinned)
    missing = _without_snapshot(lake, old, captured)
    held = {each.relation for each in missing}
    day = min((each.day for each in missing), default=horizon)
    gone = [each for each in old if each.day < day]
    forgotten = _remove(lake, day, gone, known) if gone else 0
    after = floor(lake.root)
    days = len({each.day for each in gone})
    labels = tuple(sorted(map(lake.label_of, held)))
    return Trimmed(None if after is None else after.day, days, thinned + forgotten, labels)


def _without_snapshot(
    lake: Lake, old: Sequence[_Old], captured: Collection[int] | None
) -> list[_Old]:
    """Old events that no snapshot of their table has. Where one can be made of events, it is."""
    missing = _not_in_last(lake, old)
    for relation in {each.relation for each in missing}:
        try:
            reached = lake.reached()
            if reached is not None:
                lake.fold_relation(relation, reached)
        except ResyncRequired:
            # Its state is not known since some break, and nobody will read the table again.
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


def _remove(lake: Lake, day: date, gone: Sequence[_Old], known: Floor | None) -> int:
    """First it is said, then done."""
    ends = {} if known is None else {Position.parse(p).log: p for p in known.positions}
    for each in sorted(gone, key=lambda each: Position.parse(each.position).xmax):
        ends[each.log] = _later(ends.get(each.log), each.position)
    start = max(day, known.day) if known else day
    written = Floor(start, tuple(ends.values()))
    Place.of(lake.root).write(_FILE, msgspec.json.encode(written))
    useless = [each for each in snapshots.load(lake.places) if not _serves(each, gone)]
    snapshots.remove(lake.places, useless)
    table = DeltaTable(lake.events_path)
    table.delete(f"day < '{day.isoformat()}'", commit_properties=delta.carrying(table))
    return len(useless)


def _later(one: str | None, other: str) -> str:
    if one is None or Position.parse(other).covers(Position.parse(one)):
        return other
    return one


def _serves(snapshot: Snapshot, gone: Iterable[_Old]) -> bool:
    """Whether no event that goes is needed to go on from the snapshot."""
    return all(each.is_in(snapshot) for each in gone if each.relation == snapshot.relation)


def thin(lake: Lake, now: datetime) -> int:
    """Forget older snapshots that were made from events, but for the last of each day."""
    before = (now - timedelta(days=limits.LAKE_SNAPSHOTS_DENSE_DAYS)).date()
    last: dict[tuple[int, date], Snapshot] = {}
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
