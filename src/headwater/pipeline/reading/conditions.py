"""Filters as conditions of Spark.

Both follow SQL. Spark orders texts by code point, and ignores the collation of the column. It does
not know the order of an enumeration, and cannot compare types that are text in the lake (interval,
inet): such comparisons are refused.
"""

from __future__ import annotations

from datetime import time
from decimal import ROUND_FLOOR, Context, Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any, assert_never
from uuid import UUID

import pyarrow as pa

from headwater.errors import InvalidQuery
from headwater.live import kinds
from headwater.live.filters.check import check
from headwater.live.filters.filter import And, Compare, Filter, In, IsNull, Like, Not, Or
from headwater.live.filters.like import tokens
from headwater.model import Column, Table
from headwater.pipeline.lake.keys import clock_text
from headwater.pipeline.lake.schemas import arrow_type

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn


def condition(where: Filter, table: Table) -> SparkColumn:
    """The filter over rows of the table, as `schemas` reads them. InvalidQuery where it does not
    fit the table or Spark."""
    return _ConditionBuilder(table).node(check(where, table))


class _ConditionBuilder:
    def __init__(self, table: Table) -> None:
        self._columns = {column.name: column for column in table.columns}

    def node(self, where: Filter) -> SparkColumn:
        from pyspark.sql import functions as f

        match where:
            case And(parts):
                return reduce(lambda a, b: a & b, map(self.node, parts), f.lit(True))
            case Or(parts):
                return reduce(lambda a, b: a | b, map(self.node, parts), f.lit(False))
            case Not(part):
                return ~self.node(part)
            case IsNull(column):
                return self._value(column).isNull()
            case In(column, values):
                parts = tuple(Compare(column, "=", v) for v in values if v is not None)
                unknown = f.lit(None).cast("boolean") if None in values else f.lit(False)
                return reduce(lambda a, b: a | b, map(self.node, parts), unknown)
            case Like(column, pattern, fold):
                value = self._value(column)
                regex = _regex(pattern)
                return value.rlike(f"(?isu){regex}" if fold else f"(?s){regex}")
            case Compare(column, operator, value):
                return self._compare(column, operator, value)
            case _:
                assert_never(where)

    def _value(self, name: str) -> SparkColumn:
        from pyspark.sql import functions as f

        return f.col("`" + name.replace("`", "``") + "`")

    def _compare(self, name: str, operator: str, value: Any) -> SparkColumn:
        from pyspark.sql import functions as f

        column = self._columns[name]
        _check_comparable(column, operator, value)
        left = self._value(name)
        if isinstance(value, int | Decimal) and not isinstance(value, bool):
            kind = arrow_type(column)
            if pa.types.is_decimal(kind) or pa.types.is_integer(kind):
                return _compare_number(left, operator, Decimal(value), kind)
        right = _constant(column, value)
        if column.type == "character":
            left, right = f.rtrim(left), f.rtrim(right)
        return _compared(left, operator, right)


def _compared(left: SparkColumn, operator: str, right: SparkColumn) -> SparkColumn:
    match operator:
        case "=":
            return left == right
        case "!=":
            return left != right
        case "<":
            return left < right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case _:
            return left >= right


def _compare_number(
    left: SparkColumn, operator: str, value: Decimal, kind: pa.DataType
) -> SparkColumn:
    """Spark would round a constant that the column's type cannot hold, refuse it, or take NULL for
    a match. The column has no value between the constant and `below`."""
    from pyspark.sql import functions as f

    lowest, highest, scale = _span(kind)
    if value.is_nan() or value > highest:  # NaN is above every number
        below = highest
    elif value < lowest:
        is_less = operator in ("=", "<", "<=")
        return left < f.lit(lowest) if is_less else left >= f.lit(lowest)
    else:
        context = Context(prec=39, rounding=ROUND_FLOOR)
        below = value.quantize(Decimal(1).scaleb(-scale), context=context)
    bound = f.lit(int(below) if isinstance(lowest, int) else below)
    if below == value:
        return _compared(left, operator, bound)
    match operator:
        case "=":
            return left < f.lit(lowest)
        case "!=":
            return left >= f.lit(lowest)
        case "<" | "<=":
            return left <= bound
    return left > bound


def _span(kind: pa.DataType) -> tuple[Any, Any, int]:
    """The lowest and the highest constant that is compared with such a column, and its scale."""
    if pa.types.is_integer(kind):
        return -(2**63), 2**63 - 1, 0
    highest = Decimal((0, (9,) * kind.precision, -kind.scale))
    return highest.copy_negate(), highest, kind.scale


def _check_comparable(column: Column, operator: str, value: Any) -> None:
    kind = kinds.kind_of(column)
    if not kind.text and not (kind.orders or (kind.equates and operator in ("=", "!="))):
        raise InvalidQuery(
            f"Spark cannot compare {column.name}, which is {column.declared}",
            path="where",
            hint="Read all rows, and compare them in your program.",
        )
    if isinstance(value, str) and arrow_type(column) != pa.string():
        raise InvalidQuery(
            f"{column.name}: Spark's {arrow_type(column)} cannot hold {value!r}", path="where"
        )


def _constant(column: Column, value: Any) -> SparkColumn:
    from pyspark.sql import functions as f

    match value:
        case UUID():
            return f.lit(str(value))
        case time():
            return f.lit(clock_text(value))
        case float() if column.type == "real":
            return f.lit(value).cast("float")
        case bytes():
            return f.lit(bytearray(value))
    return f.lit(value)


_SPECIAL = frozenset(".^$*+?()[]{}|\\")


def _regex(pattern: str) -> str:
    """A LIKE pattern as a regular expression that Java reads.

    >>> _regex("a.b%_")
    '\\\\Aa\\\\.b.*.\\\\z'
    """
    parts = []
    for token in tokens(pattern):
        if token.wildcard is not None:
            parts.append(".*" if token.wildcard == "%" else ".")
        else:
            parts.append("".join(f"\\{c}" if c in _SPECIAL else c for c in token.literal))
    return f"\\A{''.join(parts)}\\z"
