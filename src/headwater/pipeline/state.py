"""The state of a table at a moment: a snapshot, and the changes between the two.

A snapshot and a moment are each a set of transactions. Those of the moment that the snapshot lacks
are applied, latest image per key by `seq`; those of the snapshot that the moment lacks are undone,
earliest before-image per key. So a snapshot serves the time before it as well as the time after,
and no transaction is ever split. The snapshot nearest below the moment is tried first, then the one
nearest above; neither may have something in between that the rows of the log do not tell:

- a `reset`: rows came or went that no change speaks of. Nothing is carried across one.
- a `truncate` cannot be undone; it can be applied.
- a schema change may rewrite rows (a default, `using …`) without a word in the log. A snapshot on
  the same side of it is preferred, and nothing is undone across it. Where there is none, rows are
  carried forward across it by the names of their columns if no value could have changed by that; a
  column added is NULL, and one that only changed its name is recognised by its place and type.

Where nothing serves, that is `ResyncRequired` with the way out: a snapshot of the table. A schema
change counts from the first change written under it; a dropped table keeps its last state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from headwater import limits
from headwater.errors import ResyncRequired
from headwater.model import Column, Position, Table
from headwater.pipeline.snapshots import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

Moment: TypeAlias = datetime | Position
"""An instant, or a position. One without a time zone is in UTC."""

_UNDONE = 2**62
"""Above every `seq`, so that the earliest of the changes to be undone ranks first."""


# ------------------------------------------------------------------------ moments


def aware(when: Moment) -> Moment:
    """The moment with its time zone."""
    if isinstance(when, Position) or when.tzinfo is not None:
        return when
    return when.replace(tzinfo=UTC)


def is_below(snapshot: Snapshot, when: Moment) -> bool:
    """Whether every transaction of the snapshot is in the moment too."""
    if isinstance(when, Position):
        return when.covers(snapshot.position)
    return snapshot.taken_at <= when


def is_above(snapshot: Snapshot, when: Moment) -> bool:
    """Whether the snapshot is later than the moment."""
    if isinstance(when, Position):
        return snapshot.position.covers(when)
    return snapshot.taken_at > when


def nearest(snapshots: Sequence[Snapshot], when: Moment) -> list[Snapshot]:
    """Those to try: the last one below the moment, then the first one above it. Positions of
    another log are neither: the database was restored, or installed anew."""
    below = [each for each in snapshots if is_below(each, when)]
    above = [each for each in snapshots if each not in below and is_above(each, when)]
    return [*below[-1:], *above[:1]]


def days(
    snapshot: Snapshot, snapshots: Sequence[Snapshot], when: Moment
) -> tuple[date | None, date | None]:
    """The first and last day of changes between a snapshot and a moment; None for no bound.

    A transaction's time may lie well before a snapshot that does not contain it: it was open.
    Those that were open had begun after any snapshot that ended below the oldest of them.
    """
    ends = (snapshot.position, when) if isinstance(when, Position) else (snapshot.position,)
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
        (first - margin).astimezone(UTC).date() if first else None,
        (max(tops) + margin).astimezone(UTC).date() if tops else None,
    )


# ------------------------------------------------------------------------ sets of transactions


def contained(position: Position, xid: str = "xid") -> SparkColumn:
    """Whether a position contains a transaction."""
    from pyspark.sql import functions as f

    before_end = f.col(xid) < position.xmax
    if not position.xip:
        return before_end
    return before_end & ~f.col(xid).isin(list(position.xip))


def within(when: Moment) -> SparkColumn:
    """Whether a change's transaction is in the moment."""
    from pyspark.sql import functions as f

    if isinstance(when, Position):
        return contained(when)
    return f.col("committed_at") <= f.lit(when)


def bounds(snapshot: Snapshot, when: Moment) -> str:
    """What every change between a snapshot and a moment satisfies, in SQL that Spark and delta-rs
    both read: files, and parts of them, that have none are not opened. May say yes too often; must
    never say no wrongly."""
    return f"relation = {snapshot.relation} and ({_bounds(snapshot, when)})"


