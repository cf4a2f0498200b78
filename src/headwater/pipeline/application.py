"""The pipeline as a program: a Spark session, its streams, and an orderly stop of both."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import msgspec

from headwater import limits
from headwater.errors import PipelineError
from headwater.metrics import PipelineMetrics
from headwater.pipeline import permissions
from headwater.pipeline.jobs.pipeline import Pipeline
from headwater.pipeline.jobs.plan import JOBS, PipelinePlan, views_job
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reading.request_server import serving
from headwater.pipeline.spark import (
    class_archive,
    connect_server,
    launch,
    log_file,
    shared_session,
    start_times,
)
from headwater.pipeline.spark.launch import SparkLost
from headwater.pipeline.spark.memory import heap_setting
from headwater.pipeline.spark.session import LOCAL_MASTER, spark_folder, spark_session
from headwater.pipeline.spark.shared_session import PipelineService
from headwater.pipeline.stream.checkpoints import LakeLock
from headwater.pipeline.stream.progress import Reports, StreamProgress
from headwater.pipeline.tables.choice import Choice
from headwater.pipeline.views.definitions import StreamingView
from headwater.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_SETTINGS = {
    "spark.scheduler.mode": "FAIR",
    # Checkpoints are written for every batch: without a second file of checksums beside each.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}


_SHARED_AFTER_SECONDS = 5.0
"""The longest time that a new pipeline's Spark is not shared. Usually until the first commit; there
is none where the log has no changes."""


_ARCHIVE_AFTER_SECONDS = 60.0
"""How long a pipeline runs before it makes an archive of Spark's classes: one that was started only
to try something is not slowed down."""


async def run(
    url: str,
    settings: Settings,
    *,
    once: bool = False,
    master: str | None = None,
    metrics_port: int | None = None,
    views: Iterable[StreamingView] = (),
) -> list[StreamProgress]:
    """Run the pipeline in a thread until it ends. To cancel this waits for the batch that is being
    written, and then for Spark to stop."""
    stop = Event()
    working = asyncio.create_task(
        asyncio.to_thread(_work, url, settings, once, master, metrics_port, tuple(views), stop)
    )
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        return await working


def _work(
    url: str,
    settings: Settings,
    once: bool,
    master: str | None,
    metrics_port: int | None,
    views: tuple[StreamingView, ...],
    stop: Event,
) -> list[StreamProgress]:
    start_times.mark("imports")
    root, metrics = _absolute(settings.lake.location), PipelineMetrics()
    # The lock first of all: Spark takes seconds to start.
    with LakeLock(root), _closed(root) as files, ExitStack() as opened:
        if metrics_port is not None:
            _serve(metrics, metrics_port)
        plan = PipelinePlan(
            url,
            Lake(root),
            jobs=(*JOBS, *([views_job(views)] if views else ())),
            once=once,
            seconds=settings.lake.interval_period.total_seconds(),
            vacuum_keep=settings.lake.vacuum_period,
            snapshot_events=settings.lake.snapshots,
            retention=settings.lake.retention_period,
            metrics=metrics,
            reconcile=settings.lake.reconcile_period,
            tables=Choice.of(settings.lake),
        )
        reports = opened.enter_context(closing(Reports(url, metrics)))
        reports.enable()
        own = _SETTINGS | files | {"spark.driver.memory": heap_setting(settings.lake.memory)}
        runs = _Runs(
            plan,
            reports,
            master or LOCAL_MASTER,
            own,
            stop,
            makes_archive=settings.lake.archive,
        )
        return runs.run()


class _Runs:
    """The pipeline on one Spark after another: Java may run out of memory, or be killed."""

    def __init__(
        self,
        plan: PipelinePlan,
        reports: Reports,
        master: str,
        own: dict[str, str],
        stop: Event,
        *,
        makes_archive: bool,
    ) -> None:
        self._makes_archive = makes_archive
        self._plan = plan
        self._reports = reports
        self._master = master
        self._settings = own
        self._stop = stop
        self._lost: list[SparkLost] = []

    def run(self) -> list[StreamProgress]:
        """Run until `stop` is set. A Spark that was lost is started again, after a pause that grows
        while that does not help; not with `once`."""
        first, longest = limits.PIPELINE_RESTART_SECONDS
        pause = first
        while True:
            began = time.monotonic()
            try:
                return self._run()
            except SparkLost as error:
                self._lost.append(error)
                if self._plan.once or self._stop.is_set():
                    raise
                if time.monotonic() - began > longest:
                    pause = first
                log.warning("%s. Spark is started again in %.0f s", error, pause)
                if self._stop.wait(pause):
                    return []
                pause = min(pause * 2, longest)

    def _run(self) -> list[StreamProgress]:
        try:
            with self._spark() as spark:
                plan = msgspec.structs.replace(self._plan, lake=Lake(self._plan.lake.root, spark))
                return Pipeline(spark, plan, self._reports, self._lost).run(self._stop)
        except SparkLost:
            raise
        except Exception as error:
            reason = launch.ended()
            # A Spark that does not start is an error of the user at first, later one of the moment.
            if reason is None and not (self._lost and isinstance(error, PipelineError)):
                raise
            raise SparkLost(reason or str(error)) from error
        finally:
            if launch.ended() is not None:
                launch.forget()

    @contextmanager
    def _spark(self) -> Iterator[SparkSession]:
        """A Spark session for the pipeline. Other programs may use it, unless it ends by itself."""
        root = self._plan.lake.root
        with ExitStack() as opened:
            if self._plan.once or not self._master.startswith("local"):
                yield self._started(opened, self._settings)
                return
            token = opened.enter_context(connect_server.token_for_spark())
            spark = self._started(opened, self._settings | connect_server.SETTINGS)
            opened.enter_context(
                _SharedSpark(root, spark, self._plan.url, token, makes_archive=self._makes_archive)
            )
            yield spark

    def _started(self, opened: ExitStack, settings: dict[str, str]) -> SparkSession:
        spark = spark_session(
            spark_folder(),
            master=self._master,
            name="headwater pipeline",
            settings=settings,
            log=log_file.of_lake(self._plan.lake.root, spark_folder()),
        )
        opened.callback(_stop, spark)
        return spark


def _stop(spark: SparkSession) -> None:
    """Stop Spark, if its Java still answers."""
    try:
        if launch.ended() is None:
            spark.stop()
    except Exception as error:
        log.debug("Spark could not be stopped: %s", error)


class _SharedSpark:
    """Lets other programs use the pipeline's Spark inside the block. That begins when the pipeline
    has started: until then, nothing else takes the machine's time."""

    def __init__(
        self, root: str, spark: SparkSession, url: str, token: str, *, makes_archive: bool
    ) -> None:
        self._makes_archive = makes_archive
        self._root = root
        self._spark = spark
        self._url = url
        self._token = token
        self._end = Event()
        self._thread = Thread(target=self._serve, name="shared spark", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        start_times.finished.set()
        self._thread.join(limits.PIPELINE_STOP_SECONDS)

    def _serve(self) -> None:
        start_times.finished.wait(_SHARED_AFTER_SECONDS)
        if self._end.is_set():
            return
        try:
            with (
                connect_server.started(self._spark) as address,
                shared_session.private_socket() as path,
                serving(Lake(self._root, self._spark), path, self._url),
                shared_session.announced(
                    self._root, PipelineService(os.getpid(), path, address, self._token)
                ),
            ):
                if self._makes_archive and not self._end.wait(_ARCHIVE_AFTER_SECONDS):
                    class_archive.make_quietly(spark_folder(), self._end)
                self._end.wait()
        except Exception as error:  # the pipeline itself does not need it
            log.warning("Other programs cannot use the pipeline's Spark: %s", error)


@contextmanager
def _closed(root: str) -> Iterator[dict[str, str]]:
    """Inside the block, new files are no more open than the lake's folder. The mode of an existing
    folder is not changed; a warning is logged if other users can read it. Yields Spark's setting
    for the same, because Spark ignores the umask."""
    if "://" in root:
        yield {}
        return
    if who := permissions.readers(Path(root)):
        log.warning("The lake %s", permissions.open_lake_warning(root, who))
    with permissions.umask_of(Path(root)) as mask:
        yield {"spark.hadoop.fs.permissions.umask-mode": f"{mask:03o}"}


def _absolute(lake: str) -> str:
    return lake if "://" in lake else str(Path(lake).expanduser().absolute())


def _serve(metrics: PipelineMetrics, port: int) -> None:
    from prometheus_client import start_http_server

    start_http_server(port, addr="127.0.0.1", registry=metrics.registry)
