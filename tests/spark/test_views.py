"""Views equal the aggregate of their tables after any change of these."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from headwater import limits, views
from headwater.database import connect
from headwater.errors import ConfigError, PipelineError
from headwater.hub.hub import Hub
from headwater.model import Column, Table
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.planning import _SPARK_PART_CHANGES
from headwater.pipeline.views import catalog as view_catalog
from headwater.pipeline.views import plans
from headwater.pipeline.views.definitions import StreamingView, define
from headwater.pipeline.views.function import ViewFunction
from headwater.pipeline.views.storage import store
from tests.support.generators.sizes import first_seed, size
from tests.support.lake.tables import execute
from tests.support.lake.views import became, differences, equals, update, views_running
from tests.support.subscribers import Recorder, live

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Lake:
    return Lake(str(tmp_path / "lake"), spark)


def revenue(orders: DataFrame) -> DataFrame:
    return orders.groupBy("region", "day").agg(
        views.count().alias("orders"),
        views.count("amount").alias("priced"),
        views.sum("amount").alias("revenue"),
        views.avg("amount").alias("average"),
        views.sum("items").alias("items"),
        views.avg("items").alias("items_average"),
        views.sum("serial").alias("serials"),
        views.max("amount").alias("largest"),
        views.min("note").alias("first_note"),
        views.count_distinct("customer").alias("customers"),
        views.sum("share").alias("shares"),
        views.max("at").alias("latest"),
    )


REVENUE = """
    select region, day, count(*) as orders, count(amount) as priced, sum(amount) as revenue,
           avg(amount) as average, sum(items) as items, avg(items) as items_average,
           sum(serial) as serials, max(amount) as largest, min(note) as first_note,
           count(distinct customer) as customers, sum(share) as shares, max(at) as latest
    from orders group by region, day
"""

ORDERS = """
    create table orders (
      id int primary key, region text, day date, customer int, amount numeric(12,2), items int,
      serial bigint, share float8, note text, at timestamptz)
"""


def make_tables(url: str) -> None:
    execute(
        url,
        ORDERS,
        "create table customers (id int primary key, country text, weight numeric,"
        " odd numeric default 'NaN')",
        "select headwater.enable_reactivity('orders'), headwater.enable_reactivity('customers')",
    )


def countries(orders: DataFrame, people: DataFrame) -> DataFrame:
    pairs = views.join(orders.drop("id"), people, orders["customer"] == people["id"])
    return (
        pairs.where("items > 3")
        .withColumn("net", pairs["amount"] * 2)
        .groupBy("country")
        .agg(
            views.count().alias("orders"),
            views.sum("net").alias("net"),
            views.max("weight_").alias("heaviest"),
            views.count_distinct("region").alias("regions"),
        )
    )


COUNTRIES = """
    select country, count(*) as orders, sum(amount * 2) as net,
           trim_scale(max(weight)) as heaviest, count(distinct region) as regions
    from orders o join customers c on c.id = o.customer where items > 3 group by country
