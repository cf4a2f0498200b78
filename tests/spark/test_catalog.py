"""The statements that register typed tables, read by Spark's own parser. They cannot be executed
here: for that, Delta's jar must be on the class path of Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headwater.errors import ConfigError
from headwater.model import Table
from headwater.pipeline.tables.catalog import Catalog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Parser:
    """Takes statements as Spark does, and keeps the name and place that Spark finds in each."""

    def __init__(self, spark: SparkSession) -> None:
        self._parser: Any = spark._jsparkSession.sessionState().sqlParser()
        self.found: list[tuple[tuple[str, ...], str]] = []

    def sql(self, text: str) -> Parser:
        plan = self._parser.parsePlan(text)
        if text.startswith("describe"):
            assert plan.getClass().getSimpleName() == "DescribeRelation"
            return self
        assert plan.getClass().getSimpleName() == "CreateTable"
        assert plan.ignoreIfExists()
        spec = plan.tableSpec()
        assert spec.provider().get() == "delta"
        parts = plan.name().nameParts()
        name = tuple(parts.apply(at) for at in range(parts.size()))
        self.found.append((name, spec.location().get()))
        return self

    def collect(self) -> list[dict[str, str]]:
        return []


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


class WithDelta:
    """A Spark in which each name exists: `create table if not exists` leaves it as it is."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def sql(self, text: str) -> Any:
        return None if text.startswith("create table if not exists") else self._spark.sql(text)


def test_a_name_that_exists_must_be_the_same_folder(spark: SparkSession, tmp_path: Path) -> None:
    """Tables of Parquet stand for those of Delta."""
    table, root = Table(1, "public", "known", (), ("id",), 7), f"{tmp_path}/a lake"
    names = {"known": f"{root}/current", "known_history": f"{root}/history"}
    stand_in: Any = WithDelta(spark)
    try:
        for name, place in names.items():
            spark.sql(f"create table {name} (Location int) using parquet location '{place}'")
        Catalog("default").register(stand_in, root, table)
        with pytest.raises(ConfigError, match="known` exists and is not /other/current"):
            Catalog("default").register(stand_in, "/other", table)
        spark.sql("create view shown as select 1 as one")
        shown = Table(1, "public", "shown", (), ("id",), 7)
        with pytest.raises(ConfigError, match=r"shown` exists and is not .*, but a view"):
            Catalog("default").register(stand_in, root, shown)
    finally:
        spark.sql("drop view if exists shown")
        for name in names:
            spark.sql(f"drop table if exists {name}")
