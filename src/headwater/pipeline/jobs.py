"""Runs the pipeline: one Spark application, a streaming query for each job, all of them supervised.

This module alone knows `readStream`, checkpoints and `foreachBatch`. A query that fails is started
again after a pause that grows, and the others go on meanwhile; where waiting cannot help (a trimmed
log, an unreadable checkpoint) it stays failed and says why. To stop means: between two batches.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import msgspec

from headwater import errors, limits
from headwater.errors import ConfigError, HeadwaterError, PipelineError, ResyncRequired
from headwater.metrics import PipelineMetrics
from headwater.pipeline import events, maintenance
from headwater.pipeline.checkpoints import Checkpoint, LakeLock, owner_name
from headwater.pipeline.keeping import Keeper
from headwater.pipeline.lake import Lake
from headwater.pipeline.offsets import Offset
from headwater.pipeline.planning import Planner
from headwater.pipeline.progress import Behind, Reports, StreamProgress
from headwater.pipeline.sink import Sink
from headwater.pipeline.views.definitions import View
from headwater.pipeline.views.sink import ViewSink

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)


class Job(msgspec.Struct, frozen=True):
    """A stream from the log to somewhere. `begin` says where a new one begins; None for the
    beginning of the log."""

    name: str
    sink: Callable[[Lake, str, Checkpoint], Sink]
    begin: Callable[[Lake], Offset | None] = lambda lake: None
    tables: tuple[str, ...] = ()
    seconds: float | None = None
    """Pause between two batches; None for the pipeline's."""
    rows_max: int | None = None
    """Changes in one batch at most; None for the pipeline's."""
    view: str | None = None
    """The view that it keeps, if it does."""

    reads_itself: bool = False
    """Whether the sink reads what lies between a batch's offsets itself. Then Spark's batch has no
    rows, and costs next to nothing to plan."""


EVENTS = Job("events", events.EventsSink, events.last_offset, reads_itself=True)

JOBS: tuple[Job, ...] = (EVENTS,)


def view_job(view: View) -> Job:
    """The stream of a view. One of several tables takes whole transactions only: what a join has
    seen of its tables must be the same of all of them."""
    return Job(
        f"{_VIEW}{view.name}",
        partial(ViewSink, view),
        tables=view.sources,
        seconds=limits.VIEW_SECONDS,
        rows_max=_EVERYTHING if len(view.tables) > 1 else None,
        view=view.name,
    )


_VIEW = "view."
_EVERYTHING = 2**62


class Plan(msgspec.Struct, frozen=True):
    """What a pipeline is to do. With `once` it ends when it has everything that was there."""

    url: str
    lake: Lake
    jobs: tuple[Job, ...] = JOBS
    once: bool = False
    seconds: float = 1.0
    rows_max: int | None = None
    """Changes in one batch at most; None for the source's own bound."""

    vacuum_keep: timedelta = timedelta(days=7)
    snapshot_events: int = limits.LAKE_SNAPSHOT_EVENTS
    """Changes of a table after which another snapshot is kept; 0 for no snapshots."""

    retention: timedelta | None = None
    """How long events are kept; None for ever."""


def run(
    spark: SparkSession, plan: Plan, stop: Event, metrics: PipelineMetrics | None = None
) -> list[StreamProgress]:
    """Run the pipeline until told to stop; with `once`, until everything is there. Returns how far
    the streams came. Raises the error of a stream that ended the pipeline: any with `once`,
    otherwise that of the last one that failed for good."""
    with LakeLock(plan.lake.root):
        return Pipeline(spark, plan, Reports(plan.url, metrics)).run(stop)