"""

DUE = "update headwater.views set state = 'due' where name = 'revenue' returning generation"
GENERATION = "select generation from headwater.views where name = 'revenue' and state = 'live'"
SIZES = "select (select count(*) from revenue), (select count(*) from countries)"

VIEWS = (
    define(revenue, key=["region", "day"]),
    define(countries, key="country", tables={"people": "customers"}, name="public.countries"),
)


def history(seed: int, steps: int) -> Iterator[str]:
    """Random transactions."""
    rng = random.Random(seed)

    def value(text: str) -> str:
        return "null" if rng.random() < 0.15 else text

    for step in range(1, steps):
        some = f"id % {rng.randint(2, 5)} = {rng.randint(0, 1)}"
        low = rng.randint(1, 40)
        region = value(f"'r{rng.randint(0, 3)}'")
        insert = f"""
            insert into orders
            select i, {value(f"'r' || (i + {low}) % 4")},
                   {value(f"date '2026-01-01' + i % {rng.randint(1, 3)}")},
                   {value(f"i % {rng.randint(1, 6)}")}, {value(f"i * {low} / 7.0")},
                   {value("i")}, {value("9223372036854775807 - i")},
                   {value("case i % 9 when 0 then 'NaN' else i / 4.0 end")},
                   {value("repeat('n', 3000) || i % 7")}, {value("now()")}
            from generate_series({low}, {low + rng.randint(0, 9)}) i
            on conflict (id) do update set amount = excluded.amount + 0.01"""
        customer = f"""
            insert into customers
            select i, {value(f"'c' || i % {rng.randint(1, 3)}")}, round(i / 3.0, 5)
            from generate_series({low % 6}, {low % 6 + 3}) i
            on conflict (id) do update set country = excluded.country, weight = excluded.weight"""
        yield rng.choice(
            [
                insert,
                insert,
                insert,
                f"update orders set region = {region} where {some}",
                f"update orders set amount = amount * 1.5, customer = customer + 1 where {some}",
                f"update orders set id = id + {step * 1000} where {some} and id < 1000",
                f"delete from orders where {some} and id % 7 = 0",
                customer,
                customer,
                f"delete from customers where id = {rng.randint(0, 6)}",
            ]
        )


def test_views_equal_the_aggregates(spark: SparkSession, url: str, lake: Lake) -> None:
    """After any history: rows that come, change, change their group and go; a truncate, an altered
    table; while the pipeline runs and while it does not."""
    make_tables(url)
    steps = history(seed=6, steps=1000)

    def some(count: int) -> list[str]:
        return [next(steps) for _ in range(count)]

    execute(url, *some(10))
    rounds = (
        some(8),
        some(8),
        ["begin; " + "; ".join(some(6)) + "; commit"],
        ["truncate orders", *some(6)],
        ["alter table orders add column more int default 7", *some(6)],
    )
    sizes = []
    with views_running(spark, url, lake, *VIEWS):
        assert equals(url, "revenue", REVENUE)
        for statements in rounds:
            execute(url, *statements)
            assert equals(url, "revenue", REVENUE)
            assert equals(url, "countries", COUNTRIES)
            sizes.append(execute(url, SIZES)[0])
        ((generation,),) = execute(url, DUE)
        assert became(lambda: execute(url, GENERATION) == [(generation + 1,)])
    execute(url, *some(6))
    update(spark, url, lake, *VIEWS)
    assert differences(url, "revenue", REVENUE) == []
    assert differences(url, "countries", COUNTRIES) == []
    groups, pairs = map(max, zip(*sizes, strict=True))
    assert groups > 5
    assert pairs > 1


# ------------------------------------------------------------------------ chains of joins

CHAINS = size("view_chains", 2, large=12)
CHAIN_ROUNDS = size("view_chain_rounds", 1, large=20)


def chain(chance: random.Random, name: str, length: int) -> tuple[StreamingView, str]:
    """A view of tables of which each is joined with the next, and its aggregate in SQL. The order
    of the parameters and of the joins is random."""
    first = chance.randrange(length)
    order, ends = [first], [first, first]
    while len(order) < length:
        at = chance.choice([0, 1]) if ends[0] > 0 and ends[1] < length - 1 else int(ends[0] == 0)
        ends[at] += 2 * at - 1
        order.append(ends[at])

    def function(**tables: DataFrame) -> DataFrame:
        def link(at: int) -> DataFrame:
            columns = (f.col("l").alias(f"v{at}"), f.col("r").alias(f"v{at + 1}"), "weight")
            return tables[f"t{at}"].select(*columns)

        made = link(first)
        for number, at in enumerate(order[1:], 1):
            between = max(at, min(order[:number]))
            made = views.join(made, link(at), f"v{between}")
        return made.groupBy(f.col("v0").alias("k")).agg(
            views.count().alias("n"), views.sum(f"v{length}").alias("total")
        )

    parameters = [f"t{at}" for at in range(length)]
    chance.shuffle(parameters)
    named = ", ".join(f"{each}={each}" for each in parameters)
    source = f"lambda {', '.join(parameters)}: function({named})"
    joins = " ".join(f"join t{at} on t{at - 1}.r = t{at}.l" for at in range(1, length))
    return (
        define(eval(source, {"function": function}), key="k", name=name),
        f"select t0.l as k, count(*) as n, sum(t{length - 1}.r) as total from t0 {joins}"
        " group by t0.l",
    )


def links(chance: random.Random, tables: int) -> str:
    """A random transaction that changes several of the tables."""

    def value() -> str:
        return "null" if chance.random() < 0.1 else str(chance.randint(0, 3))

    def statement() -> str:
        table, id = f"t{chance.randrange(tables)}", chance.randint(0, 7)
        return chance.choice(
            [
                f"insert into {table} values ({id}, {value()}, {value()}) on conflict (id)"
                " do update set l = excluded.l, r = excluded.r",
                f"update {table} set l = {value()} where id = {id}",
                f"update {table} set r = {value()} where id = {id}",
                f"update {table} set r = l, l = r where id % 4 = {id % 4}",
                f"delete from {table} where id = {id}",
            ]
        )

    return f"begin; {'; '.join(statement() for _ in range(chance.randint(4, 12)))}; commit"


def test_chains_of_joins(spark: SparkSession, url: str, lake: Lake) -> None:
    """Each change is joined with the rows of all other tables, as they were or as they are."""
    chance, most = random.Random(first_seed(3)), 4
    for at in range(most):
        execute(url, f"create table t{at} (id int primary key, l int, r int)",
                f"insert into t{at} select i, i % 4, (i + {at}) % 3 from generate_series(0, 7) i",
                f"select headwater.enable_reactivity('t{at}')")  # fmt: skip
    chains = [chain(chance, f"chain{at}", 3 + at % 2) for at in range(CHAINS)]
    with views_running(spark, url, lake, *(view for view, _ in chains)):
        for _ in range(CHAIN_ROUNDS):
            for view, truth in chains:
                assert equals(url, view.name, truth)
            execute(url, links(chance, most))
        for view, truth in chains:
            assert equals(url, view.name, truth)


def by_region(orders: DataFrame) -> DataFrame:
    return orders.groupBy("region").agg(views.count().alias("n"), views.sum("items").alias("items"))


def by_region_later(orders: DataFrame) -> DataFrame:
    return (
        orders.where("items <> 3")
        .groupBy("region")
        .agg(views.count().alias("n"), views.max("items").alias("most"))
    )


def by_area(orders: DataFrame) -> DataFrame:
    return orders.withColumnRenamed("region", "area").groupBy("area").agg(views.count().alias("n"))


def by_country(customers: DataFrame) -> DataFrame:
    return customers.groupBy("country").agg(views.count().alias("n"))


def broken(orders: DataFrame) -> DataFrame:
    raise KeyError("no such thing")


INSERT = "insert into orders (id, region, items) select i, 'r' || i % 2, i from generate_series"


async def test_a_changed_function(spark: SparkSession, url: str, lake: Lake) -> None:
    """One transaction replaces the rows, which a live query over the view sees; a large batch; and
    another view that fails meanwhile."""
    make_tables(url)
    execute(url, f"{INSERT}(1, 5) i")
    first = define(by_region, key="region", name="totals")
    await asyncio.to_thread(update, spark, url, lake, first)
    recorder = Recorder()
    async with Hub(url) as hub:
        await hub.live(live("totals", order=["region"], columns=["region", "n"]), recorder)
        await recorder.until(lambda: [row["n"] for row in recorder.rows] == [2, 3])
        execute(url, f"{INSERT}(6, {_SPARK_PART_CHANGES + 10}) i")
        await asyncio.to_thread(update, spark, url, lake, first)
        half = (_SPARK_PART_CHANGES + 10) // 2
        await recorder.until(lambda: [row["n"] for row in recorder.rows] == [half, half])
        ((seq,),) = execute(url, "select max(seq) from headwater.log")
        later = define(by_region_later, key="region", name="totals")
        wrong = define(broken, key="region")
        with pytest.raises(PipelineError, match="view broken: its function failed: KeyError"):
            await asyncio.to_thread(update, spark, url, lake, wrong, later)
        await recorder.until(lambda: [row["n"] for row in recorder.rows] == [half, half - 1])
    truth = """select region, count(*) as n, max(items) as most from orders where items <> 3
               group by region"""
    assert differences(url, "totals", truth) == []
    changes = f"select count(distinct xid) from headwater.log where seq > {seq} and op <> 'R'"
    assert execute(url, changes) == [(1,)]
    renamed = define(by_area, key="area", name="totals")
    await asyncio.to_thread(update, spark, url, lake, renamed)
    truth = "select region as area, count(*) as n from orders group by region"
    assert differences(url, "totals", truth) == []
    connection = await connect(url, purpose="test", application_path=True)
    (one,) = [each for each in await view_catalog.list_views(connection) if each.name == "totals"]
    assert (one.state, one.rows, one.error) == ("live", 2, None)
    await view_catalog.rebuild(connection, "public.totals")
    assert (await view_catalog.list_views(connection))[-1].state == "due"
    inner = "select count(*) from pg_class where relname ~ '^view_[0-9]+_[0-9]+_groups$'"
    assert execute(url, inner) == [(1,)]
    await view_catalog.drop(connection, "totals")
    assert execute(url, inner) == [(0,)]
    assert execute(url, "select to_regclass('totals')") == [(None,)]
    with pytest.raises(ConfigError, match="there is no view totals"):
        await view_catalog.drop(connection, "totals")
    await connection.close()


def fails_at_13(orders: DataFrame) -> DataFrame:
    items = f.when(f.col("items") == 13, f.raise_error(f.lit("unlucky"))).otherwise(f.col("items"))
    return (
        orders.withColumn("items", items.cast("int"))
        .groupBy("region")
        .agg(views.sum("items").alias("items"))
    )


@contextmanager
def crashing_build(patch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Inside the block, a build fails after it has written the rows of the view, before its
    commit."""
    has_crashed = Event()

    def crash(place: str) -> None:
        if place == "swapping":
            has_crashed.set()
            raise PipelineError("a crash", retryable=True)

    patch.setattr(store, "failpoint", crash)
    yield has_crashed


