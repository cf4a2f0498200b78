"""A pipeline that maintains streaming views."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from pyspark.sql import SparkSession

from headwater.pipeline.jobs.pipeline import run
from headwater.pipeline.jobs.plan import PipelinePlan, views_job
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.views.definitions import StreamingView


def plan(url: str, lake: Lake, *definitions: StreamingView, once: bool = False) -> PipelinePlan:
    return PipelinePlan(url, lake, jobs=(views_job(definitions),), once=once)


def update(spark: SparkSession, url: str, lake: Lake, *definitions: StreamingView) -> None:
    """Run the streams of the views until they have every change."""
    run(spark, plan(url, lake, *definitions, once=True), Event())


@contextmanager
def views_running(
    spark: SparkSession, url: str, lake: Lake, *definitions: StreamingView
) -> Iterator[None]:
    """The streams of the views run inside the block."""
    stop = Event()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, spark, plan(url, lake, *definitions), stop)
        try:
            yield
        finally:
            stop.set()
            running.result()


def became(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met