class Pipeline:
    """The streams of one application."""

    def __init__(self, spark: SparkSession, plan: Plan, reports: Reports) -> None:
        self._plan = plan
        self._reports = reports
        self._streams = [Stream(spark, plan, job) for job in plan.jobs]
        self._report_at = 0.0
        self._vacuum_at = time.monotonic() + limits.LAKE_VACUUM_SECONDS
        self._keeper: Keeper | None = None
        if EVENTS.name in {job.name for job in plan.jobs}:
            self._keeper = Keeper(
                plan.lake, plan.url, events_max=plan.snapshot_events, retention=plan.retention
            )

    def run(self, stop: Event) -> list[StreamProgress]:
        try:
            if self._keeper is not None and not self._plan.once:
                self._keeper.start()
            while not self._has_ended():
                for stream in self._streams:
                    stream.look()
                self._tell_keeper()
                self._report()
                self._vacuum()
                if stop.wait(limits.PIPELINE_LOOK_SECONDS):
                    break
            if self._keeper is not None and self._plan.once and self._has_stopped():
                self._keeper.work()
        finally:
            for stream in self._streams:
                stream.stop()
            if self._keeper is not None:
                self._keeper.stop()
            self._report(last=True)
            self._reports.close()
        self._raise_failure()
        return [stream.progress() for stream in self._streams]

    def _tell_keeper(self) -> None:
        for stream in self._streams:
            for contents in stream.seen():
                if self._keeper is not None:
                    self._keeper.note(contents)

    def _has_ended(self) -> bool:
        return all(stream.state in ("stopped", "failed") for stream in self._streams)

    def _has_stopped(self) -> bool:
        """Whether everything that was there was taken."""
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
            if self._keeper is not None and self._plan.snapshot_events:
                streams.append(self._keeper.progress())
            self._reports.write(streams)
            self._start_due(last=last)
        except HeadwaterError as error:
            # The database is away: the streams meet that themselves.
            log.warning("The pipeline's progress could not be written: %s", error)

    def _start_due(self, *, last: bool) -> None:
        """Somebody asked for views to be built anew: that is done by the start of their streams."""
        views = {each.view: each for each in self._streams if each.view is not None}
        # With `once`, the start of a stream sees by itself that its view is due.
        if not views or last or self._plan.once:
            return
        for name in self._reports.due_views():
            if name in views:
                views[name].start_anew()

    def _behind(self, stream: Stream) -> Behind | None:
        return None if stream.offset is None else self._reports.behind(stream.offset)

    def _vacuum(self) -> None:
        if time.monotonic() < self._vacuum_at:
            return
        self._vacuum_at = time.monotonic() + limits.LAKE_VACUUM_SECONDS
        try:
            for done in maintenance.vacuum(self._plan.lake.root, self._plan.vacuum_keep):
                log.info("Removed %s files from %s", done.removed, done.table)
        except Exception as error:  # delta-rs has errors of several kinds; none may end the streams
            log.warning("The lake could not be vacuumed: %s", error)


