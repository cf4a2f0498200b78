"""How long each step of a pipeline's start took, for one line in the log after the first commit and
for `benchmarks/start.py`.

Times are in seconds since the process started: they include what Python did before our first line.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from threading import Event

log = logging.getLogger(__name__)

_imported_at = time.monotonic()
_times: dict[str, float] = {}

finished = Event()
"""Set when the last step is done."""


def mark(step: str) -> None:
    """Note that a step is done, the first time that it is."""
    _times.setdefault(step, round(_age(), 3))


def taken() -> Mapping[str, float]:
    """The steps that are done, in seconds since the process started."""
    return dict(_times)


def report(last: str) -> None:
    """Note the last step, and log all of them, once."""
    if finished.is_set():
        return
    mark(last)
    finished.set()
    steps = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in _times.items())
    log.info("The pipeline started: %s", steps)


def _age() -> float:
    """Seconds since this process started; where the system does not say that, since the import."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _imported_at
