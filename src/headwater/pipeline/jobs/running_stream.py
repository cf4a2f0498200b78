"""A stream of the pipeline: its streaming query, supervised.

Only this module knows `readStream`, checkpoints and `foreachBatch`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec

from headwater import limits
from headwater.errors import HeadwaterError, PipelineError, ResyncRequired
from headwater.pipeline.jobs.plan import LOOK_SECONDS, VIEWS, PipelinePlan, StreamJob
from headwater.pipeline.spark import start_times
from headwater.pipeline.spark_errors import explain
from headwater.pipeline.stream.checkpoints import Checkpoint
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.owner import owner_name
from headwater.pipeline.stream.planning import Planner
from headwater.pipeline.stream.progress import StreamLag, StreamProgress
from headwater.pipeline.stream.sink import StreamSink

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)


class RunningStream:
    """A job and its streaming query. `look` starts it, and starts it again after a failure."""

    def __init__(
        self,
        spark: SparkSession,
        plan: PipelinePlan,
        job: StreamJob,
        lost: Sequence[HeadwaterError] = (),
    ) -> None:
        """`lost` are the errors of the Sparks before this one."""
        self.state = "starting"
        self.error: HeadwaterError | None = lost[-1] if lost else None
        self.offset: Offset | None = None
        self._spark = spark
        self._plan = plan
        self._job = job
        self._checkpoint = Checkpoint(plan.lake.checkpoint(job.name))
        self._owner = owner_name()
        self._starts = ThreadPoolExecutor(1, f"start of {job.name}")
        self._starting: Future[None] | None = None
        self._finishing: Future[None] | None = None
        self._closing: Future[None] | None = None
        self._query: StreamingQuery | None = None
        self._sink: StreamSink | None = None
        self._inner: Callable[[], list[StreamProgress]] = list
        self._seen: list[pa.Table] = []
        self._failure: Exception | None = None
        self._gate = Lock()
        self._stopping = False
        self._error_at: datetime | None = datetime.now(UTC) if lost else None
        self._pause, self._start_at = limits.PIPELINE_RESTART_SECONDS[0], 0.0
        self._restarts = len(lost)
        self._is_abandoned = False
        self._latest: dict[str, Any] = {}
        self._rates = 0.0, 0.0
        self._noted = ""
        self._noted_batch: int | None = None
        self._taken: dict[int, int] = {}
        self._reached: Offset | None = None
        self._batch: int | None = None
        self._written: int | None = None
        self._changes = 0

    # -------------------------------------------------------------------- supervising

    def look(self) -> None:
        """Check the query, and start it if that is due. A start runs in a thread, because it may
        take long, as when a view is built."""
        if self._starting is not None:
            if self._starting.done():
                self._has_started(self._starting)
        elif self._finishing is not None:
            if self._finishing.done():
                self._has_finished(self._finishing)
        elif self.state in ("starting", "waiting") and time.monotonic() >= self._start_at:
            self._starting = self._starts.submit(self._start)
        elif self.state == "running" and self._query is not None:
            self._note_progress(self._query)
            if not self._query.isActive:
                self._ended(self._query)

    def _has_started(self, starting: Future[None]) -> None:
        self._starting = None
        try:
            starting.result()
            self.state = "running"
        except Exception as error:
            self._failed(error)

    def _has_finished(self, finishing: Future[None]) -> None:
        self._finishing = None
        try:
            finishing.result()
            self._close_sink()
            self.state = "stopped"
        except Exception as error:
            self._failed(error)

    def _ended(self, query: StreamingQuery) -> None:
        error = query.exception()
        if error is not None:
            self._failed(self._failure or error)
        elif self._plan.once and self._sink is not None:
            self._finishing = self._starts.submit(self._sink.finish)
        else:
            self._failed(PipelineError("Spark stopped the query", retryable=True))

    def _failed(self, error: Exception) -> None:
        if (sink := self._detached_sink()) is not None:
            # In the thread that starts the stream again: that may take long, and the other streams
            # are supervised meanwhile.
            self._closing = self._starts.submit(self._close, sink)
        found = explain(error, f"stream {self._job.name}")
        if isinstance(found, ResyncRequired):
            found = self._out_of_log(found)
        self.error = found
        self._error_at = datetime.now(UTC)
        log.warning("Stream %s of the pipeline: %s", self._job.name, self.error)
        self._start_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, limits.PIPELINE_RESTART_SECONDS[1])
        if not self.error.retryable or self._plan.once:
            self.state = "failed"
            return
        self.state = "waiting"
        self._restarts += 1

    def _out_of_log(self, error: ResyncRequired) -> HeadwaterError:
        """The log no longer has the changes after its offset."""
        if self._job.name == VIEWS:
            hint = "The stream of the views begins again from now."
            return PipelineError(str(error), hint=hint, retryable=True)
        return ResyncRequired(
            str(error),
            hint=f"To continue from now: headwater pipeline resnapshot --lake"
            f" {self._plan.lake.root}. The lake keeps its data; moments in the gap are unknown.",
        )

    def abandon(self, error: HeadwaterError) -> None:
        """Spark is lost: wait for the batch that is being written, and leave its query."""
        self._stopping, self._starting, self._query = True, None, None
        self._is_abandoned = True
        if self._gate.acquire(timeout=limits.PIPELINE_STOP_SECONDS):
            self._gate.release()
        self._close_sink()
        self.state, self.error, self._error_at = "waiting", error, datetime.now(UTC)
        self._restarts += 1

    def stop(self, seconds: float = limits.PIPELINE_STOP_SECONDS) -> None:
        """Stop between two batches: wait this long for the batch that is being written."""
        deadline = time.monotonic() + seconds
        if self._starting is not None:
            self._stopping = True
        wait([each for each in (self._closing, self._starting) if each is not None], seconds)
        self._starts.shutdown(wait=False, cancel_futures=True)
        if self._is_abandoned:
            return
        self._stop_query(deadline)
        if self.state != "failed":
            self.state = "stopped"

    def _stop_query(self, deadline: float) -> None:
        self._stopping = True
        if self._query is None:
            self._close_sink(deadline)
            return
        if self._gate.acquire(timeout=_left(deadline)):
            self._gate.release()
            self._wait_for_report(self._query)
        self._note_progress(self._query)
        try:
            # A query that takes longer ends with the process. With 0 Spark waits without a bound.
            milliseconds = f"{max(_left(deadline) * 1000, 1000):.0f}ms"
            self._spark.conf.set("spark.sql.streaming.stopTimeout", milliseconds)
            self._query.stop()
        except Exception as error:  # Spark's own error; the next start repairs what is left
            log.warning("Stream %s of the pipeline did not stop in time: %s", self._job.name, error)
        self._close_sink(deadline)

    def _close_sink(self, deadline: float | None = None) -> None:
        if (sink := self._detached_sink()) is not None:
            self._close(sink, limits.PIPELINE_STOP_SECONDS if deadline is None else _left(deadline))

    def _detached_sink(self) -> StreamSink | None:
        """The sink, which is to be closed. The stream no longer has it."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._seen += sink.contents()
            self._inner = sink.progress
        return sink

    def _close(self, sink: StreamSink, seconds: float = limits.PIPELINE_STOP_SECONDS) -> None:
        """Close a sink, unless a batch still writes to it: then that batch closes it. To close a
        connection in the middle of a batch would free memory that the driver still reads."""
        if self._gate.acquire(timeout=LOOK_SECONDS):
            try:
                sink.close(seconds)
            except Exception as error:
                log.warning("Stream %s of the pipeline did not end well: %s", self._job.name, error)
            finally:
                self._gate.release()

    def contents(self) -> list[pa.Table]:
        """The contents of the batches since the last call."""
        found, self._seen = self._seen, []
        return [*found, *(self._sink.contents() if self._sink is not None else ())]

    def _wait_for_report(self, query: StreamingQuery) -> None:
        """Wait until Spark reports the batch as done, which it does after the sink returns, so that
        the last report has it. This may give up."""
        deadline = time.monotonic() + limits.PIPELINE_REPORT_SECONDS
        while query.isActive and self._written is not None and time.monotonic() < deadline:
            latest = query.lastProgress
            if latest is not None and latest["batchId"] >= self._written:
                return
            time.sleep(LOOK_SECONDS / 10)

    # -------------------------------------------------------------------- the query

    def _start(self) -> None:
        self._failure = self._written = None
        # Batches are numbered from 0 again. Those that Spark did not report are written, too.
        self._changes += sum(self._taken.values())
        self._taken, self._noted_batch = {}, None
        self._sink = self._job.sink(self._plan.lake, self._plan.url, self._checkpoint)
        if self._stopping:
            self._close_sink()
            raise PipelineError("the pipeline is stopping")
        self._checkpoint.remove()
        begin = self._sink.begin or self._job.begin(self._plan.lake) or self._beginning()
        self._checkpoint.begin_at(begin)
        reader = self._spark.readStream.format("headwater").option("url", self._plan.url)
        if self._job.tables:
            reader = reader.option("tables", ",".join(self._job.tables))
        rows_max = self._plan.rows_max if self._job.rows_max is None else self._job.rows_max
        if rows_max is not None:
            reader = reader.option("maxRows", rows_max)
        since = msgspec.json.encode(begin.to_dict()).decode()
        writer = (
            reader.options(emit="parts", since=since)
            .load()
            .writeStream.foreachBatch(self._write)
            .queryName(self._job.name)
        )
        writer = writer.option("checkpointLocation", self._checkpoint.path)
        if self._plan.once:
            self._query = writer.trigger(availableNow=True).start()
        else:
            seconds = self._plan.seconds if self._job.seconds is None else self._job.seconds
            self._query = writer.trigger(
                processingTime=f"{seconds * 1000:.0f} milliseconds"
            ).start()
        start_times.mark("query")

    def _beginning(self) -> Offset:
        planner = Planner(self._plan.url)
        try:
            return Offset(planner.beginning())
        finally:
            planner.close()

    def _write(self, parts: DataFrame, batch_id: int) -> None:
        start_times.mark("planned")
        with self._gate:
            sink = self._sink
            if self._stopping or sink is None:
                raise PipelineError("the pipeline is stopping")
            try:
                taken, failure = sink.write(parts, batch_id), None
            except Exception as error:
                taken, failure = 0, error
            if self._sink is not sink:
                sink.close()  # the stream was stopped without waiting for this batch
                raise PipelineError("the pipeline has stopped") from failure
            if failure is not None:
                self._failure = failure
                raise failure
            self._taken[batch_id], self._written = taken, batch_id
        start_times.report("committed")

    # -------------------------------------------------------------------- progress

    def _note_progress(self, query: StreamingQuery) -> None:
        for latest in self._new_progress(query):
            # Spark also reports while nothing happens, under the number of the batch to come.
            if latest["timestamp"] <= self._noted or "addBatch" not in latest["durationMs"]:
                continue
            self._noted, self._noted_batch = latest["timestamp"], latest["batchId"]
            with _ignoring_invalid_progress():
                self.offset = Offset.from_dict(_end_offset(latest))
            # A batch is done: the last error is over.
            self._pause, self.error, self._error_at = limits.PIPELINE_RESTART_SECONDS[0], None, None
            taken = self._taken.pop(latest["batchId"], 0)
            # A batch of nothing but our own progress rows must not be reported: the report would
            # be the next batch, without end.
            if taken:
                self._batch, self._reached = latest["batchId"], self.offset
                self._rates = _rates(taken, self._latest, latest)
                self._latest = latest
                self._changes += taken

    def _new_progress(self, query: StreamingQuery) -> Sequence[dict[str, Any]]:
        """Spark's progress since the last look, and perhaps older entries. To fetch all that Spark
        has takes tens of milliseconds, so that is done only where several may be new. The latest
        entry may be one without a batch, and the batch before it be new."""
        latest = query.lastProgress
        if latest is None or latest["timestamp"] <= self._noted:
            return ()
        alone = self._noted_batch is not None and latest["batchId"] <= self._noted_batch + 1
        return (latest,) if alone else query.recentProgress

    def inner_progress(self) -> list[StreamProgress]:
        """The progress of what the sink maintains by itself."""
        return self._inner() if self._sink is None else self._sink.progress()

    def progress(self, behind: StreamLag | None = None) -> StreamProgress:
        idle = behind is not None and behind.changes == 0
        return StreamProgress(
            self._job.name,
            self.state,
            self._owner,
            self._batch,
            None if self._reached is None else str(self._reached.position),
            self._changes,
            *((0.0, 0.0) if idle else self._rates),
            None if behind is None else behind.changes,
            None if behind is None else round(behind.seconds, 3),
            self._restarts,
            None if self.error is None else str(self.error)[: limits.PIPELINE_ERROR_CHARS_MAX],
            self._error_at,
        )


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _end_offset(progress: dict[str, Any]) -> dict[str, Any]:
    offset = progress["sources"][0]["endOffset"]
    return dict(msgspec.json.decode(offset) if isinstance(offset, str) else offset)


@contextmanager
def _ignoring_invalid_progress() -> Iterator[None]:
    """Ignore progress of Spark without an offset: progress is only displayed, so an error in it
    must not end a stream."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, msgspec.DecodeError):
        return


def _rates(taken: int, before: dict[str, Any], latest: dict[str, Any]) -> tuple[float, float]:
    """Changes a second: that came in, and that were written. Spark itself counts parts.

    >>> batch = lambda at: {"timestamp": at, "durationMs": {"triggerExecution": 250}}
    >>> _rates(100, batch("2026-11-15T10:00:00.000Z"), batch("2026-11-15T10:00:02.000Z"))
    (50.0, 400.0)
    """
    durations = latest["durationMs"]
    # Without the time for which it waited for changes.
    worked = (durations.get("triggerExecution", 0) - durations.get("latestOffset", 0)) / 1000
    began = [datetime.fromisoformat(each["timestamp"]) for each in (before, latest) if each]
    passed = (began[-1] - began[0]).total_seconds() if len(began) > 1 else worked
    return round(taken / max(passed, 0.001), 1), round(taken / max(worked, 0.001), 1)
