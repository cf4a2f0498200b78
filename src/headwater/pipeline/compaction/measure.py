"""Measures the files and the last commit of the Delta tables of a lake, for the metrics of a
pipeline."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from headwater.metrics import PipelineMetrics
from headwater.pipeline.compaction.choice import SMALL_BYTES
from headwater.pipeline.lake import delta

MEASURED = ("events", "audit", "snapshots/rows", "snapshots/list", "shapes", "gaps", "drift")


def measure(root: str, metrics: PipelineMetrics) -> None:
    """Set the metrics of the tables that there are."""
    for name in MEASURED:
        table = delta.open_table(f"{root}/{name}")
        if table is None:
            continue
        sizes = pa.table(table.get_add_actions(flatten=True)).column("size_bytes")
        small = pc.sum(pc.less(sizes, SMALL_BYTES)).as_py() or 0
        metrics.lake_files.labels(name).set(len(sizes))
        metrics.lake_small_files.labels(name).set(small)
        metrics.lake_bytes.labels(name).set(pc.sum(sizes).as_py() or 0)
        (last,) = table.history(limit=1)
        metrics.lake_commit_timestamp_seconds.labels(name).set(last["timestamp"] / 1000)
