"""Builds one view, and applies changes to it.

A view is built from its tables, read in one snapshot of the database. From then on it is at a
position: it has exactly the transactions that this position contains. The position is stored with
the view, in the transaction that writes the rows, and nothing else says how far the view is. To
advance means to apply the changes between that position and a later one:

- Weighted rows of one table are added: f(changes).
- For weighted rows of several tables, the rows that the changes are joined with are read from the
  database, at the later position: f(A1, B1) - f(A0, B0) = f(dA, B1) + f(A0, dB). The rows before
  are the rows after with the changes taken back: A0 = A1 - dA.
- A view that is local to a column is computed for the touched values of that column, from the rows
  of the database that have them, and replaces its rows with these values.

After a truncate, a reset, a change of a table's schema, or when too many values changed at once,
the view is built again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from headwater import limits
from headwater.errors import HeadwaterError, ResyncRequired
from headwater.model import Position, Table
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.snapshots import reader
from headwater.pipeline.snapshots.chunks import Chunk, chunks_of
from headwater.pipeline.snapshots.database_snapshot import DatabaseSnapshot, database_snapshot
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import ChangeKind, Planner
from headwater.pipeline.views import source_rows, weighted
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.function import ViewFunction
from headwater.pipeline.views.results import Result, RowResult, ViewResult
from headwater.pipeline.views.source_rows import TooManyValuesError, Values
from headwater.pipeline.views.storage import groups, row_tables
from headwater.pipeline.views.storage.group_tables import GroupTables
from headwater.pipeline.views.storage.row_tables import RowTables
from headwater.pipeline.views.storage.staging import Rows, StagedRows
from headwater.pipeline.views.storage.store import Generation, ViewRecord, ViewStore
from headwater.pipeline.views.weighted import SourceTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)


class BuildProgress(msgspec.Struct, frozen=True):
    """How far a build is: bytes of the tables that were read, of all, and the seconds so far."""

    done: int
    total: int
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """An estimate; None before the first part is done."""
        return self.seconds * (self.total - self.done) / self.done if self.done else None


class MaintainedView:
    """A view, and the position that it is at. Used by one thread at a time."""

    def __init__(
        self, view: StreamingView, spark: SparkSession, url: str, store: ViewStore
    ) -> None:
        self.view = view
        self.building: BuildProgress | None = None
        self.position: Position | None = None
        """The position that the view is at, also where no change since the stored position changes
        it. None until `start`."""

        self.relations: frozenset[int] = frozenset()
        """The tables whose changes may change it."""

        self.has_changed = False
        """Whether the last advance applied changes."""

        self._spark = spark
        self._url = url
        self._store = store
        self._function = ViewFunction(view, spark)
        self._record: ViewRecord | None = None

    # -------------------------------------------------------------------- starting

    def start(self) -> None:
        """Use the view as it is, or build it if it is new, due, or defined in another way."""
        record = self._store.record()
        with self._snapshot() as now:
            shapes = self._shapes(now)
            result = self._function.result(shapes)
            is_due = (
                record.state != "live"
                or record.definition != self.view.digest(result.text)
                or record.shapes != shapes
                or record.position is None
            )
            if is_due:
                self._build(now, record, result)
            else:
                self._use(record, self._store.resume(record))
        self.note_error(None)

    def rebuild(self) -> None:
        """Build the view again, at a position of now."""
        with self._snapshot() as now:
            self._build(now, self._store.record(), self._function.result(self._shapes(now)))
        self.note_error(None)

    def _snapshot(self) -> Any:
        names = tuple(table for _, table in self.view.tables)
        return database_snapshot(self._url, names, purpose=f"view {self.view.name}")

    def _shapes(self, now: DatabaseSnapshot) -> dict[str, Table]:
        return {parameter: now.tables[table].table for parameter, table in self.view.tables}

    def _use(self, record: ViewRecord, tables: Generation) -> None:
        shapes = record.shapes
        self._record = record
        self._tables = tables
        self._sources = self._source_tables(shapes, tables.result)
        self._known = {(table.oid, table.id) for table in shapes.values()}
        self.relations = frozenset(table.oid for table in shapes.values())
        self.position = record.position

    def _source_tables(self, shapes: Mapping[str, Table], result: Result) -> dict[str, SourceTable]:
        has_weight = isinstance(result, ViewResult)
        return {
            name: SourceTable(table, self._function.used[name], has_weight)
            for name, table in shapes.items()
        }

    # -------------------------------------------------------------------- building

    def _build(self, now: DatabaseSnapshot, record: ViewRecord, result: Result) -> None:
        log.info("Building view %s at %s", self.view.name, now.position)
        began = time.monotonic()
        shapes = self._shapes(now)
        tables = self._store.begin(record, result)
        build = _Build(self, now, tables, self._source_tables(shapes, result))
        try:
            with self._function.executing():
                rows = build.run(self._spark, self._function, self._url)
            swapped = self._store.swap(
                tables,
                rows,
                definition=self.view.digest(result.text),
                shapes=shapes,
                built=now.position,
                at=now.at,
            )
            self._use(swapped, tables)
        finally:
            self.building = None
        log.info("Built view %s in %.1f s", self.view.name, time.monotonic() - began)

    # -------------------------------------------------------------------- advancing

    def skip(self, until: Position) -> None:
        """Note that nothing up to a position changes the view."""
        self.position, self.has_changed = until, False

    def save_position(self) -> None:
        """Store the position, so that the log may be trimmed up to it."""
        if self._record is None or self.position in (None, self._record.position):
            return
        self._record = self._store.advance(self._record, self._at)

    def note_error(self, error: HeadwaterError | None) -> None:
        """Save the error for `headwater view list`; skipped if the database cannot be reached."""
        try:
            self._store.fail(error)
        except HeadwaterError as other:
            log.debug("The state of view %s could not be written: %s", self.view.name, other)

    def touches(self, kinds: Iterable[ChangeKind]) -> bool:
        """Whether changes may change the view."""
        return any(kind.relation in self.relations for kind in kinds)

    def advance(
        self,
        until: Position,
        planner: Planner,
        shared: tuple[DataFrame, Sequence[ChangeKind]] | None = None,
    ) -> None:
        """Apply the changes up to a position, or a later one. `shared` are the parts and kinds of
        the changes from the view's own position, if these are planned."""
        assert self.position is not None
        self.has_changed = True
        try:
            if shared is None:
                kinds: Sequence[ChangeKind] = planner.kinds(self.position, until)
            else:
                kinds = shared[1]
            if not self.touches(kinds):
                self.skip(until)
            elif self._needs_rebuild(kinds):
                self.rebuild()
            else:
                self._apply(until, planner, kinds, None if shared is None else shared[0])
        except TooManyValuesError:
            self.rebuild()
        except ResyncRequired:
            log.warning("The log does not reach back to view %s: it is built again", self.view.name)
            self.rebuild()

    def _needs_rebuild(self, kinds: Iterable[ChangeKind]) -> bool:
        """Whether there are more than changes of rows."""
        return any(
            not kind.is_row or (kind.relation, kind.shape) not in self._known
            for kind in kinds
            if kind.relation in self.relations
        )

    def _apply(
        self,
        until: Position,
        planner: Planner,
        kinds: Sequence[ChangeKind],
        parts: DataFrame | None,
    ) -> None:
        assert self._record is not None
        tables, result = self._tables, self._tables.result
        if isinstance(tables, GroupTables) and len(self.view.tables) == 1:
            parts = self._planned(planner, until) if parts is None else parts
            (name,) = self.view.parameters
            terms = [{name: weighted.changed(parts, self._sources[name])}]
            self._add(tables, terms, until)
            return
        with self._snapshot() as now:
            # The log has everything that the snapshot contains only from here on.
            planner.now(holds_snapshot=True)
            kinds = planner.kinds(self._at, now.position)
            if self._needs_rebuild(kinds) or self._shapes(now) != self._record.shapes:
                self._build(now, self._record, self._function.result(self._shapes(now)))
                return
            parts = self._planned(planner, now.position)
            state = _TableState(self._spark, now, self.view, self._sources)
            if isinstance(tables, GroupTables):
                assert isinstance(result, ViewResult)
                changed = [n for n, s in self._sources.items() if s.table.oid in _rows(kinds)]
                with self._function.executing():
                    terms = list(state.terms(parts, result, changed))
                self._add(tables, terms, now.position)
            else:
                self._replace(tables, state, parts, now.position)

    @property
    def _at(self) -> Position:
        assert self.position is not None
        return self.position

    def _planned(self, planner: Planner, until: Position) -> DataFrame:
        parts = planner.parts(Offset(self._at), Offset(until))
        return weighted.parts_frame(self._spark, parts)

    def _add(
        self, tables: GroupTables, terms: Sequence[Mapping[str, DataFrame]], until: Position
    ) -> None:
        """Add weighted rows: the sum of the function over several arguments."""
        assert self._record is not None
        rows = StagedRows(tables.staging())
        share = limits.VIEW_DRIVER_BYTES_MAX // max(1, len(terms))
        with self._function.executing():
            for each in terms:
                made = self._function.aggregated(each, tables.result)
                rows.stage(made, self._url, _group_rows(tables), share)
        failpoint("unapplied")
        self._record = self._store.add(tables, self._record, rows, until)
        self.position = until

    def _replace(
        self, tables: RowTables, state: _TableState, parts: DataFrame, until: Position
    ) -> None:
        """Compute the view for the touched values, and replace its rows with these values."""
        assert self._record is not None
        rows = StagedRows(tables.staging())
        with self._function.executing():
            touched, frames = state.touched(parts, tables.result)
            made = self._function.rows(frames, tables.result)
            rows.stage(made, self._url, _view_rows(tables, touched), limits.VIEW_DRIVER_BYTES_MAX)
        failpoint("unapplied")
        self._record = self._store.replace(tables, self._record, rows, touched, until)
        self.position = until


