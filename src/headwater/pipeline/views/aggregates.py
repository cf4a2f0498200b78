"""The aggregates of streaming views, as Spark columns.

In a function with these aggregates, a row of a view's tables has a `weight`: +1 if it was added, -1
if it was removed. Each aggregate sums over weighted rows, so that the changes of a batch can be
added to the stored result. The result is a struct whose field names identify the aggregate: the
schema of a function's result shows its aggregates without executing it. The fields that a sum needs
depend on the type of its argument. The first call of the function finds that type; later calls make
only these fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from headwater.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    Given: TypeAlias = str | Column

_VIEW_COLUMNS_REMEMBERED = 1_000
"""Aggregates of columns that are remembered between the calls of views' functions."""


WEIGHT = "weight"
"""The column that every DataFrame of a view has, from its tables to the aggregate."""

SIDES = (f"{WEIGHT} of left", f"{WEIGHT} of right")
"""The names of the two weights during a join."""

FIELDS: dict[str, tuple[str, ...]] = {
    "count": ("rows", "total"),
    "sum": ("rows", "total", "added", "removed", "values"),
    "avg": ("rows", "total", "added", "removed", "values"),
    "min": ("rows", "values"),
    "max": ("rows", "values"),
    "count_distinct": ("rows", "values"),
}
"""The fields of each aggregate's struct, after the aggregate's name: `sum_rows`, …"""


class AggregateCalls:
    """The aggregates in one call of a view's function, numbered in order. `forms` has the fields
    that each needs; without it, all fields are made."""

    def __init__(self, forms: Sequence[tuple[str, ...]] = ()) -> None:
        self._forms = forms
        self._count = 0

    @property
    def is_empty(self) -> bool:
        return not self._count

    def next(self, kind: str) -> tuple[int, tuple[str, ...]]:
        number, self._count = self._count, self._count + 1
        return number, self._forms[number] if number < len(self._forms) else FIELDS[kind]


calls: ContextVar[AggregateCalls | None] = ContextVar("calls", default=None)
"""Set during a call of a view's function."""


def count(column: Given | None = None) -> Column:
    """How many rows; with a column, those in which it is not NULL."""
    return _struct("count", column)


def sum(column: Given) -> Column:
    """The total of a number; NULL where there is none, as in SQL."""
    return _struct("sum", column)


def avg(column: Given) -> Column:
    """The average of a number, exactly as in SQL."""
    return _struct("avg", column)


def min(column: Given) -> Column:
    """The lowest value, in PostgreSQL's order."""
    return _struct("min", column)


def max(column: Given) -> Column:
    """The highest value, in PostgreSQL's order."""
    return _struct("max", column)


def count_distinct(column: Given) -> Column:
    """How many different values, without NULL."""
    return _struct("count_distinct", column)


def join(left: DataFrame, right: DataFrame, on: Any, how: str = "inner") -> DataFrame:
    """Joins rows of two tables: `on` and `how` are as for DataFrame.join. Where rows have weights,
    the weight of a pair is the product of both. Such a join is an inner one: a row without a
    partner depends on other rows."""
    from pyspark.sql import functions as f

    if WEIGHT not in left.columns or WEIGHT not in right.columns:
        return left.join(right, on, how)
    if how != "inner":
        raise ConfigError(
            f"a streaming view with aggregates of headwater.views cannot have a join of kind"
            f" {how!r}",
            hint="There, views.join is an inner join. Use Spark's own aggregates, grouped by the "
            "column of the join.",
        )
    one, two = SIDES
    pairs = left.withColumnRenamed(WEIGHT, one).join(right.withColumnRenamed(WEIGHT, two), on)
    return pairs.withColumn(WEIGHT, f.col(f"`{one}`") * f.col(f"`{two}`")).drop(one, two)


def rows_field(kind: str, number: int | None) -> str:
    """The name of the first field, which has the aggregate and the number of its call."""
    return f"{kind}_rows" if number is None else f"{kind}_rows_{number}"


def _struct(kind: str, column: Given | None) -> Column:
    from pyspark import SparkContext

    counting = calls.get()
    number, fields = (None, FIELDS[kind]) if counting is None else counting.next(kind)
    if column is not None and not isinstance(column, str):
        return _built(kind, column, number, fields)
    return _remembered(kind, column, number, fields, SparkContext._active_spark_context)


@lru_cache(maxsize=_VIEW_COLUMNS_REMEMBERED)
def _remembered(
    kind: str, column: str | None, number: int | None, fields: tuple[str, ...], context: object
) -> Column:
    """Cached: to build a column takes dozens of calls into the JVM, and a view's function runs for
    every batch."""
    return _built(kind, column, number, fields)


def _built(kind: str, column: Given | None, number: int | None, fields: tuple[str, ...]) -> Column:
    from pyspark.sql import functions as f

    parts = _parts(f.col(column) if isinstance(column, str) else column)
    names = {"rows": rows_field(kind, number)}
    return f.struct(*(parts[each]().alias(names.get(each, f"{kind}_{each}")) for each in fields))


def _parts(value: Column | None) -> dict[str, Callable[[], Column]]:
    from pyspark.sql import functions as f

    weight = f.col(WEIGHT)
    if value is None:
        return {"rows": lambda: f.sum(weight), "total": lambda: f.sum(weight)}
    known = value.isNotNull()
    # Makes an integer a decimal, and leaves decimals and floats as they are: a batch of large
    # integers adds up to more than an integer holds.
    wide = f.coalesce(value, f.lit(None).cast("decimal(1,0)"))
    pair = f.struct(value.alias("value"), weight.alias("weight"))
    return {
        "rows": lambda: f.sum(weight),
        "total": lambda: f.sum(f.when(known, weight)),
        # Added and removed values are separate sums: to negate or multiply may lose a digit.
        "added": lambda: f.sum(f.when(weight > 0, wide)),
        "removed": lambda: f.sum(f.when(weight < 0, wide)),
        "values": lambda: f.collect_list(f.when(known, pair)),
    }
