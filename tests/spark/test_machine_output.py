"""Commands that start their own Spark print rows and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headwater.pipeline.reading.lake import Lake
from tests.support.lake.processes import headwater
from tests.support.lake.tables import execute, make_orders, run_once

pytestmark = pytest.mark.timeout(300)

LIVE = "2100-01-01"


def test_only_rows_are_printed(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Neither Spark's messages nor its progress, which it shows for what takes half a second."""
    make_orders(url)
    execute(url, "insert into orders select i, i, 'n' from generate_series(1, 50) i")
    lake = Lake(str(tmp_path / "lake"), spark)
    run_once(spark, url, lake)
    lake.snapshot(url, "orders")
    for command in (
        ("asof", "orders", LIVE),
        ("history", "orders", "7"),
        ("audit", "--by", "table"),
        ("replay", "orders", "--emit"),
    ):
        done = headwater(*command, "--lake", lake.root, "--url", url, "--json")
        assert (done.returncode, done.stderr) == (0, ""), command
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert rows, command
        assert all(isinstance(row, dict) for row in rows), command
