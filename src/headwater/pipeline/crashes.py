"""Places at which a test kills this process, as a crash of the machine would.

`HEADWATER_CRASH_AT=written:3` means: the third time that a batch has been written and not yet
committed. Without the variable nothing happens here.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

_VARIABLE = "HEADWATER_CRASH_AT"

_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Go on, unless a test wants to see what happens otherwise."""
    wanted = os.environ.get(_VARIABLE)
    if wanted is None:
        return
    _passed[name] += 1
    if wanted == f"{name}:{_passed[name]}":
        os.kill(os.getpid(), signal.SIGKILL)
