"""Makes snapshots of tables while the events stream runs, so that every moment can be computed from
a snapshot that is near it. Also removes old events (`trim`).

`snapshot_schedule` decides which tables are due. The events sink reports what each batch contained;
after a start, the changes since the last snapshots are counted once from the lake.

This runs in a thread of its own. It never delays the events. A failure ends nothing: it is logged,
reported as the stream `snapshots`, and the snapshot is tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from threading import Condition, Thread
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater import limits
from headwater.database import connect_blocking, translated
from headwater.errors import HeadwaterError, PipelineError, ResyncRequired
from headwater.pipeline.files import FileLocation
from headwater.pipeline.jobs.snapshot_schedule import BatchContent, CapturedShape, SnapshotSchedule
from headwater.pipeline.jobs.trim import trim
from headwater.pipeline.lake import audit, delta, maintenance, snapshots
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading import state
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.checkpoints import owner_name
from headwater.pipeline.stream.progress import StreamProgress

log = logging.getLogger(__name__)

NAME = "snapshots"
"""Its name in the pipeline's progress."""


class SnapshotJob:
    """Makes the snapshots that are due: in a thread after `start`, or once with `work`."""

    def __init__(
        self, lake: Lake, url: str, *, events_max: int, retention: timedelta | None = None
    ) -> None:
        self._lake = lake
        self._url = url
        self._events_max = events_max
        self._retention = retention
        self._schedule: SnapshotSchedule | None = None
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
        """Add the contents of a batch, as `audit.counted` makes them."""
        with self._wake:
            self._noted.append(contents)
            self._wake.notify()

    def stop(self) -> None:
        """Stop after the present snapshot. One that takes too long is abandoned, and not listed."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(limits.PIPELINE_STOP_SECONDS)
        self._set(state="stopped")

    def _run(self) -> None:
        # A scheduler pool of its own: the streams do not wait for these Spark jobs.
        self._lake.spark.sparkContext.setLocalProperty("spark.scheduler.pool", NAME)
        while not self._stopping:
            if time.monotonic() >= self._retry_at:
                self.work()
            self._trim_when_due()
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._is_due(), self._pause_seconds())

    def _is_due(self) -> bool:
        return bool(self._noted) and time.monotonic() >= self._retry_at

    def _pause_seconds(self) -> float:
        """The time until the next attempt."""
        left = self._retry_at - time.monotonic()
        return left if left > 0 else limits.PIPELINE_RESTART_SECONDS[1]

    def progress(self) -> StreamProgress:
        return self._progress

    # -------------------------------------------------------------------- the work

    def work(self) -> None:
        """Make the snapshots that are due now. Never raises."""
        if not self._events_max:
            return
        failures: list[Exception] = []
        try:
            schedule = self._updated()
            for relation in schedule.to_read():
                self._attempt(lambda: self._read(schedule, relation), failures)  # noqa: B023
            for relation in schedule.to_fold():
                self._attempt(lambda: self._fold(schedule, relation), failures)  # noqa: B023
        except Exception as error:
            failures.append(error)
        self._note_outcome(failures)

    def _attempt(self, step: Any, failures: list[Exception]) -> None:
        """A failure of one table does not affect the others."""
        if self._stopping:
            return
        try:
            step()
        except Exception as error:
            failures.append(error)

    def _updated(self) -> SnapshotSchedule:
        """The schedule, with the batches since the last call."""
        with self._wake:
            noted, self._noted = self._noted, []
        if self._schedule is None:
            # The noted batches are in the lake already, and counted from there.
            self._schedule = self._examined()
            return self._schedule
        for contents in noted:
            for content in contents_of(contents):
                self._schedule.add_changes(content)
        return self._schedule

    def _examined(self) -> SnapshotSchedule:
        """The schedule after a start: from the database, the list of snapshots and later events."""
        schedule = SnapshotSchedule(self._events_max)
        maintenance.clean_stage(self._lake.places.rows)
        for each in snapshots.load(self._lake.places):
            schedule.add_snapshot(each)
        log_id, tables = captured(self._url)
        wanted = {table.relation for table in tables}
        for content in since(
            self._lake, [s for s in schedule.last_snapshots() if s.relation in wanted]
        ):
            schedule.add_changes(content)
        schedule.examine(tables, log_id)
        return schedule

    def _read(self, schedule: SnapshotSchedule, relation: int) -> None:
        _, tables = captured(self._url)
        if relation not in {table.relation for table in tables}:
            schedule.forget(relation)
            return
        self._made(schedule, self._lake.snapshot(self._url, relation))

    def _fold(self, schedule: SnapshotSchedule, relation: int) -> None:
        position = self._lake.reached()
        if position is None:
            return
        try:
            folded = self._lake.fold_relation(relation, position)
        except ResyncRequired:
            schedule.require_read(relation)
            self._read(schedule, relation)
        else:
            self._made(schedule, folded)

    def _made(self, schedule: SnapshotSchedule, snapshot: TableSnapshot) -> None:
        schedule.add_snapshot(snapshot)
        log.info(
            "Made a snapshot of %s: %s rows",
            self._lake.label_of(snapshot.relation),
            snapshot.rows,
        )
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
        done = trim(self._lake, self._retention, captured=relations)
        log.info(
            "Trimmed the lake %s: removed %s days of events and %s snapshots",
            self._lake.root,
            done.days,
            done.snapshots,
        )
        if done.held:
            log.warning(
                "Old events of these tables were not removed, because no later snapshot has them:"
                " %s. To make one: headwater pipeline snapshot TABLE",
                ", ".join(done.held),
            )

    # -------------------------------------------------------------------- progress

    def _note_outcome(self, failures: list[Exception]) -> None:
        if not failures:
            self._pause, self._retry_at = limits.PIPELINE_RESTART_SECONDS[0], 0.0
            self._set(state="running", error=None, error_at=None)
            return
        for error in failures:
            log.warning("A snapshot for the lake %s failed: %s", self._lake.root, error)
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


# ------------------------------------------------------------------------ counting changes


def contents_of(counted: pa.Table) -> Iterator[BatchContent]:
    """The changes of each table, from what `audit.counted` made."""
    names = BatchContent.__struct_fields__
    for row in counted.select(list(names)).to_pylist():
        yield BatchContent(**row)


def since(lake: Lake, last: list[TableSnapshot]) -> Iterator[BatchContent]:
    """The changes of tables since these snapshots. The driver counts them from a few columns of the
    files that may contain some."""
    table = delta.open_table(lake.events_path)
    if table is None or not last:
        return
    for file in delta.chosen_files(table, state.missing_from_all(last)):
        place = FileLocation.of(file)
        with pq.ParquetFile(place.base, filesystem=place.system) as source:
            batches = source.iter_batches(columns=list(audit.NEEDED))
            yield from contents_of(audit.counted(_lacked(batch, last) for batch in batches))


def _lacked(batch: pa.RecordBatch, last: list[TableSnapshot]) -> pa.Table:
    """The changes of a batch that their table's snapshot lacks. Tables are looked up in arrays,
    because there may be many."""
    relations = pa.array([each.relation for each in last], pa.int64())
    ends = pa.array([each.position.xmax for each in last], pa.int64())
    opens = pa.array([xid for each in last for xid in each.position.xip], pa.int64())
    xid = batch.column("xid")
    place = pc.index_in(batch.column("relation"), relations)
    later = pc.or_(pc.greater_equal(xid, pc.take(ends, place)), pc.is_in(xid, opens))
    rows = pa.Table.from_batches([batch])
    return rows.filter(pc.and_(pc.is_valid(place), pc.fill_null(later, False)))


def captured(url: str) -> tuple[str, list[CapturedShape]]:
    """The log's id, and the captured tables without Headwater's own."""
    with (
        translated(url),
        connect_blocking(url, purpose="pipeline") as database,
    ):
        rows = database.execute(_CAPTURED).fetchall()
        row = database.execute("select headwater.log_id()").fetchone()
    assert row is not None
    return row[0], [CapturedShape(*each) for each in rows]


_CAPTURED = """
    select t.relid::bigint, headwater.shape_id(t.relid)
    from headwater.tables t join pg_class c on c.oid = t.relid
    join pg_namespace n on n.oid = c.relnamespace
    where t.enabled and n.nspname <> 'headwater' order by t.relid
"""
