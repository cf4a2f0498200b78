"""The sink of a streaming view: turns a batch of changes into changes of the view in PostgreSQL.

A view is built once from its tables, read at one position. Changes of transactions that this
position contains are skipped afterwards, so the stream may begin anywhere before it. Spark computes
the effect of a batch with the view's own function; it is added in one transaction together with the
batch's number. After a truncate, a reset, or a change of a table's schema the view is rebuilt from
its tables, at a position after the batch, and replaced together with the batch's number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import HeadwaterError, InvalidQuery, PipelineError
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.lake.database_snapshot import DatabaseSnapshot, database_snapshot
from headwater.pipeline.lake.moments import contained
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.checkpoints import Checkpoint
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from headwater.pipeline.stream.sink import StreamSink
from headwater.pipeline.stream.worker import EVENTS, forget, read
from headwater.pipeline.views import weighted
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.function import ViewFunction
from headwater.pipeline.views.results import ViewResult
from headwater.pipeline.views.state import BUILD_ROWS, JoinState
from headwater.pipeline.views.store import ViewBatch, ViewStore
from headwater.pipeline.views.tables import ViewTables
from headwater.pipeline.views.weighted import CHANGES, SourceTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


class ViewSink(StreamSink):
    """Writes the batches of one view. A new one is made for every start of the stream, and builds
    the view if that is due."""

    def __init__(self, view: StreamingView, lake: Lake, url: str, checkpoint: Checkpoint) -> None:
        self._view = view
        self._spark = lake.spark
        self._function = ViewFunction(view, lake.spark)
        self._url = url
        self._checkpoint = checkpoint
        self._store = ViewStore(url, view)
        # A small batch is read here, which is faster than a task of Spark. The rows are the same.
        self._planner = Planner(url, view.sources)
        self._owner = f"view {view.name}"
        self._states: dict[str, JoinState] = {}
        try:
            with self._saving_errors():
                self._state = self._store.state()
                self._prepare()
        except BaseException:
            self.close()
            raise

    @property
    def begin(self) -> Offset:
        """Where a new stream begins."""
        return self._state.offset

    @property
    def is_new_stream(self) -> bool:
        """Whether the view was just built: no stream before was past its position."""
        return self._state.query_id is None

    def close(self) -> None:
        self._store.close()
        self._planner.close()
        forget(self._url, self._owner)

    # -------------------------------------------------------------------- building

    def _prepare(self) -> None:
        """Build the view, unless it exists with the present definition."""
        with self._database_snapshot() as now:
            result = self._function.result({p: now.tables[t].table for p, t in self._view.tables})
            state = self._state
            shapes = {p: now.tables[t].table for p, t in self._view.tables}
            is_due = (
                state.state != "live"
                or state.definition != self._view.digest(result.text)
                or state.shapes != shapes
            )
            # The rows that a join needs are stored only while the pipeline runs.
            if is_due or len(self._view.tables) > 1:
                self._build(now, result, None)
            else:
                self._use_current()

    def _database_snapshot(self) -> Any:
        names = tuple(table for _, table in self._view.tables)
        return database_snapshot(self._url, names, purpose=f"view {self._view.name}")

    def _build(self, now: DatabaseSnapshot, result: ViewResult, batch: ViewBatch | None) -> None:
        log.info("Building view %s at %s", self._view.name, now.position)
        tables = self._store.begin(self._state, result)
        for changes in self._all(now, result):
            self._store.add(tables, changes)
        shapes = {p: now.tables[t].table for p, t in self._view.tables}
        self._state = self._store.swap(
            tables,
            definition=self._view.digest(result.text),
            shapes=shapes,
            built=now.position,
            batch=batch,
        )
        self._use_current()

    def _use_current(self) -> None:
        """Use the present generation."""
        state = self._state
        self._tables = ViewTables(self._view, state.number, state.generation, state.columns)
        self._shapes = state.shapes
        self._sources = {
            n: SourceTable(table, self._function.used[n]) for n, table in self._shapes.items()
        }
        self._readers = {name: source.reader() for name, source in self._sources.items()}
        self._built = state.position
        self._note(None)

    def _all(self, now: DatabaseSnapshot, result: ViewResult) -> Iterator[pa.Table]:
        """The aggregates of all rows, for one part of the first table at a time."""
        sources = {
            p: SourceTable(now.tables[t].table, self._function.used[p])
            for p, t in self._view.tables
        }
        (first, table), *others = self._view.tables
        self._states = {p: JoinState.read(self._spark, now, t, sources[p]) for p, t in others}
        rest = {name: state.frame() for name, state in self._states.items()}
        parts: list[DataFrame] = []
        reader = sources[first].reader()
        for keys, images in now.rows(table, BUILD_ROWS):
            rows = weighted.frame(self._spark, reader.rows(images, [1] * len(images)))
            if others:
                part = JoinState.part(self._spark, reader, keys, images)
                parts.append(part)
                rows = JoinState.rows_of(part)
            yield self._function.aggregated({first: rows, **rest}, result)
        if others:
            self._states[first] = JoinState(self._spark, sources[first], parts)

    def _rebuild(self, batch: ViewBatch) -> None:
        with self._database_snapshot() as now:
            tables = {p: now.tables[t].table for p, t in self._view.tables}
            self._build(now, self._function.result(tables), batch)

    # -------------------------------------------------------------------- batches

    def write(self, batch: DataFrame, batch_id: int) -> int | None:
        with self._saving_errors():
            return self._write(batch, batch_id)

    def _write(self, batch: DataFrame, batch_id: int) -> int | None:
        current = ViewBatch(self._checkpoint.query_id, batch_id, self._checkpoint.offset(batch_id))
        if self._is_in(current):
            return 0
        if not self._follows(current):
            self._rebuild(current)
            return None
        parts = self._planner.parts(self._start(batch_id), current.end)
        if len(parts) > 1:
            self._write_large(batch.select(*CHANGES).persist(), current)
            return None
        changes = pa.Table.from_batches(
            (each for part in parts for each in read(part, self._owner)), EVENTS
        )
        return self._write_small(self._beyond(changes.select(CHANGES)), current)

    def _start(self, batch_id: int) -> Offset:
        """Where a batch begins."""
        if batch_id > 0:
            return self._checkpoint.offset(batch_id - 1)
        begin = self._checkpoint.begin
        return self.begin if begin is None else Offset(begin.position)

    def _beyond(self, changes: pa.Table) -> pa.Table:
        """Without the changes before the offset that the stream began at."""
        begin = self._checkpoint.begin
        if begin is None or begin.until is None or not changes.num_rows:
            return changes
        pairs = zip(changes["xid"].to_pylist(), changes["seq"].to_pylist(), strict=True)
        new = [not begin.until.contains(xid) or seq > begin.seq for xid, seq in pairs]
        return changes.filter(pa.array(new, pa.bool_()))

    def _is_in(self, batch: ViewBatch) -> bool:
        state = self._state
        if state.query_id != batch.query_id or state.batch is None or batch.number > state.batch:
            return False
        if batch.number == state.batch and state.batch_end == batch.end_text:
            return True
        raise PipelineError(
            f"the checkpoint {self._checkpoint.path} is older than view {self._view.name}",
            hint=f"Rebuild the view: headwater view rebuild {self._view.name}",
        )

    def _follows(self, batch: ViewBatch) -> bool:
        """Whether the batch continues where the view is. A new stream must have begun there."""
        state = self._state
        if state.query_id in (None, batch.query_id):
            return True
        return self._checkpoint.begin == state.offset

    def _write_small(self, changes: pa.Table, batch: ViewBatch) -> int:
        position = self._built
        xids = changes.column("xid").to_pylist()
        changes = changes.filter(pa.array([not position.contains(xid) for xid in xids], pa.bool_()))
        if not changes.num_rows:
            self._skip(batch)
            return 0
        kinds = zip(
            *(changes.column(c).to_pylist() for c in ("relation", "shape", "op")), strict=True
        )
        if self._needs_rebuild(kinds):
            self._rebuild(batch)
            return int(changes.num_rows)
        changes = changes.sort_by("seq")
        rows = {}
        for name, table in self._shapes.items():
            own = changes.filter(pc.field("relation") == table.oid)
            if own.num_rows:
                rows[name] = own
        frames = {
            name: weighted.frame(self._spark, self._readers[name].changed(own))
            for name, own in rows.items()
        }
        folds = {name: self._states[name].folded(own) for name, own in rows.items() if self._states}
        self._apply(frames, folds, batch)
        return int(changes.num_rows)

    def _write_large(self, held: DataFrame, batch: ViewBatch) -> None:
        from pyspark.sql import functions as f

        try:
            changes = held.where(~contained(self._built))
            whole = f.when(f.col("op").isin("truncate", "reset"), f.col("op")).otherwise("row")
            with self._function.executing():
                kinds = changes.groupBy("relation", "shape", whole.alias("op")).count().collect()
            if self._needs_rebuild((each[0], each[1], each[2]) for each in kinds):
                self._rebuild(batch)
                return
            relations = {each[0] for each in kinds}
            parts = {
                name: (changes.where(f.col("relation") == source.table.oid), source)
                for name, source in self._sources.items()
                if source.table.oid in relations
            }
            frames = {name: weighted.spread(*part) for name, part in parts.items()}
            folds = {
                name: self._states[name].folded_by_spark(own)
                for name, (own, _) in parts.items()
                if self._states
            }
            self._apply(frames, folds, batch)
        finally:
            held.unpersist()

    def _needs_rebuild(self, kinds: Iterable[tuple[int, int, str]]) -> bool:
        """Whether the batch has more than changes of rows: the view must be rebuilt."""
        known = {(table.oid, table.id) for table in self._shapes.values()}
        return any(
            op in ("truncate", "reset") or (relation, shape) not in known
            for relation, shape, op in kinds
        )

    def _apply(
        self, frames: Mapping[str, DataFrame], folds: Mapping[str, JoinState], batch: ViewBatch
    ) -> None:
        if not frames:
            self._skip(batch)
            return
        result = self._tables.result
        changes = [self._function.aggregated(each, result) for each in self._terms(frames, folds)]
        self._state = self._store.apply(self._tables, self._state, changes, batch)
        failpoint("applied")
        self._states |= folds

    def _skip(self, batch: ViewBatch) -> None:
        """Skip a batch without changes for this view. The first one is saved all the same, which
        ties the view to this checkpoint."""
        if self._state.query_id is None:
            self._state = self._store.apply(self._tables, self._state, (), batch)

    def _terms(
        self, frames: Mapping[str, DataFrame], folds: Mapping[str, JoinState]
    ) -> Iterator[dict[str, DataFrame]]:
        """The arguments of the calls of the function. For each changed table: its changes, with the
        tables before it in their old state and the tables after it in their new state. Together
        they are the effect of the batch: f(A1, B1) - f(A0, B0) = f(dA, B1) + f(A0, dB)."""
        names = self._view.parameters
        for at, name in enumerate(names):
            if name not in frames:
                continue
            before = {each: self._states[each].frame() for each in names[:at]}
            after = {each: folds.get(each, self._states[each]).frame() for each in names[at + 1 :]}
            yield {**before, name: frames[name], **after}

    @contextmanager
    def _saving_errors(self) -> Iterator[None]:
        """Save errors with the view. A value that Spark cannot hold is an error of the view only if
        its function uses the column."""
        try:
            yield
        except InvalidQuery as error:
            found = PipelineError(
                f"view {self._view.name}: {error}",
                hint="Keep such values out of the column, or leave the column out of the view.",
            )
            self._note(found)
            raise found from error
        except HeadwaterError as error:
            self._note(error)
            raise

    def _note(self, error: HeadwaterError | None) -> None:
        """Save the error for `headwater view list`; skipped if the database cannot be reached."""
        try:
            self._store.fail(error)
        except HeadwaterError as other:
            log.debug("The state of view %s could not be written: %s", self._view.name, other)
