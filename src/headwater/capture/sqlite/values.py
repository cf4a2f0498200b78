"""The PostgreSQL type of a SQLite column, and SQLite values as texts of that type.

SQLite columns have a declared type, but most accept any value. A value that the mirror's type
cannot hold is a misfit: the cell becomes NULL and the misfit is counted (`Misfits`), which `health`
reports. A row whose key has a misfit or a NULL cannot be in the mirror and is counted, too. Types
can be overridden for each column (`TableSpec.types`), by one of those in `CONVERTERS`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from headwater.errors import SourceRefused


class InvalidText:
    """A TEXT value that is not UTF-8."""


INVALID_TEXT: Final = InvalidText()


def decode_text(data: bytes) -> str | InvalidText:
    """For `sqlite3.Connection.text_factory`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return INVALID_TEXT


class Misfit(Exception):
    """The mirror's type cannot hold the value."""


def _text(value: Any) -> str:
    match value:
        case str() if "\x00" not in value:
            return value
        case int() | float():
            return repr(value)
    raise Misfit


def _integer(bits: int) -> Callable[[Any], str]:
    bound = 1 << (bits - 1)

    def convert(value: Any) -> str:
        if isinstance(value, int) and -bound <= value < bound:
            return str(value)
        raise Misfit

    return convert


def _float(value: Any) -> str:
    match value:
        case int():
            return str(value)
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case float():
            return repr(value)
    raise Misfit


_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)


def _number(value: Any) -> str:
    match value:
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return repr(value)
        case str() if _NUMBER.fullmatch(value):
            return value
    raise Misfit


def _numeric(precision: int, scale: int) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        text = _number(value)
        if abs(Decimal(text)) + Decimal(5).scaleb(-scale - 1) >= Decimal(10) ** (precision - scale):
            raise Misfit
        return text

    return convert


def _bytes(value: Any) -> str:
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    raise Misfit


_BOOLEANS = {0: "false", 1: "true", "0": "false", "1": "true", "false": "false", "true": "true"}


def _boolean(value: Any) -> str:
    value = value.lower() if isinstance(value, str) else value
    if isinstance(value, str | int) and value in _BOOLEANS:
        return _BOOLEANS[value]
    raise Misfit


def _moment(value: Any) -> datetime:
    try:
        found = datetime.fromisoformat(value)
        return found if found.tzinfo is None else found.astimezone(UTC).replace(tzinfo=None)
    except (TypeError, ValueError, OverflowError):
        raise Misfit from None


def _timestamp(value: Any) -> str:
    return _moment(value).isoformat(" ")


def _timestamp_with_zone(value: Any) -> str:
    return _moment(value).isoformat(" ") + "+00"


def _date(value: Any) -> str:
    try:
        return date.fromisoformat(value).isoformat()
    except (TypeError, ValueError):
        moment = _moment(value)
    if moment.time() != time():
        raise Misfit
    return moment.date().isoformat()


def _time(value: Any) -> str:
    try:
        found = time.fromisoformat(value)
    except (TypeError, ValueError):
        raise Misfit from None
    if found.tzinfo is not None:
        raise Misfit
    return found.isoformat()


def _refuse_constant(name: str) -> Any:
    raise Misfit


def _json(value: Any) -> str:
    if isinstance(value, int | float):
        return _number(value)
    if not isinstance(value, str) or "\\u0000" in value or "\x00" in value:
        raise Misfit
    try:
        found = json.loads(value, parse_constant=_refuse_constant, parse_float=Decimal)
        json.dumps(found, default=str, ensure_ascii=False).encode()
    except (ValueError, RecursionError, ArithmeticError):
        raise Misfit from None
    return value


def _uuid(value: Any) -> str:
    try:
        return str(UUID(bytes=value) if isinstance(value, bytes) else UUID(value))
    except (AttributeError, TypeError, ValueError):
        raise Misfit from None


