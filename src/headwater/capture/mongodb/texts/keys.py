"""The text of an `_id`: one text for each value that MongoDB tells apart.

    >>> key_text(ObjectId("507f1f77bcf86cd799439011")), key_text("Zoë"), key_text(7)
    ('507f1f77bcf86cd799439011', 'Zoë', '7')
    >>> key_text("7"), key_text(7.5), key_text({"year": 2026})
    ('"7"', '{"$numberDouble":"7.5"}', '{"year":2026}')

Strings, ObjectIds and integers are written as they are. A string that could be mistaken for another
value is quoted as in JSON. Everything else is extended JSON. MongoDB compares numbers by their
value, whatever their type, so the integer 7, the double 7.0 and the decimal 7.00 have one text.
"""

from __future__ import annotations

import decimal
import json
import re
from typing import Any

from bson import json_util
from bson.binary import UUID_SUBTYPE, Binary
from bson.code import Code
from bson.codec_options import DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.timestamp import Timestamp

_MISTAKABLE = re.compile(r"-?[0-9]+|[0-9a-f]{24}|true|false|null|[\[{\"].*|.*\0.*", re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]+")
_OBJECT_ID = re.compile(r"[0-9a-f]{24}")
_INT64_MAX = 2**63 - 1
_EXACT = decimal.Context(prec=50)
"""More digits than a Decimal128 has."""
_READING = json_util.JSONOptions(tz_aware=False, datetime_conversion=DatetimeConversion.DATETIME_MS)


def key_text(value: Any) -> str:
    """The text of an `_id`."""
    match value:
        case str():
            return _json(value) if _MISTAKABLE.fullmatch(value) else value
        case ObjectId():
            return str(value)
    return _json(_extended(value))


def key_value(text: str) -> Any:
    """A value that MongoDB compares as the one whose text this is.

    >>> [key_value(text) for text in ("7", '"7"', "Zoë", '{"$numberDouble":"7.5"}')]
    [7, '7', 'Zoë', 7.5]
    """
    if _OBJECT_ID.fullmatch(text):
        return ObjectId(text)
    if _INTEGER.fullmatch(text):
        return int(text)
    if _MISTAKABLE.fullmatch(text):
        return json_util.loads(text, json_options=_READING)
    return text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _extended(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value
        case DatetimeMS():
            return {"$date": {"$numberLong": str(int(value))}}
        case int() | float() | Decimal128():
            return _number(value)
        case dict():
            return {name: _extended(inner) for name, inner in value.items()}
        case list():
            return [_extended(inner) for inner in value]
        case DBRef():
            return _extended(dict(value.as_doc()))
        case bytes():
            return binary(value)
        case ObjectId():
            return {"$oid": str(value)}
    return rare(value)


def binary(value: bytes) -> Any:
    """The extended JSON of a binary value; a UUID keeps its readable form."""
    if getattr(value, "subtype", 0) == UUID_SUBTYPE and len(value) == 16:
        return {"$uuid": str(Binary(value, UUID_SUBTYPE).as_uuid())}
    return json_util.default(
        Binary(value, getattr(value, "subtype", 0)), json_util.CANONICAL_JSON_OPTIONS
    )


def rare(value: Any) -> Any:
    """The extended JSON of types that documents rarely have."""
    match value:
        case Timestamp():
            return {"$timestamp": {"t": value.time, "i": value.inc}}
        case MinKey():
            return {"$minKey": 1}
        case MaxKey():
            return {"$maxKey": 1}
        case Regex() | re.Pattern() | Code():
            return json_util.default(value, json_util.CANONICAL_JSON_OPTIONS)
    raise TypeError(f"BSON has no type {type(value).__name__}")


def _number(value: int | float | Decimal128) -> Any:
    if isinstance(value, int):
        return int(value)
    number = value.to_decimal() if isinstance(value, Decimal128) else decimal.Decimal(value)
    if number.is_nan():
        return {"$numberDouble": "NaN"}
    if number.is_infinite():
        return {"$numberDouble": "Infinity" if number > 0 else "-Infinity"}
    if number.adjusted() < 20 and number == (whole := int(number)) and abs(whole) <= _INT64_MAX:
        return whole
    as_double = float(number)
    if decimal.Decimal(as_double) == number:
        return {"$numberDouble": repr(as_double)}
    return {"$numberDecimal": str(_EXACT.normalize(number))}
