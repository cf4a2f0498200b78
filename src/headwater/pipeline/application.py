"""The pipeline as a program: a Spark session, the streams, and a way to end both in order."""

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
from headwater.pipeline import connecting, jobs, ownership, shapes, spark_log, standing
from headwater.pipeline.answers import answer, answering
from headwater.pipeline.checkpoints import LakeLock
from headwater.pipeline.lake import Lake
from headwater.pipeline.progress import Reports, StreamProgress
from headwater.pipeline.questions import AsOf
from headwater.pipeline.session import LOCAL_MASTER, spark_folder, spark_session
from headwater.pipeline.views.definitions import View
from headwater.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_SETTINGS = {
    # A query that does not end within this time is left to the end of the process.
    "spark.sql.streaming.stopTimeout": "30s",
    "spark.scheduler.mode": "FAIR",
    # Checkpoints without a second file of checksums beside each: they are written for every batch.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}


async def run(
    url: str,
    settings: Settings,
    *,
    once: bool = False,
    master: str | None = None,
    metrics_port: int | None = None,
    views: Iterable[View] = (),
) -> list[StreamProgress]:
    """Run the pipeline in a thread until it has ended. Who cancels this waits for the batch that is
    being written, and then for Spark to end."""
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
    views: tuple[View, ...],
    stop: Event,
) -> list[StreamProgress]:
    root, metrics = _absolute(settings.lake), PipelineMetrics()
    # The lock first of all: Spark takes seconds to start.
    with (
        LakeLock(root),
        _closed(root) as files,
        _spark(root, url, once, master or LOCAL_MASTER, files) as spark,
    ):
        if metrics_port is not None:
            _serve(metrics, metrics_port)
        plan = jobs.Plan(
            url,
            Lake(root, spark),
            jobs=(*jobs.JOBS, *map(jobs.view_job, views)),
            once=once,
            seconds=settings.lake_interval_period.total_seconds(),
            vacuum_keep=settings.lake_vacuum_period,
            snapshot_events=settings.lake_snapshots,
            retention=settings.lake_retention_period,
        )
        reports = Reports(url, metrics)
        reports.enable()
        return jobs.Pipeline(spark, plan, reports).run(stop)


@contextmanager
def _closed(root: str) -> Iterator[dict[str, str]]:
    """What is written inside is no more open than the lake's folder. One that was there before
    keeps its mode, which is reported where others can read it. Gives what Spark is to know of it:
    its files have the modes that it says, whatever the umask is."""
    if "://" in root:
        yield {}
        return
    if who := ownership.openness(Path(root)):
        log.warning("The lake %s", ownership.notice(root, who))
    with ownership.umask_of(Path(root)) as mask:
        yield {"spark.hadoop.fs.permissions.umask-mode": f"{mask:03o}"}


@contextmanager
def _spark(
    root: str, url: str, once: bool, master: str, files: dict[str, str]
) -> Iterator[SparkSession]:
    """A Spark for the pipeline. Unless it ends by itself soon, others may use it meanwhile."""
    with ExitStack() as opened:
        if once or not master.startswith("local"):
            spark = _started(opened, root, master, _SETTINGS | files)
        else:
            token = opened.enter_context(connecting.token_for_spark())
            spark = _started(opened, root, master, _SETTINGS | connecting.SETTINGS | files)
            lake, path = Lake(root, spark), opened.enter_context(standing.private_socket())
            opened.enter_context(answering(lake, path, url))
            service = standing.Service(os.getpid(), path, connecting.address(spark), token)
            opened.enter_context(standing.announced(root, service))
            Thread(target=_warm_up, args=(lake,), name="warm-up", daemon=True).start()
        yield spark


def _started(opened: ExitStack, root: str, master: str, settings: dict[str, str]) -> SparkSession:
    spark = spark_session(
        spark_folder(),
        master=master,
        name="headwater pipeline",
        settings=settings,
        log=spark_log.of_lake(root, spark_folder()),
    )
    opened.callback(spark.stop)
    return spark


def _warm_up(lake: Lake) -> None:
    """Ask something, so that the first who asks need not wait for Spark to compile and for Python's
    workers to start."""
    try:
        for shape in shapes.load(lake.shapes_path)[:1]:
            answer(lake, AsOf(shape.table.label, datetime.now(UTC), limit=1))
    except Exception as error:  # an empty lake, a table without a snapshot, the end of the pipeline
        log.debug("Nothing to warm up with: %s", error)


def _absolute(lake: str) -> str:
    return lake if "://" in lake else str(Path(lake).expanduser().absolute())


def _serve(metrics: PipelineMetrics, port: int) -> None:
    from prometheus_client import start_http_server

    start_http_server(port, addr="127.0.0.1", registry=metrics.registry)
