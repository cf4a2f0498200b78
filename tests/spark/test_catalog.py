"""The statements that register typed tables, read by Spark's own parser. They cannot be executed
here: for that, Delta's jar must be on the class path of Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from headwater.model import Table
from headwater.pipeline.tables.catalog import Catalog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Parser:
    """Takes statements as Spark does, and keeps the name and place that Spark finds in each."""

    def __init__(self, spark: SparkSession) -> None:
        self._parser: Any = spark._jsparkSession.sessionState().sqlParser()
        self.found: list[tuple[tuple[str, ...], str]] = []

    def sql(self, text: str) -> None:
        plan = self._parser.parsePlan(text)
        assert plan.getClass().getSimpleName() == "CreateTable"
        assert plan.ignoreIfExists()
        spec = plan.tableSpec()
        assert spec.provider().get() == "delta"
        parts = plan.name().nameParts()
        name = tuple(parts.apply(at) for at in range(parts.size()))
        self.found.append((name, spec.location().get()))


@pytest.mark.parametrize(
    ("catalog", "table", "root"),
    [
        ("lake", "orders", "/lake/tables/public/orders"),
        ("main.lake", "größe", "s3://bucket/a lake"),
        ("lake", "a.b`c``d", "/it's/ö"),
        ("lake", "x` using csv location '/etc'; --", r"/a\'; drop table x; --\\"),
    ],
)
def test_spark_reads_the_names_and_places_that_were_meant(
    spark: SparkSession, catalog: str, table: str, root: str
) -> None:
    parser: Any = Parser(spark)
    Catalog(catalog).register(parser, root, Table(1, "public", table, (), ("id",), 7))
    schema = tuple(catalog.split("."))
    assert parser.found == [
        ((*schema, table), f"{root}/current"),
        ((*schema, f"{table}_history"), f"{root}/history"),
    ]
