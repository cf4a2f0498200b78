"""The pipeline's Spark as a Spark Connect server, for programs of the same user on this machine.

The server listens on 127.0.0.1, which every user of the machine can reach: so it requires a token.
Spark gets the token in its environment, because every user can read its command line.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headwater.pipeline.spark.launch import begun_token

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

SETTINGS = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
}

PACKAGES = ("grpc", "grpc_status", "google.rpc", "zstandard", "pandas")
"""The packages that a client of Spark Connect needs besides PySpark."""

_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"


def new_token() -> str:
    return secrets.token_urlsafe(32)


@contextmanager
def token_for_spark() -> Iterator[str]:
    """A token for clients of a Spark that is started inside the block, or was begun with one."""
    token, before = begun_token() or new_token(), os.environ.get(_TOKEN)
    os.environ[_TOKEN] = token
    try:
        yield token
    finally:
        if before is None:
            del os.environ[_TOKEN]
        else:
            os.environ[_TOKEN] = before


@contextmanager
def started(spark: SparkSession) -> Iterator[str | None]:
    """The address of this Spark's Connect server, which runs inside the block. The session was made
    with SETTINGS. None if the server does not start."""
    jvm = spark._jvm
    assert jvm is not None
    package = jvm.org.apache.spark.sql.connect.service
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    try:
        service.start(spark.sparkContext._jsc.sc())
    except Exception as error:
        log.warning("Programs cannot use the pipeline's Spark: %s", error)
    try:
        port = service.localPort() if service.started() else 0
        yield f"sc://localhost:{port}" if port else None
    finally:
        with suppress(Exception):  # Java may have ended
            none = jvm.scala.Option.empty()
            service.stop(none, none)


def missing() -> list[str]:
    """The packages of a client that are not installed."""
    return [name for name in PACKAGES if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
