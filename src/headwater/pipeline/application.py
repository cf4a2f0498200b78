"""The pipeline as a program: a Spark session, the streams, and a way to end both in order."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from threading import Event

from headwater.metrics import PipelineMetrics
from headwater.pipeline import jobs
from headwater.pipeline.checkpoints import LakeLock
from headwater.pipeline.lake import Lake
from headwater.pipeline.progress import Reports, StreamProgress
from headwater.pipeline.session import LOCAL_MASTER, spark_session
from headwater.settings import Settings

# A query that does not end within this time is left to the end of the process.
_SETTINGS = {"spark.sql.streaming.stopTimeout": "30s", "spark.scheduler.mode": "FAIR"}


async def run(
    url: str,
    settings: Settings,
    *,
    once: bool = False,
    master: str | None = None,
    metrics_port: int | None = None,
) -> list[StreamProgress]:
    """Run the pipeline in a thread until it has ended. Who cancels this waits for the batch that is
    being written, and then for Spark to end."""
    stop = Event()
    working = asyncio.create_task(
        asyncio.to_thread(_work, url, settings, once, master, metrics_port, stop)
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
    stop: Event,
) -> list[StreamProgress]:
    root = _absolute(settings.lake)
    # First of all: Spark takes seconds to start.
    with LakeLock(root):
        return _work_alone(url, root, settings, once, master, metrics_port, stop)


def _work_alone(
    url: str,
    root: str,
    settings: Settings,
    once: bool,
    master: str | None,
    metrics_port: int | None,
    stop: Event,
) -> list[StreamProgress]:
    metrics = PipelineMetrics()
    spark = spark_session(
        spark_folder(), master=master or LOCAL_MASTER, name="headwater pipeline", settings=_SETTINGS
    )
    try:
        if metrics_port is not None:
            _serve(metrics, metrics_port)
        plan = jobs.Plan(
            url,
            Lake(root, spark),
            once=once,
            seconds=settings.lake_interval_period.total_seconds(),
            vacuum_keep=settings.lake_vacuum_period,
            snapshot_events=settings.lake_snapshots,
            retention=settings.lake_retention_period,
        )
        return jobs.Pipeline(spark, plan, Reports(url, metrics)).run(stop)
    finally:
        spark.stop()


def _absolute(lake: str) -> str:
    return lake if "://" in lake else str(Path(lake).expanduser().absolute())


def _serve(metrics: PipelineMetrics, port: int) -> None:
    from prometheus_client import start_http_server

    start_http_server(port, addr="127.0.0.1", registry=metrics.registry)


def spark_folder() -> Path:
    """Where Spark keeps what it needs on this machine: it may be removed at any time."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(cache if os.path.isabs(cache) else "~/.cache").expanduser()
    return home / "headwater" / "spark"
