"""PySpark: how its Java is started with its output elsewhere (`pipeline/spark/session.py`)."""

from __future__ import annotations

from inspect import signature

from pyspark import SparkContext
from pyspark.java_gateway import launch_gateway


def test_java_can_be_started_apart_and_handed_over() -> None:
    assert list(signature(launch_gateway).parameters) == ["conf", "popen_kwargs"]
    assert "gateway" in signature(SparkContext._ensure_initialized).parameters
    assert hasattr(SparkContext, "_gateway")
