"""What is registered with Spark's catalog, and when.

A stand-in takes the statements in the place of `spark.sql`: `create table … using delta` works only
with Delta's jar on the class path of Spark, which comes from Maven and cannot be installed here.
`tests/spark/test_catalog.py` has Spark's own parser read the statements.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest

from headwater.errors import ConfigError
from headwater.model import Table
from headwater.pipeline.tables.catalog import Catalog

ORDERS = Table(1, "public", "orders", (), ("id",), 7)


class FakeSpark:
    """Takes statements, or fails. `existing` describes what each name means already."""

    def __init__(self, error: str = "", existing: dict[str, str] | None = None) -> None:
        self.statements: list[str] = []
        self.error = error
        # A column of the table may have any name.
        found = {"location": "bigint"} | (existing or {})
        self.rows = [{"col_name": key, "data_type": value} for key, value in found.items()]

    def sql(self, text: str) -> FakeSpark:
        if not text.startswith("describe table extended "):
            self.statements.append(text)
        if self.error:
            raise RuntimeError(self.error)
        return self

    def collect(self) -> list[dict[str, str]]:
        return self.rows


@pytest.fixture
def spark() -> Any:
    return FakeSpark()


def table(name: str, schema: str = "public") -> Table:
    return Table(1, schema, name, (), ("id",), 7)


def test_both_tables_are_registered_once(spark: Any) -> None:
    catalog = Catalog("lake")
    for _ in "123":
        assert catalog.register(spark, "s3://b/tables/public/orders", ORDERS) == [
            "`lake`.`orders`",
            "`lake`.`orders_history`",
        ]
    assert spark.statements == [
        "create table if not exists `lake`.`orders` using delta location"
        " 's3://b/tables/public/orders/current'",
        "create table if not exists `lake`.`orders_history` using delta location"
        " 's3://b/tables/public/orders/history'",
    ]
    catalog.register(spark, "s3://b/tables/public/items", table("items"))
    assert len(spark.statements) == 4


@pytest.mark.parametrize(
    ("catalog", "schema", "name", "registered"),
    [
        ("lake", "sales", "orders", "`lake`.`sales_orders`"),
        ("main.lake", "public", "orders", "`main`.`lake`.`orders`"),
        ("main.my lake", "public", "Orders 2", "`main`.`my lake`.`Orders 2`"),
        ("lake", "public", "größe", "`lake`.`größe`"),
        ("lake", "public", "a.b", "`lake`.`a.b`"),
        ("lake", "public", "a`b", "`lake`.`a``b`"),
        ("lake", "a`b", "``", "`lake`.`a``b_`````"),
        ("lake", "public", "x` using csv location '/etc'; --",
         "`lake`.`x`` using csv location '/etc'; --`"),
    ],
)  # fmt: skip
def test_names_are_quoted(
    catalog: str, schema: str, name: str, registered: str, spark: Any
) -> None:
    found = Catalog(catalog).register(spark, "/lake/t", table(name, schema))
    assert found == [registered, f"{registered[:-1]}_history`"]
    assert spark.statements == [
        f"create table if not exists {found[0]} using delta location '/lake/t/current'",
        f"create table if not exists {found[1]} using delta location '/lake/t/history'",
    ]


@pytest.mark.parametrize(
    ("root", "quoted"),
    [
        ("/it's", r"'/it\'s/current'"),
        ("C:\\lake", r"'C:\\lake/current'"),
        (r"/a\'; drop", r"'/a\\\'; drop/current'"),
        ("/a b/`c`", "'/a b/`c`/current'"),
    ],
)
def test_places_are_quoted(root: str, quoted: str, spark: Any) -> None:
    Catalog("lake").register(spark, root, ORDERS)
    assert spark.statements[0].endswith(f" using delta location {quoted}")


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (table("orders"), table("orders_history"),
         "orders_history would be both the history of orders and the current state of"
         " orders_history"),
        (table("sales_orders"), table("orders", "sales"),
         "sales_orders would be both the current state of sales_orders and the current state of"
         " sales.orders"),
        (table("Orders"), table("orders"),
         "orders would be both the current state of Orders and the current state of orders"),
    ],
)  # fmt: skip
def test_a_name_of_two_tables_is_refused(
    one: Table, other: Table, message: str, spark: Any
) -> None:
    among = [one, msgspec.structs.replace(other, oid=2)]
    refusals = []
    for each in among:
        with pytest.raises(ConfigError) as caught:
            Catalog("lake").register(spark, "/lake/t", each, among)
        refusals.append(str(caught.value))
        assert "tables_exclude" in str(caught.value.hint)
    assert refusals[0] == f"[lake] tables_catalog lake: {message}"
    assert spark.statements == []
    Catalog("lake").register(spark, "/lake/t", one, [one])
    assert len(spark.statements) == 2


@pytest.mark.parametrize(
    ("existing", "root"),
    [
        ({"Location": "file:/srv/lake/orders/current", "Type": "EXTERNAL"}, "/srv/lake/orders"),
        ({"Location": "s3a://b/a lake/current"}, "s3://b/a lake"),
        ({}, "/lake"),
    ],
)
def test_the_same_table_may_exist(existing: dict[str, str], root: str) -> None:
    spark: Any = FakeSpark(existing=existing)
    with suppress(ConfigError):  # of the history
        Catalog("lake").register(spark, root, ORDERS)
    assert len(spark.statements) == 2, "the current state was accepted"


@pytest.mark.parametrize(
    ("existing", "message"),
    [
        ({"Location": "file:/other/current"}, "not /lake/t/current, but file:/other/current"),
        ({"Type": "VIEW"}, "not /lake/t/current, but a view"),
    ],
)
def test_a_name_that_is_something_else_is_refused(existing: dict[str, str], message: str) -> None:
    spark: Any = FakeSpark(existing=existing)
    catalog = Catalog("lake")
    for _ in "12":
        with pytest.raises(ConfigError, match="`orders` exists and is not ") as caught:
            catalog.register(spark, "/lake/t", ORDERS)
        assert message in str(caught.value)
        assert "Drop it from the catalog" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: delta.",
         "Spark cannot register Delta tables, because Delta is not on its class path",
         "io.delta:delta-spark"),
        ("An error occurred while calling o50.sql.\n: java.lang.ClassNotFoundException: delta.X\n",
         "because Delta is not on its class path", "unset [lake] tables_catalog"),
        ("[SCHEMA_NOT_FOUND] The schema `lake` cannot be found.\nmore",
         "Spark refused create table if not exists `lake`.`orders` using delta location"
         " '/lake/t/current': [SCHEMA_NOT_FOUND] The schema `lake` cannot be found.",
         "Check that the schema exists"),
        ("An error occurred while calling o50.sql.\n: x.PermissionException: not yours\n\tat x.Y",
         "/current': : x.PermissionException: not yours", "may create tables"),
    ],
)  # fmt: skip
def test_an_error_says_the_reason_and_is_tried_again(error: str, message: str, hint: str) -> None:
    spark: Any = FakeSpark(error)
    catalog = Catalog("lake")
    for _ in "12":
        with pytest.raises(ConfigError) as caught:
            catalog.register(spark, "/lake/t", ORDERS)
        assert str(caught.value).startswith("[lake] tables_catalog lake: ")
        assert message in str(caught.value)
        assert hint in str(caught.value.hint)
    assert len(spark.statements) == 2
    spark.error = ""
    catalog.register(spark, "/lake/t", ORDERS)
    assert len(spark.statements) == 4
