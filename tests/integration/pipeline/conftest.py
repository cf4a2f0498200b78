"""The same table as in the tests with a Spark."""

from __future__ import annotations

from tests.spark.conftest import orders

__all__ = ["orders"]
