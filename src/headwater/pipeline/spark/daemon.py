"""Starts Spark's Python workers with what they need already imported.

Spark forks its Python workers from one process. Without this module each worker would import ours
again, which takes most of a second. Nothing here may open a connection or start a thread, because
neither survives a fork.
"""

from __future__ import annotations

from pyspark.daemon import manager

if __name__ == "__main__":
    manager()
