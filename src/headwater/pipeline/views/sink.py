"""Keeps views up to date: from a batch of changes to what they change in PostgreSQL.

A view is built once from its tables, read at one position; every change whose transaction that
position contains is left out afterwards, so the stream may begin anywhere before it. What a batch
changes is computed by Spark, with the view's own function, and added in one transaction with the
batch's number. A batch that tells of more than rows (a truncate, a reset, a table altered or made
anew) has the view built again from its tables, at a position beyond the batch: as exact, and
swapped in with the batch's number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from headwater import limits
from headwater.errors import HeadwaterError, InvalidQuery, PipelineError
from headwater.pipeline.checkpoints import Checkpoint
from headwater.pipeline.crashes import crash_point
from headwater.pipeline.lake import Lake
from headwater.pipeline.offsets import Offset
from headwater.pipeline.planning import Planner
from headwater.pipeline.reading import EVENTS, forget, read
from headwater.pipeline.sink import Sink
from headwater.pipeline.state import contained
from headwater.pipeline.table_reading import Reading, reading
from headwater.pipeline.views import weighted
from headwater.pipeline.views.definitions import View
from headwater.pipeline.views.function import Function
from headwater.pipeline.views.results import Result
from headwater.pipeline.views.state import TableState
from headwater.pipeline.views.tables import Batch, Store, Tables
from headwater.pipeline.views.weighted import CHANGES, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


class ViewSink(Sink):
    """Writes the batches of one view. Made for every start of its stream; builds the view where
    that is due."""

    def __init__(self, view: View, lake: Lake, url: str, checkpoint: Checkpoint) -> None:
        self._view = view
        self._spark = lake.spark
        self._function = Function(view, lake.spark)
        self._url = url
        self._checkpoint = checkpoint
        self._store = Store(url, view)
        # A small batch is read here: quicker than by a task of Spark's, and the same rows for ever.
        self._planner = Planner(url, view.sources)
        self._owner = f"view {view.name}"
        self._states: dict[str, TableState] = {}
        try:
            with self._noting():
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
    def begins_anew(self) -> bool:
        """It was built just now, at a position that no stream before was beyond."""
        return self._state.query_id is None

    def close(self) -> None:
        self._store.close()
        self._planner.close()
        forget(self._url, self._owner)

    # -------------------------------------------------------------------- building

    def _prepare(self) -> None:
        """Build the view unless it is there, as the application defines it."""
        with self._reading() as now:
            result = self._function.result({p: now.tables[t].table for p, t in self._view.tables})
            state = self._state
            shapes = {p: now.tables[t].table for p, t in self._view.tables}
            is_due = (
                state.state != "live"
                or state.definition != self._view.digest(result.text)
                or state.shapes != shapes
            )
            # What a join needs of its tables is kept while the pipeline runs.
            if is_due or len(self._view.tables) > 1:
                self._build(now, result, None)
            else:
                self._go_on()

    def _reading(self) -> Any:
        names = tuple(table for _, table in self._view.tables)
        return reading(self._url, names, purpose=f"view {self._view.name}")

    def _build(self, now: Reading, result: Result, batch: Batch | None) -> None:
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
        self._go_on()

    def _go_on(self) -> None:
        """With the generation that is there."""
        state = self._state
        self._tables = Tables(self._view, state.number, state.generation, state.columns)
        self._shapes = state.shapes
        self._sources = {
            n: Source(table, self._function.used[n]) for n, table in self._shapes.items()
        }
        self._weighers = {name: source.reader() for name, source in self._sources.items()}
        self._built = state.position
        self._note(None)

    def _all(self, now: Reading, result: Result) -> Iterator[pa.Table]:
        """What all rows of the tables come to, in parts of the first one."""
        sources = {
            p: Source(now.tables[t].table, self._function.used[p]) for p, t in self._view.tables
        }
        (first, table), *others = self._view.tables
        self._states = {p: TableState.read(self._spark, now, t, sources[p]) for p, t in others}
        rest = {name: state.frame() for name, state in self._states.items()}
        kept: list[DataFrame] = []
        weigher = sources[first].reader()
        for keys, images in now.rows(table, limits.VIEW_BUILD_ROWS):
            rows = weighted.frame(self._spark, weigher.rows(images, [1] * len(images)))
            if others:
                part = TableState.part(self._spark, weigher, keys, images)
                kept.append(part)
                rows = TableState.rows_of(part)
            yield self._function.aggregated({first: rows, **rest}, result)
        if others:
            self._states[first] = TableState(self._spark, sources[first], kept)

    def _rebuild(self, batch: Batch) -> None:
        with self._reading() as now:
            tables = {p: now.tables[t].table for p, t in self._view.tables}
            self._build(now, self._function.result(tables), batch)

    # -------------------------------------------------------------------- batches

    def write(self, batch: DataFrame, batch_id: int) -> int | None:
        with self._noting():
            return self._write(batch, batch_id)

    def _write(self, batch: DataFrame, batch_id: int) -> int | None:
        told = Batch(self._checkpoint.query_id, batch_id, self._checkpoint.offset(batch_id))
        if self._is_in(told):
            return 0
        if not self._follows(told):
            self._rebuild(told)
            return None
        parts = self._planner.parts(self._start(batch_id), told.end)
        if len(parts) > 1:
            self._write_large(batch.select(*CHANGES).persist(), told)
            return None
        changes = pa.Table.from_batches(
            (each for part in parts for each in read(part, self._owner)), EVENTS
        )
        return self._write_small(self._beyond(changes.select(CHANGES)), told)

    def _start(self, batch_id: int) -> Offset:
        """Where a batch begins."""
        if batch_id > 0:
            return self._checkpoint.offset(batch_id - 1)
        begin = self._checkpoint.begin
        return self.begin if begin is None else Offset(begin.position)

    def _beyond(self, changes: pa.Table) -> pa.Table:
        """Without what had been taken where the stream began inside a read."""
        begin = self._checkpoint.begin
        if begin is None or begin.until is None or not changes.num_rows:
            return changes
        pairs = zip(changes["xid"].to_pylist(), changes["seq"].to_pylist(), strict=True)
        new = [not begin.until.contains(xid) or seq > begin.seq for xid, seq in pairs]
        return changes.filter(pa.array(new, pa.bool_()))

    def _is_in(self, batch: Batch) -> bool:
        state = self._state
        if state.query_id != batch.query_id or state.batch is None or batch.number > state.batch:
            return False
        if batch.number == state.batch and state.batch_end == batch.end_text:
            return True
        raise PipelineError(
            f"the checkpoint {self._checkpoint.path} is older than view {self._view.name}",
            hint=f"Build the view anew: headwater view rebuild {self._view.name}",
        )

    def _follows(self, batch: Batch) -> bool:
        """Whether the batch goes on where the view is: another stream than the last one must have
        begun there."""
        state = self._state
        if state.query_id in (None, batch.query_id):
            return True
        return self._checkpoint.begin == state.offset

    def _write_small(self, changes: pa.Table, batch: Batch) -> int:
        position = self._built
        xids = changes.column("xid").to_pylist()
        changes = changes.filter(pa.array([not position.contains(xid) for xid in xids], pa.bool_()))
        if not changes.num_rows:
            self._pass(batch)
            return 0
        kinds = zip(
            *(changes.column(c).to_pylist() for c in ("relation", "shape", "op")), strict=True
        )
        if self._tells_more(kinds):
            self._rebuild(batch)
            return int(changes.num_rows)
        changes = changes.sort_by("seq")
        rows = {}
        for name, table in self._shapes.items():
            own = changes.filter(pc.field("relation") == table.oid)
            if own.num_rows:
                rows[name] = own
        frames = {
            name: weighted.frame(self._spark, self._weighers[name].changed(own))
            for name, own in rows.items()
        }
        folds = {name: self._states[name].folded(own) for name, own in rows.items() if self._states}
        self._apply(frames, folds, batch)
        return int(changes.num_rows)

    def _write_large(self, held: DataFrame, batch: Batch) -> None:
        from pyspark.sql import functions as f

        try:
            changes = held.where(~contained(self._built))
            whole = f.when(f.col("op").isin("truncate", "reset"), f.col("op")).otherwise("row")
            with self._function.executing():
                kinds = changes.groupBy("relation", "shape", whole.alias("op")).count().collect()
            if self._tells_more((each[0], each[1], each[2]) for each in kinds):
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

    def _tells_more(self, kinds: Iterable[tuple[int, int, str]]) -> bool:
        """Whether there is something in a batch that rows do not tell."""
        known = {(table.oid, table.id) for table in self._shapes.values()}
        return any(
            op in ("truncate", "reset") or (relation, shape) not in known
            for relation, shape, op in kinds
        )

    def _apply(
        self, frames: Mapping[str, DataFrame], folds: Mapping[str, TableState], batch: Batch
    ) -> None:
        if not frames:
            self._pass(batch)
            return
        result = self._tables.result
        changes = [self._function.aggregated(each, result) for each in self._terms(frames, folds)]
        self._state = self._store.apply(self._tables, self._state, changes, batch)
        crash_point("applied")
        self._states |= folds

    def _pass(self, batch: Batch) -> None:
        """Nothing in it is for this view. The first such batch is noted all the same: from then on
        the checkpoint is worth something."""
        if self._state.query_id is None:
            self._state = self._store.apply(self._tables, self._state, (), batch)

    def _terms(
        self, frames: Mapping[str, DataFrame], folds: Mapping[str, TableState]
    ) -> Iterator[dict[str, DataFrame]]:
        """What the function is called with. For each table that changed: its changes, with the
        tables before it as they were and those after it as they are now. Together that is what the
        batch changed: f(A1, B1) - f(A0, B0) = f(dA, B1) + f(A0, dB)."""
        names = self._view.parameters
        for at, name in enumerate(names):
            if name not in frames:
                continue
            before = {each: self._states[each].frame() for each in names[:at]}
            after = {each: folds.get(each, self._states[each]).frame() for each in names[at + 1 :]}
            yield {**before, name: frames[name], **after}

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """What goes wrong is noted, too. A value that Spark has no place for is the view's
        affair only where its function uses the column."""
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
        """For `headwater view list`. That the database is away it cannot tell the database."""
        try:
            self._store.fail(error)
        except HeadwaterError as other:
            log.debug("The state of view %s could not be written: %s", self._view.name, other)
