"""The state of a table at a moment: a snapshot, and the changes between the two.

A snapshot and a moment are each a set of transactions. Transactions of the moment that the snapshot
lacks are applied (the latest image per key by `seq`). Transactions of the snapshot that the moment
lacks are undone (the earliest before-image per key). So a snapshot can be used for moments before
and after it, and no transaction is split. The nearest snapshot below the moment is tried first,
then the nearest above. Some events in between are obstacles:

- A `reset` means that rows changed without changes in the log. No state is computed across it.
- A `truncate` can be applied, but not undone. It is a snapshot without rows for moments after it.
- A schema change may rewrite rows (a default, `using …`) without changes in the log. A snapshot on
  the same side of it is preferred, and nothing is undone across it. Otherwise rows are carried
  forward across it by the names of their columns, if no value can have changed. An added column is
  NULL. A renamed column is recognised by its place and type.

Without a usable snapshot, `ResyncRequired` says to make one. A schema change takes effect with the
first change written under it. A dropped table keeps its last state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from headwater.errors import ResyncRequired
from headwater.model import Column, Position, Table
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.lake.moments import (
    Moment,
    contained_sql,
    in_utc,
    instant,
    of_log_sql,
    shifted,
    within_sql,
)
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.event_query import KEY, AnswerRow, EventQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation

Days: TypeAlias = tuple[date | None, date | None]
"""The first and the last day; None for no bound."""

_LAKE_XIDS_LISTED_MAX = 100
"""Transactions that were open at a snapshot and are looked for one by one. Beyond, everything since
the oldest of them is read."""

_LAKE_RANGES_MAX = 100
"""Tables, or ranges of tables, whose changes are looked for one by one."""


_UNDONE = 2**62
"""Above every `seq`, so that the earliest of the changes to be undone ranks first."""


# ------------------------------------------------------------------------ moments


def is_below(snapshot: TableSnapshot, when: Moment) -> bool:
    """Whether every transaction of the snapshot is in the moment too."""
    if isinstance(when, Position):
        return when.covers(snapshot.position)
    return snapshot.taken_at <= when


def is_above(snapshot: TableSnapshot, when: Moment) -> bool:
    """Whether the snapshot is later than the moment."""
    if isinstance(when, Position):
        return snapshot.position.covers(when)
    return snapshot.taken_at > when


def nearest(snapshots: Sequence[TableSnapshot], when: Moment) -> list[TableSnapshot]:
    """The snapshots to try: the last one below the moment, then the first one above it. A snapshot
    of another log is neither: the database was restored, or Headwater was installed again."""
    below = [each for each in snapshots if is_below(each, when)]
    above = [each for each in snapshots if each not in below and is_above(each, when)]
    return [*below[-1:], *above[:1]]


def days(snapshot: TableSnapshot, snapshots: Sequence[TableSnapshot], when: Moment) -> Days:
    """The days of changes between a snapshot and a moment.

    The time of a transaction may be well before a snapshot that does not contain it, because it was
    still running. It began after every snapshot whose `xmax` is below the oldest running one.
    """
    ends = (snapshot.position, when) if isinstance(when, Position) else (snapshot.position,)
    if snapshot.origin == "truncate":
        return (snapshot.taken_at - timedelta(days=1)).astimezone(UTC).date(), None
    oldest = min(position.xmin for position in ends)
    done = [each.taken_at for each in snapshots if each.position.xmax <= oldest]
    first = max(done, default=None)
    if first is not None and isinstance(when, datetime):
        first = min(first, when)
    tops = [snapshot.taken_at]
    if isinstance(when, datetime):
        tops.append(when)
    else:
        later = [each.taken_at for each in snapshots if each.position.covers(when)]
        tops = [*tops, later[0]] if later else []
    # A clock may be set back a little, and midnight be near.
    margin = timedelta(hours=1)
    return (
        in_utc(shifted(first, -margin)).date() if first else None,
        in_utc(shifted(max(tops), margin)).date() if tops else None,
    )


# ------------------------------------------------------------------------ sets of transactions


def bounds(snapshot: TableSnapshot, when: Moment) -> str:
    """A condition on every change between a snapshot and a moment, in SQL that Spark and delta-rs
    both read: files without such changes are skipped. It may be true too often; it must never be
    false for such a change."""
    return f"relation = {snapshot.relation} and ({_bounds(snapshot, when)})"


def _bounds(snapshot: TableSnapshot, when: Moment) -> str:
    position = snapshot.position
    if isinstance(when, Position):
        plans = []
        if not position.covers(when):
            plans.append(f"(({lacked(position)}) and xid < {when.xmax})")
        if not when.covers(position):
            plans.append(f"(({lacked(when)}) and xid < {position.xmax})")
        return " or ".join(plans) or "xid < 0"
    low, high = min(when, snapshot.taken_at), max(when, snapshot.taken_at)
    return (
        f"(committed_at <= '{_instant(when, 1)}' and ({lacked(position)}))"
        f" or (committed_at >= '{_instant(when, -1)}' and xid < {position.xmax})"
        # Of another log, whose transactions have other numbers.
        f" or (committed_at >= '{_instant(low, -1)}' and committed_at <= '{_instant(high, 1)}')"
    )


def missing_from_all(positions: Mapping[int, Position]) -> str:
    """The changes of tables that their positions lack, in the same SQL. Of many tables, those with
    neighbouring numbers are a range, with the changes after the oldest of its positions: files that
    were joined have few tables each."""
    tables = sorted(positions)
    size = -(-len(tables) // _LAKE_RANGES_MAX)
    if size <= 1:
        return " or ".join(f"(relation = {t} and ({lacked(positions[t])}))" for t in tables)
    ranges = (tables[at : at + size] for at in range(0, len(tables), size))
    return " or ".join(
        f"(relation >= {each[0]} and relation <= {each[-1]}"
        f" and xid >= {min(positions[t].xmin for t in each)})"
        for each in ranges
    )


def counted_after(events: DataFrame, positions: Mapping[int, Position]) -> DataFrame:
    """The changes of tables that their positions lack, counted by table, shape and operation, with
    their first and last transaction."""
    import pyarrow as pa
    from pyspark.sql import functions as f

    columns = {
        "relation": pa.array(positions, pa.int64()),
        "xmax": pa.array((each.xmax for each in positions.values()), pa.int64()),
        "xip": pa.array((each.xip for each in positions.values()), pa.list_(pa.int64())),
    }
    begun = events.sparkSession.createDataFrame(pa.table(columns))
    oldest = min(each.xmin for each in positions.values())
    return (
        events.filter(f"xid >= {oldest}")
        .join(f.broadcast(begun), "relation")
        .filter("xid >= xmax or array_contains(xip, xid)")
        .groupBy("relation", "shape", "op")
        .agg(
            f.count("*").alias("changes"),
            f.min("xid").alias("first_xid"),
            f.max("xid").alias("last_xid"),
        )
    )


def lacked(position: Position) -> str:
    """The transactions that a position does not contain."""
    if len(position.xip) > _LAKE_XIDS_LISTED_MAX:
        return f"xid >= {position.xmin}"
    return " or ".join([f"xid >= {position.xmax}", *(f"xid = {xid}" for xid in position.xip)])


def _instant(at: datetime, milliseconds: int) -> str:
    """Delta may cut the bounds of times to milliseconds: so one millisecond is added."""
    return instant(shifted(at, timedelta(milliseconds=milliseconds)))


class ChangesBetween(msgspec.Struct, frozen=True):
    """The changes between a snapshot and a moment, in SQL over events. `forward` says which ones to
    apply; the others are undone. Changes of another log have the `op` reset: the database was
    restored in between."""

    where: str
    forward: str
    op: str


def between(snapshot: TableSnapshot, when: Moment) -> ChangesBetween:
    own = of_log_sql(snapshot.position.log)
    forward = within_sql(when)
    apart = f"({own} and {forward} <> {contained_sql(snapshot.position)})"
    if isinstance(when, datetime):
        apart += f" or (not {own} and {forward} <> {within_sql(snapshot.taken_at)})"
    where = f"({bounds(snapshot, when)}) and ({apart})"
    return ChangesBetween(where, forward, f"(case when {own} then op else 'reset' end)")


def between_frame(events: DataFrame, snapshot: TableSnapshot, when: Moment) -> DataFrame:
    """The same in Spark, with the columns `forward` and `op`."""
    from pyspark.sql import functions as f

    found = between(snapshot, when)
    columns = {"forward": f.expr(found.forward), "op": f.expr(found.op)}
    return events.filter(found.where).withColumns(columns)


# ------------------------------------------------------------------------ plans


class ChangeSummary(msgspec.Struct, frozen=True):
    """Changes between a snapshot and a moment: of one direction, operation and shape."""

    forward: bool
    op: str
    shape: int
    first: int
    last: int


def summary(
    snapshot: TableSnapshot, when: Moment, days: Days, explained: Collection[int] = ()
) -> EventQuery:
    """The changes by direction, operation and shape: each row of the answer is a `ChangeSummary`.
    Resets that are `explained` are left out."""
    found = between(snapshot, when)
    where = [found.where]
    if explained:
        numbers = ", ".join(map(str, sorted(explained)))
        where.append(f"not (op = 'reset' and seq in ({numbers}))")
    if snapshot.origin == "truncate":
        where.append(f"seq >= {snapshot.snapshot}")
    return EventQuery(
        relations=(snapshot.relation,),
        where=tuple(where),
        columns={
            "forward": found.forward,
            "op": f"(case when {found.op} in ('truncate', 'reset') then {found.op} else 'row' end)",
            "shape": "shape",
        },
        spans=True,
        days=days,
        among=bounds(snapshot, when),
    )


def shape_at(snapshot: TableSnapshot, when: Moment) -> EventQuery:
    """The shape of the last change up to the moment."""
    return EventQuery(
        relations=(snapshot.relation,),
        where=(of_log_sql(snapshot.position.log), within_sql(when)),
        columns={"shape": "shape", "seq": "seq"},
        order=("-seq",),
        limit=1,
    )


def last_truncate(relation: int, when: Moment) -> EventQuery:
    """The last truncate of a table up to a moment."""
    own_log = (of_log_sql(when.log),) if isinstance(when, Position) else ()
    return EventQuery(
        relations=(relation,),
        where=(*own_log, within_sql(when), "op = 'truncate'"),
        columns={name: name for name in ("seq", "shape", "committed_at", "position")},
        order=("-committed_at", "-seq"),
        limit=1,
        among=f"relation = {relation} and op = 'truncate'",
    )


def emptied(relation: int, truncate: AnswerRow) -> TableSnapshot:
    """A truncate as a snapshot without rows. Its number is that of the truncate: later changes are
    applied to it, and it has the transactions of none."""
    log = truncate["position"].partition("-")[0]
    return TableSnapshot(
        relation,
        truncate["seq"],
        Position(log, 1, 1),
        truncate["committed_at"].astimezone(UTC),
        truncate["shape"],
        0,
        "truncate",
    )


class StatePlan(msgspec.Struct, frozen=True):
    """How the state at a moment is computed from a snapshot."""

    snapshot: TableSnapshot
    shape: int
    """The table's shape at the moment."""
    passed: tuple[int, ...]
    """The shapes in between, in order; the last is `shape`."""
    truncated: int = 0
    """The `seq` of the last truncate to apply; earlier changes do not count."""
    obstacle: str = ""
    """Why this snapshot cannot be used."""


