"""The order of BSON values, across types, as MongoDB has it: numbers by value, whatever their type,
then strings, documents, arrays, binary, ObjectIds, booleans, dates, timestamps."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.timestamp import Timestamp


def order(value: Any) -> tuple[Any, ...]:
    """A key that compares as the value does, and is equal where MongoDB says equal."""
    match value:
        case MinKey():
            return (-1,)
        case None:
            return (5,)
        case bool():
            return (40, value)
        case int() | float() | Decimal128():
            return (10, *_number(value))
        case str():
            return (15, value.encode())
        case dict():
            return (20, tuple((order(v)[0], k, order(v)) for k, v in value.items()))
        case list():
            return (25, tuple(map(order, value)))
        case bytes():
            return (30, len(value), getattr(value, "subtype", 0), bytes(value))
        case ObjectId():
            return (35, value.binary)
        case DatetimeMS():
            return (45, int(value))
        case Timestamp():
            return (47, value.time, value.inc)
        case Regex():
            return (50, str(value.pattern))
        case MaxKey():
            return (127,)
    raise TypeError(f"no order for {type(value)}")


def _number(value: Any) -> tuple[Any, ...]:
    number = value.to_decimal() if isinstance(value, Decimal128) else value
    if not isinstance(number, int):
        if math.isnan(number):
            return (0, 0)
        if math.isinf(number):
            return (1, 0) if number < 0 else (3, 0)
    return (2, Fraction(number))
