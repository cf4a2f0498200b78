"""Views that are maintained key by key equal their function over the tables of the database.

The functions and the histories are generated: joins of every kind, windows, distinct, unions and
aggregates, in any order; rows that come, change, change their keys and go, truncates, transactions
over several tables; with the pipeline stopped and started in between.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from headwater import limits, views
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.snapshots.database_snapshot import database_snapshot
from headwater.pipeline.views import weighted
from headwater.pipeline.views.definitions import StreamingView, define
from headwater.pipeline.views.weighted import SourceTable
from tests.support.generators.sizes import first_seed, size
from tests.support.lake.tables import execute
from tests.support.lake.views import became, views_running

pytestmark = pytest.mark.timeout(600)

SEED = first_seed(12)
RUNS = size("local_views", 1, large=20)
VIEWS = size("local_views_functions", 2, large=12)
ROUNDS = size("local_views_rounds", 1, large=20)

TABLES = (
    """create table orders (id bigint primary key, customer int, region text, amount numeric(12,2),
       price double precision, weight int)""",
    "create table customers (id int primary key, country text, since date, parent int)",
    "create table regions (name text primary key, tax numeric)",
    "create index on orders (customer)",
    "select headwater.enable_reactivity('orders'), headwater.enable_reactivity('customers'),"
    " headwater.enable_reactivity('regions')",
)

Step = Callable[[DataFrame], DataFrame]


# ------------------------------------------------------------------------ generated functions

LABELS = {"people": "customers"}
KINDS = ("inner", "left", "right", "full", "left_semi", "left_anti")


def generated(chance: random.Random, name: str) -> StreamingView:
    """A view that is local to the column `customer`."""
    start, parameters = _start(chance)
    steps = [_step(chance, at) for at in range(chance.randint(0, 3))]
    last, key = _last(chance)

    def function(*tables: DataFrame) -> DataFrame:
        made = start(dict(zip(parameters, tables, strict=True)))
        for step in steps:
            made = step(made)
        return last(made)

    # A view's function has a parameter for each table.
    source = f"lambda {', '.join(parameters)}: function({', '.join(parameters)})"
    return define(
        eval(source, {"function": function}),
        key=key,
        name=name,
        tables={p: LABELS[p] for p in parameters if p in LABELS},
    )


def _start(
    chance: random.Random,
) -> tuple[Callable[[dict[str, DataFrame]], DataFrame], tuple[str, ...]]:
    """Rows with `customer`, a text and a number."""

    def orders(tables: dict[str, DataFrame]) -> DataFrame:
        return tables["orders"].select("customer", f.col("region").alias("name"), "amount")

    def people(tables: dict[str, DataFrame]) -> DataFrame:
        return tables["people"].select(
            f.col("id").alias("customer"),
            f.col("country").alias("name"),
            f.lit(1).cast("decimal(12,2)").alias("amount"),
        )

    kind, how = chance.choice(("one", "union", "join", "join", "self", "except")), ""
    how = chance.choice(KINDS)

    def joined(tables: dict[str, DataFrame]) -> DataFrame:
        others = tables["people"].withColumnRenamed("id", "customer")
        pairs = views.join(tables["orders"], others, "customer", how)
        text = "region" if how in ("left_semi", "left_anti") else "country"
        return pairs.select("customer", f.col(text).alias("name"), "amount")

    def self_joined(tables: dict[str, DataFrame]) -> DataFrame:
        one = tables["people"].select(f.col("id").alias("customer"), f.col("country").alias("name"))
        two = (
            tables["people"]
            .groupBy(f.col("parent").alias("customer"))
            .agg(f.count("*").cast("decimal(12,2)").alias("amount"))
        )
        return one.join(two, "customer", how if how[:5] != "left_" else "left").select(
            "customer", "name", "amount"
        )

    match kind:
        case "one":
            return orders, ("orders",)
        case "union":
            return (lambda t: orders(t).union(people(t))), ("orders", "people")
        case "except":
            return (lambda t: orders(t).exceptAll(people(t)).distinct()), ("orders", "people")
        case "self":
            return self_joined, ("people",)
    return joined, ("orders", "people")


def _step(chance: random.Random, at: int) -> Step:
    number = chance.randint(1, 3)
    by = Window.partitionBy("customer")
    return chance.choice(
        (
            lambda made: made.where(f.col("amount") > number * 10),
            lambda made: made.distinct(),
            lambda made: (
                made.withColumn("place", f.rank().over(by.orderBy("amount", "name")))
                .where(f.col("place") <= number)
                .drop("place")
            ),
            lambda made: made.withColumn("amount", f.max("amount").over(by)),
            lambda made: made.union(made.where(f.col("amount") < 50)),
            lambda made: made.groupBy("customer", "name").agg(f.sum("amount").alias("amount")),
        )
    )


def _last(chance: random.Random) -> tuple[Step, list[str]]:
    order = Window.partitionBy("customer").orderBy("amount", "name")
    return chance.choice(
        (
            (
                lambda made: made.groupBy("customer").agg(
                    f.count("*").alias("n"),
                    f.sum("amount").alias("total"),
                    f.min("name").alias("first"),
                    f.countDistinct("name").alias("names"),
                ),
                ["customer"],
            ),
            (lambda made: made.select("name", "customer").distinct(), ["name", "customer"]),
            (
                lambda made: made.withColumn("place", f.row_number().over(order)),
                ["customer", "place"],
            ),
        )
    )


# ------------------------------------------------------------------------ the truth


def truth(spark: SparkSession, url: str, view: StreamingView) -> Counter[tuple[Any, ...]]:
    """The view's function over the rows of the database."""
    with database_snapshot(url, [table for _, table in view.tables]) as now:
        frames = [
            weighted.present(now.frame(spark, table), _whole(now.tables[table].table))
            for _, table in view.tables
        ]
        made = view.function(*frames)
        return Counter(tuple(row) for row in made.select(sorted(made.columns)).collect())