def plan(snapshot: TableSnapshot, spans: Iterable[ChangeSummary]) -> StatePlan:
    """The plan for a snapshot and the changes after it."""
    found = sorted(spans, key=lambda span: span.last)
    applied = [span for span in found if span.forward]
    undone = [span for span in found if not span.forward]
    obstacle = ""
    if any(span.op == "reset" for span in found):
        obstacle = "rows changed in between without changes in the log (a reset)"
    elif any(span.op == "truncate" for span in undone):
        obstacle = "the table was truncated in between, which cannot be undone"
    elif any(span.shape != snapshot.shape for span in undone):
        obstacle = "the table was altered in between"
    passed = tuple(dict.fromkeys([snapshot.shape, *(span.shape for span in applied)]))
    last = applied[-1].shape if applied else snapshot.shape
    truncated = max((span.last for span in applied if span.op == "truncate"), default=0)
    ordered = (*(shape for shape in passed if shape != last), last)
    return StatePlan(snapshot, last, ordered, truncated, obstacle)


def is_unaltered_since(snapshot: TableSnapshot, when: Moment) -> bool:
    """Whether it is known that a table was not altered between a moment and a later snapshot."""
    return (
        isinstance(when, Position)
        and snapshot.altered_in is not None
        and when.log == snapshot.position.log
        and when.contains(snapshot.altered_in)
    )


