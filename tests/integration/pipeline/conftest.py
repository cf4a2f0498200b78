"""The table that tests with a Spark have, too."""

from __future__ import annotations

from tests.spark.conftest import orders

__all__ = ["orders"]
