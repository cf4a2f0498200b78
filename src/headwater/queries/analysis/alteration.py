"""Whether an update may have altered a column, by its two images. May say yes too often; must never
say no wrongly.

An image is JSON, and JSON does not show everything that a query can see: the lower bound of an
array, the difference between NULL and a null in JSON, the spaces in a JSON text, the sign of `-0`.
So only for certain types do equal values in images mean equal values in the table. A column of any
other type may have been altered by every update.
"""

from __future__ import annotations

from typing import Any

from headwater.model import Column, Value, differ

_FAITHFUL = frozenset(
    {
        "smallint", "integer", "bigint", "numeric", "boolean", "money", "bytea", "uuid",
        "text", "character varying", "character", "name", '"char"',
        "date", "time without time zone", "time with time zone", "interval",
        "timestamp without time zone", "timestamp with time zone",
        "inet", "cidr", "macaddr", "macaddr8", "bit", "bit varying", "oid", "xid", "xid8", "pg_lsn",
        "int4range", "int8range", "numrange", "daterange", "tsrange", "tstzrange",
        "int4multirange", "int8multirange", "nummultirange", "datemultirange", "tsmultirange",
        "tstzmultirange", "tsvector", "tsquery", "point", "line", "lseg", "box", "path", "polygon",
        "circle",
    }
)  # fmt: skip
"""Types whose different values always have different texts in images."""


def may_differ(before: Value, after: Value, column: Column | None) -> bool:
    """Whether the table may have had different values for these values of two images."""
    if column is None or differ(before, after):
        return True
    if column.type in ("real", "double precision"):
        return bool(before == 0)  # an image has -0, which is read as 0
    if column.type == "jsonb":
        # NULL and a null in JSON have the same image, and a fraction loses digits in Python.
        return before is None or _has_fraction(before)
    return column.type not in _FAITHFUL and not column.enum


def _has_fraction(value: Any) -> bool:
    match value:
        case list():
            return any(map(_has_fraction, value))
        case dict():
            return any(map(_has_fraction, value.values()))
    return isinstance(value, float)
