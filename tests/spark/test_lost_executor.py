"""Views follow their tables while the executor of a cluster is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

from headwater import views
from headwater.pipeline.views.definitions import define
from tests.support.databases import passable_folder
from tests.support.lake.tables import execute
from tests.support.lake.views import became, equals
from tests.support.spark_cluster import executors, spark_cluster

pytestmark = pytest.mark.timeout(300)

TABLES = (
    "create table orders (id int primary key, customer int, amount numeric(12,2))",
    "create table customers (id int primary key, country text)",
    "create index on orders (customer)",
    "select headwater.enable_reactivity('orders'), headwater.enable_reactivity('customers')",
    "insert into customers select i, 'c' || i % 3 from generate_series(1, 20) i",
    "insert into orders select i, i % 25, i from generate_series(1, 300) i",
)


def totals(orders: DataFrame) -> DataFrame:
    return orders.groupBy("customer").agg(
        views.count().alias("n"), views.sum("amount").alias("total"), views.max("id").alias("last")
    )


def countries(orders: DataFrame, customers: DataFrame) -> DataFrame:
    others = customers.withColumnRenamed("id", "customer")
    pairs = views.join(orders, others, "customer")
    return pairs.groupBy("country").agg(
        views.count().alias("n"), views.sum("amount").alias("total")
    )


def places(orders: DataFrame, customers: DataFrame) -> DataFrame:
    by_amount = Window.partitionBy("customer").orderBy(f.desc("amount"), "id")
    ranked = orders.withColumn("place", f.row_number().over(by_amount))
    return ranked.join(customers.withColumnRenamed("id", "customer"), "customer", "left")


VIEWS = (
    define(totals, key="customer"),
    define(countries, key="country"),
    define(places, key=["customer", "place"]),
)

TRUTH = {
    "totals": """select customer, count(*) as n, sum(amount) as total, max(id) as last
                 from orders group by customer""",
    "countries": """select country, count(*) as n, sum(amount) as total
                    from orders o join customers c on c.id = o.customer group by country""",
    "places": """select customer, row_number() over (partition by customer order by amount desc,
                        o.id)::int as place, o.id, amount, country
                 from orders o left join customers c on c.id = o.customer""",
}

PROGRAM = """
import sys
from headwater import Lake, limits, spark_session
from tests.spark.test_lost_executor import VIEWS
from tests.support.lake.views import views_running

limits.VIEW_DRIVER_BYTES_MAX = 4_000  # some rows are returned, others are staged
url, master, folder = sys.argv[1:]
settings = {
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}
spark = spark_session(folder + "/spark", master=master, name="tests", settings=settings)
with views_running(spark, url, Lake(folder + "/lake", spark), *VIEWS):
    sys.stdin.read()
spark.stop()
"""


@contextmanager
def following(url: str, master: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A driver that maintains the views inside the block."""
    with (
        (folder / "driver.log").open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url, master, str(folder)],
            env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            finally:
                process.kill()


@contextmanager
def writing(url: str) -> Iterator[None]:
    """Two sessions write inside the block."""
    stop = threading.Event()

    def write(chance: random.Random) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not stop.wait(0.02):
                connection.execute(statement(chance).encode())

    threads = [threading.Thread(target=write, args=(random.Random(seed),)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


def statement(chance: random.Random) -> str:
    key, customer = chance.randint(1, 400), chance.randint(0, 25)
    return chance.choice(
        (
            f"insert into orders values ({key}, {customer}, {key}) on conflict (id) do update"
            f" set amount = orders.amount + 1",
            f"update orders set customer = {customer} where id = {key}",
            f"delete from orders where id = {key}",
            f"update customers set country = 'c{key % 4}' where id = {customer}",
        )
    )


def test_an_executor_is_lost(url: str) -> None:
    execute(url, *TABLES)
    with (
        passable_folder() as folder,
        spark_cluster(folder) as master,
        following(url, master, folder) as driver,
    ):
        assert became(lambda: live(url) == len(VIEWS)), (folder / "driver.log").read_text()
        with writing(url):
            for _ in range(2):
                assert all_move(url)
                kill_executor(folder)
            assert all_move(url)
        for view, truth in TRUTH.items():
            assert equals(url, view, truth), (folder / "driver.log").read_text()
        assert driver.poll() is None
    # No view was built again.
    assert execute(url, "select distinct generation from headwater.views") == [(1,)]


def kill_executor(folder: Path) -> None:
    """Kill it, and wait for the one that Spark starts instead."""
    (executor,) = executors(folder)
    os.kill(executor, signal.SIGKILL)
    assert became(lambda: executors(folder) not in ([], [executor]))


def live(url: str) -> int:
    found = execute(url, "select count(*) from headwater.views where state = 'live'")
    return int(found[0][0])


def all_move(url: str) -> bool:
    """Whether each view applies changes."""
    query = "select name, reached from headwater.views"
    before = set(execute(url, query))
    return became(lambda: before.isdisjoint(execute(url, query)))