class Stream:
    """A job and its streaming query: started, looked at, started again."""

    def __init__(self, spark: SparkSession, plan: Plan, job: Job) -> None:
        self.state = "starting"
        self.error: HeadwaterError | None = None
        self.offset: Offset | None = None
        self.view = job.view
        self._spark = spark
        self._plan = plan
        self._job = job
        self._checkpoint = Checkpoint(plan.lake.checkpoint(job.name))
        self._owner = owner_name()
        self._starts = ThreadPoolExecutor(1, f"start of {job.name}")
        self._starting: Future[None] | None = None
        self._query: StreamingQuery | None = None
        self._sink: Sink | None = None
        self._seen: list[pa.Table] = []
        self._failure: Exception | None = None
        self._gate = Lock()
        self._stopping = False
        self._error_at: datetime | None = None
        self._pause, self._start_at = limits.PIPELINE_RESTART_SECONDS[0], 0.0
        self._restarts = 0
        self._latest: dict[str, Any] = {}
        self._rates = 0.0, 0.0
        self._noted = ""
        self._noted_batch: int | None = None
        self._taken: dict[int, int | None] = {}
        self._reached: Offset | None = None
        self._batch: int | None = None
        self._written: int | None = None
        self._changes = 0

    # -------------------------------------------------------------------- supervising

    def look(self) -> None:
        """See how it is, and start it where that is due. To start may take long, as when a view is
        built: the others are looked at meanwhile."""
        if self._starting is not None:
            if self._starting.done():
                self._has_started(self._starting)
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

    def _ended(self, query: StreamingQuery) -> None:
        error = query.exception()
        if error is not None:
            self._failed(self._failure or error)
        elif self._plan.once:
            self._close_sink()
            self.state = "stopped"
        else:
            self._failed(PipelineError("Spark stopped the query", retryable=True))

    def _failed(self, error: Exception) -> None:
        self._close_sink()
        self.error = explain(error, self._job.name, self._plan.lake.root)
        self._error_at = datetime.now(UTC)
        log.warning("Stream %s of the pipeline failed: %s", self._job.name, self.error)
        self._start_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, limits.PIPELINE_RESTART_SECONDS[1])
        if not self.error.retryable or self._plan.once:
            self.state = "failed"
            return
        self.state = "waiting"
        self._restarts += 1

    def start_anew(self) -> None:
        """Stop, and start again at the next look, also what failed for good; that not without a
        pause."""
        if self.state != "running" and time.monotonic() < self._start_at:
            return
        if self._starting is None and self.state in ("running", "failed", "waiting"):
            self._stop_query()
            self._stopping, self._start_at, self.state = False, 0.0, "starting"

    def stop(self) -> None:
        """Stop between two batches: one that is being written is waited for."""
        if self._starting is not None:
            self._stopping = True
            wait([self._starting], limits.PIPELINE_STOP_SECONDS)
        self._starts.shutdown(wait=False)
        self._stop_query()
        if self.state != "failed":
            self.state = "stopped"

    def _stop_query(self) -> None:
        self._stopping = True
        if self._query is None:
            self._close_sink()
            return
        if self._gate.acquire(timeout=limits.PIPELINE_STOP_SECONDS):
            self._gate.release()
            self._wait_for_commit(self._query)
        self._note_progress(self._query)
        try:
            self._query.stop()
        except Exception as error:  # Spark's, for one that does not end; the next start repairs it
            log.warning("Stream %s did not stop in time: %s", self._job.name, error)
        self._close_sink()

    def _close_sink(self) -> None:
        """One that a batch still writes to is closed by that batch: in the middle of it, the
        database's driver would free what is being read."""
        sink, self._sink = self._sink, None
        if sink is None:
            return
        self._seen += sink.seen()
        if self._gate.acquire(timeout=limits.PIPELINE_LOOK_SECONDS):
            try:
                sink.close()
            finally:
                self._gate.release()

    def seen(self) -> list[pa.Table]:
        """What the batches since the last call contained."""
        found, self._seen = self._seen, []
        return [*found, *(self._sink.seen() if self._sink is not None else ())]

    def _wait_for_commit(self, query: StreamingQuery) -> None:
        """Spark notes a batch as done after the sink returns. What is not noted is repeated by the
        next start, and found to be in: so this may give up."""
        deadline = time.monotonic() + limits.PIPELINE_REPORT_SECONDS
        while query.isActive and self._written is not None and time.monotonic() < deadline:
            latest = query.lastProgress
            if latest is not None and latest["batchId"] >= self._written:
                return
            time.sleep(limits.PIPELINE_LOOK_SECONDS / 10)

    # -------------------------------------------------------------------- the query

    def _start(self) -> None:
        self._failure = self._written = None
        self._sink = self._job.sink(self._plan.lake, self._plan.url, self._checkpoint)
        if self._stopping:
            self._close_sink()
            raise PipelineError("the pipeline is stopping")
        if self._sink.begins_anew:
            self._checkpoint.remove()
        self._checkpoint.check()
        begin = self._begin()
        reader = self._spark.readStream.format("headwater").option("url", self._plan.url)
        if self._job.tables:
            reader = reader.option("tables", ",".join(self._job.tables))
        rows_max = self._plan.rows_max if self._job.rows_max is None else self._job.rows_max
        if rows_max is not None:
            reader = reader.option("maxRows", rows_max)
        if begin is not None:
            reader = reader.option("since", str(begin.position))
        if self._job.reads_itself:
            changes = reader.load().where("false")
        else:
            changes = events.beyond(reader.load(), begin)
        writer = changes.writeStream.foreachBatch(self._write).queryName(self._job.name)
        writer = writer.option("checkpointLocation", self._checkpoint.path)
        if self._plan.once:
            self._query = writer.trigger(availableNow=True).start()
        else:
            seconds = self._plan.seconds if self._job.seconds is None else self._job.seconds
            self._query = writer.trigger(
                processingTime=f"{seconds * 1000:.0f} milliseconds"
            ).start()

    def _begin(self) -> Offset | None:
        """Where the stream began, or begins now. Written down first, so that the first batch is the
        same rows when it is repeated."""
        begin = self._checkpoint.begin
        if begin is None and not self._checkpoint.exists:
            assert self._sink is not None
            begin = self._sink.begin or self._job.begin(self._plan.lake) or self._beginning()
            self._checkpoint.begin_at(begin)
        return begin

    def _beginning(self) -> Offset:
        planner = Planner(self._plan.url)
        try:
            return Offset(planner.beginning())
        finally:
            planner.close()

    def _write(self, batch: DataFrame, batch_id: int) -> None:
        with self._gate:
            sink = self._sink
            if self._stopping or sink is None:
                raise PipelineError("the pipeline is stopping")
            try:
                taken, failure = sink.write(batch, batch_id), None
            except Exception as error:
                taken, failure = None, error
            if self._sink is not sink:
                sink.close()  # nobody waited any longer
                raise PipelineError("the pipeline has stopped") from failure
            if failure is not None:
                self._failure = failure
                raise failure
            self._taken[batch_id], self._written = taken, batch_id

    # -------------------------------------------------------------------- progress

    def _note_progress(self, query: StreamingQuery) -> None:
        for latest in self._news(query):
            # Spark also reports while nothing happens, under the number of the batch to come.
            if latest["timestamp"] <= self._noted or "addBatch" not in latest["durationMs"]:
                continue
            self._noted, self._noted_batch = latest["timestamp"], latest["batchId"]
            with _unless_odd():
                self.offset = Offset.from_dict(_end_offset(latest))
            # It goes on: what was wrong is over.
            self._pause, self.error, self._error_at = limits.PIPELINE_RESTART_SECONDS[0], None, None
            taken = self._taken.pop(latest["batchId"], None)
            if taken is None:
                taken = latest["numInputRows"]
            # A batch of nothing but our own reports must not be reported: that never ended.
            if taken:
                self._batch, self._reached = latest["batchId"], self.offset
                self._rates = _rates(taken, self._latest, latest)
                self._latest = latest
                self._changes += taken

    def _news(self, query: StreamingQuery) -> Sequence[dict[str, Any]]:
        """What Spark has said of batches since the last look, and perhaps more. To fetch all that
        it remembers takes tens of milliseconds: done only where there are several. A report of no
        batch may be the latest, and the batch before it be new."""
        latest = query.lastProgress
        if latest is None or latest["timestamp"] <= self._noted:
            return ()
        alone = self._noted_batch is not None and latest["batchId"] <= self._noted_batch + 1
        return (latest,) if alone else query.recentProgress

    def progress(self, behind: Behind | None = None) -> StreamProgress:
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


