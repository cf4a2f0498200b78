"""Keeps snapshots of tables while the events stream runs, so that every moment can be worked out
from one that is near.

A table is read itself where it has no snapshot, where rows may have changed without a word in the
log (a reset, a new shape), and where the database is another one. After many changes its state is
folded from the events, without asking the database. What a batch contained is told by the sink
that wrote it; after a start it is counted once from the lake. Old events are removed here, too.

This runs in a thread of its own. It never holds up the events, and its failures end nothing: they
are logged, reported as the stream `snapshots`, and tried again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater import limits
from headwater.database import connect_blocking, translated
from headwater.errors import HeadwaterError, PipelineError, ResyncRequired
from headwater.pipeline import audit, delta, maintenance, retention, snapshots, state
from headwater.pipeline.checkpoints import owner_name
from headwater.pipeline.files import Place
from headwater.pipeline.progress import StreamProgress
from headwater.pipeline.snapshots import Snapshot

if TYPE_CHECKING:
    from headwater.pipeline.lake import Lake

log = logging.getLogger(__name__)

NAME = "snapshots"
"""What it is called in the pipeline's progress."""


class Content(msgspec.Struct, frozen=True):
    """Changes of a table that a batch contained, under one shape and of one operation."""

    relation: int
    shape: int
    op: str
    changes: int
    first_xid: int
    last_xid: int


class Captured(msgspec.Struct, frozen=True):
    """A table that is captured now: its relation, and the shape it has."""

    relation: int
    shape: int


class Tally:
    """Which tables are due for a snapshot. Pure: it is told what happens, and asked."""

    def __init__(self, events_max: int) -> None:
        self._events_max = events_max
        self._last: dict[int, Snapshot] = {}
        self._changes: Counter[int] = Counter()
        self._broken: set[int] = set()

    def kept(self, snapshot: Snapshot) -> None:
        """A snapshot is there."""
        self._last[snapshot.relation] = snapshot
        self._changes[snapshot.relation] = 0
        self._broken.discard(snapshot.relation)

    def broken(self, relation: int) -> None:
        """Only the table itself can tell its rows."""
        self._broken.add(relation)

    def forget(self, relation: int) -> None:
        """It is no longer captured."""
        self._broken.discard(relation)
        self._changes[relation] = 0

    def examine(self, tables: Iterable[Captured], log_id: str) -> None:
        """The tables as they are."""
        for table in tables:
            last = self._last.get(table.relation)
            if last is None or last.position.log != log_id or last.shape != table.shape:
                self._broken.add(table.relation)

    def note(self, content: Content) -> None:
        last = self._last.get(content.relation)
        if last is None:
            self._broken.add(content.relation)
            return
        contains = last.position.contains
        if contains(content.first_xid) and contains(content.last_xid):
            return
        self._changes[content.relation] += content.changes
        if content.op == "reset" or content.shape != last.shape:
            self._broken.add(content.relation)

    def to_read(self) -> list[int]:
        """Tables that must be read themselves."""
        return sorted(self._broken)

    def to_fold(self) -> list[int]:
        """Tables so much of which has changed that their state is to be kept."""
        return sorted(
            relation
            for relation, changes in self._changes.items()
            if relation not in self._broken and changes >= self._bound(relation)
        )

    def _bound(self, relation: int) -> float:
        rows = self._last[relation].rows if relation in self._last else 0
        return max(self._events_max, rows * limits.LAKE_SNAPSHOT_SHARE, 1)

    def last(self) -> list[Snapshot]:
        return list(self._last.values())


