"""A row's key as events store it: its values as PostgreSQL prints them in JSON, without blanks.

Keys are compared as text, so that Parquet files without a match can be skipped. Values of Python
and texts that people type are both accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, time
from decimal import Context, Decimal, InvalidOperation
from typing import Any

import msgspec
from psycopg import sql

from headwater.errors import InvalidQuery
from headwater.live import kinds
from headwater.live.kinds import single
from headwater.model import Column, Table
from headwater.pipeline.lake.schemas import scale

_DIGITS_MAX = 1_000
"""Digits that PostgreSQL lets a numeric with a scale have."""


def key_text(table: Table, key: Any) -> str:
    """The text of a key: one value, several in the order of the key, or by their names. No row has
    the text of a value that its column cannot hold.

    >>> column = Column("id", "integer", "integer")
    >>> key_text(Table(1, "public", "orders", (column,), ("id",)), "42")
    '{"id":42}'
    """
    columns = {column.name: column for column in table.columns}
    values = _values(table, key)
    parts = (
        f"{json.dumps(name, ensure_ascii=False)}:{_json(columns[name], value)}"
        for name, value in zip(table.key, values, strict=True)
    )
    return f"{{{','.join(parts)}}}"


def key_expression(image: str, key: Sequence[str]) -> sql.Composed:
    """The same in SQL, of an image."""
    parts = (
        sql.SQL(
            "to_json({name}::text)::text || ':' || coalesce(({image} -> {name})::text, 'null')"
        ).format(name=sql.Literal(name), image=sql.SQL(image))
        for name in key
    )
    return sql.SQL("'{{' || {parts} || '}}'").format(parts=sql.SQL(" || ',' || ").join(parts))


def _values(table: Table, key: Any) -> tuple[Any, ...]:
    if isinstance(key, Mapping):
        given = tuple(key[name] for name in table.key if name in key)
        fits = set(key) == set(table.key)
    else:
        given = tuple(key) if isinstance(key, tuple | list) else (key,)
        fits = len(given) == len(table.key)
    if not fits:
        raise InvalidQuery(
            f"the key of {table.label} is ({', '.join(table.key)})",
            hint="Give one value for each of these columns, in this order.",
        )
    return given


def _json(column: Column, value: Any) -> str:
    try:
        read = kinds.read(kinds.kind_of(column), value)
    except ValueError as error:
        raise InvalidQuery(str(error), path=f"key.{column.name}") from None
    return _printed(column, read)


def _printed(column: Column, value: Any) -> str:
    """As PostgreSQL prints it in JSON."""
    match value:
        case Decimal() if not value.is_finite():
            return json.dumps(str(value))
        case Decimal():
            return f"{_scaled(column, value):f}"
        case datetime():
            return json.dumps(moment_text(value))
        case time():
            return json.dumps(clock_text(value))
        case bytes():
            return json.dumps(f"\\x{value.hex()}")
        case str():
            padded = _padded(column, value)
            return json.dumps(padded, ensure_ascii=False)
        case float():
            return float_json(value, digits=6 if column.type == "real" else 15)
    return msgspec.json.encode(value).decode()


def float_json(value: float, digits: int) -> str:
    """With the fewest digits that mean this number: `digits` is 15 for a double, 6 for a real. As
    PostgreSQL prints it in JSON.

    >>> [float_json(value, 15) for value in (1.0, 1e15, 0.00001)], float_json(single(0.1), 6)
    (['1', '1e+15', '1e-05'], '0.1')
    """
    if value - value != 0:
        name = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        return json.dumps(name)
    shortest = repr(value)
    if digits < 15:
        texts = (f"{value:.{n}g}" for n in range(1, 10))
        shortest = next(text for text in texts if single(float(text)) == value)
    exact = Decimal(shortest).normalize()
    exponent = exact.adjusted() if exact else 0
    if -4 <= exponent < digits:
        return f"{exact:f}"
    return f"{exact.scaleb(-exponent):f}e{exponent:+03d}"


def _scaled(column: Column, value: Decimal) -> Decimal:
    """With the zeros that the column's scale adds; a value that does not fit stays as it is."""
    value = value if value else value.copy_abs()  # PostgreSQL knows no negative zero
    digits = scale(column)
    if digits is None:
        return value
    try:
        scaled = value.quantize(Decimal(1).scaleb(-digits), context=Context(prec=_DIGITS_MAX))
    except InvalidOperation:
        return value
    return scaled if scaled == value else value


def moment_text(value: datetime) -> str:
    """As PostgreSQL prints it in JSON."""
    text = value.isoformat(timespec="microseconds")
    head, tail = text[:26].rstrip("0").rstrip("."), text[26:]
    return head + tail


def clock_text(value: time) -> str:
    """As PostgreSQL prints it: without zeros at the end.

    >>> clock_text(time(10, 0, 0, 500_000)), clock_text(time(10, 30))
    ('10:00:00.5', '10:30:00')
    """
    text = value.isoformat()
    return text.rstrip("0") if "." in text else text


def _padded(column: Column, value: str) -> str:
    """`character(n)` is stored with its blanks."""
    if column.type == "character" and column.declared.endswith(")"):
        return value.ljust(int(column.declared[:-1].partition("(")[2]))
    return value