def test_a_view_that_fails_or_is_slow_delays_no_other(
    spark: SparkSession, url: str, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every view is too slow for the stream here: each catches up by itself."""
    monkeypatch.setattr(limits, "VIEW_BATCH_SECONDS", 0.0)
    make_tables(url)
    execute(url, f"{INSERT}(1, 5) i")
    both = define(fails_at_13, key="region"), define(by_region, key="region")
    truth = "select region, sum(items) as items from orders group by region"
    counted = "select region, count(*) as n, sum(items) as items from orders group by region"
    failure = "select error ~ 'unlucky' from headwater.views where name = 'fails_at_13'"
    with views_running(spark, url, lake, *both):
        assert equals(url, "fails_at_13", truth)
        assert equals(url, "by_region", counted)
        execute(url, f"{INSERT}(13, 13) i")
        assert became(lambda: execute(url, failure) == [(True,)])
        execute(url, "update orders set region = 'r7' where id = 2")
        assert equals(url, "by_region", counted)
        states = "select name, state from headwater.pipeline where name like 'view%' order by 1"
        assert became(
            lambda: (
                execute(url, states)
                == [
                    ("view.by_region", "running"),
                    ("view.fails_at_13", "failed"),
                    ("views", "running"),
                ]
            )
        )
        before = execute(url, "select region, items from fails_at_13 order by 1")
        execute(url, "delete from orders where id = 13")
        with monkeypatch.context() as once, crashing_build(once) as has_crashed:
            execute(url, "update headwater.views set state = 'due' where name = 'fails_at_13'")
            assert became(has_crashed.is_set)
            # The rows before are there until the build is complete.
            assert execute(url, "select region, items from fails_at_13 order by 1") == before
        assert equals(url, "fails_at_13", truth)
        assert became(lambda: execute(url, failure) == [(None,)])


def constants(orders: DataFrame) -> DataFrame:
    return orders.sparkSession.createDataFrame([("r1", 0.2)], "region string, tax double")


WRONG: list[tuple[Any, str]] = [
    (lambda orders: orders.groupBy("day").agg(views.count().alias("n")), "no column region"),
    (
        lambda orders: orders.groupBy("region").agg(
            f.sum("items").alias("n"), views.count().alias("rows")
        ),
        "column n is neither",
    ),
    (lambda orders: orders.groupBy("region").agg(views.sum("note").alias("n")), "is not a number"),
    (
        lambda orders: orders.select("region").groupBy("region").agg(views.count().alias("n")),
        "the column weight is missing",
    ),
    (
        lambda orders: orders.limit(3).groupBy("region").agg(views.count().alias("n")),
        "Limit before the aggregate",
    ),
    (
        lambda orders: orders.dropDuplicates().groupBy("region").agg(views.count().alias("n")),
        "Deduplicate before",
    ),
    (
        lambda orders: orders.groupBy("region").agg(views.count().alias("n")).limit(3),
        "Limit after the aggregate",
    ),
    (
        lambda orders: (
            views.join(orders, orders.select("region", "weight"), "region")
            .groupBy("region")
            .agg(views.count().alias("n"))
        ),
        "joins its table with itself",
    ),
    (
        lambda orders: (
            views.join(orders, orders, "region", how="left")
            .groupBy("region")
            .agg(views.count().alias("n"))
        ),
        "cannot have a join of kind 'left'",
    ),
    (
        lambda orders: orders.where(f.rand() < 0.5).groupBy("region").agg(views.count().alias("n")),
        "a random value",
    ),
    (
        lambda orders: (
            orders.where(f.col("day") < f.current_date())
            .groupBy("region")
            .agg(views.count().alias("n"))
        ),
        "or the present time",
    ),
    (
        lambda orders: (
            constants(orders)
            .join(orders, "region", "left")
            .groupBy("region")
            .agg(views.count().alias("n"))
        ),
        "some of them without a row of orders",
    ),
    (
        lambda orders: (
            orders.join(constants(orders), "region", "full")
            .groupBy("region")
            .agg(views.count().alias("n"))
        ),
        "some of them without a row of orders",
    ),
    (
        lambda orders: orders.join(
            orders.select(f.col("id").alias("n")), f.col("items").cast("smallint") == f.col("n")
        ),
        "without an equality of two such columns",
    ),
    (lambda orders: 7, "returned int, not a DataFrame"),
    (lambda orders: orders.limit(3), "a limit over all rows"),
    (lambda orders: orders.dropDuplicates(["region"]), "any one of several rows"),
    (lambda orders: orders.groupBy().agg(f.max("region").alias("region")), "groups by other"),
    (
        lambda orders: orders.groupBy(f.upper("region").alias("region")).agg(f.max("id")),
        "groups by other columns than orders.day",
    ),
    (
        lambda orders: orders.withColumn("region", f.rank().over(Window.orderBy("id"))),
        "a window that is not partitioned by",
    ),
    (lambda orders: orders.rollup("region").agg(f.max("id").alias("id")), "several sets"),
    (lambda orders: orders.crossJoin(orders.select("region")), "called region twice|without an eq"),
    (lambda orders: orders.groupBy("region").agg(f.collect_list("id").alias("n")), "cannot store"),
    (lambda orders: orders.select(f.upper("region").alias("region")), "drops orders.day"),
]


WRONG_TABLE = Table(
    1,
    "public",
    "orders",
    (
        Column("id", "integer", "integer"),
        Column("region", "text", "text"),
        Column("day", "date", "date"),
        Column("items", "integer", "integer"),
        Column("note", "text", "text"),
    ),
    ("id",),
)


def test_functions_that_cannot_be_views(spark: SparkSession) -> None:
    for function, message in WRONG:
        view = define(function, key="region", name="wrong")
        with pytest.raises(ConfigError, match=message) as error:
            ViewFunction(view, spark).result({"orders": WRONG_TABLE})
        assert str(error.value).startswith("view wrong")
        assert error.value.hint


RANDOM = (
    "rand()", "randn()", "uniform(0, 9)", "uniform(0, 9, 1)", "randstr(3)", "uuid()",
    "shuffle(array(id, items))", "reflect('java.util.UUID', 'randomUUID')",
    "try_reflect('java.util.UUID', 'randomUUID')", "java_method('java.lang.System', 'nanoTime')",
    "input_file_name()", "input_file_block_start()", "input_file_block_length()",
    "monotonically_increasing_id()", "spark_partition_id()",
)  # fmt: skip

CLOCKS = (
    "now()", "current_timestamp()", "current_date()", "current_time()", "localtimestamp()",
    "unix_timestamp()", "date_add(current_date(), items)", "aes_encrypt(note, '0000111122223333')",
)  # fmt: skip


def test_functions_that_give_another_result_for_the_same_rows(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(function: Callable[[DataFrame], DataFrame]) -> None:
        view = define(lambda orders: function(orders), key="region", name="varying")
        ViewFunction(view, spark).result({"orders": WRONG_TABLE})

    def refused(function: Callable[[DataFrame], DataFrame]) -> None:
        with pytest.raises(ConfigError, match="a random value or the present time"):
            result(function)

    def selected(value: SparkColumn) -> Callable[[DataFrame], DataFrame]:
        return lambda orders: orders.select("region", value.alias("x"))

    def filtered(value: SparkColumn) -> Callable[[DataFrame], DataFrame]:
        return lambda orders: (
            orders.where(value.isNotNull()).groupBy("region").agg(views.count().alias("n"))
        )

    for text in (*RANDOM, *CLOCKS):
        refused(selected(f.expr(text)))
        refused(filtered(f.expr(text)))
    # Aggregates that depend on the order of rows are accepted: the order may be stated.
    result(
        lambda orders: orders.groupBy("region").agg(f.array_min(f.collect_list("id")).alias("x"))
    )
    # Spark knows more such expressions than the list has.
    monkeypatch.setattr(plans, "_VARYING", ())
    for text in RANDOM:
        refused(selected(f.expr(text)))
    refused(filtered(f.udf(lambda id: str(id)).asNondeterministic()("id")))


def by_total(orders: DataFrame) -> DataFrame:
    return orders.where("x <> 3").groupBy("key").agg(views.count().alias("n"))


READ: list[tuple[Callable[..., DataFrame], dict[str, str]]] = [
    (by_total, {"orders": "key x weight"}),
    (lambda a, b: a.union(b).distinct(), {"a": "id key x y", "b": "id key x y"}),
    (lambda a, b: a.union(b).union(b).distinct(), {"a": "id key x y", "b": "id key x y"}),
    (lambda a, b: a.union(b.where("x > 1")).select("key"), {"a": "key", "b": "key x"}),
    (lambda a, b: a.exceptAll(b), {"a": "id key x y", "b": "id key x y"}),
    (
        lambda a, b, c: a.union(b).join(c.select("key"), "key", "left").where("y > 1"),
        {"a": "id key x y", "b": "id key x y", "c": "key"},
    ),
    (
        lambda a, b: (
            views.join(a.drop("id"), b.select("key", f.col("x").alias("z"), "weight"), "key")
            .where("z > x")
            .groupBy("key")
            .agg(views.count().alias("n"))
        ),
        {"a": "key x weight", "b": "key x weight"},
    ),
]


def test_the_columns_that_are_read(spark: SparkSession) -> None:
    columns = tuple(Column(name, "integer", "integer") for name in ("id", "key", "x", "y"))
    for function, read in READ:
        view = ViewFunction(define(function, key="key", name="read"), spark)
        view.result({name: Table(1, "public", name, columns, ("id",)) for name in read})
        assert view.used == {name: frozenset(each.split()) for name, each in read.items()}
