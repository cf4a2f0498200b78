"""Whether an update may have altered a column, judged by its two images. May say yes too often;
must never say no wrongly.

An image is JSON, and JSON does not show all that a query can see. An array in it has no lower
bound, a composite no difference between NULL and a null in JSON, a JSON text inside of it no
spaces, and `-0` in it is read as `0`. So only for types of a list do equal values in images mean
equal values in the table. A column of any other type may have been altered by every update.
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
"""Types of which two different values always have different texts, as capture writes them."""


def may_differ(before: Value, after: Value, column: Column | None) -> bool:
    """Whether the table may have held two values where the images have these."""
    if column is None or differ(before, after):
        return True
    if column.type in ("real", "double precision"):
        return bool(before == 0)  # an image has -0, which is read as 0
    if column.type == "jsonb":
        # NULL and a null in JSON have the same image, and a fraction loses digits when it is read.
        return before is None or _has_fraction(before)
    return column.type not in _FAITHFUL and not column.enum


def _has_fraction(value: Any) -> bool:
    match value:
        case list():
            return any(map(_has_fraction, value))
        case dict():
            return any(map(_has_fraction, value.values()))
    return isinstance(value, float)
