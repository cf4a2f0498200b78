"""Joins small files while a pipeline runs, in a thread of its own (`job_thread`): a batch of the
stream never waits for it. It is reported as the stream `compaction`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headwater import limits
from headwater.metrics import PipelineMetrics
from headwater.pipeline.compaction import tables
from headwater.pipeline.compaction.measure import measure
from headwater.pipeline.job_thread import JobThread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

NAME = "compaction"
"""Its name in the pipeline's progress."""


class CompactionJob:
    """Joins files when there are many. `step` is what a `JobThread` runs."""

    def __init__(
        self, root: str, spark: Callable[[], SparkSession], metrics: PipelineMetrics
    ) -> None:
        self._root = root
        self._spark = spark
        self._metrics = metrics
        self._next = 0.0

    def step(self, run: JobThread) -> None:
        run.contents()
        if time.monotonic() < self._next:
            return
        try:
            for each in tables.join_due(self._root, self._spark, lambda: run.is_stopping):
                log.info("Joined %s files of %s/%s", each.files, self._root, each.table)
                run.count(each.files)
        finally:
            # Also where that failed: the metrics show that files are not joined.
            measure(self._root, self._metrics)
        self._next = time.monotonic() + limits.LAKE_COMPACT_SECONDS
