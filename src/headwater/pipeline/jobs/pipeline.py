"""Runs the pipeline: one Spark application with a supervised streaming query for each job, and the
jobs beside them (`background`).

A query that fails is started again after a pause that grows, while the others continue. Where a
retry cannot help (a trimmed log, an unreadable checkpoint) the stream stays failed and reports why.
The pipeline stops between two batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from math import inf
from threading import Event, Thread
from typing import TYPE_CHECKING

from headwater import limits
from headwater.errors import HeadwaterError
from headwater.metrics import PipelineMetrics
from headwater.pipeline.jobs.background import BackgroundJobs, jobs_of
from headwater.pipeline.jobs.plan import LOOK_SECONDS, PipelinePlan
from headwater.pipeline.jobs.running_stream import RunningStream
from headwater.pipeline.spark import launch
from headwater.pipeline.spark.launch import SparkLost
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
    with LakeLock(plan.lake.root), closing(Reports(plan.url, metrics)) as reports:
        return Pipeline(spark, plan, reports).run(stop)


class Pipeline:
    """The streams of one application."""

    def __init__(
        self,
        spark: SparkSession,
        plan: PipelinePlan,
        reports: Reports,
        lost: Sequence[SparkLost] = (),
    ) -> None:
        """`lost` are the errors of the Sparks before this one."""
        self._plan = plan
        self._reports = reports
        self._streams = [RunningStream(spark, plan, job, lost) for job in plan.jobs]
        self._report_at = 0.0
        self._background = BackgroundJobs(list(jobs_of(plan)))

    def run(self, stop: Event) -> list[StreamProgress]:
        try:
            if not self._plan.once:
                self._background.start()
            while not self._has_ended():
                if reason := launch.ended():
                    raise SparkLost(reason)
                for stream in self._streams:
                    stream.look()
                self._pass_contents()
                self._report()
                if stop.wait(LOOK_SECONDS):
                    break
            if self._plan.once and self._has_stopped():
                self._work_once(stop)
        except Exception as error:
            lost = launch.lost(error)
            if lost is None:
                raise
            for stream in self._streams:
                stream.abandon(lost)
            raise lost from error
        finally:
            self._stop()
        self._raise_failure()
        return [stream.progress() for stream in self._streams]

    def _work_once(self, stop: Event) -> None:
        """Do the work of all jobs, until `stop` is set. What they do then may take a while longer,
        or it is abandoned."""
        worker = Thread(target=self._background.work, name="headwater-jobs", daemon=True)
        worker.start()
        deadline = inf
        while worker.is_alive() and time.monotonic() < deadline:
            if reason := launch.ended():
                raise SparkLost(reason)
            if stop.is_set() and deadline == inf:
                self._background.request_stop()
                deadline = time.monotonic() + limits.PIPELINE_STOP_SECONDS
            worker.join(LOOK_SECONDS)

    def _stop(self) -> None:
        """Stop streams and jobs, all within one time."""
        deadline = time.monotonic() + limits.PIPELINE_STOP_SECONDS
        self._background.request_stop()
        for stream in self._streams:
            try:
                stream.stop(max(0.0, deadline - time.monotonic()))
            except Exception as error:  # of Spark; it must not prevent that the others stop
                log.warning("A stream of the pipeline did not stop in order: %s", error)
        self._background.stop(deadline)
        self._report(last=True)

    def _pass_contents(self) -> None:
        for stream in self._streams:
            for contents in stream.contents():
                self._background.note(contents)

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
        if self._plan.once and (error := self._background.failure) is not None:
            raise error

    def _report(self, *, last: bool = False) -> None:
        if not last and time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + limits.PIPELINE_REPORT_SECONDS
        try:
            streams = [each.progress(self._behind(each)) for each in self._streams]
            views = [each for stream in self._streams for each in stream.inner_progress()]
            self._reports.write([*streams, *views, *self._background.progress()])
        except HeadwaterError as error:
            # The database cannot be reached: the streams report that themselves.
            log.warning("Could not write the pipeline's progress to the database: %s", error)

    def _behind(self, stream: RunningStream) -> StreamLag | None:
        return None if stream.offset is None else self._reports.behind(stream.offset)
