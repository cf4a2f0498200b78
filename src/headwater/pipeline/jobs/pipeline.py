"""Runs the pipeline: one Spark application with a supervised streaming query for each job.

A query that fails is started again after a pause that grows, while the others continue. Where a
retry cannot help (a trimmed log, an unreadable checkpoint) the stream stays failed and reports why.
The pipeline stops between two batches.
"""

from __future__ import annotations

import logging
import time
from threading import Event
from typing import TYPE_CHECKING

from headwater import limits
from headwater.errors import HeadwaterError
from headwater.metrics import PipelineMetrics
from headwater.pipeline.jobs.plan import EVENTS, LOOK_SECONDS, PipelinePlan
from headwater.pipeline.jobs.running_stream import RunningStream
from headwater.pipeline.jobs.snapshot_job import SnapshotJob
from headwater.pipeline.lake import maintenance
from headwater.pipeline.stream.checkpoints import LakeLock
from headwater.pipeline.stream.progress import Reports, StreamLag, StreamProgress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def run(
    spark: SparkSession, plan: PipelinePlan, stop: Event, metrics: PipelineMetrics | None = None
) -> list[StreamProgress]:
    """Run the pipeline until `stop` is set; with `once`, until every change up to now is written.
    Returns the progress of the streams. Raises the error of a failed stream: of any stream with
    `once`, otherwise only when all streams have failed."""
    with LakeLock(plan.lake.root):
        return Pipeline(spark, plan, Reports(plan.url, metrics)).run(stop)


class Pipeline:
    """The streams of one application."""

    def __init__(self, spark: SparkSession, plan: PipelinePlan, reports: Reports) -> None:
        self._plan = plan
        self._reports = reports
        self._streams = [RunningStream(spark, plan, job) for job in plan.jobs]
        self._report_at = 0.0
        self._vacuum_at = time.monotonic() + limits.LAKE_VACUUM_SECONDS
        self._snapshots: SnapshotJob | None = None
        if EVENTS.name in {job.name for job in plan.jobs}:
            self._snapshots = SnapshotJob(
                plan.lake, plan.url, events_max=plan.snapshot_events, retention=plan.retention
            )

    def run(self, stop: Event) -> list[StreamProgress]:
        try:
            if self._snapshots is not None and not self._plan.once:
                self._snapshots.start()
            while not self._has_ended():
                for stream in self._streams:
                    stream.look()
                self._pass_contents()
                self._report()
                self._vacuum()
                if stop.wait(LOOK_SECONDS):
                    break
            if self._snapshots is not None and self._plan.once and self._has_stopped():
                self._snapshots.work()
        finally:
            for stream in self._streams:
                stream.stop()
            if self._snapshots is not None:
                self._snapshots.stop()
            self._report(last=True)
            self._reports.close()
        self._raise_failure()
        return [stream.progress() for stream in self._streams]

    def _pass_contents(self) -> None:
        for stream in self._streams:
            for contents in stream.contents():
                if self._snapshots is not None:
                    self._snapshots.note(contents)

    def _has_ended(self) -> bool:
        return all(stream.state in ("stopped", "failed") for stream in self._streams)

    def _has_stopped(self) -> bool:
        """Whether every stream has written all its changes."""
        return all(stream.state == "stopped" for stream in self._streams)

    def _raise_failure(self) -> None:
        failed = [each for each in self._streams if each.state == "failed"]
        if failed and (self._plan.once or len(failed) == len(self._streams)):
            assert failed[0].error is not None
            raise failed[0].error

    def _report(self, *, last: bool = False) -> None:
        if not last and time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + limits.PIPELINE_REPORT_SECONDS
        try:
            streams = [each.progress(self._behind(each)) for each in self._streams]
            if self._snapshots is not None and self._plan.snapshot_events:
                streams.append(self._snapshots.progress())
            self._reports.write(streams)
            self._start_due(last=last)
        except HeadwaterError as error:
            # The database cannot be reached: the streams report that themselves.
            log.warning("Could not write the pipeline's progress to the database: %s", error)

    def _start_due(self, *, last: bool) -> None:
        """Restart the streams of views for which a rebuild was requested: the start builds them."""
        views = {each.view: each for each in self._streams if each.view is not None}
        # With `once`, the start of a stream sees by itself that its view is due.
        if not views or last or self._plan.once:
            return
        for name in self._reports.due_views():
            if name in views:
                views[name].restart()

    def _behind(self, stream: RunningStream) -> StreamLag | None:
        return None if stream.offset is None else self._reports.behind(stream.offset)

    def _vacuum(self) -> None:
        if time.monotonic() < self._vacuum_at:
            return
        self._vacuum_at = time.monotonic() + limits.LAKE_VACUUM_SECONDS
        try:
            for done in maintenance.vacuum(self._plan.lake.root, self._plan.vacuum_keep):
                log.info("Removed %s files from %s", done.removed, done.table)
        except Exception as error:  # delta-rs has errors of several kinds; none may end the streams
            log.warning("Vacuum of the lake %s failed: %s", self._plan.lake.root, error)
