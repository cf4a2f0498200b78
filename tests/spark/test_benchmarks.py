"""The benchmark of the pipeline runs at its smallest, so that it does not rot. Its figures prove
nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.timeout(300)
def test_runs(spark: SparkSession) -> None:
    results = pipeline.run(tiny=True, spark=spark)
    assert len(results) == 5
    assert all(result.target and result.value for result in results)
