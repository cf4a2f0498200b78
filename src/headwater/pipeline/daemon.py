"""Starts Spark's Python workers with what they need already imported.

Spark forks its workers from one process, which by itself has imported nothing of ours: each would
begin with the better part of a second of imports. Nothing here may open a connection or start a
thread, because neither lives through a fork.
"""

from __future__ import annotations

from pyspark.daemon import manager

import headwater.pipeline.reading
import headwater.pipeline.schemas  # noqa: F401

if __name__ == "__main__":
    manager()