def check_shape(found: StatePlan, shape: int | None, when: Moment) -> StatePlan:
    """The plan for a snapshot above, given the table's shape at the moment: changes are undone
    under one shape only, and not before the first captured change."""
    if found.obstacle or shape == found.snapshot.shape:
        return found
    if shape is not None and is_unaltered_since(found.snapshot, when):
        return found
    obstacle = "it was not captured yet" if shape is None else "the table was altered in between"
    return msgspec.structs.replace(found, obstacle=obstacle)


def outside_gaps(found: StatePlan, gaps: Iterable[LakeGap], when: Moment) -> StatePlan:
    """The plan, with an obstacle if a gap lies between the snapshot and the moment."""
    for gap in gaps:
        if not _same_side(gap, found.snapshot, when):
            return msgspec.structs.replace(found, obstacle=str(gap))
    return found


def _same_side(gap: LakeGap, snapshot: TableSnapshot, when: Moment) -> bool:
    begin = snapshot.taken_at if snapshot.origin == "truncate" else snapshot.position
    if gap.is_before(when):
        return gap.is_before(begin)
    return gap.is_after(when) and gap.is_after(begin)


def choose(plans: Sequence[StatePlan], label: str, when: Moment) -> StatePlan:
    """The first plan without an obstacle and without a schema change, else the first without an
    obstacle. ResyncRequired if there is none."""
    possible = [each for each in plans if not each.obstacle]
    same = [each for each in possible if len(each.passed) == 1]
    for each in [*same, *possible]:
        return each
    reason = plans[0].obstacle if plans else "the lake has no snapshot of it"
    moment = when if isinstance(when, Position) else f"{when:%Y-%m-%d %H:%M:%S %Z}"
    raise ResyncRequired(
        f"the state of {label} at {moment} is not known: {reason}",
        hint="Make a snapshot, for moments since the last reset or schema change: "
        f"headwater pipeline snapshot {label}",
    )


