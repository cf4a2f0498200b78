"""Views whose tables are locked by others: they wait a bounded time, and are tried again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from headwater import limits
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.views.definitions import define
from tests.support.lake.tables import execute
from tests.support.lake.views import became, differences, equals, update, views_running

pytestmark = pytest.mark.timeout(300)

TABLES = (
    "create table orders (id int primary key, customer int)",
    "create table customers (id int primary key, country text)",
    "insert into orders select i, i % 3 from generate_series(1, 9) i",
    "insert into customers values (0, 'a'), (1, 'b')",
    "select headwater.enable_reactivity('orders'), headwater.enable_reactivity('customers')",
)


def totals(orders: DataFrame, customers: DataFrame) -> DataFrame:
    people = customers.withColumnRenamed("id", "customer")
    counted = orders.groupBy("customer").agg(f.count("*").alias("n"))
    return people.join(counted, "customer", "left")


TOTALS = """
    select c.id as customer, country, n from customers c
    left join (select customer, count(*) as n from orders group by 1) o on o.customer = c.id
"""


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Lake:
    return Lake(str(tmp_path / "lake"), spark)


@contextmanager
def locked(url: str, table: str) -> Iterator[None]:
    """No other session can read the table inside the block."""
    with psycopg.connect(url) as session:
        session.execute(f"lock table {table} in access exclusive mode".encode())
        yield


def fails_with(url: str, words: str) -> bool:
    """Whether the view has an error with these words after a while."""
    found = f"select error ~ '{words}' from headwater.views where name = 'totals'"
    return became(lambda: execute(url, found) == [(True,)])


def test_a_table_that_another_session_has_locked(
    spark: SparkSession, url: str, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view is tried again, also with `--once`."""
    monkeypatch.setattr(limits, "SNAPSHOT_LOCK_SECONDS", 0.05)
    execute(url, *TABLES)
    view = define(totals, key="customer")
    with ThreadPoolExecutor(1) as thread:
        with locked(url, "orders"):
            once = thread.submit(update, spark, url, lake, view)
            assert fails_with(url, "being altered")
        once.result()
    assert differences(url, "totals", TOTALS) == []
    with views_running(spark, url, lake, view):
        execute(url, "insert into customers values (2, 'c')")
        assert equals(url, "totals", TOTALS)
        with locked(url, "orders"):
            execute(url, "update customers set country = 'd' where id = 2")
            assert fails_with(url, "being altered")
        assert equals(url, "totals", TOTALS)
