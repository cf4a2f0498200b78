"""The thread of a job beside the streams, such as snapshots: when its step runs, and what is
reported about it.

The step runs after the start, after each batch of events, and after a pause at the latest. It never
delays a stream. A failure ends nothing: it is logged, reported as the progress of the job, and the
step is tried again after a pause that grows. A job supplies its name and its step; the step says
what it did.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import msgspec

from headwater import limits
from headwater.errors import HeadwaterError
from headwater.pipeline.spark_errors import explain
from headwater.pipeline.stream.owner import owner_name
from headwater.pipeline.stream.progress import StreamProgress

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


class JobThread:
    """Runs the step of a job: in a thread after `start`, or once with `work`. With `spark`, the
    thread has a scheduler pool of its own: the streams do not wait for its Spark jobs."""

    def __init__(
        self,
        name: str,
        step: Callable[[JobThread], None],
        *,
        spark: Callable[[], SparkSession] | None = None,
        seconds: float = limits.PIPELINE_RESTART_SECONDS[1],
        is_reported: bool = True,
        merge: Callable[[pa.Table], pa.Table] = lambda contents: contents,
    ) -> None:
        """`merge` makes the contents of many batches smaller, for a step that takes long."""
        self.name = name
        self._merge = merge
        self._step = step
        self._spark = spark
        self._seconds = seconds
        self._is_reported = is_reported
        self._noted: list[pa.Table] = []
        self._contents: list[pa.Table] = []
        self._failures: list[HeadwaterError] = []
        self._warning: tuple[str | None, datetime | None] = None, None
        self._wake = Condition()
        self._stopping = False
        self._thread: Thread | None = None
        self._pause, self._retry_at = limits.PIPELINE_RESTART_SECONDS[0], 0.0
        self._progress = StreamProgress(name, "starting", owner_name())

    # -------------------------------------------------------------------- for the pipeline

    def start(self) -> None:
        self._thread = Thread(target=self._run, name=f"headwater-{self.name}", daemon=True)
        self._thread.start()

    def note(self, contents: pa.Table) -> None:
        """Add the contents of a batch, as `audit.counted` makes them. Wakes the thread."""
        with self._wake:
            self._noted.append(contents)
            if len(self._noted) >= _NOTED_MAX:
                self._noted = [self._merge(_joined(self._noted))]
            self._wake.notify()

    def work(self) -> None:
        """Run the step once, in the thread of the caller. Never raises."""
        with self._wake:
            self._contents += self._noted
            self._noted = []
        self._failures = []
        self.attempt(lambda: self._step(self))
        if not self._failures:
            self._contents = []
        self._note_outcome()

    def progress(self) -> StreamProgress | None:
        return self._progress if self._is_reported else None

    @property
    def failure(self) -> HeadwaterError | None:
        """The first error of the last run of the step."""
        return self._failures[0] if self._failures else None

    def request_stop(self) -> None:
        """Let the step end at its next part."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def stop(self, seconds: float = limits.PIPELINE_STOP_SECONDS) -> None:
        """Stop between two parts of the step. A part that takes longer is abandoned."""
        self.request_stop()
        if self._thread is not None:
            self._thread.join(seconds)
        self.report(state="stopped")

    # -------------------------------------------------------------------- for the step

    @property
    def is_stopping(self) -> bool:
        """Whether the step should end at its next part."""
        return self._stopping

    def contents(self) -> list[pa.Table]:
        """The contents of the batches since the last run that succeeded or took them."""
        found, self._contents = self._contents, []
        return found

    def attempt(self, part: Callable[[], None]) -> bool:
        """Run a part of the step, such as one table: its failure does not affect the others, but
        the step is tried again. Returns whether it succeeded. Does nothing while stopping."""
        if self._stopping:
            return False
        try:
            part()
        except Exception as error:
            self._failures.append(explain(error, f"job {self.name}"))
            return False
        return True

    def warn(self, text: str | None, at: datetime | None = None) -> None:
        """A problem that the step has found, reported as the error of the job until it says
        otherwise. The step itself has not failed."""
        self._is_reported = self._is_reported or text is not None
        self._warning = (None if text is None else text[: limits.PIPELINE_ERROR_CHARS_MAX]), at

    def report(self, **fields: Any) -> None:
        """Change the progress, for instance `changes`, `position` or `task`."""
        self._progress = msgspec.structs.replace(self._progress, **fields)

    def count(self, rows: int) -> None:
        """Add to the rows or changes that the job has processed."""
        self.report(changes=self._progress.changes + rows)

    # -------------------------------------------------------------------- the thread

    def _run(self) -> None:
        if self._spark is not None:
            self._spark().sparkContext.setLocalProperty("spark.scheduler.pool", self.name)
        while not self._stopping:
            if time.monotonic() >= self._retry_at:
                self.work()
            with self._wake:
                self._wake.wait_for(self._is_due, self._pause_seconds())

    def _is_due(self) -> bool:
        return self._stopping or (bool(self._noted) and time.monotonic() >= self._retry_at)

    def _pause_seconds(self) -> float:
        """The time until the next run of the step."""
        left = self._retry_at - time.monotonic()
        return left if left > 0 else self._seconds

    def _note_outcome(self) -> None:
        if not self._failures:
            self._pause, self._retry_at = limits.PIPELINE_RESTART_SECONDS[0], 0.0
            text, at = self._warning
            self.report(state="running", error=text, error_at=at)
            return
        for error in self._failures:
            hint = f". {error.hint}" if error.hint else ""
            log.warning("Job %s of the pipeline: %s%s", self.name, error, hint)
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, limits.PIPELINE_RESTART_SECONDS[1])
        self.report(
            state="waiting",
            restarts=self._progress.restarts + 1,
            error=str(self._failures[0])[: limits.PIPELINE_ERROR_CHARS_MAX],
            error_at=datetime.now(UTC),
        )


_NOTED_MAX = 100
"""Batches whose contents are stored one by one while a step runs."""


def _joined(contents: list[pa.Table]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(contents)
