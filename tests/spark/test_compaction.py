"""Spark's tasks join the files of a large day; a running pipeline joins files beside its stream."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from headwater.pipeline.compaction import choice, rewrite
from headwater.pipeline.lake.stored_files import stored_files
from tests.support.lake.event_stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_tasks_join_large_files(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each table is in one or two files of a day, and there in order."""
    monkeypatch.setattr(rewrite, "_DRIVER_BYTES", 0)
    stream = Stream(tmp_path / "events", 3)
    while len(stream.rows) < 300:
        stream.append()
    total = sum(file.size for file in stored_files(DeltaTable(stream.path)))
    monkeypatch.setattr(choice, "FILE_BYTES", total // 6)
    rewrite.join_small(stream.path, lambda: spark, all_days=True)
    stream.check()
    table = DeltaTable(stream.path)
    files = stored_files(table)
    assert 3 < len(files) < 14
    tables: dict[object, list[tuple[int, int]]] = {}
    for file in files:
        read = pq.read_table(f"{stream.path}/{file.path}", partitioning=None)
        rows = [(row["relation"], row["seq"]) for row in read.to_pylist()]
        assert rows == sorted(rows)
        tables.setdefault(file.day, []).append((rows[0][0], rows[-1][0]))
    for spans in tables.values():
        assert all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))
