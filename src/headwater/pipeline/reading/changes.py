"""The changes of a table between two moments, in order, one transaction after the other.

Between two moments are the transactions that the later one contains and the earlier one does not.
They come in the order of their last change of the table, as readers of the log get them: that order
is right for every row. Only a part of them is in memory at a time.

A time is turned into a position first (`Lake.settle`). A reader that continues later then means the
same transactions as at the beginning, also when others commit late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import reduce
from itertools import groupby
from operator import add
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.errors import ResyncRequired
from headwater.limits import TRANSACTION_PART_CHANGES
from headwater.log.images import ImageDecoder
from headwater.model import NO_ACTOR, Actor, Change, Op, Origin, Position, Table, Transaction
from headwater.pipeline.lake.events import after_offset
from headwater.pipeline.lake.moments import Moment, contained, of_log_sql, within_sql
from headwater.pipeline.stream.offsets import Offset

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

_LAKE_PART_BYTES = 32 * 2**20
"""Bytes of text in one part of the rows that are read in order, about; a single row may have
more."""

_LAKE_ROWS_UNMEASURED = 32
"""This many rows are one part, without a look at their size."""

_LAKE_GROUP_BYTES = 16 * 2**20
"""After this many characters, rows of a group are passed on."""

_LAKE_PART_ROWS = 50_000
"""Rows of the lake that are brought to the driver at a time where they are taken in order."""


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# ------------------------------------------------------------------------ moments


def inside_sql(when: Moment) -> str:
    """Whether the transaction of a change is in the moment. A position contains only transactions
    of its own log."""
    own = f"{of_log_sql(when.log)} and " if isinstance(when, Position) else ""
    return f"({own}{within_sql(when)})"


def inside(when: Moment) -> SparkColumn:
    """The same in Spark."""
    from pyspark.sql import functions as f

    return f.expr(inside_sql(when))


def of_log(position: Position) -> SparkColumn:
    from pyspark.sql import functions as f

    return f.expr(of_log_sql(position.log))


def between(events: DataFrame, since: Moment | None, until: Moment | None) -> DataFrame:
    """The events after one moment, up to and including another."""
    if until is not None:
        events = events.filter(inside(until))
    if isinstance(since, Position):
        events = events.filter(of_log(since))
    return events if since is None else events.filter(~inside(since))


def after(events: DataFrame, offset: Offset) -> DataFrame:
    """The events after an offset, of its log."""
    own = events.filter(of_log(offset.position) & ~contained(offset.position))
    return after_offset(own, offset)


def position_at(events: DataFrame, reached: Position, when: datetime) -> Moment:
    """The position with exactly the transactions up to that time, of those in `reached`. A time of
    an earlier log stays a time: that log does not grow any more."""
    from pyspark.sql import functions as f

    is_early = f.col("committed_at") <= f.lit(when)
    known = of_log(reached) & contained(reached)
    (last,) = (
        events.filter(is_early)
        .agg(
            f.max_by("position", f.struct("committed_at", "seq")).alias("position"),
            f.max(f.when(known, f.col("xid"))).alias("xid"),
        )
        .collect()
    )
    if last["position"] is not None and not last["position"].startswith(f"{reached.log}-"):
        return when
    end = last["xid"] or 0
    late = events.filter(known & ~is_early)
    (others,) = late.agg(
        f.min(f.when(f.col("xid") > end, f.col("xid"))).alias("following"),
        f.collect_set(f.when(f.col("xid") < end, f.col("xid"))).alias("running"),
    ).collect()
    xmax = others["following"] or reached.xmax
    xip = tuple(sorted({*others["running"], *(xid for xid in reached.xip if xid < xmax)}))
    return Position(reached.log, min(xip, default=xmax), xmax, xip)


# ------------------------------------------------------------------------ in order


class StoredChange(msgspec.Struct, frozen=True, gc=False):
    """A change as the lake stores it: its images are PostgreSQL's JSON texts."""

    seq: int
    xid: int
    at: datetime
    shape: int
    op: Op
    before: str | None
    after: str | None
    actor: Actor
    origin: Origin | None = None


class ChangeGroup(msgspec.Struct, frozen=True):
    """The events of one transaction; `last` is the highest `seq` of all. A large transaction comes
    in parts, of which only the last is `complete`."""

    xid: int
    last: int
    events: tuple[StoredChange, ...]
    complete: bool = True


