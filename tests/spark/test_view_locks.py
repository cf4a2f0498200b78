"""Views whose tables are locked by others: they wait a bounded time, and are tried again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from headwater import limits
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.views.definitions import define
from headwater.pipeline.views.storage.staging import StagedRows
from tests.support.lake.tables import execute
from tests.support.lake.views import became, differences, equals, update, views_running
from tests.support.wal_capture import still_behind

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


WAITS = """
    select exists (select from pg_locks where relation = 'totals'::regclass and not granted)
      and exists (select from pg_locks where relation = 'orders'::regclass and granted)
"""
"""Whether the view waits for the lock on its table while it holds locks on those that it reads."""


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Lake:
    return Lake(str(tmp_path / "lake"), spark)


def test_a_table_that_another_session_has_locked(
    spark: SparkSession,
    url: str,
    lake: Lake,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The view is tried again, also with `--once`: after the driver could not lock the table, and
    after its tasks could not, behind a statement that waits for the driver."""
    monkeypatch.setattr(limits, "SNAPSHOT_LOCK_SECONDS", 0.05)
    monkeypatch.setattr(limits, "PIPELINE_RESTART_SECONDS", (0.1, 1.0))
    execute(url, *TABLES)
    view, stage = define(totals, key="customer"), StagedRows.stage

    def behind_an_alter(*arguments: Any) -> None:
        monkeypatch.setattr(StagedRows, "stage", stage)
        other.pgconn.send_query(b"alter table orders add column note text")
        waits = "select true from pg_locks where relation = 'orders'::regclass and not granted"
        assert became(lambda: execute(url, waits) == [(True,)])
        stage(*arguments)

    monkeypatch.setattr(StagedRows, "stage", behind_an_alter)
    failed = "select error ~ 'being altered' from headwater.views where name = 'totals'"
    with ThreadPoolExecutor(1) as thread, psycopg.connect(url, autocommit=True) as other:
        with psycopg.connect(url) as session:
            session.execute("lock table orders in access exclusive mode")
            once = thread.submit(update, spark, url, lake, view)
            assert became(lambda: execute(url, failed) == [(True,)])
        once.result()
        while other.pgconn.get_result():
            pass
    assert "View totals failed: view totals: a table of" in caplog.text
    assert differences(url, "totals", TOTALS) == []


def test_a_migration_of_a_view_and_its_table(
    spark: SparkSession, url: str, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The migration has locked the view, which waits for it and has locked the table that the
    migration alters next."""
    monkeypatch.setattr(limits, "VIEW_LOCK_SECONDS", 1.0)
    monkeypatch.setattr(limits, "PIPELINE_RESTART_SECONDS", (0.1, 1.0))
    execute(url, *TABLES)
    with views_running(spark, url, lake, define(totals, key="customer")):
        assert equals(url, "totals", TOTALS)
        # Nor are the tables locked for as long as capture from the WAL takes.
        with still_behind(monkeypatch) as met:
            execute(url, "delete from orders where id = 3")
            assert equals(url, "totals", TOTALS)
        assert len(met) == 1
        with psycopg.connect(url, options="-c lock_timeout=20s") as migration:
            migration.execute("alter table totals add check (true)")
            execute(url, "delete from orders where id = 1")
            assert became(lambda: execute(url, WAITS) == [(True,)])
            migration.execute("alter table orders add column note text")
        assert equals(url, "totals", TOTALS)