CONVERTERS: Final[dict[str, Callable[[Any], str]]] = {
    "bigint": _integer(64),
    "integer": _integer(32),
    "smallint": _integer(16),
    "double precision": _float,
    "numeric": _number,
    "text": _text,
    "bytea": _bytes,
    "boolean": _boolean,
    "date": _date,
    "time": _time,
    "timestamp": _timestamp,
    "timestamp with time zone": _timestamp_with_zone,
    "timestamptz": _timestamp_with_zone,
    "json": _json,
    "jsonb": _json,
    "uuid": _uuid,
}
"""The types that a mirror of a SQLite table may have. `numeric(p,s)` is one, too."""

_WITH_PRECISION = re.compile(r"(?:numeric|decimal)\s*\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)")


def converter(type: str) -> Callable[[Any], str]:
    """Texts of the PostgreSQL type; raises `Misfit` for values that it cannot hold."""
    type = " ".join(type.lower().split())
    if type in CONVERTERS:
        return CONVERTERS[type]
    if found := _WITH_PRECISION.fullmatch(type):
        precision, scale = int(found[1]), int(found[2] or 0)
        if scale <= precision <= 1000 and precision > 0:
            return _numeric(precision, scale)
    allowed = ", ".join([*CONVERTERS, "numeric(p,s)"])
    raise SourceRefused(
        f"the type {type!r} is not one that a SQLite column can have in the mirror",
        hint=f"use one of: {allowed}",
    )


_BY_NAME = {
    "BOOL": "boolean",
    "BOOLEAN": "boolean",
    "DATE": "date",
    "TIME": "time",
    "DATETIME": "timestamp",
    "TIMESTAMP": "timestamp",
    "TIMESTAMPTZ": "timestamp with time zone",
    "TIMESTAMP WITH TIME ZONE": "timestamp with time zone",
    "JSON": "jsonb",
    "JSONB": "jsonb",
    "UUID": "uuid",
    "STRING": "text",
    "ANY": "text",
    "": "text",
}

_BY_AFFINITY = (
    (("INT",), "bigint"),
    (("CHAR", "CLOB", "TEXT"), "text"),
    (("BLOB",), "bytea"),
    (("REAL", "FLOA", "DOUB"), "double precision"),
)
"""SQLite's own rules, in their order."""

_KEY_TYPES = ("bigint", "text", "bytea", "double precision", "numeric", "boolean")
"""Each of their texts stands for one value. A date, for example, can be written in two ways, and
two rows of the source would be one in the mirror."""


def mirror_type(declared: str, *, key: bool) -> str:
    """The PostgreSQL type of a column that was declared so.

    >>> mirror_type("varchar(20)", key=False), mirror_type("DECIMAL(12, 2)", key=False)
    ('text', 'numeric(12,2)')
    >>> mirror_type("date", key=False), mirror_type("date", key=True)
    ('date', 'text')
    """
    found = _declared_type(declared)
    if not key or found in _KEY_TYPES:
        return found
    return "numeric" if found.startswith("numeric") else "text"


def _declared_type(declared: str) -> str:
    name = " ".join(re.sub(r"\(.*", "", declared).upper().split())
    if name in _BY_NAME:
        return _BY_NAME[name]
    for parts, type in _BY_AFFINITY:
        if any(part in name for part in parts):
            return type
    found = _WITH_PRECISION.fullmatch(declared.strip().lower())
    if found and int(found[2] or 0) <= int(found[1]) <= 1000 and int(found[1]) > 0:
        return f"numeric({int(found[1])},{int(found[2] or 0)})"
    return "numeric"


def key_value(type: str, text: str) -> Any:
    """The SQLite value whose text this is, to continue a copy after it."""
    match type:
        case "bigint":
            return int(text)
        case "numeric":
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        case "double precision":
            return float(text)
        case "bytea":
            return bytes.fromhex(text[2:])
        case "boolean":
            return int(text == "true")
        case _:
            return text