class ChangeRange(msgspec.Struct, frozen=True):
    """The changes of a table between two settled moments.

    `begin` and `end` are positions to continue from: at the start, and when all is processed.
    """

    rows: Any
    tables: Mapping[int, Table]
    since: Moment | None
    until: Moment
    begin: Position
    end: Position
    changes: int

    def groups(self) -> Iterator[ChangeGroup]:
        """The transactions as events."""
        rows = in_order(self.rows, ("last", "seq"), self.changes)
        for _, found in groupby(rows, lambda row: (row["last"], row["xid"])):
            yield from _parts(found)

    def transactions(self) -> Iterator[Transaction]:
        """The transactions as followers of the log get them. The last one has the position `end`,
        the others have `begin`: to resume from any of them skips nothing."""
        decoders = {id_: ImageDecoder(table) for id_, table in self.tables.items()}
        held: Transaction | None = None
        for group in self.groups():
            if held is not None:
                yield held
            found = tuple(self._change(event, decoders) for event in group.events)
            held = Transaction(group.xid, found, self.begin, group.complete)
        if held is not None:
            yield msgspec.structs.replace(held, position=self.end)

    def table(self, shape: int) -> Table:
        """ResyncRequired for a shape that the lake does not know."""
        return known(self.tables, shape)

    def _change(self, event: StoredChange, decoders: Mapping[int, ImageDecoder]) -> Change:
        table = self.table(event.shape)
        decode = decoders[event.shape]
        before, after = (
            None if image is None else decode(image) for image in (event.before, event.after)
        )
        row = after if after is not None else before
        key = () if row is None else table.key_of(row)
        return Change(
            event.seq,
            event.xid,
            event.at,
            table,
            event.op,
            key,
            before,
            after,
            event.actor,
            event.origin,
        )


def change_range(
    events: DataFrame,
    tables: Mapping[int, Table],
    since: Moment | None,
    until: Moment,
    after: int = 0,
) -> ChangeRange:
    """The transactions of a table's events between two settled moments whose last change has a
    higher number than `after`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    own = between(events, since, until)
    last = f.max("seq").over(Window.partitionBy("xid"))
    rows = own.withColumn("last", last).filter(f.col("last") > after)
    log = f.split_part("position", f.lit("-"), f.lit(1))
    (totals,) = own.agg(
        f.count("*").alias("changes"),
        f.min("xid").alias("first"),
        f.max("xid").alias("last"),
        f.array_sort(f.collect_set(log)).alias("logs"),
    ).collect()
    if len(totals["logs"]) > 1:
        raise ResyncRequired(
            "the database was restored, or Headwater installed again, between the two moments:"
            " changes before and after have no common order",
            hint="Make two requests, one up to that time (until) and one after it (since).",
        )
    positions = [each for each in (until, since) if isinstance(each, Position)]
    log_id = totals["logs"][0] if totals["logs"] else positions[0].log if positions else "0"
    first, end = totals["first"] or 1, (totals["last"] or 0) + 1
    return ChangeRange(
        rows,
        tables,
        since,
        until,
        since if isinstance(since, Position) else Position(log_id, first, first),
        until if isinstance(until, Position) else Position(log_id, end, end),
        totals["changes"],
    )


def in_order(rows: DataFrame, by: tuple[str, ...], count: int) -> Iterator[Any]:
    """The rows in this order, a part of them at a time: bounded in rows and in bytes."""
    parts = max(1, -(-count // _LAKE_PART_ROWS))
    if count > _LAKE_ROWS_UNMEASURED:
        parts = max(parts, -(-_bytes_of(rows) // _LAKE_PART_BYTES))
    spread = rows.repartitionByRange(parts, *by) if parts > 1 else rows.coalesce(1)
    return iter(spread.sortWithinPartitions(*by).toLocalIterator())


def _bytes_of(rows: DataFrame) -> int:
    """The bytes of all texts of the rows."""
    from pyspark.sql import functions as f

    texts = [name for name, kind in rows.dtypes if kind == "string"]
    sizes = (f.coalesce(f.octet_length(name), f.lit(0)).cast("long") for name in texts)
    (total,) = rows.agg(f.sum(reduce(add, sizes, f.lit(0))).alias("bytes")).collect()
    return int(total["bytes"] or 0)


def bounded(rows: Iterable[Any], count: int) -> Iterator[tuple[Any, ...]]:
    """The rows in groups of at most this many, of a bounded number of bytes; each has a row."""
    group: list[Any] = []
    size = 0
    for row in rows:
        size += sum(len(value) for value in row if isinstance(value, str))
        group.append(row)
        if len(group) == count or size >= _LAKE_GROUP_BYTES:
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)


def _parts(rows: Iterable[Any]) -> Iterator[ChangeGroup]:
    groups = bounded(rows, TRANSACTION_PART_CHANGES)
    found = next(groups, ())
    while found:
        more = next(groups, ())
        events = tuple(map(_event, found))
        yield ChangeGroup(events[0].xid, found[0]["last"], events, complete=not more)
        found = more


def _event(row: Any) -> StoredChange:
    who = row["user_id"], row["function_name"], row["trace_id"]
    actor = Actor(*who) if any(who) else NO_ACTOR
    return StoredChange(
        row["seq"],
        row["xid"],
        _moment(row["micros"]),
        row["shape"],
        row["op"],
        row["before"],
        row["after"],
        actor,
        _origin(row),
    )


def _origin(row: Any) -> Origin | None:
    if row["source"] is None:
        return None
    committed = row["source_micros"]
    at = None if committed is None else _moment(committed)
    return Origin(row["source"], row["source_position"], at)


def _moment(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def known(tables: Mapping[int, Table], shape: int) -> Table:
    """The table of a shape. ResyncRequired for one that the lake does not know."""
    try:
        return tables[shape]
    except KeyError:
        raise ResyncRequired(
            f"the lake lacks shape {shape}, under which some of its events were written",
            hint="Save the shapes of the database in the lake: headwater pipeline snapshot TABLE",
        ) from None