# ------------------------------------------------------------------------ folding


class FoldedChanges(msgspec.Struct, frozen=True):
    """The changes that make a state, in SQL. Of a row, the image with the highest `rank` counts.
    The snapshot's has the rank 0."""

    where: str
    image: str
    rank: str


def folded(chosen: StatePlan, forward: str = "forward", op: str = "op") -> FoldedChanges:
    return FoldedChanges(
        f"({op} in ('insert', 'update', 'delete') and (not {forward} or seq > {chosen.truncated}))",
        f"(case when {forward} then after else before end)",
        f"(case when {forward} then seq else {_UNDONE} - seq end)",
    )


def fold(
    rows: DataFrame, changes: DataFrame, chosen: StatePlan, check: Observation | None = None
) -> DataFrame:
    """`key`, `image` and `shape` of the rows at the moment. `rows` are the snapshot's. `check`
    counts the keys (`differing`) whose first change began with another image than the snapshot's:
    such a row was written without a change in the log."""
    from pyspark.sql import functions as f

    if check is not None:
        return _checked_fold(rows, changes, chosen, check)

    found = folded(chosen)
    effective = changes.filter(found.where).select(
        "key", f.expr(found.image).alias("image"), "shape", f.expr(found.rank).alias("rank")
    )
    unchanged = rows.select("key", "image", "shape", f.lit(0).cast("long").alias("rank"))
    everything = effective if chosen.truncated else unchanged.unionByName(effective)
    latest = f.max_by(f.struct("image", "shape"), "rank").alias("row")
    return (
        everything.groupBy("key")
        .agg(latest)
        .filter("row.image is not null")
        .select("key", "row.image", "row.shape")
    )


def _checked_fold(
    rows: DataFrame, changes: DataFrame, chosen: StatePlan, check: Observation
) -> DataFrame:
    from pyspark.sql import functions as f

    found = folded(chosen)
    effective = changes.filter(f"forward and {found.where}").select(
        "key",
        f.col("after").alias("image"),
        "shape",
        f.col("seq").alias("rank"),
        f.coalesce("before", f.lit("")).alias("first"),
    )
    unchanged = rows.select(
        "key",
        "image",
        "shape",
        f.lit(0).cast("long").alias("rank"),
        f.lit(None).cast("string").alias("first"),
    )
    grouped = (
        unchanged.unionByName(effective)
        .groupBy("key")
        .agg(
            f.max_by(f.struct("image", "shape"), "rank").alias("row"),
            f.min_by("first", f.when(f.col("rank") > 0, f.col("rank"))).alias("first"),
            f.max(f.when(f.col("rank") == 0, f.col("image"))).alias("stored"),
        )
    )
    differs = "first is not null and first <> coalesce(stored, '')"
    return (
        grouped.observe(check, f.count_if(f.expr(differs)).alias("differing"))
        .filter("row.image is not null")
        .select("key", "row.image", "row.shape")
    )


