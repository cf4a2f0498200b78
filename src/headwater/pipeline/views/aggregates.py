"""The aggregates of streaming views, as Spark columns.

A row of a view's tables has a `weight`: +1 where it came, -1 where it went. Each of these sums over
weighted rows, so that what a batch changes can be added to what was there before. The result is a
struct whose fields say which aggregate it is: what a function made of them is read from the schema
of its result, and nothing need be executed for it. Which form a sum needs depends on the type of
what is summed: when that is known from a first call of the function, later ones make only that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from headwater import limits
from headwater.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    Given: TypeAlias = str | Column

WEIGHT = "weight"
"""The column that every frame of a view has, from its tables to the aggregate."""

SIDES = (f"{WEIGHT} of left", f"{WEIGHT} of right")
"""What the weights of two frames are called while they are joined."""

FIELDS: dict[str, tuple[str, ...]] = {
    "count": ("rows", "total"),
    "sum": ("rows", "total", "added", "removed", "values"),
    "avg": ("rows", "total", "added", "removed", "values"),
    "min": ("rows", "values"),
    "max": ("rows", "values"),
    "count_distinct": ("rows", "values"),
}
"""What the struct of each aggregate has, after the aggregate's own name: `sum_rows`, …"""


class Calls:
    """The aggregates that a function asks for in one call of it, numbered in their order. `forms`
    has for each the fields that are needed; without it, all are made."""

    def __init__(self, forms: Sequence[tuple[str, ...]] = ()) -> None:
        self._forms = forms
        self._count = 0

    def next(self, kind: str) -> tuple[int, tuple[str, ...]]:
        number, self._count = self._count, self._count + 1
        return number, self._forms[number] if number < len(self._forms) else FIELDS[kind]


calls: ContextVar[Calls | None] = ContextVar("calls", default=None)
"""Set around a call of a view's function."""


def count(column: Given | None = None) -> Column:
    """How many rows; with a column, those in which it is not NULL."""
    return _struct("count", column)


def sum(column: Given) -> Column:
    """The total of a number; NULL where there is none, as in SQL."""
    return _struct("sum", column)


def avg(column: Given) -> Column:
    """The average of a number, to the last digit what SQL's is."""
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
    """Rows of two tables together: `on` is what DataFrame.join takes. The weight of a pair is the
    product of theirs. Only inner joins: a row without a partner would come and go with others."""
    from pyspark.sql import functions as f

    if how != "inner":
        raise ConfigError(
            f"a streaming view cannot have a join of kind {how!r}",
            hint="views.join is an inner join. Count the rows without a partner in another view.",
        )
    one, two = SIDES
    pairs = left.withColumnRenamed(WEIGHT, one).join(right.withColumnRenamed(WEIGHT, two), on)
    return pairs.withColumn(WEIGHT, f.col(f"`{one}`") * f.col(f"`{two}`")).drop(one, two)


def rows_field(kind: str, number: int | None) -> str:
    """The first field, which tells the aggregate and which call of the function made it."""
    return f"{kind}_rows" if number is None else f"{kind}_rows_{number}"


def _struct(kind: str, column: Given | None) -> Column:
    from pyspark import SparkContext

    counting = calls.get()
    number, fields = (None, FIELDS[kind]) if counting is None else counting.next(kind)
    if column is not None and not isinstance(column, str):
        return _built(kind, column, number, fields)
    return _remembered(kind, column, number, fields, SparkContext._active_spark_context)


@lru_cache(maxsize=limits.VIEW_COLUMNS_REMEMBERED)
def _remembered(
    kind: str, column: str | None, number: int | None, fields: tuple[str, ...], context: object
) -> Column:
    """To build one takes dozens of calls into the JVM, and a view's function runs for every
    batch."""
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
        # The signs are kept apart: to turn a number's sign, or to multiply it, may lose a digit.
        "added": lambda: f.sum(f.when(weight > 0, wide)),
        "removed": lambda: f.sum(f.when(weight < 0, wide)),
        "values": lambda: f.collect_list(f.when(known, pair)),
    }