def _bounds(snapshot: Snapshot, when: Moment) -> str:
    position = snapshot.position
    if isinstance(when, Position):
        ways = []
        if not position.covers(when):
            ways.append(f"(({_lacked(position)}) and xid < {when.xmax})")
        if not when.covers(position):
            ways.append(f"(({_lacked(when)}) and xid < {position.xmax})")
        return " or ".join(ways) or "xid < 0"
    low, high = min(when, snapshot.taken_at), max(when, snapshot.taken_at)
    return (
        f"(committed_at <= '{_instant(when, 1)}' and ({_lacked(position)}))"
        f" or (committed_at >= '{_instant(when, -1)}' and xid < {position.xmax})"
        # Of another log, whose transactions have other numbers.
        f" or (committed_at >= '{_instant(low, -1)}' and committed_at <= '{_instant(high, 1)}')"
    )


def missing_from_all(taken: Sequence[Snapshot]) -> str:
    """The changes that none of these has of its table, in the same SQL; of many tables, what came
    after the oldest of them."""
    if len(taken) > limits.LAKE_XIDS_LISTED_MAX:
        return f"xid >= {min(each.position.xmin for each in taken)}"
    return " or ".join(
        f"(relation = {each.relation} and ({_lacked(each.position)}))" for each in taken
    )


def _lacked(position: Position) -> str:
    """The transactions that a position does not contain."""
    if len(position.xip) > limits.LAKE_XIDS_LISTED_MAX:
        return f"xid >= {position.xmin}"
    return " or ".join([f"xid >= {position.xmax}", *(f"xid = {xid}" for xid in position.xip)])


def _instant(at: datetime, milliseconds: int) -> str:
    """The bounds that Delta keeps of times may be cut to milliseconds: one more is taken."""
    with suppress(OverflowError):
        at += timedelta(milliseconds=milliseconds)
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def between(events: DataFrame, snapshot: Snapshot, when: Moment) -> DataFrame:
    """The changes that tell a snapshot from a moment; `forward` for those to be applied, the others
    are to be undone. Those of another log count as resets: the database was restored in between,
    and its transactions are others."""
    from pyspark.sql import functions as f

    own = f.col("position").startswith(f"{snapshot.position.log}-")
    apart = own & (f.col("forward") != contained(snapshot.position))
    if isinstance(when, datetime):
        taken = f.col("committed_at") <= f.lit(snapshot.taken_at)
        apart = apart | (~own & (f.col("forward") != taken))
    return (
        events.filter(bounds(snapshot, when))
        .withColumn("forward", within(when))
        .filter(apart)
        .withColumn("op", f.when(own, f.col("op")).otherwise("reset"))
    )


# ------------------------------------------------------------------------ what lies between


class Span(msgspec.Struct, frozen=True):
    """What the changes between a snapshot and a moment amount to."""

    forward: bool
    op: str
    shape: int
    first: int
    last: int


def survey(changes: DataFrame) -> list[Span]:
    """The changes by direction, operation and shape."""
    from pyspark.sql import functions as f

    whole = f.when(f.col("op").isin("truncate", "reset"), f.col("op")).otherwise("row")
    grouped = changes.groupBy("forward", whole.alias("op"), "shape")
    rows = grouped.agg(f.min("seq").alias("first"), f.max("seq").alias("last")).collect()
    return [Span(r["forward"], r["op"], r["shape"], r["first"], r["last"]) for r in rows]


class Way(msgspec.Struct, frozen=True):
    """How to come from a snapshot to a moment."""

    snapshot: Snapshot
    shape: int
    """The table's shape at the moment."""
    passed: tuple[int, ...]
    """The shapes on the way, in their order; the last is `shape`."""
    truncated: int = 0
    """The last truncate to be applied; nothing before it counts."""
    obstacle: str = ""
    """Why rows cannot be carried this way at all."""


def way(snapshot: Snapshot, spans: Iterable[Span]) -> Way:
    """Read a survey."""
    found = sorted(spans, key=lambda span: span.last)
    applied = [span for span in found if span.forward]
    undone = [span for span in found if not span.forward]
    obstacle = ""
    if any(span.op == "reset" for span in found):
        obstacle = "rows came or went in between that the log does not tell (a reset)"
    elif any(span.op == "truncate" for span in undone):
        obstacle = "the table was truncated in between, which cannot be undone"
    elif any(span.shape != snapshot.shape for span in undone):
        obstacle = "the table was altered in between"
    passed = tuple(dict.fromkeys([snapshot.shape, *(span.shape for span in applied)]))
    last = applied[-1].shape if applied else snapshot.shape
    truncated = max((span.last for span in applied if span.op == "truncate"), default=0)
    ordered = (*(shape for shape in passed if shape != last), last)
    return Way(snapshot, last, ordered, truncated, obstacle)


