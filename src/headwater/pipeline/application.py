"""The pipeline as a program: a Spark session, its streams, and an orderly stop of both."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from headwater.metrics import PipelineMetrics
from headwater.pipeline import permissions
from headwater.pipeline.jobs.pipeline import Pipeline
from headwater.pipeline.jobs.plan import JOBS, PipelinePlan, view_job
from headwater.pipeline.lake import shapes
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reading.request_server import run_request, serving
from headwater.pipeline.reading.requests import AsOfRequest
from headwater.pipeline.spark import connect_server, log_file, shared_session
from headwater.pipeline.spark.session import LOCAL_MASTER, spark_folder, spark_session
from headwater.pipeline.stream.checkpoints import LakeLock
from headwater.pipeline.stream.progress import Reports, StreamProgress
from headwater.pipeline.views.definitions import StreamingView
from headwater.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_SETTINGS = {
    # A query that does not stop within this time ends with the process.
    "spark.sql.streaming.stopTimeout": "30s",
    "spark.scheduler.mode": "FAIR",
    # Checkpoints are written for every batch: without a second file of checksums beside each.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}


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
    root, metrics = _absolute(settings.lake.location), PipelineMetrics()
    # The lock first of all: Spark takes seconds to start.
    with (
        LakeLock(root),
        _closed(root) as files,
        _spark(root, url, once, master or LOCAL_MASTER, files) as spark,
    ):
        if metrics_port is not None:
            _serve(metrics, metrics_port)
        plan = PipelinePlan(
            url,
            Lake(root, spark),
            jobs=(*JOBS, *map(view_job, views)),
            once=once,
            seconds=settings.lake.interval_period.total_seconds(),
            vacuum_keep=settings.lake.vacuum_period,
            snapshot_events=settings.lake.snapshots,
            retention=settings.lake.retention_period,
        )
        reports = Reports(url, metrics)
        reports.enable()
        return Pipeline(spark, plan, reports).run(stop)


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


@contextmanager
def _spark(
    root: str, url: str, once: bool, master: str, files: dict[str, str]
) -> Iterator[SparkSession]:
    """A Spark session for the pipeline. Other programs may use it, unless it ends by itself."""
    with ExitStack() as opened:
        if once or not master.startswith("local"):
            spark = _started(opened, root, master, _SETTINGS | files)
        else:
            token = opened.enter_context(connect_server.token_for_spark())
            spark = _started(opened, root, master, _SETTINGS | connect_server.SETTINGS | files)
            lake, path = Lake(root, spark), opened.enter_context(shared_session.private_socket())
            opened.enter_context(serving(lake, path, url))
            service = shared_session.PipelineService(
                os.getpid(), path, connect_server.address(spark), token
            )
            opened.enter_context(shared_session.announced(root, service))
            Thread(target=_warm_up, args=(lake,), name="warm-up", daemon=True).start()
        yield spark


def _started(opened: ExitStack, root: str, master: str, settings: dict[str, str]) -> SparkSession:
    spark = spark_session(
        spark_folder(),
        master=master,
        name="headwater pipeline",
        settings=settings,
        log=log_file.of_lake(root, spark_folder()),
    )
    opened.callback(spark.stop)
    return spark


def _warm_up(lake: Lake) -> None:
    """Run a request, so that the first user need not wait for Spark to compile and for Python's
    workers to start."""
    try:
        for shape in shapes.load(lake.shapes_path)[:1]:
            run_request(lake, AsOfRequest(shape.table.label, datetime.now(UTC), limit=1))
    except Exception as error:  # an empty lake, a table without a snapshot, the end of the pipeline
        log.debug("The warm-up request failed: %s", error)


def _absolute(lake: str) -> str:
    return lake if "://" in lake else str(Path(lake).expanduser().absolute())


def _serve(metrics: PipelineMetrics, port: int) -> None:
    from prometheus_client import start_http_server

    start_http_server(port, addr="127.0.0.1", registry=metrics.registry)
