"""Removes files that no longer belong to the lake, once a day, in a thread of its own."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from headwater import limits
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.lake import maintenance

log = logging.getLogger(__name__)

NAME = "vacuum"


class VacuumJob:
    """`step` is what a `JobThread` runs. The first time is a day after the start."""

    def __init__(self, root: str, keep: timedelta) -> None:
        self._root = root
        self._keep = keep
        self._next = time.monotonic() + limits.LAKE_VACUUM_SECONDS

    def step(self, run: JobThread) -> None:
        run.contents()
        if time.monotonic() < self._next:
            return
        for done in maintenance.vacuum(self._root, self._keep):
            log.info("Removed %s files from %s", done.removed, done.table)
        self._next = time.monotonic() + limits.LAKE_VACUUM_SECONDS
