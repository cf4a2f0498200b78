"""MySQL's binary JSON as text, written as MySQL itself prints it: `{"a": 1, "b": [1, 2]}`.

A value is a byte for its type and its data. Objects and arrays have their count, their size, and
entries with the places of keys and values; small numbers are in the entry itself. MariaDB has no
binary JSON.
"""

from __future__ import annotations

import base64
import json
import struct

from headwater.capture.mysql.values import json_text
from headwater.capture.mysql.wire.decimals import decimal_reader

_DECIMAL, _DATE, _DATETIME, _TIME, _TIMESTAMP = 246, 10, 12, 11, 7
_NUMBERS = {5: "<h", 6: "<H", 7: "<i", 8: "<I", 9: "<q", 10: "<Q"}
_LITERALS = ("null", "true", "false")


def json_from_binary(data: bytes) -> str:
    """The text of a column's value; MySQL logs a damaged generated value as nothing."""
    return json_text(_value(data[0], data[1:])) if data else "null"


def _value(type: int, data: bytes) -> str:
    if type <= 3:
        return _container(data, large=bool(type & 1), is_object=type < 2)
    if type == 4:
        return _LITERALS[data[0]]
    if type in _NUMBERS:
        return str(struct.unpack_from(_NUMBERS[type], data)[0])
    if type == 11:
        return _double(struct.unpack_from("<d", data)[0])
    if type == 12:
        size, place = _variable(data, 0)
        return _quoted(data[place : place + size].decode("utf-8", "replace"))
    if type == 15:
        size, place = _variable(data, 1)
        return _opaque(data[0], data[place : place + size])
    raise ValueError(f"the binary log has JSON of the unknown type {type}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _double(number: float) -> str:
    """As MySQL prints it: with a point, and an exponent without a plus."""
    return repr(number).replace("e+", "e")


def _container(data: bytes, *, large: bool, is_object: bool) -> str:
    width = 4 if large else 2
    count = int.from_bytes(data[:width], "little")
    keys = list[str]()
    place = 2 * width
    if is_object:
        for _ in range(count):
            start = int.from_bytes(data[place : place + width], "little")
            size = int.from_bytes(data[place + width : place + width + 2], "little")
            keys.append(_quoted(data[start : start + size].decode("utf-8", "replace")))
            place += width + 2
    values = [_entry(data, place + i * (1 + width), width) for i in range(count)]
    if is_object:
        return "{" + ", ".join(f"{k}: {v}" for k, v in zip(keys, values, strict=True)) + "}"
    return "[" + ", ".join(values) + "]"


def _entry(data: bytes, place: int, width: int) -> str:
    type, inline = data[place], data[place + 1 : place + 1 + width]
    if type in (4, 5, 6) or (type in (7, 8) and width == 4):
        return _value(type, inline)
    return _value(type, data[int.from_bytes(inline, "little") :])


def _variable(data: bytes, place: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first."""
    number = shift = 0
    while True:
        byte = data[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not byte & 0x80:
            return number, place


def _opaque(type: int, data: bytes) -> str:
    if type == _DECIMAL:
        return _decimal(data)
    if type in (_DATE, _DATETIME, _TIMESTAMP):
        return _quoted(_datetime(type, data))
    if type == _TIME:
        return _quoted(_time(data))
    return _quoted(f"base64:type{type}:{base64.b64encode(data).decode()}")


def _decimal(data: bytes) -> str:
    text, _ = decimal_reader(data[0], data[1])(data, 2)
    return text


def _datetime(type: int, data: bytes) -> str:
    packed = int.from_bytes(data[:8], "little")
    number, micros = packed >> 24, packed & 0xFFFFFF
    days, time = number >> 17, number & 0x1FFFF
    day = f"{days // 416:04d}-{(days >> 5) % 13:02d}-{days & 31:02d}"
    if type == _DATE:
        return day
    return f"{day} {time >> 12:02d}:{time >> 6 & 63:02d}:{time & 63:02d}.{micros:06d}"


def _time(data: bytes) -> str:
    packed = int.from_bytes(data[:8], "little", signed=True)
    sign, packed = ("-", -packed) if packed < 0 else ("", packed)
    time, micros = packed >> 24, packed & 0xFFFFFF
    return f"{sign}{time >> 12:02d}:{time >> 6 & 63:02d}:{time & 63:02d}.{micros:06d}"
