"""A pipeline that maintains streaming views."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

from pyspark.sql import SparkSession

from headwater.pipeline.jobs.pipeline import run
from headwater.pipeline.jobs.plan import PipelinePlan, views_job
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.views.definitions import StreamingView
from tests.support.lake.tables import execute


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


def differences(url: str, view: str, truth: str) -> list[tuple[Any, ...]]:
    """The rows that the view has and the aggregate has not, and the reverse."""
    columns = execute(
        url,
        f"select string_agg(quote_ident(attname) || case when atttypid = 'numeric'::regtype then"
        f" '::text' else '' end, ', ' order by attnum) from pg_attribute"
        f" where attrelid = '{view}'::regclass and attnum > 1 and not attisdropped",
    )[0][0]
    one, two = (f"select {columns} from {each}" for each in (view, f"({truth}) t"))
    return execute(url, f"({one} except all {two}) union all ({two} except all {one})")


def equals(url: str, view: str, truth: str) -> bool:
    """Whether the view equals the aggregate after a while."""
    exists = f"select to_regclass('{view}') is not null"
    return became(lambda: execute(url, exists) == [(True,)] and not differences(url, view, truth))