def _rows(kinds: Iterable[ChangeKind]) -> set[int]:
    return {kind.relation for kind in kinds}


# ------------------------------------------------------------------------ building


class _Build:
    """Reads the tables of a view in one snapshot, and stages its result. Weighted rows are read and
    staged in portions of bounded size; a view that is local to a column needs all of its rows at
    once, which Spark keeps on disk where they do not fit."""

    def __init__(
        self,
        owner: MaintainedView,
        now: DatabaseSnapshot,
        tables: Generation,
        sources: Mapping[str, SourceTable],
    ) -> None:
        self._owner = owner
        self._now = now
        self._tables = tables
        self._sources = sources
        self._began = time.monotonic()

    def run(self, spark: SparkSession, function: ViewFunction, url: str) -> StagedRows:
        """Returns the rows of the view. All of them are in the staging tables."""
        tables = self._tables
        rows = StagedRows(tables.staging())
        if isinstance(tables, RowTables):
            labels = {label for _, label in self._owner.view.tables}
            self._note(0, sum(chunk.bytes for each in labels for chunk in self._chunks(each)))
            frames = {
                parameter: weighted.present(self._now.frame(spark, table), self._sources[parameter])
                for parameter, table in self._owner.view.tables
            }
            rows.stage(function.rows(frames, tables.result), url, _view_rows(tables))
            return rows
        for frames in self._portions(spark):
            rows.stage(function.aggregated(frames, tables.result), url, _group_rows(tables))
            failpoint("building")
        return rows

    def _portions(self, spark: SparkSession) -> Iterator[dict[str, DataFrame]]:
        """The arguments of the function: some chunks of a table, with the other tables whole. For
        tables of a union, which are in no pair with the first, that is done once for each."""
        names = [parameter for parameter, _ in self._owner.view.tables]
        labels = dict(self._owner.view.tables)
        result = self._tables.result
        assert isinstance(result, ViewResult)
        partners = result.combined.partners if result.combined else {}
        parts: list[tuple[str, list[str]]] = []
        left = list(names)
        while left:
            with_it = [name for name in left if name in partners.get(left[0], ())]
            parts.append((left[0], with_it))
            left = [name for name in left[1:] if name not in with_it]
        chunks = {name: self._chunks(labels[name]) for name, _ in parts}
        total, done = sum(c.bytes for each in chunks.values() for c in each), 0
        self._note(done, total)
        for name, with_it in parts:
            others = [each for each in names if each != name and each not in with_it]
            empty = {each: self._sources[each].empty(spark, each) for each in others}
            with self._whole(spark, {each: labels[each] for each in with_it}) as whole:
                for portion in _portions(chunks[name]):
                    images = reader.frame(spark, self._now.exported, portion)
                    rows = weighted.present(images, self._sources[name])
                    yield {**empty, **whole, name: rows}
                    done += sum(chunk.bytes for chunk in portion)
                    self._note(done, total)

    def _chunks(self, table: str) -> list[Chunk]:
        return chunks_of(self._now.tables[table].source, limits.VIEW_BUILD_CHUNK_BYTES)

    @contextmanager
    def _whole(
        self, spark: SparkSession, tables: Mapping[str, str]
    ) -> Iterator[dict[str, DataFrame]]:
        """Whole tables, read once. A part that is lost with an executor is read again."""
        frames = {
            name: weighted.present(self._now.frame(spark, table), self._sources[name]).persist()
            for name, table in tables.items()
        }
        try:
            yield frames
        finally:
            for frame in frames.values():
                frame.unpersist()

    def _note(self, done: int, total: int) -> None:
        self._owner.building = BuildProgress(done, total, time.monotonic() - self._began)


