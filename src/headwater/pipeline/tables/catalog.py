"""Registers typed tables with the catalog of Spark (Hive, Unity), so that other programs find them
by name.

`<catalog>.<schema>_<table>` is the current state, `…_history` the history. This is Spark's own
`create table … using delta`, which needs Delta's jar on the class path of Spark. A name that means
something else already is refused: it would show other rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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

    def register(
        self, spark: SparkSession, root: str, table: Table, among: Iterable[Table] = ()
    ) -> list[str]:
        """Register both tables. ConfigError where Spark cannot read Delta tables, and for a name
        that is also one of another table of the lake (`among`) or exists for something else."""
        names = {
            which: ".".join(map(_quoted, (*self.name.split("."), each)))
            for which, each in _names(table).items()
        }
        if not self.registered.issuperset(names.values()):
            self._check_distinct(table, among)
        for which, name in names.items():
            if name not in self.registered:
                path = f"{root}/{which}"
                self._execute(spark, statement(name, path))
                self._check_existing(spark, name, path)
                self.registered.add(name)
        return list(names.values())

    def _check_distinct(self, table: Table, among: Iterable[Table]) -> None:
        """Catalogs do not distinguish upper and lower case."""
        own = {name.lower(): which for which, name in _names(table).items()}
        for other in among:
            for which, name in _names(other).items():
                if other.oid != table.oid and name.lower() in own:
                    raise ConfigError(
                        f"[lake] tables_catalog {self.name}: {name} would be both"
                        f" {_MEANINGS[own[name.lower()]]} of {table.label} and {_MEANINGS[which]}"
                        f" of {other.label}",
                        hint="Rename one of the two tables, or leave it out of the typed tables:"
                        " [lake] tables_exclude.",
                    )

    def _check_existing(self, spark: SparkSession, name: str, path: str) -> None:
        """Something that exists under the name stays as it is."""
        rows = self._execute(spark, f"describe table extended {name}").collect()
        found = {row["col_name"]: row["data_type"] for row in rows}
        place = found.get("Location")
        if found.get("Type") == "VIEW" or (place is not None and _place(place) != _place(path)):
            raise ConfigError(
                f"[lake] tables_catalog {self.name}: {name} exists and is not {path}, but"
                f" {place or 'a view'}",
                hint="Drop it from the catalog, or name another schema in [lake] tables_catalog.",
            )

    def _execute(self, spark: SparkSession, text: str) -> Any:
        try:
            return spark.sql(text)
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


_MEANINGS = {CURRENT: "the current state", HISTORY: "the history"}


def _names(table: Table) -> dict[str, str]:
    """The names of both tables in the schema of the catalog."""
    own = table.name if table.schema == "public" else f"{table.schema}_{table.name}"
    return {CURRENT: own, HISTORY: f"{own}_history"}


def _place(path: str) -> str:
    """A path or URL without what Spark writes in another way: `/lake` is `file:/lake` to it."""
    return re.sub(r"^\w+:", "", path).strip("/")


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
