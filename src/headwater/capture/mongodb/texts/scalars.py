"""Single BSON values as the texts of PostgreSQL's types, without a document around them.

The declared type decides. Numbers fit where PostgreSQL would take them without an error: an
integer column takes 7.0 and not 7.5, `numeric(5,2)` takes what rounds to at most 999.99. A string
fits a number, a date, a UUID or a boolean if it is written exactly as one. Everything else is a
`Misfit`, and NULL in the mirror.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

from bson.binary import UUID_SUBTYPE, Binary
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.objectid import ObjectId
from bson.timestamp import Timestamp

from headwater.capture.mongodb.texts import dates

Conversion = Callable[[Any], str]


class Misfit(ValueError):
    """The value does not fit the type."""


_DIGITS = Context(prec=2000)
_NUMBER = re.compile(
    r"[+-]?([0-9]{1,1000}(\.[0-9]{0,1000})?|\.[0-9]{1,1000})([eE][+-]?[0-9]{1,4})?"
)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NUMERIC = re.compile(r"(?:numeric|decimal) ?\( ?(\d{1,4}) ?(?:, ?(\d{1,4}) ?)?\)")
_VARCHAR = re.compile(r"(?:varchar|character varying) ?\( ?(\d{1,8}) ?\)")


def scalar_conversion(name: str) -> Conversion | None:
    """For a type's name in lower case; None where we do not know it."""
    if match := _NUMERIC.fullmatch(name):
        precision, scale = int(match[1]), int(match[2] or 0)
        return _numeric(precision, scale) if 1 <= precision <= 1000 and scale <= precision else None
    if match := _VARCHAR.fullmatch(name):
        return _text_up_to(int(match[1])) if int(match[1]) else None
    return _CONVERSIONS.get(name)


# ------------------------------------------------------------------------ numbers


def _decimal(value: Any) -> Decimal:
    match value:
        case bool():
            raise Misfit("a boolean is no number")
        case int():
            return Decimal(int(value))
        case float():
            return Decimal(repr(value))
        case Decimal128():
            number = value.to_decimal()
            return Decimal("NaN") if number.is_nan() else number
        case str() if _NUMBER.fullmatch(value):
            return Decimal(value)
    raise Misfit("not a number")


def _integer(bits: int) -> Conversion:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def convert(value: Any) -> str:
        number = _decimal(value)
        if not number.is_finite() or number.adjusted() > 20 or number != int(number):
            raise Misfit("not an integer")
        if not low <= number <= high:
            raise Misfit("out of range")
        return str(int(number))

    return convert


def _any_numeric(value: Any) -> str:
    return str(_decimal(value))


def _numeric(precision: int, scale: int) -> Conversion:
    step, bound = Decimal(1).scaleb(-scale), Decimal(1).scaleb(precision - scale)

    def convert(value: Any) -> str:
        number = _decimal(value)
        if number.is_nan():
            return "NaN"
        if not number.is_finite() or number.adjusted() > precision:
            raise Misfit("out of range")
        if abs(number.quantize(step, ROUND_HALF_UP, _DIGITS)) >= bound:
            raise Misfit("out of range")
        return str(number)

    return convert


def _double(value: Any) -> str:
    number = _decimal(value)
    double = float(number)
    if number.is_finite() and double in (float("inf"), float("-inf")):
        raise Misfit("out of range")
    return _float_text(double)


def _real(value: Any) -> str:
    double = float(_double(value))
    try:
        single: float = struct.unpack("<f", struct.pack("<f", double))[0]
    except OverflowError:
        raise Misfit("out of range") from None
    if single == 0 and double != 0:
        raise Misfit("out of range")
    return _float_text(single)


def _float_text(value: float) -> str:
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), repr(value))


# ------------------------------------------------------------------------ texts and others


def _text(value: Any) -> str:
    match value:
        case str():
            return value.replace("\0", "\ufffd")
        case bool():
            return "true" if value else "false"
        case DatetimeMS() if dates.fits(int(value)):
            return _timestamptz(value)
        case int() | float() | Decimal128():
            return str(_decimal(value))
        case ObjectId():
            return str(value)
        case Binary() if value.subtype == UUID_SUBTYPE and len(value) == 16:
            return str(value.as_uuid())
    raise Misfit("neither a text nor a single value")


def _text_up_to(characters: int) -> Conversion:
    def convert(value: Any) -> str:
        text = _text(value)
        if len(text) > characters:
            raise Misfit("too long")
        return text

    return convert


def _boolean(value: Any) -> str:
    if value is True or value == "true":
        return "true"
    if value is False or value == "false":
        return "false"
    raise Misfit("not a boolean")


def _milliseconds(value: Any) -> int:
    match value:
        case DatetimeMS():
            milliseconds = int(value)
        case Timestamp():
            milliseconds = value.time * 1000
        case _:
            raise Misfit("not a date")
    if not dates.fits(milliseconds):
        raise Misfit("out of range")
    return milliseconds


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise Misfit("not a date") from None


def _timestamp(value: Any) -> str:
    if isinstance(value, str):
        return _moment(value).replace(tzinfo=None).isoformat(" ")
    return dates.timestamp_text(_milliseconds(value))


def _timestamptz(value: Any) -> str:
    """The zone stands before the era: `0044-03-15 12:00:00+00 BC`."""
    text = _timestamp(value)
    return f"{text.removesuffix(' BC')}+00{' BC' if text.endswith(' BC') else ''}"


def _date(value: Any) -> str:
    if isinstance(value, str):
        return _moment(value).date().isoformat()
    return dates.date_text(_milliseconds(value))


def _uuid(value: Any) -> str:
    match value:
        case Binary() if value.subtype == UUID_SUBTYPE and len(value) == 16:
            return str(value.as_uuid())
        case str() if _UUID.fullmatch(value):
            return value
    raise Misfit("not a UUID")


def _bytea(value: Any) -> str:
    if not isinstance(value, bytes):
        raise Misfit("not binary")
    return "\\x" + value.hex()


_NAMES: dict[Conversion, tuple[str, ...]] = {
    _text: ("text", "varchar", "character varying"),
    _integer(16): ("smallint", "int2"),
    _integer(32): ("integer", "int", "int4"),
    _integer(64): ("bigint", "int8"),
    _any_numeric: ("numeric", "decimal"),
    _double: ("double precision", "float8"),
    _real: ("real", "float4"),
    _boolean: ("boolean", "bool"),
    _timestamptz: ("timestamptz", "timestamp with time zone"),
    _timestamp: ("timestamp", "timestamp without time zone"),
    _date: ("date",),
    _uuid: ("uuid",),
    _bytea: ("bytea",),
}
_CONVERSIONS = {name: convert for convert, names in _NAMES.items() for name in names}
TYPES = ", ".join([*(names[0] for names in _NAMES.values()), "jsonb"]) + ", and arrays of them"
"""For messages."""