def _portions(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    """Chunks that are read by one job."""
    for at in range(0, len(chunks), limits.VIEW_BUILD_CHUNKS):
        yield chunks[at : at + limits.VIEW_BUILD_CHUNKS]


def _group_rows(tables: GroupTables) -> Rows:
    result, names = tables.result, list(tables.staging().tables)
    return lambda batch: groups.group_rows(result, names, batch)


def _view_rows(tables: RowTables, touched: Mapping[str, Values] | None = None) -> Rows:
    result, (name,) = tables.result, tables.staging().tables
    return lambda batch: iter([(name, row_tables.view_rows(result, batch, touched))])


# ------------------------------------------------------------------------ rows of the tables


class _TableState:
    """The rows of a view's tables in a snapshot, found by the values that changed."""

    def __init__(
        self,
        spark: SparkSession,
        now: DatabaseSnapshot,
        view: StreamingView,
        sources: Mapping[str, SourceTable],
    ) -> None:
        self._spark = spark
        self._now = now
        self._labels = dict(view.tables)
        self._sources = sources

    def _rows(self, name: str, conditions: Iterable[Mapping[str, Values]]) -> DataFrame:
        images = source_rows.rows_with(self._spark, self._now, self._labels[name], conditions)
        return weighted.present(images, self._sources[name])

    # -------------------------------------------------------------------- local views

    def touched(
        self, parts: DataFrame, result: RowResult
    ) -> tuple[dict[str, Values], dict[str, DataFrame]]:
        """The values that changed, by the columns that the view is local to; and all rows of the
        tables with these values."""
        columns: dict[str, set[str]] = {}
        for each in result.local:
            for name, own in each.columns.items():
                columns.setdefault(name, set()).update(own)
        found = source_rows.collected(weighted.changed_values(parts, self._sources, columns))
        touched = {
            each.column: _merged(
                found.get((name, column), Values())
                for name, own in each.columns.items()
                for column in own
            )
            for each in result.local
        }
        frames = {
            name: self._rows(
                name,
                [dict.fromkeys(each.columns[name], touched[each.column]) for each in result.local],
            )
            for name in self._sources
        }
        return touched, frames

    # -------------------------------------------------------------------- weighted views

    def terms(
        self, parts: DataFrame, result: ViewResult, changed: Sequence[str]
    ) -> Iterator[dict[str, DataFrame]]:
        """The arguments of the function whose results add up to the effect of the changes. For each
        changed table: its changes, with the tables before it in their old state and the tables
        after it in their new state. Tables that it is not joined with have no rows."""
        names = list(self._sources)
        for at, name in enumerate(names):
            if name not in changed:
                continue
            rows = weighted.changed(parts, self._sources[name])
            frames = self._partners(parts, result, name, set(names[:at]) & set(changed))
            for each in names:
                if each not in frames and each != name:
                    frames[each] = self._sources[each].empty(self._spark, each)
            yield {**frames, name: rows}

    def _partners_of(self, result: ViewResult, name: str) -> frozenset[str]:
        assert result.combined is not None
        return result.combined.partners[name]

    def _partners(
        self, parts: DataFrame, result: ViewResult, name: str, old: Collection[str]
    ) -> dict[str, DataFrame]:
        """The rows that changes of a table may be joined with: of the tables `old` those before the
        changes. A table that is linked to no other is read as a whole."""
        assert result.combined is not None
        equal = [*result.combined.equal, *((b, a) for a, b in result.combined.equal)]
        wanted = set(self._partners_of(result, name))
        found: dict[str, DataFrame] = {}
        values: dict[tuple[str, str], Values] = {}
        self._note_values(values, name, equal, parts=parts)
        while wanted:
            linked = {
                to[0]: (to[1], values[of]) for of, to in equal if to[0] in wanted and of in values
            }
            name = next(iter(linked), None) or sorted(wanted)[0]
            condition = [{linked[name][0]: linked[name][1]}] if name in linked else []
            found[name] = self._rows(name, condition)
            if name in old:
                back = weighted.changed(parts, self._sources[name], sign=-1)
                # The next table is searched by the values of these rows as well.
                found[name] = found[name].unionByName(back)
            wanted.remove(name)
            if any(of[0] == name and to[0] in wanted for of, to in equal):
                self._note_values(values, name, equal, rows=found[name])
        return found

    def _note_values(
        self,
        values: dict[tuple[str, str], Values],
        name: str,
        equal: Iterable[tuple[tuple[str, str], tuple[str, str]]],
        *,
        parts: DataFrame | None = None,
        rows: DataFrame | None = None,
    ) -> None:
        """Find the values of the columns that a table is joined by."""
        columns = {of[1] for of, _ in equal if of[0] == name}
        if not columns:
            return
        if parts is not None:
            made = weighted.changed_values(parts, self._sources, {name: columns})
        else:
            assert rows is not None
            made = weighted.column_values(rows, name, columns)
        found = source_rows.collected(made)
        values |= {(name, column): found.get((name, column), Values()) for column in columns}


def _merged(values: Iterable[Values]) -> Values:
    merged = Values()
    for each in values:
        merged = merged | each
    return merged
