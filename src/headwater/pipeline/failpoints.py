"""Failpoints: places at which a test kills this process, as a crash of the machine would.

`HEADWATER_FAILPOINT=written:3` kills it the third time that a batch has been written and not yet
committed. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from threading import Lock

_VARIABLE = "HEADWATER_FAILPOINT"

_passed: Counter[str] = Counter()
_lock = Lock()


def failpoint(name: str) -> None:
    """Kill this process if the environment names this failpoint and this pass."""
    wanted = os.environ.get(_VARIABLE)
    if wanted is None:
        return
    with _lock:
        _passed[name] += 1
        passes = _passed[name]
    if wanted == f"{name}:{passes}":
        os.kill(os.getpid(), signal.SIGKILL)