class Keeper:
    """Takes the snapshots that are due: in a thread after `start`, or once by `work`."""

    def __init__(
        self, lake: Lake, url: str, *, events_max: int, retention: timedelta | None = None
    ) -> None:
        self._lake = lake
        self._url = url
        self._events_max = events_max
        self._retention = retention
        self._tally: Tally | None = None
        self._noted: list[pa.Table] = []
        self._wake = Condition()
        self._stopping = False
        self._thread: Thread | None = None
        self._pause, self._retry_at = limits.PIPELINE_RESTART_SECONDS[0], 0.0
        self._trim_at = 0.0
        self._progress = StreamProgress(NAME, "starting", owner_name())

    # -------------------------------------------------------------------- the thread

    def start(self) -> None:
        self._thread = Thread(target=self._run, name="headwater-snapshots", daemon=True)
        self._thread.start()

    def note(self, contents: pa.Table) -> None:
        """Hear what a batch contained."""
        with self._wake:
            self._noted.append(contents)
            self._wake.notify()

    def stop(self) -> None:
        """End between two snapshots; one that takes too long is left, and not in the list."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(limits.PIPELINE_STOP_SECONDS)
        self._set(state="stopped")

    def _run(self) -> None:
        # Of its own share of the cores: the streams do not wait for these jobs.
        self._lake.spark.sparkContext.setLocalProperty("spark.scheduler.pool", NAME)
        while not self._stopping:
            if time.monotonic() >= self._retry_at:
                self.work()
            self._trim_when_due()
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._is_due(), self._rest())

    def _is_due(self) -> bool:
        return bool(self._noted) and time.monotonic() >= self._retry_at

    def _rest(self) -> float:
        """Until the next attempt, or for a while."""
        left = self._retry_at - time.monotonic()
        return left if left > 0 else limits.PIPELINE_RESTART_SECONDS[1]

    def progress(self) -> StreamProgress:
        return self._progress

    # -------------------------------------------------------------------- the work

    def work(self) -> None:
        """Take what is due now. Never raises."""
        if not self._events_max:
            return
        failures: list[Exception] = []
        try:
            tally = self._told()
            for relation in tally.to_read():
                self._attempt(lambda: self._read(tally, relation), failures)  # noqa: B023
            for relation in tally.to_fold():
                self._attempt(lambda: self._fold(tally, relation), failures)  # noqa: B023
        except Exception as error:
            failures.append(error)
        self._note_outcome(failures)

    def _attempt(self, step: Any, failures: list[Exception]) -> None:
        """One table's trouble is not another's."""
        if self._stopping:
            return
        try:
            step()
        except Exception as error:
            failures.append(error)

    def _told(self) -> Tally:
        """What is known, with what was heard since."""
        with self._wake:
            noted, self._noted = self._noted, []
        if self._tally is None:
            # What was heard by now is in the lake already.
            self._tally = self._examined()
            return self._tally
        for contents in noted:
            for content in contents_of(contents):
                self._tally.note(content)
        return self._tally

    def _examined(self) -> Tally:
        """After a start: from the database, the list of snapshots and the events since them."""
        tally = Tally(self._events_max)
        maintenance.clean_stage(self._lake.places.rows)
        for each in snapshots.load(self._lake.places):
            tally.kept(each)
        log_id, tables = captured(self._url)
        wanted = {table.relation for table in tables}
        for content in since(self._lake, [s for s in tally.last() if s.relation in wanted]):
            tally.note(content)
        tally.examine(tables, log_id)
        return tally

    def _read(self, tally: Tally, relation: int) -> None:
        _, tables = captured(self._url)
        if relation not in {table.relation for table in tables}:
            tally.forget(relation)
            return
        self._kept(tally, self._lake.snapshot(self._url, relation))

    def _fold(self, tally: Tally, relation: int) -> None:
        position = self._lake.reached()
        if position is None:
            return
        try:
            folded = self._lake.fold_relation(relation, position)
        except ResyncRequired:
            tally.broken(relation)
            self._read(tally, relation)
        else:
            self._kept(tally, folded)

    def _kept(self, tally: Tally, snapshot: Snapshot) -> None:
        tally.kept(snapshot)
        log.info("Kept %s rows of relation %s", snapshot.rows, snapshot.relation)
        rows = self._progress.changes + snapshot.rows
        self._set(changes=rows, position=str(snapshot.position))

    # -------------------------------------------------------------------- trimming

    def _trim_when_due(self) -> None:
        if self._retention is None or self._stopping or time.monotonic() < self._trim_at:
            return
        self._trim_at = time.monotonic() + limits.LAKE_VACUUM_SECONDS
        failures: list[Exception] = []
        self._attempt(self._trim, failures)
        if failures:
            self._note_outcome(failures)

    def _trim(self) -> None:
        assert self._retention is not None
        _, tables = captured(self._url)
        relations = {table.relation for table in tables}
        done = retention.trim(self._lake, self._retention, captured=relations)
        log.info("The lake was trimmed: %s days, %s snapshots", done.days, done.snapshots)
        if done.held:
            log.warning("Older events are kept for want of a snapshot: %s", ", ".join(done.held))

    # -------------------------------------------------------------------- how it is

    def _note_outcome(self, failures: list[Exception]) -> None:
        if not failures:
            self._pause, self._retry_at = limits.PIPELINE_RESTART_SECONDS[0], 0.0
            self._set(state="running", error=None, error_at=None)
            return
        for error in failures:
            log.warning("A snapshot could not be kept: %s", error)
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, limits.PIPELINE_RESTART_SECONDS[1])
        self._set(
            state="waiting",
            restarts=self._progress.restarts + 1,
            error=_text(failures[0]),
            error_at=datetime.now(UTC),
        )

    def _set(self, **fields: Any) -> None:
        self._progress = msgspec.structs.replace(self._progress, **fields)


def _text(error: Exception) -> str:
    known = error if isinstance(error, HeadwaterError) else PipelineError(str(error))
    return str(known)[: limits.PIPELINE_ERROR_CHARS_MAX]


# ------------------------------------------------------------------------ what there is


def contents_of(counted: pa.Table) -> Iterator[Content]:
    """What `audit.counted` tells of tables."""
    names = Content.__struct_fields__
    for row in counted.select(list(names)).to_pylist():
        yield Content(**row)


def since(lake: Lake, last: list[Snapshot]) -> Iterator[Content]:
    """The changes of tables since these snapshots, counted by the driver from a few columns of
    those files that may have some."""
    table = delta.open_table(lake.events_path)
    if table is None or not last:
        return
    for file in delta.chosen_files(table, state.missing_from_all(last)):
        place = Place.of(file)
        with pq.ParquetFile(place.base, filesystem=place.system) as source:
            batches = source.iter_batches(columns=list(audit.NEEDED))
            yield from contents_of(audit.counted(_lacked(batch, last) for batch in batches))


def _lacked(batch: pa.RecordBatch, last: list[Snapshot]) -> pa.Table:
    """The changes of a batch that its table's snapshot does not have. There may be many tables: so
    they are looked up, not asked for one by one."""
    relations = pa.array([each.relation for each in last], pa.int64())
    ends = pa.array([each.position.xmax for each in last], pa.int64())
    opens = pa.array([xid for each in last for xid in each.position.xip], pa.int64())
    xid = batch.column("xid")
    place = pc.index_in(batch.column("relation"), relations)
    later = pc.or_(pc.greater_equal(xid, pc.take(ends, place)), pc.is_in(xid, opens))
    rows = pa.Table.from_batches([batch])
    return rows.filter(pc.and_(pc.is_valid(place), pc.fill_null(later, False)))


def captured(url: str) -> tuple[str, list[Captured]]:
    """The log's id, and the tables that are captured, but for our own."""
    with (
        translated(url),
        connect_blocking(url, purpose="pipeline") as database,
    ):
        rows = database.execute(_CAPTURED).fetchall()
        row = database.execute("select headwater.log_id()").fetchone()
    assert row is not None
    return row[0], [Captured(*each) for each in rows]


_CAPTURED = """
    select t.relid::bigint, headwater.shape_id(t.relid)
    from headwater.tables t join pg_class c on c.oid = t.relid
    join pg_namespace n on n.oid = c.relnamespace
    where t.enabled and n.nspname <> 'headwater' order by t.relid
"""
