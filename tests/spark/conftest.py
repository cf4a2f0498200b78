"""One Spark for all tests of the pipeline: starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest

from headwater.pipeline.spark.session import spark_session
from tests.support.databases import passable_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Most plans of the tests are executed once: to compile each would take longer than to run it.
INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with passable_folder() as folder:
        session = spark_session(folder, master="local[2,4]", name="tests", settings=INTERPRETED)
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()


@pytest.fixture
def orders(url: str) -> Iterator[psycopg.Connection]:
    """A session in a database with a table `orders (id, amount)` that is captured."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table orders (id int primary key, amount int)")
        capture(connection, "orders")
        yield connection


def capture(connection: psycopg.Connection, table: str) -> None:
    """Enable a table. The reset that this writes is skipped."""
    connection.execute("select headwater.enable_reactivity(%s)", (table,))
    connection.execute("delete from headwater.log where op = 'R'")
