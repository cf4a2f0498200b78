"""Brings the two Delta tables of one table up to date.

Each of the two has its own progress, and is exact at the position of its last commit. Where a crash
left one behind, it is brought to the same position first by its own changes: both are computed from
the same events, which never change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import pyarrow as pa

from headwater.errors import ResyncRequired
from headwater.model import Position, Table
from headwater.pipeline.lake import delta, gaps, retention, shapes, snapshots
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.tables import eras, steps
from headwater.pipeline.tables.columns import TypedColumn, columns_of, schema_of, shows_hidden
from headwater.pipeline.tables.eras import Changes, End, Merge, Rebase, Step, Wait, Window
from headwater.pipeline.tables.layout import (
    CURRENT,
    END_COLUMNS,
    HISTORY,
    KEY,
    OPEN,
    OWN,
    Progress,
    folder,
)
from headwater.pipeline.tables.options import TableOptions
from headwater.pipeline.tables.steps import BEYOND, KIND, Typing
from headwater.pipeline.tables.writes import TypedDelta

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession

    Persist: TypeAlias = Callable[[DataFrame], DataFrame]

log = logging.getLogger(__name__)

_ATTEMPTS = 2
"""A step is repeated once for each column that becomes text, and this often besides."""


class Advanced(msgspec.Struct, frozen=True):
    """What a run did for one table. `waits` says why it is not up to date."""

    changes: int
    position: Position | None
    waits: str | None = None


class TypedTable:
    """The typed tables of one relation."""

    def __init__(
        self,
        lake: Lake,
        relation: int,
        options: TableOptions,
        *,
        fill: str = "",
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._lake = lake
        self._relation = relation
        self._options = options
        self._fill = fill
        self._is_stopping = is_stopping
        known = shapes.load(lake.shapes_path, relation)
        self._shapes = {shape.table.id: shape.table for shape in known}
        self._last = known[-1].table
        self._options.check(self._last)
        self._root = f"{lake.root}/{folder(self._last)}"
        self._text: set[str] = set()
        self._last_examined: tuple[object, Changes] | None = None
        self._changes = 0
        self.targets = self._opened()

    def _opened(self) -> list[TypedDelta]:
        return [TypedDelta(f"{self._root}/{which}", which) for which in (HISTORY, CURRENT)]

    # -------------------------------------------------------------------- what is due

    def advance(self, reached: Position) -> Advanced:
        """Apply everything up to this position."""
        self._clear_if_other_options()
        waits: str | None = None
        while not self._is_stopping():
            due = [(target, self._due(target, reached)) for target in self.targets]
            steps_ = [(target, step) for target, step in due if step is not None]
            waits = next((s.reason for _, s in steps_ if isinstance(s, Wait)), None)
            work = [(target, step) for target, step in steps_ if not isinstance(step, Wait)]
            if not work:
                break
            target, step = work[0]
            same = [t for t, s in work if s == step and _alike(t, target)]
            self._apply(same, step)
        known = self.targets[-1].progress
        return Advanced(self._changes, None if known is None else known.position, waits)

    def _clear_if_other_options(self) -> None:
        """Remove tables that have columns which should not be there, or should be different."""
        found = [t.progress for t in self.targets if t.progress is not None]
        stored = [t.schema for t in self.targets if t.schema is not None]
        if any(each.options != self._options.fingerprint() for each in found) or any(
            shows_hidden(each, self._options) for each in stored
        ):
            delta.remove_folder(self._root)
            self.targets = self._opened()

    def _due(self, target: TypedDelta, reached: Position) -> Step | None:
        """What to do next for one of the two tables; None if it is up to date."""
        known, taken = target.progress, snapshots.load(self._lake.places, self._relation)
        floor = retention.load(self._lake.root)
        if known is None or known.fill != self._fill or known.relation != self._relation:
            return self._begin(known, eras.first(taken, floor, last=target.which == CURRENT))
        missed = gaps.load(self._lake.gaps_path, self._relation)
        window = eras.window(known, reached, missed, floor, taken)
        if window is None:
            return None
        found = eras.step(known, window, self._examined(known, window), taken, floor)
        if isinstance(found, Rebase) and found.position is not None:
            try:
                self._base_rows(found)
            except ResyncRequired as error:
                return Wait(str(error))
        return None if isinstance(found, Merge) and found.is_empty else found

    def _begin(self, known: Progress | None, found: Step) -> Step:
        """The first fill. Where another table had the name before, its era ends."""
        if known is None or known.fill != self._fill or isinstance(found, Wait):
            return found
        assert isinstance(found, Rebase)
        end = End("dropped", None, known.position.xmax, known.at)
        return msgspec.structs.replace(found, end=end)

    def _examined(self, known: Progress, window: Window) -> Changes:
        """What the window contains. Usually asked for both tables."""
        asked = (known.position, known.shape, window.until)
        if self._last_examined is None or self._last_examined[0] != asked:
            changes = steps.examined(steps.events(self._lake, known, window.until))
            self._last_examined = (asked, changes)
        return self._last_examined[1]

    # -------------------------------------------------------------------- doing it

    def _apply(self, targets: Sequence[TypedDelta], step: Merge | Rebase) -> None:
        """Do the step, again with other types where a value does not fit."""
        for _ in range(len(self._last.columns) + _ATTEMPTS):
            with self._persisted() as persist:
                if isinstance(step, Merge):
                    beyond = self._merge(targets, step, persist)
                else:
                    beyond = self._rebase(targets, step, persist)
            if not beyond:
                break
            log.info("Columns of %s become text: %s", self._last.label, ", ".join(sorted(beyond)))
            self._text.update(beyond)
        for target in targets:
            target.compact_when_due()

    def _merge(
        self, targets: Sequence[TypedDelta], step: Merge, persist: Persist
    ) -> Collection[str]:
        known = targets[0].progress
        assert known is not None
        columns = self._columns(self._shapes[known.shape])
        typing = Typing(self._shapes[known.shape], tuple(columns), self._options, known.snapshot)
        after = msgspec.structs.replace(known, position=step.until, at=step.at)
        found = steps.events(self._lake, known, step.until)
        frame = steps.versions(found, typing, step.changes.truncates, None)
        if step.is_small and all(target.has(columns) for target in targets):
            rows = frame.toArrow()
            if beyond := _beyond(rows):
                return beyond
            for target in targets:
                target.merge(rows, columns, self._own(target, after))
        else:
            frame = persist(frame)
            if beyond := _beyond_frame(frame):
                return beyond
            truncate = next(iter(step.changes.truncates), None)
            for target in targets:
                combined = _combined(self._lake.spark, target, columns, frame, truncate)
                whole = target.retypes(columns)
                target.rewrite(combined, columns, self._own(target, after), whole=whole)
        self._changes += step.changes.count + len(step.changes.truncates)
        return ()

    def _rebase(
        self, targets: Sequence[TypedDelta], step: Rebase, persist: Persist
    ) -> Collection[str]:
        base, table = self._begun(targets, step), self._shapes[step.base.shape]
        for name, treatment in self._options.inherited:
            log.warning(
                "The column %s of %s may be a hidden column under another name, so it is hidden as"
                " well (%s): name it in include, mask, hash or exclude of [lake.table.%s]",
                name, table.label, treatment, table.label,
            )  # fmt: skip
        # The history is filled first: its names and types are those of `current` as well.
        fresh = step.end is None and any(each.which == HISTORY for each in targets)
        columns = self._columns(table, fresh=fresh)
        position = str(base.position)
        typing = Typing(table, tuple(columns), self._options, position)
        rows = persist(steps.snapshot_rows(self._base_rows(step), base.taken_at, typing))
        beyond = set(_beyond_frame(rows))
        after = Progress(
            base.position,
            base.taken_at,
            self._relation,
            base.shape,
            position,
            self._options.fingerprint(),
            self._fill,
        )
        for target in targets:
            frame = rows
            if target.which == HISTORY:
                frame = rows.unionByName(self._unknown(target, step.end, base, typing))
                if step.end is not None:
                    ended, more = self._ended(target, step, columns, persist)
                    beyond |= set(more)
                    frame = frame.select(*_names(columns)).unionByName(ended)
            if beyond:
                return beyond
            whole = step.end is None or target.retypes(columns)
            target.rewrite(frame, columns, after, whole=whole)
        self._changes += base.rows
        return ()

    def _begun(self, targets: Sequence[TypedDelta], step: Rebase) -> TableSnapshot:
        """The snapshot that an era begins with, at the position that it begins at."""
        if step.position is None:
            return step.base
        times = [t.progress.at for t in targets if t.progress is not None]
        at = max([step.base.taken_at, *times])
        return msgspec.structs.replace(step.base, position=step.position, taken_at=at)

    def _base_rows(self, step: Rebase) -> DataFrame:
        if step.position is None:
            return self._lake.rows_of(step.base)
        return self._lake.rows_from(step.base, step.position)

    def _unknown(
        self, target: TypedDelta, end: End | None, base: TableSnapshot, typing: Typing
    ) -> DataFrame:
        known = target.progress
        snapshot = "" if known is None else known.snapshot
        return steps.unknown(self._lake, typing, snapshot, end, base.taken_at)

    def _ended(
        self, target: TypedDelta, step: Rebase, columns: list[TypedColumn], persist: Persist
    ) -> tuple[DataFrame, Collection[str]]:
        """The versions of the era that ends, with its last changes."""
        known, window = target.progress, step.window
        assert known is not None
        assert step.end is not None
        spark = self._lake.spark
        if window is None:
            return _combined(spark, target, columns, None, step.end), ()
        table = self._shapes[known.shape]
        own = columns_of(table, self._options, schema_of(HISTORY, columns), self._text)
        typing = Typing(table, tuple(own), self._options, known.snapshot)
        found = steps.events(self._lake, known, window.until)
        truncates = [
            each
            for each in self._examined(known, window).truncates
            if step.end.seq is None or (each.seq or 0) < step.end.seq
        ]
        last = steps.versions(steps.before(found, step.end), typing, truncates, step.end)
        frame = persist(last)
        first = truncates[0] if truncates else step.end
        return _combined(spark, target, columns, frame, first), _beyond_frame(frame)

    def _columns(self, table: Table, *, fresh: bool = False) -> list[TypedColumn]:
        stored = None if fresh else self.targets[0].schema
        return columns_of(table, self._options, stored, self._text)

    def _own(self, target: TypedDelta, after: Progress) -> Progress:
        """The progress with the era of the target."""
        assert target.progress is not None
        return msgspec.structs.replace(after, snapshot=target.progress.snapshot)

    @contextmanager
    def _persisted(self) -> Iterator[Persist]:
        """Frames that are read several times stay on the disks of the executors meanwhile."""
        from pyspark import StorageLevel

        found: list[DataFrame] = []

        def persist(frame: DataFrame) -> DataFrame:
            found.append(frame.persist(StorageLevel.DISK_ONLY))
            return found[-1]

        try:
            yield persist
        finally:
            for each in found:
                each.unpersist()


def _alike(one: TypedDelta, other: TypedDelta) -> bool:
    """Whether the same changes are to be applied to both."""
    known, also = one.progress, other.progress
    if one is other or known is None or also is None:
        return one is other or known is also
    return (known.position, known.shape) == (also.position, also.shape)


# ------------------------------------------------------------------------ frames


def _combined(
    spark: SparkSession,
    target: TypedDelta,
    columns: Sequence[TypedColumn],
    frame: DataFrame | None,
    end: End | None,
) -> DataFrame:
    """The rows of one of the two tables after steps. `end` is what ends versions without a step: a
    truncate, or the end of the era."""
    from pyspark.sql import functions as f

    whole = target.retypes(columns)
    stored = target.rows(spark, columns, whole=whole)
    if target.which == CURRENT:
        assert frame is not None
        names = schema_of(CURRENT, columns).names
        present = frame.filter(f"{KIND} = 'version' and {OPEN}").select(*_quoted(names))
        if end is not None:
            return present
        touched = frame.filter(f"{KIND} = 'end'").select(KEY)
        return stored.join(touched, KEY, "left_anti").select(*_quoted(names)).unionByName(present)
    names = _names(columns)
    open_, closed = stored.filter(OPEN), stored.filter(f"not {OPEN}")
    ended = _with_ends(open_, frame, end).select(*names)
    if frame is not None:
        ended = ended.unionByName(frame.filter(f"{KIND} = 'version'").select(*names))
    ended = ended.withColumn(OPEN, f.col("_end_op").isNull())
    return ended.unionByName(closed.select(*names)) if whole else ended


def _with_ends(versions: DataFrame, frame: DataFrame | None, end: End | None) -> DataFrame:
    """Open versions with what ended them."""
    from pyspark.sql import functions as f

    values = _end_values(end)
    # A gap may begin before changes that were applied already.
    values["_valid_to"] = f.when(
        values["_valid_to"].isNotNull(), f.greatest("_valid_from", values["_valid_to"])
    )
    if frame is None:
        return versions.withColumns({name: values[name] for name in END_COLUMNS})
    renamed = {name: f"_new{name}" for name in END_COLUMNS}
    ends = frame.filter(f"{KIND} = 'end'").select(
        f.col(KEY), *(f.col(name).alias(new) for name, new in renamed.items())
    )
    is_ended = f.col("_new_end_op").isNotNull()
    return versions.join(ends, KEY, "left").withColumns(
        {
            name: f.when(is_ended, f.col(new)).otherwise(values[name])
            for name, new in renamed.items()
        }
    )


def _end_values(end: End | None) -> dict[str, SparkColumn]:
    from pyspark.sql import functions as f

    found = {} if end is None else msgspec.structs.asdict(end)
    values = {f"_end_{name}": found.get(name) for name in found if name != "at"}
    values["_valid_to"] = found.get("at")
    kinds = {field.name: str(field.type) for field in OWN[HISTORY]}
    names = {"string": "string", "int64": "long"}
    return {
        name: f.lit(values.get(name)).cast(names.get(kinds[name], "timestamp"))
        for name in END_COLUMNS
    }


def _names(columns: Sequence[TypedColumn]) -> list[str]:
    return _quoted(schema_of(HISTORY, columns).names)


def _quoted(names: Sequence[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _beyond(rows: pa.Table) -> Collection[str]:
    found = rows[BEYOND].combine_chunks()
    return {name for names in found.drop_null().to_pylist() for name in names}


def _beyond_frame(frame: DataFrame) -> Collection[str]:
    from pyspark.sql import functions as f

    found = frame.select(f.explode(BEYOND).alias("name")).distinct().collect()
    return {row["name"] for row in found}