def within_shape(found: Way, shape: int | None) -> Way:
    """The way from a snapshot above, given the table's shape at the moment: changes are undone
    under one shape only, and not past the first change that was captured."""
    if found.obstacle or shape == found.snapshot.shape:
        return found
    obstacle = "it was not captured yet" if shape is None else "the table was altered in between"
    return msgspec.structs.replace(found, obstacle=obstacle)


def choose(ways: Sequence[Way], label: str, when: Moment) -> Way:
    """The first way without an obstacle and without a schema change, else one without an obstacle;
    ResyncRequired where there is none."""
    open_ways = [each for each in ways if not each.obstacle]
    same = [each for each in open_ways if len(each.passed) == 1]
    for each in [*same, *open_ways]:
        return each
    reason = ways[0].obstacle if ways else "the lake has no snapshot of it"
    moment = when if isinstance(when, Position) else f"{when:%Y-%m-%d %H:%M:%S %Z}"
    raise ResyncRequired(
        f"the state of {label} at {moment} is not known: {reason}",
        hint=f"Take a snapshot; it serves the time since the last such break: "
        f"headwater snapshot {label}",
    )


# ------------------------------------------------------------------------ folding


def fold(rows: DataFrame, changes: DataFrame, chosen: Way) -> DataFrame:
    """`key`, `image` and `shape` of the rows at the moment. `rows` are the snapshot's."""
    from pyspark.sql import functions as f

    told = changes.filter(
        f.col("op").isin("insert", "update", "delete")
        & (~f.col("forward") | (f.col("seq") > chosen.truncated))
    ).select(
        "key",
        f.when(f.col("forward"), f.col("after")).otherwise(f.col("before")).alias("image"),
        "shape",
        f.when(f.col("forward"), f.col("seq")).otherwise(_UNDONE - f.col("seq")).alias("rank"),
    )
    kept = rows.select("key", "image", "shape", f.lit(0).cast("long").alias("rank"))
    everything = told if chosen.truncated else kept.unionByName(told)
    latest = f.max_by(f.struct("image", "shape"), "rank").alias("row")
    return (
        everything.groupBy("key")
        .agg(latest)
        .filter("row.image is not null")
        .select("key", "row.image", "row.shape")
    )


# ------------------------------------------------------------------------ schema changes


def names_of(passed: Sequence[Table]) -> dict[int, dict[str, str]]:
    """For each shape on the way: what the columns of the last one are called there. ResyncRequired
    where a value may have changed without a word in the log."""
    names: dict[int, dict[str, str]] = {}
    for place, table in enumerate(passed[:-1]):
        steps = [step(a, b) for a, b in zip(passed[place:], passed[place + 1 :], strict=False)]
        names[table.id] = reduce(_through, reversed(steps))
    return names


def _through(later: Mapping[str, str], earlier: Mapping[str, str]) -> dict[str, str]:
    return {name: earlier[old] for name, old in later.items() if old in earlier}


def step(before: Table, after: Table) -> dict[str, str]:
    """What the columns of `after` were called in `before`; those that are new are left out.

    >>> integer = lambda name: Column(name, "integer", "integer")
    >>> table = lambda *names: Table(1, "public", "t", tuple(map(integer, names)), ("id",))
    >>> step(table("id", "a", "b"), table("id", "x", "b", "c"))
    {'id': 'id', 'b': 'b', 'x': 'a'}
    """
    old = {column.name: column for column in before.columns}
    names = {column.name: column.name for column in after.columns if column.name in old}
    kept = {column.name for column in after.columns}
    # A column that was dropped and one that was added stand in different places, unless the last
    # column was dropped and another of its type was added: that is taken for a new name.
    for a, b in zip(before.columns, after.columns, strict=False):
        if a.name not in kept and b.name not in old and a.declared == b.declared:
            names[b.name] = a.name
    for column in after.columns:
        source = old.get(names.get(column.name, ""))
        if source is not None and not _keeps_values(source, column):
            raise _rewritten(after, f"{column.name} became {column.declared}")
    if tuple(names.get(name) for name in after.key) != before.key or before.key != after.key:
        raise _rewritten(after, "its primary key was altered")
    return names


def _keeps_values(before: Column, after: Column) -> bool:
    """Whether the change of type, without a `using`, leaves every value as it prints."""
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
        f"{table.label} was altered and the log does not tell what became of its rows: {what}",
        hint=f"Take a snapshot; it serves the time since the change: "
        f"headwater snapshot {table.label}",
    )
