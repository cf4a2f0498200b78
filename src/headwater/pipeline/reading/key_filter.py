"""Recognises filters that name rows by their whole key: `id = 7`, `region = 1` with `id in 2, 3`.

Such a filter is answered like a request for these keys. It must mean exactly the same: every column
of the key is compared once, by = or IN, and there is no other condition; and two values of the
column are equal only if PostgreSQL prints them alike, because keys are compared as text. So a key
that is a float, or a numeric without scale (1.0 and 1.00 are equal), is left to Spark. A value that
the column cannot hold (1.004 in a numeric with two decimals) names no row. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import date
from decimal import Decimal
from itertools import product
from typing import Any
from uuid import UUID

import pyarrow as pa

from headwater import limits
from headwater.live import kinds
from headwater.live.filters.check import check
from headwater.live.filters.filter import And, Compare, Filter, In
from headwater.model import Column, Table
from headwater.pipeline.lake.schemas import arrow_type, scale


def keys_of(
    where: Filter, table: Table, as_text: Collection[str] = ()
) -> list[tuple[Any, ...]] | None:
    """The keys that the filter names, each once; None for another filter, and for no key or too
    many. Columns in `as_text` are compared as text. InvalidQuery for a value that cannot be
    compared with its column of the key."""
    named = [part.column if isinstance(part, Compare | In) else None for part in _parts(where)]
    if set(named) != set(table.key) or set(named) & set(as_text):
        return None
    found: dict[str, tuple[Any, ...]] = {}
    for part in _parts(check(where, table)):
        match part:
            case Compare(column, "=", value):
                values: tuple[Any, ...] = (value,)
            case In(column, values):
                pass
            case _:
                return None
        if column in found:
            return None
        found[column] = tuple(dict.fromkeys(values))
    columns = {column.name: column for column in table.columns}
    if not all(_is_exact(columns[name], v) for name, values in found.items() for v in values):
        return None
    count = 1
    for values in found.values():
        count *= len(values)
    if not 0 < count <= limits.LAKE_POINT_KEYS_MAX:
        return None
    return list(product(*(found[name] for name in table.key)))


def _parts(where: Filter) -> Iterator[Filter]:
    if not isinstance(where, And):
        yield where
        return
    for part in where.parts:
        yield from _parts(part)


def _is_exact(column: Column, value: Any) -> bool:
    """Whether the column's values that equal this one all have the same text."""
    kind, is_text = kinds.kind_of(column), arrow_type(column) == pa.string()
    match value:
        case bool() | int() | date():  # a datetime is a date
            return kind.equates and not kind.strict and not is_text
        case str():
            return column.type in ("text", "character varying")
        case UUID():
            return column.type == "uuid"
        case Decimal():
            return scale(column) is not None and pa.types.is_decimal(arrow_type(column))
    return False
