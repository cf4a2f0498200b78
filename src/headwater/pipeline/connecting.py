"""The pipeline's Spark as a Connect server, for programs of its own user on this machine.

The server listens on 127.0.0.1 only, where every user of the machine could reach it: so it wants a
token. Spark is given that in its environment, because its command line can be read by everybody.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
}

PACKAGES = ("grpc", "grpc_status", "google.rpc", "zstandard", "pandas")
"""What a client of Connect needs beside PySpark."""

_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"


@contextmanager
def token_for_spark() -> Iterator[str]:
    """A token that a Spark started meanwhile asks of its clients."""
    token, before = secrets.token_urlsafe(32), os.environ.get(_TOKEN)
    os.environ[_TOKEN] = token
    try:
        yield token
    finally:
        if before is None:
            del os.environ[_TOKEN]
        else:
            os.environ[_TOKEN] = before


def address(spark: SparkSession) -> str | None:
    """Where this Spark listens for Connect; None where it does not."""
    jvm = spark._jvm
    if jvm is None:
        return None
    package = jvm.org.apache.spark.sql.connect.service
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    port = service.localPort() if service.started() else 0
    return f"sc://localhost:{port}" if port else None


def missing() -> list[str]:
    """The packages of a client that are not installed."""
    return [name for name in PACKAGES if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