def _whole(table: Any) -> SourceTable:
    return SourceTable(table, frozenset(column.name for column in table.columns), False)


def shown(url: str, view: StreamingView) -> Counter[tuple[Any, ...]]:
    columns = execute(
        url,
        "select string_agg(quote_ident(attname), ', ' order by attname collate \"C\")"
        f" from pg_attribute where attrelid = '{view.name}'::regclass and attnum > 1"
        " and not attisdropped",
    )[0][0]
    return Counter(execute(url, f"select {columns} from {view.name}"))


def settled(spark: SparkSession, url: str, view: StreamingView) -> bool:
    expected = truth(spark, url, view)
    exists = f"select to_regclass('{view.name}') is not null"
    return became(lambda: execute(url, exists) == [(True,)] and shown(url, view) == expected)


# ------------------------------------------------------------------------ generated histories


def history(chance: random.Random) -> Iterator[str]:
    """Random statements."""

    def value(text: str) -> str:
        return "null" if chance.random() < 0.2 else text

    while True:
        low, customer = chance.randint(1, 30), chance.randint(1, 6)
        some = f"id % {chance.randint(2, 4)} = 0"
        yield chance.choice(
            (
                f"""insert into orders
                    select i, {value(f"(i + {customer}) % 7")}, {value("'r' || i % 3")},
                           {value("i % 4 * 20")}, i / 3.0, 1
                    from generate_series({low}, {low + chance.randint(0, 6)}) i
                    on conflict (id) do update set amount = orders.amount + 1,
                    customer = excluded.customer""",
                f"""insert into customers
                    select i, {value("'c' || i % 2")}, {value("date '2026-01-01' + i")},
                           {value(str(customer))}
                    from generate_series({customer}, {customer + 2}) i
                    on conflict (id) do update set country = excluded.country""",
                f"update orders set customer = {value(str(customer))} where {some}",
                f"update orders set amount = amount * 2, region = {value(chr(39) + 'r9' + chr(39))}"
                f" where {some}",
                f"update customers set id = id + 100 where id = {customer} and not exists"
                f" (select from customers where id = {customer} + 100)",
                f"update customers set parent = {value(str(customer))} where {some}",
                f"delete from orders where {some} and id > {low}",
                f"delete from customers where id = {customer}",
                f"insert into regions values ('r{customer}', {low}) on conflict do nothing",
            )
        )


@pytest.mark.parametrize("seed", range(SEED, SEED + RUNS))
def test_views_equal_their_functions(
    seed: int, spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    lake = Lake(str(tmp_path / "lake"), spark)
    execute(url, *TABLES)
    definitions = [generated(chance, f"v{at}") for at in range(VIEWS)]
    steps = history(chance)
    generations = "select sum(generation) from headwater.views"

    def some() -> list[str]:
        found = [next(steps) for _ in range(chance.randint(1, 6))]
        return [f"begin; {'; '.join(found)}; commit"] if chance.random() < 0.5 else found

    execute(url, *some(), *some(), *some())
    with views_running(spark, url, lake, *definitions):
        for _ in range(ROUNDS):
            for view in definitions:
                assert settled(spark, url, view), (view.name, seed)
            execute(url, *some())
        for view in definitions:
            assert settled(spark, url, view), (view.name, seed)
        built = execute(url, generations)
    execute(url, *some())
    with views_running(spark, url, lake, *definitions):
        for view in definitions:
            assert settled(spark, url, view), (view.name, seed)
        # They continued where they were.
        assert execute(url, generations) == built == [(len(definitions),)]
        # Too many values at once, and a truncate: they are built again.
        monkeypatch.setattr(limits, "VIEW_TOUCHED_VALUES_MAX", 2)
        execute(url, "truncate customers", *some())
        for view in definitions:
            assert settled(spark, url, view), (view.name, seed)


def waiting(place: Path) -> Callable[[str | None], str | None]:
    """A function of a view that waits until there is a file `end`, and says by another that it
    does."""

    def wait(text: str | None) -> str | None:
        while not (place / "end").exists():
            (place / "waits").touch()
            time.sleep(0.05)
        return text

    return wait


def test_a_stop_interrupts_the_work_of_a_view(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch as well as a build, whose progress is reported."""
    monkeypatch.setattr(limits, "VIEW_BATCH_SECONDS", 0.0)
    lake, waits, end = Lake(str(tmp_path / "lake"), spark), tmp_path / "waits", tmp_path / "end"
    execute(url, *TABLES, "insert into regions values ('r1', 1)")
    slow = f.udf(waiting(tmp_path), "string", useArrow=False)

    def taxes(regions: DataFrame) -> DataFrame:
        return regions.select("name", slow(f.col("tax").cast("string")).alias("tax"))

    task = "select task, task_done from headwater.pipeline where name = 'view.taxes'"
    with views_running(spark, url, lake, define(taxes, key="name")):
        assert became(waits.exists)
        assert became(lambda: execute(url, task) == [("build", 0)])
        end.touch()
        assert became(lambda: execute(url, task) == [(None, None)])
        end.unlink()
        waits.unlink()
        execute(url, "update regions set tax = 2")
        assert became(waits.exists)
    try:
        names = [thread.name for thread in threading.enumerate()]
        assert [name for name in names if name.endswith("view-taxes")] == []
    finally:
        end.touch()
