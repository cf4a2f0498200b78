"""Makes snapshots of tables while the events stream runs, so that every moment can be computed from
a snapshot that is near it. Once a day it removes rows of snapshots that were never finished, and
old events (`trim`).

`snapshot_schedule` decides which tables are due. The events sink reports what each batch contained;
after a start, the changes since the last snapshots are counted once from the lake.

This runs in a thread of its own (`job_thread`), and is reported as the stream `snapshots`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pyarrow as pa

from headwater import limits
from headwater.database import connect_blocking, translated
from headwater.errors import HeadwaterError, ResyncRequired
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.jobs.snapshot_schedule import BatchContent, CapturedShape, SnapshotSchedule
from headwater.pipeline.jobs.trim import trim
from headwater.pipeline.lake import delta, maintenance, snapshots
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.lake import Contradiction, Lake
from headwater.pipeline.snapshots import catalog_marks
from headwater.pipeline.snapshots.continuity import Unaltered
from headwater.pipeline.snapshots.database_snapshot import NotCapturedError
from headwater.pipeline.snapshots.table_reads import FailedTable, ReadProgress

log = logging.getLogger(__name__)

NAME = "snapshots"
"""Its name in the pipeline's progress."""


class SnapshotJob:
    """Makes the snapshots that are due: `step` is what a `JobThread` runs."""

    def __init__(
        self, lake: Lake, url: str, *, events_max: int, retention: timedelta | None = None
    ) -> None:
        self._lake = lake
        self._url = url
        self._events_max = events_max
        self._retention = retention
        self._schedule: SnapshotSchedule | None = None
        self._trim_at = 0.0
        self._failed: set[int] = set()
        self._watch_at = 0.0
        self._unaltered: dict[int, Unaltered] = {}
        self._contradicted: set[int] = set()

    def step(self, run: JobThread) -> None:
        contents = run.contents()
        if self._events_max:
            self._make_due(run, contents)
        self._trim_when_due(run)

    def _make_due(self, run: JobThread, contents: list[pa.Table]) -> None:
        self._failed.clear()
        schedule = self._updated(contents)
        self._watch(schedule)
        self._read(run, schedule)
        for relation in schedule.to_fold():
            run.attempt(lambda: self._fold(run, schedule, relation))  # noqa: B023
        # Some could not be computed from the events.
        self._read(run, schedule)

    def _watch(self, schedule: SnapshotSchedule) -> None:
        """Find tables that were altered in a way that the log does not have."""
        if time.monotonic() < self._watch_at:
            return
        self._watch_at = time.monotonic() + limits.SNAPSHOT_WATCH_SECONDS
        position, at, marks = catalog_marks.present(self._url)
        for relation in schedule.observe({each: found.mark for each, found in marks.items()}):
            self._unaltered[relation] = Unaltered(position, at)

    def _updated(self, noted: list[pa.Table]) -> SnapshotSchedule:
        """The schedule, with the batches since the last call."""
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

    def _read(self, run: JobThread, schedule: SnapshotSchedule) -> None:
        """Read the tables that must be read, many at a time."""
        due = [each for each in schedule.to_read() if each not in self._failed]
        if due and not run.is_stopping:
            run.attempt(lambda: self._read_tables(run, schedule, due))
            run.report(task=None, task_done=None, task_total=None, task_seconds_left=None)

    def _read_tables(self, run: JobThread, schedule: SnapshotSchedule, due: list[int]) -> None:
        name = f"reading {len(due)} table{'s' if len(due) > 1 else ''}"
        reads = self._lake.snapshots_of(
            self._url, due, unaltered=self._unaltered, contradicted=self._contradicted
        )
        with closing(reads) as outcomes:
            for outcome in outcomes:
                match outcome:
                    case TableSnapshot():
                        self._contradicted.discard(outcome.relation)
                        self._made(run, schedule, outcome)
                    case FailedTable(int() as relation, error):
                        self._failed.add(relation)
                        run.attempt(lambda: self._note_failure(schedule, relation, error))
                    case ReadProgress():
                        run.report(
                            task=name,
                            task_done=outcome.bytes_done,
                            task_total=outcome.bytes,
                            task_seconds_left=outcome.seconds_left,
                        )
                if run.is_stopping:
                    return

    def _note_failure(
        self, schedule: SnapshotSchedule, relation: int, error: HeadwaterError
    ) -> None:
        if not isinstance(error, NotCapturedError):
            raise error
        schedule.forget(relation)

    def _fold(self, run: JobThread, schedule: SnapshotSchedule, relation: int) -> None:
        position = self._lake.reached()
        if position is None:
            return
        try:
            folded = self._lake.fold_relation(relation, position)
        except Contradiction as error:
            log.warning("%s", error)
            self._contradicted.add(relation)
            schedule.require_read(relation)
        except ResyncRequired:
            schedule.require_read(relation)
        else:
            self._made(run, schedule, folded)

    def _made(self, run: JobThread, schedule: SnapshotSchedule, snapshot: TableSnapshot) -> None:
        schedule.add_snapshot(snapshot)
        log.info(
            "Made a snapshot of %s: %s rows",
            self._lake.label_of(snapshot.relation),
            snapshot.rows,
        )
        run.count(snapshot.rows)
        run.report(position=str(snapshot.position))

    # -------------------------------------------------------------------- trimming

    def _trim_when_due(self, run: JobThread) -> None:
        if time.monotonic() >= self._trim_at and run.attempt(self._trim):
            self._trim_at = time.monotonic() + limits.LAKE_VACUUM_SECONDS

    def _trim(self) -> None:
        if self._retention is None:
            snapshots.remove(self._lake.places)
            return
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
                "Old events of these tables were not removed, because no later snapshot that the"
                " lake has reached has them: %s. To make one: headwater pipeline snapshot TABLE",
                ", ".join(done.held),
            )


# ------------------------------------------------------------------------ counting changes


def contents_of(counted: pa.Table) -> Iterator[BatchContent]:
    """The changes of each table, from the contents of a batch (`audit.contents_of`)."""
    names = BatchContent.__struct_fields__
    for row in counted.select(list(names)).to_pylist():
        yield BatchContent(**row)


def since(lake: Lake, last: list[TableSnapshot]) -> Iterator[BatchContent]:
    """The changes of tables since these snapshots."""
    if last and delta.open_table(lake.events_path) is not None:
        positions = {each.relation: each.position for each in last}
        yield from contents_of(lake.counted_after(positions))


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