def changed_rows(chosen: StatePlan, when: Moment, days: Days, key: str | None = None) -> EventQuery:
    """The changes that `fold_rows` needs; of one row only the one with the highest rank."""
    snapshot = chosen.snapshot
    apart = between(snapshot, when)
    found = folded(chosen, apart.forward, apart.op)
    own = () if key is None else (f"key = {KEY}",)
    return EventQuery(
        relations=(snapshot.relation,),
        where=(apart.where, found.where, *own),
        columns={"key": "key", "image": found.image, "shape": "shape", "rank": found.rank},
        order=("-rank",),
        limit=None if key is None else 1,
        days=days,
        among=" and ".join([bounds(snapshot, when), *own]),
        key=key,
    )


def fold_rows(
    rows: Iterable[AnswerRow], changes: Iterable[AnswerRow], chosen: StatePlan
) -> list[AnswerRow]:
    """The same as `fold`, for few rows."""
    latest: dict[str, AnswerRow] = {}
    unchanged = () if chosen.truncated else ({**row, "rank": 0} for row in rows)
    for each in (*unchanged, *changes):
        known = latest.get(each["key"])
        if known is None or each["rank"] > known["rank"]:
            latest[each["key"]] = each
    return [row for row in latest.values() if row["image"] is not None]


# ------------------------------------------------------------------------ schema changes


def names_of(passed: Sequence[Table]) -> dict[int, dict[str, str]]:
    """For each shape: the names that the columns of the last shape have in it, from the first time
    that the table had it on. ResyncRequired where a value may have changed without a change in the
    log."""
    names: dict[int, dict[str, str]] = {}
    for place, table in enumerate(passed[:-1]):
        steps = [step(a, b) for a, b in zip(passed[place:], passed[place + 1 :], strict=False)]
        names.setdefault(table.id, reduce(_through, reversed(steps)))
    return names


def _through(later: Mapping[str, str], earlier: Mapping[str, str]) -> dict[str, str]:
    return {name: earlier[old] for name, old in later.items() if old in earlier}


def step(before: Table, after: Table) -> dict[str, str]:
    """The names that the columns of `after` have in `before`; without new columns.

    >>> integer = lambda name: Column(name, "integer", "integer")
    >>> table = lambda *names: Table(1, "public", "t", tuple(map(integer, names)), ("id",))
    >>> step(table("id", "a", "b"), table("id", "x", "b", "c"))
    {'id': 'id', 'b': 'b', 'x': 'a'}
    """
    old = {column.name: column for column in before.columns}
    names = {column.name: column.name for column in after.columns if column.name in old}
    new = {column.name for column in after.columns}
    # A dropped and an added column have different places, unless the last column was dropped and
    # another one of its type was added: that counts as a new name.
    for a, b in zip(before.columns, after.columns, strict=False):
        if a.name not in new and b.name not in old and a.declared == b.declared:
            names[b.name] = a.name
    for column in after.columns:
        source = old.get(names.get(column.name, ""))
        if source is not None and not _keeps_values(source, column):
            raise _rewritten(after, f"{column.name} became {column.declared}")
    if tuple(names.get(name) for name in after.key) != before.key or before.key != after.key:
        raise _rewritten(after, "its primary key was altered")
    return names


def _keeps_values(before: Column, after: Column) -> bool:
    """Whether the change of type, without a `using`, leaves the text of every value the same."""
    if before.declared == after.declared:
        return True
    if before.type in _INTEGERS and after.type in _INTEGERS:
        return _INTEGERS.index(before.type) <= _INTEGERS.index(after.type)
    if before.type in (*_INTEGERS, "numeric"):
        return after.declared == "numeric"
    return before.type in _TEXTS and after.type == "text"


_INTEGERS = ("smallint", "integer", "bigint")
_TEXTS = ("character varying", "text")


def _rewritten(table: Table, what: str) -> ResyncRequired:
    return ResyncRequired(
        f"{table.label} was altered, and its rows may have changed without changes in the log:"
        f" {what}",
        hint=f"Make a snapshot, for moments since then: headwater pipeline snapshot {table.label}",
    )
