"""The sink of the stream `views`: passes each batch to the views that it touches.

Each view has its own position, stored with its rows. A view at the start of a batch applies the
parts of the batch; all these views do so at the same time, and the stream waits for them. A view
that is being built, is behind, or has failed is not waited for: its own thread brings it to the
position of the stream, after which it applies batches again. So one view delays or fails no other.

The position of the stream itself does not matter: each start begins at the present, and views that
are before it catch up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING

import msgspec

from headwater import limits
from headwater.errors import HeadwaterError, PipelineError
from headwater.model import Position
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.spark import log_file
from headwater.pipeline.stream.checkpoints import Checkpoint, owner_name
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import ChangeKind, Planner
from headwater.pipeline.stream.progress import StreamProgress
from headwater.pipeline.stream.sink import StreamSink
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.maintenance import MaintainedView
from headwater.pipeline.views.permits import Permits, ViewPermits
from headwater.pipeline.views.storage.connections import ViewConnections
from headwater.pipeline.views.storage.store import ViewStore, due_views

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

VIEW_PREFIX = "view."
"""View `revenue` is called `view.revenue` in the progress of the pipeline."""

_DUE_SECONDS = 2.0
"""How often it is checked whether a rebuild was requested."""


_INTERRUPT_SECONDS = 1.0
"""How often the jobs of a view that works are interrupted while the pipeline stops."""


class Batch(msgspec.Struct, frozen=True):
    """A batch of the stream: between which positions, its parts, and what changed."""

    start: Position
    end: Position
    parts: DataFrame
    kinds: Sequence[ChangeKind]

    @property
    def shared(self) -> tuple[DataFrame, Sequence[ChangeKind]]:
        return self.parts, self.kinds


class ViewsSink(StreamSink):
    """Maintains all views of a pipeline."""

    def __init__(
        self, views: Sequence[StreamingView], lake: Lake, url: str, checkpoint: Checkpoint
    ) -> None:
        self._checkpoint = checkpoint
        self._planners = _Planners(url)
        self._connections = ViewConnections(url)
        self._permits = ViewPermits()
        self._is_closing = Condition()
        self._stopping = False
        with self._planners.one() as planner:
            self._begin = planner.now()
        self._workers = [
            ViewWorker(
                MaintainedView(view, lake.spark, url, ViewStore(self._connections, view)),
                lake.spark,
                self._planners,
                self._permits,
                self._begin,
            )
            for view in views
        ]
        for worker in self._workers:
            worker.start()
        self._watcher = Thread(target=self._watch, name="headwater-views", daemon=True)
        self._watcher.start()

    @property
    def begin(self) -> Offset:
        """Where a new stream begins."""
        return Offset(self._begin)

    def write(self, parts: DataFrame, batch_id: int) -> int:
        start = self._checkpoint.start(batch_id)
        begin = self._begin if start is None else start.position
        end = self._checkpoint.offset(batch_id).position
        with self._planners.one() as planner:
            batch = Batch(begin, end, parts, planner.kinds(begin, end))
        given = [worker for worker in self._workers if worker.offer(batch)]
        deadline = time.monotonic() + limits.VIEW_BATCH_SECONDS
        for worker in given:
            if not worker.wait(deadline):
                log.info("View %s is slow, and catches up by itself", worker.name)
        relations = frozenset[int]().union(*(worker.relations for worker in self._workers))
        return sum(kind.count for kind in batch.kinds if kind.relation in relations)

    def finish(self) -> None:
        """Wait until every view has what the stream has written. Raises the error of a view that
        failed; one whose error may pass is tried again first."""
        for worker in self._workers:
            worker.finish()
        for worker in self._workers:
            if worker.error is not None:
                raise worker.error

    def progress(self) -> list[StreamProgress]:
        return [worker.progress() for worker in self._workers]

    def close(self, seconds: float = limits.PIPELINE_STOP_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        with self._is_closing:
            self._stopping = True
            self._is_closing.notify_all()
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join(deadline)
        self._watcher.join(max(0.0, deadline - time.monotonic()))
        self._connections.close()
        self._planners.close()

    # -------------------------------------------------------------------- rebuilds

    def _watch(self) -> None:
        """Rebuild views for which that was requested, and store positions, until the end."""
        save_at = time.monotonic() + limits.VIEW_POSITION_SECONDS
        while True:
            with self._is_closing:
                self._is_closing.wait_for(lambda: self._stopping, _DUE_SECONDS)
            if self._stopping:
                return
            try:
                self._start_due()
            except HeadwaterError as error:
                log.debug("Requested rebuilds could not be read: %s", error)
            if time.monotonic() >= save_at:
                save_at = time.monotonic() + limits.VIEW_POSITION_SECONDS
                for worker in self._workers:
                    worker.save_position()

    def _start_due(self) -> None:
        due = due_views(self._connections)
        for worker in self._workers:
            if worker.name in due:
                worker.request_build()


class ViewWorker:
    """The thread of one view."""

    def __init__(
        self,
        view: MaintainedView,
        spark: SparkSession,
        planners: _Planners,
        permits: ViewPermits,
        target: Position,
    ) -> None:
        self.name = view.view.name
        self.error: HeadwaterError | None = None
        self._view = view
        self._spark = spark
        self._planners = planners
        self._permits = permits
        self._target = target
        self._is_started = False
        self._is_due = False
        self._batch: Batch | None = None
        self._is_working = False
        self._stopping = False
        self._wake = Condition()
        self._permit: Permits | None = None
        self._is_awaited = False
        self._pause, self._retry_at = limits.PIPELINE_RESTART_SECONDS[0], 0.0
        # Where the view last changed. Its position moves with each batch, also with one of nothing
        # but our own progress rows: reported, it would be the next batch, without end.
        self._reported: Position | None = None
        self._changes = self._restarts = 0
        self._error_at: datetime | None = None
        self._failing_since: float | None = None
        self._tag = f"headwater-view-{self.name}"
        self._thread = Thread(target=self._run, name=f"headwater-{self._tag}", daemon=True)

    # -------------------------------------------------------------------- for the sink

    @property
    def relations(self) -> frozenset[int]:
        return self._view.relations

    def start(self) -> None:
        self._thread.start()

    def offer(self, batch: Batch) -> bool:
        """Take a batch. Returns whether the view applies it now; otherwise it is not touched, or
        catches up by itself."""
        with self._wake:
            self._target = batch.end
            is_here = self._is_started and not self._is_working and not self._is_due
            if not is_here or self.error is not None or self._view.position != batch.start:
                self._wake.notify_all()
                return False
            if not self._view.touches(batch.kinds):
                self._view.skip(batch.end)
                return False
            self._batch, self._is_working, self._is_awaited = batch, True, True
            self._wake.notify_all()
            return True

    def wait(self, deadline: float) -> bool:
        """Wait for the batch; returns whether it is done."""
        with self._wake:
            is_done = self._wake.wait_for(
                lambda: not self._is_working, max(0.0, deadline - time.monotonic())
            )
            self._is_awaited = False
            if not is_done and (permit := self.release()) is not None:
                # Others may use it: the stream no longer waits for this view.
                permit.release()
            return is_done

    def finish(self) -> None:
        """Wait until the view is at the position of the stream, or has failed. An error that may
        pass counts once it has lasted for `limits.PIPELINE_ONCE_RETRY_SECONDS`."""
        with self._wake:
            while not self._has_finished():
                left = None
                if self._failing_since is not None and not self._is_working:
                    until = self._failing_since + limits.PIPELINE_ONCE_RETRY_SECONDS
                    left = until - time.monotonic()
                    if left <= 0:
                        return
                self._wake.wait(left)

    def _has_finished(self) -> bool:
        if self._stopping or not self._thread.is_alive():
            return True
        if self.error is not None:
            return not self.error.retryable
        return self._is_started and not self._is_working and not self._is_behind()

    def request_build(self) -> None:
        with self._wake:
            if not self._is_working and time.monotonic() >= self._retry_at:
                self._is_due = True
                self._wake.notify_all()

    def save_position(self) -> None:
        with self._wake:
            if self._is_working or not self._is_started:
                return
            try:
                self._view.save_position()
            except HeadwaterError as error:
                log.debug("The position of view %s was not stored: %s", self.name, error)

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._interrupt()

    def join(self, deadline: float) -> None:
        """Wait for the thread. Its work may have begun another job of Spark since `stop`."""
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._interrupt()
            self._thread.join(min(left, _INTERRUPT_SECONDS))
        self.save_position()

    def _interrupt(self) -> None:
        if self._is_working:
            with suppress(Exception):  # Spark may be gone
                # `SparkSession.interruptTag` knows only the tags of the thread that calls it.
                self._spark.sparkContext.cancelJobsWithTag(self._tag)

    def progress(self) -> StreamProgress:
        position, error, building = self._reported, self.error, self._view.building
        return StreamProgress(
            f"{VIEW_PREFIX}{self.name}",
            self._state(),
            _OWNER,
            position=None if position is None else str(position),
            changes=self._changes,
            restarts=self._restarts,
            error=None if error is None else str(error)[: limits.PIPELINE_ERROR_CHARS_MAX],
            error_at=self._error_at,
            task=None if building is None else "build",
            task_done=None if building is None else building.done,
            task_total=None if building is None else building.total,
            task_seconds_left=None if building is None else building.seconds_left,
        )

    def _state(self) -> str:
        if self.error is not None:
            return "waiting" if self.error.retryable else "failed"
        if self._stopping:
            return "stopped"
        return "running" if self._is_started else "starting"

    # -------------------------------------------------------------------- the thread

    def _run(self) -> None:
        # A scheduler pool of its own: no view waits for the Spark jobs of another one.
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", self._tag)
        self._spark.sparkContext.addJobTag(self._tag)
        while self._wait_for_work():
            batch = self._batch
            try:
                with self._permits.held(self, is_behind=batch is None):
                    if not self._stopping:
                        self._work(batch)
                self._has_worked()
            except Exception as error:
                self._failed(error)
        with self._wake:
            self._is_working = False
            self._wake.notify_all()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False to stop."""
        with self._wake:
            self._batch, self._is_working = None, False
            self._wake.notify_all()
            while not self._stopping:
                if self._batch is not None:
                    return True
                if self._has_work() and time.monotonic() >= self._retry_at:
                    self._is_working = True
                    return True
                left = self._retry_at - time.monotonic()
                self._wake.wait(left if left > 0 else None)
            return False

    def _has_work(self) -> bool:
        if self.error is not None and not self.error.retryable and not self._is_due:
            return False
        return not self._is_started or self._is_due or self._is_behind()

    def _is_behind(self) -> bool:
        position = self._view.position
        return position is None or not position.covers(self._target)

    def _work(self, batch: Batch | None) -> None:
        if batch is not None:
            with self._planners.one() as planner:
                self._view.advance(batch.end, planner, batch.shared)
            self._changes += sum(k.count for k in batch.kinds if k.relation in self.relations)
        elif not self._is_started or self._is_due:
            self._view.start()
            self._is_started, self._is_due = True, False
        else:
            with self._planners.one() as planner:
                self._view.advance(self._target, planner)
            if not self._view.has_changed:
                return
        self._reported = self._view.position

    def _has_worked(self) -> None:
        if self.error is not None:
            self._view.note_error(None)
        self.error = self._error_at = self._failing_since = None
        if not self._is_behind():
            self._pause = limits.PIPELINE_RESTART_SECONDS[0]

    def _failed(self, error: Exception) -> None:
        if self._stopping:
            log.debug("View %s stopped: %s", self.name, error)
            return
        found = error if isinstance(error, HeadwaterError) else _explained(self.name, error)
        log.warning("View %s failed: %s", self.name, found, exc_info=found is not error)
        self._view.note_error(found)
        with self._wake:
            self.error, self._error_at = found, datetime.now(UTC)
            if self._failing_since is None:
                self._failing_since = time.monotonic()
            self._restarts += 1
            self._is_due = False
            self._retry_at = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, limits.PIPELINE_RESTART_SECONDS[1])
            # What the view has is read from the database.
            self._is_started = False

    # -------------------------------------------------------------------- its permit

    def hold(self, permit: Permits) -> None:
        """Take a permit. One to work with the stream is given back at once where the stream no
        longer waits."""
        with self._wake:
            self._permit = permit
            is_late = self._batch is not None and not self._is_awaited
        if is_late and (late := self.release()) is not None:
            late.release()

    def release(self) -> Permits | None:
        """Take its permit away, if it has one."""
        with self._wake:
            permit, self._permit = self._permit, None
            return permit


_OWNER = owner_name()


def _explained(view: str, error: Exception) -> HeadwaterError:
    text = log_file.cause(str(error)) or type(error).__name__
    return PipelineError(f"view {view}: {text}", hint=log_file.record(error), retryable=True)


class _Planners:
    """Planners of the log, one for each thread that needs one at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._free: list[Planner] = []
        self._lock = Lock()
        self._is_closed = False

    @contextmanager
    def one(self) -> Iterator[Planner]:
        with self._lock:
            planner = self._free.pop() if self._free else Planner(self._url)
        try:
            yield planner
        finally:
            with self._lock:
                if not self._is_closed:
                    self._free.append(planner)
                    planner = None  # type: ignore[assignment]
            if planner is not None:
                planner.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for planner in free:
            planner.close()
