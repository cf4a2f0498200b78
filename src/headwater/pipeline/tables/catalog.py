"""Registers typed tables with the catalog of Spark (Hive, Unity), so that other programs find them
by name.

`<catalog>.<schema>_<table>` is the current state, `…_history` the history. This is Spark's own
`create table … using delta`, which needs Delta's jar on the class path of Spark.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from headwater.errors import ConfigError
from headwater.model import Table
from headwater.pipeline.tables.layout import CURRENT, HISTORY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Catalog(msgspec.Struct):
    """A schema of Spark's catalog, such as `lake` or `main.lake`."""

    name: str
    registered: set[str] = msgspec.field(default_factory=set)

    def register(self, spark: SparkSession, root: str, table: Table) -> list[str]:
        """Register both tables. ConfigError where Spark cannot read Delta tables."""
        names = []
        for which, suffix in ((CURRENT, ""), (HISTORY, "_history")):
            own = table.name if table.schema == "public" else f"{table.schema}_{table.name}"
            name = ".".join(map(_quoted, (*self.name.split("."), f"{own}{suffix}")))
            if name not in self.registered:
                self._execute(spark, statement(name, f"{root}/{which}"))
                self.registered.add(name)
            names.append(name)
        return names

    def _execute(self, spark: SparkSession, text: str) -> None:
        try:
            spark.sql(text)
        except Exception as error:
            # An error of Java has its reason below the first line.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = next((each for each in lines if "Exception: " in each), lines[0])
            if _MISSING.search(str(error)):
                raise ConfigError(
                    f"[lake] tables_catalog {self.name}: Spark cannot register Delta tables,"
                    " because Delta is not on its class path",
                    hint="Run the pipeline on a Spark with Delta (spark.jars.packages"
                    " io.delta:delta-spark), or unset [lake] tables_catalog: the tables can be"
                    " read by their path.",
                ) from error
            raise ConfigError(
                f"[lake] tables_catalog {self.name}: Spark refused {text}: {reason:.500}",
                hint="Check that the schema exists and that the pipeline may create tables in it.",
            ) from error


_MISSING = re.compile("DATA_SOURCE_NOT_FOUND|Failed to find.* data source|ClassNotFoundException")


def statement(name: str, path: str) -> str:
    """The statement that registers a table.

    >>> statement("`lake`.`orders`", "s3://b/orders")
    "create table if not exists `lake`.`orders` using delta location 's3://b/orders'"
    """
    location = path.replace("\\", "\\\\").replace("'", "\\'")
    return f"create table if not exists {name} using delta location '{location}'"


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