def _end_offset(progress: dict[str, Any]) -> dict[str, Any]:
    offset = progress["sources"][0]["endOffset"]
    return dict(msgspec.json.decode(offset) if isinstance(offset, str) else offset)


@contextmanager
def _unless_odd() -> Iterator[None]:
    """Progress is for people: what Spark says of a batch without an offset ends no stream."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, msgspec.DecodeError):
        return


def _rates(taken: int, before: dict[str, Any], latest: dict[str, Any]) -> tuple[float, float]:
    """Changes a second that came, and that were written. Spark counts rows that it has read itself,
    and not all sinks take theirs from it.

    >>> batch = lambda at: {"timestamp": at, "durationMs": {"triggerExecution": 250}}
    >>> _rates(100, batch("2026-11-15T10:00:00.000Z"), batch("2026-11-15T10:00:02.000Z"))
    (50.0, 400.0)
    """
    worked = latest["durationMs"].get("triggerExecution", 0) / 1000
    began = [datetime.fromisoformat(each["timestamp"]) for each in (before, latest) if each]
    passed = (began[-1] - began[0]).total_seconds() if len(began) > 1 else worked
    return round(taken / max(passed, 0.001), 1), round(taken / max(worked, 0.001), 1)


# ------------------------------------------------------------------------ errors


def explain(error: BaseException, name: str, lake: str = "FOLDER") -> HeadwaterError:
    """The error a user should see for what Spark, Arrow or delta-rs say. Ours come out of Spark's
    workers as text."""
    if isinstance(error, ResyncRequired):
        return _ours("ResyncRequired", str(error), name, lake)
    if isinstance(error, HeadwaterError):
        return error
    text = "\n".join(map(str, _chain(error)))
    if re.search(_FULL, text):
        return PipelineError(
            f"the disk is full: stream {name} of the pipeline cannot write",
            hint="Make room; nothing is lost, and it goes on by itself.",
            retryable=True,
        )
    if found := re.search(r"headwater\.errors\.(\w+): (.+)", text):
        return _ours(found[1], found[2].strip(), name, lake)
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return PipelineError(
        f"stream {name} of the pipeline failed: {first}",
        hint="headwater status names the file with what Spark says about it.",
        retryable=True,
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from: a full disk hides behind a file that cannot be closed."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_FULL = r"No space left on device|Disk quota exceeded|File too large|os error (28|122|27)\b"


def _ours(kind: str, message: str, name: str, lake: str) -> HeadwaterError:
    found = getattr(errors, kind, HeadwaterError)
    hint = _HINTS.get(kind, "").format(lake=lake) or None
    if found is errors.ResyncRequired and name.startswith(_VIEW):
        hint = f"Build the view anew: headwater view rebuild {name.removeprefix(_VIEW)}"
    error: HeadwaterError = found(message, hint=hint)
    return error


_HINTS = {
    "ResyncRequired": "To go on from now: headwater pipeline resnapshot --lake {lake}. The lake "
    "keeps what it has, and says of moments in between that they are not known.",
    "NotInstalled": "Run: headwater init",
    "DatabaseError": "Check that the server runs; the stream goes on when it is back.",
}


def chosen(names: Sequence[str], jobs: tuple[Job, ...] = JOBS) -> tuple[Job, ...]:
    """The jobs of these names; all for none. ConfigError for one that there is not."""
    known = {job.name: job for job in jobs}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"the pipeline has no stream {name!r}", hint=f"It has: {', '.join(known)}."
            )
    return tuple(known[name] for name in names) or jobs
