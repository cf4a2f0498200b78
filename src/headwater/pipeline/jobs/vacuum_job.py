"""Removes files that no longer belong to the lake, once a day, in a thread of its own."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from functools import partial

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
        self._due: list[str] = []

    def step(self, run: JobThread) -> None:
        """Tables that fail are tried again, and no other table waits for them."""
        run.contents()
        if time.monotonic() >= self._next:
            self._due = list(maintenance.tables(self._root))
            self._next = time.monotonic() + limits.LAKE_VACUUM_SECONDS
        # While stopping, nothing is attempted any more.
        self._due = [name for name in self._due if not run.attempt(partial(self._vacuum, name))]

    def _vacuum(self, name: str) -> None:
        done = maintenance.vacuum_table(self._root, name, self._keep)
        log.info("Removed %s files from %s", done.removed, done.table)
