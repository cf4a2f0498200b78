"""Compares a snapshot that was read from the database with what the lake computes for its position:
the snapshot before it, and the changes since.

Where the catalog shows that the table was altered in between, or there was a reset, or a change
contradicts the snapshot before, rows may have changed without changes in the log. If both are
equal, nothing is lost, and resets in between need not be considered. If they differ, the state is
unknown between the last position at which the table is known to be unaltered, and the last
transaction that altered it: a gap of that table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa

from headwater.errors import ResyncRequired
from headwater.model import Position, Table
from headwater.pipeline.lake import gaps, shapes
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.lake.schemas import split
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading import state
from headwater.pipeline.reading.state import StatePlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REASON = "rows changed without changes in the log"


class Unaltered(msgspec.Struct, frozen=True):
    """A table was seen with the same mark as its last snapshot."""

    position: Position
    at: datetime


class LakeReads(Protocol):
    """What of a lake is needed, at one version with the end of the log."""

    @property
    def gaps_path(self) -> str: ...

    @property
    def shapes_path(self) -> str: ...

    def reached(self) -> Position | None: ...

    def plan_from(self, snapshot: TableSnapshot, when: Position) -> StatePlan: ...

    def changes_after(
        self,
        snapshot: TableSnapshot,
        when: Position,
        *where: str,
        order: str = "seq",
        limit: int | None = None,
    ) -> list[dict[str, Any]]: ...

    def folded(self, plan: StatePlan, when: Position) -> DataFrame:
        """The rows at the position by a plan, with its obstacles disregarded."""

    def between(self, snapshot: TableSnapshot, when: Position) -> DataFrame:
        """The changes after a snapshot, as `state.between_frame` has them."""

    def rows(self, snapshot: TableSnapshot) -> DataFrame: ...


def examined(
    listed: Iterable[TableSnapshot],
    open_lake: Callable[[], LakeReads],
    snapshot: TableSnapshot,
    unaltered: Mapping[int, Unaltered],
    contradicted: Collection[int],
    rebuild_views: Callable[[int], None],
) -> TableSnapshot:
    """The snapshot with the resets that it explains. A gap is recorded if the rows differ, and the
    views of the table are built again. `listed` are the snapshots of the table in the lake, the
    oldest first; without an earlier one the lake is not opened. `contradicted` are tables of which
    a change contradicts the snapshot before."""
    earlier = [
        each
        for each in listed
        if each.position.log == snapshot.position.log and snapshot.position.covers(each.position)
    ]
    if not earlier:
        return snapshot
    last, lake = earlier[-1], open_lake()
    is_unaltered = last.mark is not None and last.mark == snapshot.mark
    reached = lake.reached()
    if reached is None or not reached.covers(snapshot.position):
        return snapshot
    resets = lake.changes_after(last, snapshot.position, "op = 'reset'")
    if is_unaltered and not resets and snapshot.relation not in contradicted:
        return snapshot
    known = gaps.load(lake.gaps_path, snapshot.relation)
    plan = lake.plan_from(last, snapshot.position)
    unobstructed = msgspec.structs.replace(plan, obstacle="")
    if state.outside_gaps(unobstructed, known, snapshot.position).obstacle:
        return snapshot
    if _is_equal(lake, plan, snapshot):
        return _explaining(snapshot, [each["seq"] for each in resets])
    if is_unaltered or snapshot.relation in contradicted:
        # When rows changed is not known.
        gap = _gap(snapshot, [Unaltered(last.position, last.taken_at)], None)
    else:
        seen = _seen_unaltered(lake, last, snapshot, resets, unaltered)
        gap = _gap(snapshot, seen, snapshot.altered_in)
    # The first write after the table was altered logs a reset, if capture noticed it.
    first = lake.changes_after(
        msgspec.structs.replace(last, position=gap.until), snapshot.position, limit=1
    )
    # A change of that transaction, or after it, has a time that is not before it.
    own = [each for each in resets if each["xid"] == snapshot.altered_in]
    for each in (*own, *first):
        until_at = min(gap.until_at, each["committed_at"].astimezone(UTC))
        gap = msgspec.structs.replace(gap, until_at=max(gap.since_at, until_at))
    # First: after a crash between the two the rows are compared again, later they are not.
    rebuild_views(snapshot.relation)
    gaps.add(lake.gaps_path, gap)
    return _explaining(snapshot, [each["seq"] for each in first if each["op"] == "reset"])


def _explaining(snapshot: TableSnapshot, resets: list[int]) -> TableSnapshot:
    return msgspec.structs.replace(snapshot, explained=tuple(resets))


def _seen_unaltered(
    lake: LakeReads,
    last: TableSnapshot,
    snapshot: TableSnapshot,
    resets: list[dict[str, Any]],
    unaltered: Mapping[int, Unaltered],
) -> Iterator[Unaltered]:
    """Positions at which the table was not altered yet: that of the last snapshot, that at which
    the catalog was looked at, and that of the last write before the first reset. A write that our
    triggers capture after the table was altered logs a reset first."""
    yield Unaltered(last.position, last.taken_at)
    if snapshot.relation in unaltered:
        yield unaltered[snapshot.relation]
    if last.mark is None or not last.mark.startswith("triggers "):
        return
    before = [f"seq < {resets[0]['seq']} and xid <> {resets[0]['xid']}"] if resets else []
    writes = lake.changes_after(
        last, snapshot.position, "op <> 'reset'", *before, order="-seq", limit=1
    )
    for write in writes:
        end, altered_in = write["xid"] + 1, snapshot.altered_in
        running = (altered_in,) if altered_in is not None and altered_in < end else ()
        position = Position(last.position.log, running[0] if running else end, end, running)
        yield Unaltered(position, write["committed_at"].astimezone(UTC))


def _gap(snapshot: TableSnapshot, seen: Iterable[Unaltered], altered_in: int | None) -> LakeGap:
    """From the last position at which the table was seen unaltered to its last alteration."""
    since = reduce(lambda one, other: other if other.position.covers(one.position) else one, seen)
    until = snapshot.position
    if altered_in is not None and not since.position.contains(altered_in):
        running = tuple(xid for xid in until.xip if xid < altered_in)
        end = altered_in + 1
        until = Position(until.log, running[0] if running else end, end, running)
    return LakeGap(since.position, until, since.at, snapshot.taken_at, snapshot.relation, REASON)


def _is_equal(lake: LakeReads, plan: StatePlan, snapshot: TableSnapshot) -> bool:
    """Whether the rows that are computed are those that were read, and each first change began with
    the row of the snapshot before. After a truncate the rows before it are not known any more: then
    the columns and triggers must not have been altered."""
    from pyspark.sql.pandas.types import from_arrow_schema

    last = plan.snapshot
    truncates = lake.changes_after(last, snapshot.position, "op = 'truncate'", limit=1)
    if truncates and (last.mark or "").split()[-1:] != (snapshot.mark or "").split()[-1:]:
        return False
    known = {each.table.id: each.table for each in shapes.load(lake.shapes_path, snapshot.relation)}
    passed = [*plan.passed, *(s for s in (snapshot.shape,) if s not in plan.passed)]
    if any(shape not in known for shape in passed):
        return False
    try:
        names = state.names_of([known[shape] for shape in passed])
    except ResyncRequired:
        return False  # another type or key
    pairs = _pairs(lake, plan, snapshot, truncates[0]["seq"] if truncates else None)
    suspects = pairs.filter("not (one <=> other)")
    if len(passed) == 1:
        return bool(suspects.isEmpty())
    found = suspects.mapInArrow(differing(names, known[snapshot.shape]), from_arrow_schema(_ONE))
    # Not `isEmpty`, which ends Python's workers while they write.
    return bool(found.count() == 0)


def _pairs(
    lake: LakeReads, plan: StatePlan, snapshot: TableSnapshot, truncated: int | None
) -> DataFrame:
    """Images that must be the same, each with its shape: `one` and `other`."""
    from pyspark.sql import functions as f

    def side(rows: DataFrame, name: str) -> DataFrame:
        return rows.select("key", f.struct("image", "shape").alias(name))

    def paired(one: DataFrame, other: DataFrame, how: str) -> DataFrame:
        return (
            side(one, "a")
            .join(side(other, "b"), "key", how)
            .selectExpr(
                "a.image as one",
                "a.shape as one_shape",
                "b.image as other",
                "b.shape as other_shape",
            )
        )

    computed = lake.folded(plan, snapshot.position)
    changes = lake.between(plan.snapshot, snapshot.position)
    first = (
        changes.filter("forward and op in ('insert', 'update', 'delete')")
        .groupBy("key")
        .agg(f.min_by(f.struct("before", "shape", "seq"), "seq").alias("first"))
        .selectExpr("key", "first.before as image", "first.shape as shape", "first.seq as seq")
    )
    before = lake.rows(plan.snapshot)
    if truncated is not None:
        emptied = first.filter(f"seq > {truncated}").select("key")
        before = before.join(emptied, "key", "left_anti")
    return paired(computed, lake.rows(snapshot), "full").unionByName(paired(first, before, "left"))


_ONE = pa.schema([("found", pa.bool_())])


def differing(
    names: Mapping[int, Mapping[str, str]], table: Table
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Whether images differ when both are read in the columns of the table."""
    columns = [column.name for column in table.columns]
    same = {name: name for name in columns}

    def differ(
        one: str | None, one_shape: int | None, other: str | None, other_shape: int | None
    ) -> bool:
        if one is None or other is None:
            return True
        first, second = split(one), split(other)
        old, new = (names.get(shape or 0, same) for shape in (one_shape, other_shape))
        return any(
            first.get(old.get(name, ""), "null") != second.get(new.get(name, ""), "null")
            for name in columns
        )

    def compare(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if any(differ(*row.values()) for row in batch.to_pylist()):
                yield pa.RecordBatch.from_arrays([pa.array([True])], schema=_ONE)

    return compare
