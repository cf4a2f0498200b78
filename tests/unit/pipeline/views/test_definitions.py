"""What a view is, read from functions and schemas, without a Spark session."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from headwater import Headwater
from headwater.errors import ConfigError
from headwater.pipeline.views.aggregates import FIELDS, rows_field
from headwater.pipeline.views.definitions import define
from headwater.pipeline.views.results import Aggregate, ResultField, read_result
from headwater.pipeline.views.storage.groups import group_rows, texts


def struct(kind: str, value: DataType, call: int = 0) -> StructType:
    pair = StructType([StructField("value", value), StructField("weight", IntegerType())])
    types = {"values": ArrayType(pair), "added": value, "removed": value}
    names = {"rows": rows_field(kind, call)}
    return StructType(
        [
            StructField(names.get(part, f"{kind}_{part}"), types.get(part, LongType()))
            for part in FIELDS[kind]
        ]
    )


@pytest.mark.parametrize(
    ("kind", "value", "column", "needs"),
    [
        ("count", StringType(), "bigint", ("rows", "total")),
        ("sum", IntegerType(), "bigint", ("rows", "total", "added", "removed")),
        ("sum", LongType(), "numeric", ("rows", "total", "added", "removed")),
        ("sum", DecimalType(12, 2), "numeric", ("rows", "total", "added", "removed")),
        ("sum", DoubleType(), "double precision", ("rows", "values")),
        ("avg", IntegerType(), "numeric", ("rows", "total", "added", "removed")),
        ("avg", DoubleType(), "double precision", ("rows", "values")),
        ("max", StringType(), "text", ("rows", "values")),
        ("min", DecimalType(38, 18), "numeric", ("rows", "values")),
        ("count_distinct", StringType(), "bigint", ("rows", "values")),
    ],
)
def test_an_aggregate(kind: str, value: DataType, column: str, needs: tuple[str, ...]) -> None:
    schema = StructType(
        [StructField("region", StringType()), StructField("it", struct(kind, value, 2))]
    )
    result = read_result("v", ("region",), schema)
    (found,) = result.aggregates
    assert (found.kind, found.type, found.needs) == (kind, column, needs)
    assert result.columns == (("region", "text"), ("it", column))
    assert result.forms == (("rows",), ("rows",), needs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"it": struct("count", LongType())}, "no column region"),
        ({"region": StringType()}, "has no aggregate"),
        ({"region": StringType(), "it": LongType()}, "column it is neither"),
        ({"region": StringType(), "it": struct("sum", StringType())}, "it is the sum of a column"),
        (
            {"region": ArrayType(LongType()), "it": struct("count", LongType())},
            "a view cannot store",
        ),
        (
            {"region": StringType(), "row_id": struct("count", LongType())},
            "cannot be called row_id",
        ),
    ],
)
def test_schemas_that_cannot_be_a_result(fields: dict[str, DataType], message: str) -> None:
    schema = StructType([StructField(name, kind) for name, kind in fields.items()])
    with pytest.raises(ConfigError, match=message) as error:
        read_result("revenue", ("region",), schema)
    assert str(error.value).startswith("view revenue")
    assert error.value.hint


def revenue(orders: Any, lines: Any) -> Any:
    return orders, lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": []}, "needs a key"),
        ({"key": ["a", "a"]}, "needs a key"),
        ({"key": "a", "name": "Revenue"}, "cannot be the name"),
        ({"key": "a", "name": "a.b.c"}, "cannot be the name"),
        ({"key": "a", "name": "headwater.x"}, "Headwater's own"),
        ({"key": "a", "name": "pg_catalog.x"}, "PostgreSQL's own"),
        ({"key": "a", "name": "information_schema.x"}, "PostgreSQL's own"),
        ({"key": "a", "tables": {"order": "x"}}, "no parameter order"),
        (
            {"key": "a", "tables": {"orders": "public.revenue"}},
            "reads the table that",
        ),
    ],
)
def test_functions_that_cannot_be_a_view(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        define(revenue, **options)
    with pytest.raises(ConfigError, match="must be tables"):
        define(lambda **tables: None, key="a", name="v")


def test_registering() -> None:
    hw = Headwater("postgresql://nowhere/shop")
    returned = hw.view(key="region", tables={"lines": "sales.lines"}, name="reports.revenue")(
        revenue
    )
    assert returned is revenue
    view = hw.views["reports.revenue"]
    assert view.tables == (("orders", "orders"), ("lines", "sales.lines"))
    assert (view.schema, view.table, view.key) == ("reports", "revenue", ("region",))
    assert view.digest("a") != view.digest("b")
    with pytest.raises(ConfigError, match="registered twice"):
        hw.view(key="region", name="reports.revenue")(revenue)


def test_the_groups_that_a_batch_adds() -> None:
    key = (ResultField("region", "text"),)
    aggregates = (Aggregate("n", "count"), Aggregate("most", "max", "numeric", 2))
    result = type(read_result("v", ("k",), one_column()))(key, aggregates)
    pairs = [[{"value": Decimal("1.50"), "weight": 1}] * 2, [], None]
    batch = pa.RecordBatch.from_pydict(
        {
            "k0": ["west", None, "null"],
            "rows": [1, -1, 2],
            "a0_total": [1, -1, None],
            "a1_values": pa.array(
                pairs,
                pa.list_(pa.struct([("value", pa.decimal128(12, 2)), ("weight", pa.int32())])),
            ),
        }
    )
    (one, groups), (two, values) = group_rows(result, ["groups", "values"], batch)
    assert (one, two) == ("groups", "values")
    ids = groups.column("id").to_pylist()
    assert len(set(ids)) == 3
    assert groups.column("k0").to_pylist() == ["west", None, "null"]
    assert groups.column("rows").to_pylist() == [1, -1, 2]
    assert groups.column("a0_total").to_pylist() == [1, -1, None]
    assert values.to_pylist() == [{"id": ids[0], "value": "1.50", "n": 2}]


def one_column() -> StructType:
    return StructType(
        [StructField("k", StringType()), StructField("n", struct("count", LongType()))]
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([1.5, float("nan"), float("-inf"), 1e300]), ["1.5", "nan", "-inf", "1e+300"]),
        (pa.array([Decimal("-0.10")]), ["-0.10"]),
        (pa.array([date(2026, 1, 2)]), ["2026-01-02"]),
        (
            pa.array([datetime(2026, 1, 2, 3, tzinfo=UTC)], pa.timestamp("us", "UTC")),
            ["2026-01-02 03:00:00.000000Z"],
        ),
    ],
)
def test_texts(values: pa.Array, expected: list[str]) -> None:
    assert texts(values) == expected
