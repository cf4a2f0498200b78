"""The jobs that run beside the streams of a pipeline, such as snapshots.

A job has a thread of its own (`job_thread`) and never delays a stream. An error of one job ends
neither a stream nor another job: it is logged, and reported by the job itself as a stream of
`headwater.pipeline`. To add a job, add a `JobThread` with its step to `jobs_of`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from headwater import limits
from headwater.errors import HeadwaterError
from headwater.pipeline.compaction import job as compaction_job
from headwater.pipeline.compaction.job import CompactionJob
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.jobs import snapshot_job, vacuum_job
from headwater.pipeline.jobs.plan import EVENTS, PipelinePlan
from headwater.pipeline.jobs.snapshot_job import SnapshotJob
from headwater.pipeline.jobs.vacuum_job import VacuumJob
from headwater.pipeline.lake import audit
from headwater.pipeline.reconcile import job as reconcile_job
from headwater.pipeline.reconcile.job import ReconcileJob
from headwater.pipeline.stream.progress import StreamProgress
from headwater.pipeline.tables import job as tables_job
from headwater.pipeline.tables.job import TablesJob

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


class BackgroundJob(Protocol):
    """A job beside the streams. A pipeline calls either `start`, or, with `once`, `work`."""

    def start(self) -> None:
        """Start a thread that does the work when it is due, until `stop`."""

    def note(self, contents: pa.Table) -> None:
        """Take the contents of a batch of events, as `audit.counted` makes them. Returns at
        once."""

    def work(self) -> None:
        """Do all the work that is due now, and return."""

    @property
    def failure(self) -> HeadwaterError | None:
        """The error of the last work; None if it succeeded."""

    def progress(self) -> StreamProgress | None:
        """Its row in `headwater.pipeline`; None for a job that is not in use. Returns at once."""

    def request_stop(self) -> None:
        """Let the work end at its next step. Returns at once."""

    def stop(self, seconds: float) -> None:
        """Stop between two steps of the work, within this time. May be called without `start`."""


def jobs_of(plan: PipelinePlan) -> Iterator[BackgroundJob]:
    """The jobs of a pipeline. They read the lake's events: so they run with that stream only."""
    if EVENTS.name not in {job.name for job in plan.jobs}:
        return
    retention = None if plan.once else plan.retention
    if plan.snapshot_events or retention is not None:
        job = SnapshotJob(plan.lake, plan.url, events_max=plan.snapshot_events, retention=retention)
        yield JobThread(
            snapshot_job.NAME,
            job.step,
            spark=lambda: plan.lake.spark,
            is_reported=bool(plan.snapshot_events),
            merge=audit.contents_of,
        )
    if plan.tables is not None:
        typed = TablesJob(plan.lake, plan.tables, once=plan.once)
        yield JobThread(
            tables_job.NAME,
            typed.step,
            spark=lambda: plan.lake.spark,
            seconds=max(plan.tables.seconds, 1.0),
            merge=audit.contents_of,
        )
    yield JobThread(
        reconcile_job.NAME,
        ReconcileJob(plan.lake, plan.url, plan.reconcile, plan.metrics).step,
        spark=lambda: plan.lake.spark,
        seconds=limits.RECONCILE_CHECK_SECONDS,
        is_reported=plan.reconcile is not None,
    )
    yield JobThread(
        compaction_job.NAME,
        CompactionJob(plan.lake.root, lambda: plan.lake.spark, plan.metrics).step,
        spark=lambda: plan.lake.spark,
        seconds=limits.LAKE_COMPACT_SECONDS,
    )
    if not plan.once:
        yield JobThread(
            vacuum_job.NAME,
            VacuumJob(plan.lake.root, plan.vacuum_keep).step,
            seconds=limits.LAKE_VACUUM_SECONDS,
            is_reported=False,
        )


class BackgroundJobs:
    """All jobs of a pipeline, as one. No method raises an error of a job."""

    def __init__(self, jobs: Sequence[BackgroundJob]) -> None:
        self._jobs = tuple(jobs)

    def start(self) -> None:
        self._each(lambda job: job.start())

    def note(self, contents: pa.Table) -> None:
        self._each(lambda job: job.note(contents))

    def work(self) -> None:
        self._each(lambda job: job.work())

    def progress(self) -> list[StreamProgress]:
        found: list[StreamProgress] = []
        for job in self._jobs:
            with _logged(job):
                if (reported := job.progress()) is not None:
                    found.append(reported)
        return found

    @property
    def failure(self) -> HeadwaterError | None:
        """The first error of the last work."""
        return next((job.failure for job in self._jobs if job.failure is not None), None)

    def request_stop(self) -> None:
        self._each(lambda job: job.request_stop())

    def stop(self, deadline: float) -> None:
        """Stop all jobs, before a time of the monotonic clock."""
        self.request_stop()
        self._each(lambda job: job.stop(max(0.0, deadline - time.monotonic())))

    def _each(self, step: Callable[[BackgroundJob], None]) -> None:
        for job in self._jobs:
            with _logged(job):
                step(job)


@contextmanager
def _logged(job: BackgroundJob) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.warning("%s of the pipeline failed: %s", type(job).__name__, error, exc_info=error)
