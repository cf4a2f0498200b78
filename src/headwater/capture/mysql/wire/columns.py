"""Readers of single values in the binary log: from bytes to the text that PostgreSQL reads.

A reader takes the bytes of an event and a place, and gives the text and the place after the value.
It is made once for each column of a table map, so that nothing about types is decided per row.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable
from typing import TypeAlias
from uuid import UUID

from headwater.capture.mysql.types import Shape
from headwater.capture.mysql.values import (
    NUL_PICTURE,
    Decode,
    bits,
    date_text,
    day_text,
    decoder,
    hexadecimal,
    inet,
    json_text,
    without_nul,
)
from headwater.capture.mysql.wire import table_map as wire
from headwater.capture.mysql.wire.decimals import decimal_reader
from headwater.capture.mysql.wire.events import WireColumn
from headwater.capture.mysql.wire.json_binary import json_from_binary

Reader: TypeAlias = Callable[[bytes, int], tuple[str | None, int]]

_INTEGERS = {
    wire.TINY: ("<b", "<B"), wire.SHORT: ("<h", "<H"), wire.LONG: ("<i", "<I"),
    wire.LONGLONG: ("<q", "<Q"),
}  # fmt: skip
_SIZED = frozenset((
    wire.VARCHAR, wire.VAR_STRING, wire.STRING, wire.BLOB, wire.TINY_BLOB, wire.MEDIUM_BLOB,
    wire.LONG_BLOB, wire.JSON, wire.GEOMETRY, wire.BLOB_COMPRESSED, wire.VARCHAR_COMPRESSED,
))  # fmt: skip
_BLOBS = frozenset((
    wire.BLOB, wire.TINY_BLOB, wire.MEDIUM_BLOB, wire.LONG_BLOB, wire.JSON, wire.GEOMETRY,
    wire.BLOB_COMPRESSED,
))  # fmt: skip


def reader(column: WireColumn, shape: Shape, tables: dict[str, str]) -> Reader:
    """`tables` has the characters of one-byte character sets."""
    if column.type in _SIZED:
        return _sized(_size_bytes(column), _from_bytes(column, shape, tables))
    if shape.kind == "boolean":
        return lambda data, place: ("f" if data[place] == 0 else "t", place + 1)
    if column.type in _INTEGERS:
        return _integer(_INTEGERS[column.type][shape.unsigned])
    if column.type in (wire.ENUM, wire.SET):
        return _members(column, shape)
    if column.type in _FRACTIONS:
        return _FRACTIONS[column.type](column.meta)
    match column.type:
        case wire.INT24:
            return _integer24(shape.unsigned)
        case wire.FLOAT | wire.DOUBLE:
            return _floating("<f" if column.type == wire.FLOAT else "<d")
        case wire.NEWDECIMAL:
            return decimal_reader(shape.size, shape.scale)
        case wire.BIT:
            return _bits((column.meta >> 8) * 8 + (column.meta & 0xFF))
        case wire.DATE | wire.NEWDATE:
            return _date
        case wire.YEAR:
            return _year
        case wire.TIME:
            return _old_time
        case wire.DATETIME:
            return _old_datetime
        case wire.TIMESTAMP:
            return _old_timestamp
        case other:
            raise ValueError(f"the binary log has a column of the unknown type {other}")


def _size_bytes(column: WireColumn) -> int:
    if column.type in _BLOBS:
        return column.meta or 1
    return 2 if column.meta > 255 else 1


# ------------------------------------------------------------------------ numbers


def _integer(format: str) -> Reader:
    unpack, size = struct.Struct(format).unpack_from, struct.calcsize(format)

    def read(data: bytes, place: int) -> tuple[str, int]:
        return str(unpack(data, place)[0]), place + size

    return read


def _integer24(unsigned: bool) -> Reader:
    def read(data: bytes, place: int) -> tuple[str, int]:
        number = int.from_bytes(data[place : place + 3], "little", signed=not unsigned)
        return str(number), place + 3

    return read


def _floating(format: str) -> Reader:
    unpack, size = struct.Struct(format).unpack_from, struct.calcsize(format)

    def read(data: bytes, place: int) -> tuple[str, int]:
        return repr(unpack(data, place)[0]), place + size

    return read


def _bits(size: int) -> Reader:
    width = (size + 7) // 8

    def read(data: bytes, place: int) -> tuple[str, int]:
        end = place + width
        return bits(int.from_bytes(data[place:end], "big"), size), end

    return read


# ------------------------------------------------------------------------ dates


def _date(data: bytes, place: int) -> tuple[str | None, int]:
    number = data[place] | data[place + 1] << 8 | data[place + 2] << 16
    return date_text(number >> 9, number >> 5 & 15, number & 31), place + 3


def _year(data: bytes, place: int) -> tuple[str, int]:
    year = data[place]
    return str(year + 1900 if year else 0), place + 1


def _fraction(digits: int) -> tuple[int, Callable[[int], str]]:
    """The bytes of a fraction of a second, and how to print it."""
    width = (digits + 1) // 2
    if not digits:
        return 0, lambda number: ""
    return width, lambda number: "." + f"{number:0{width * 2}d}"[:digits]


def _datetime2(digits: int) -> Reader:
    width, fraction = _fraction(digits)

    def read(data: bytes, place: int) -> tuple[str | None, int]:
        middle, end = place + 5, place + 5 + width
        number = int.from_bytes(data[place:middle], "big") - 0x8000000000
        days, time = number >> 17, number & 0x1FFFF
        day = date_text(days // 416, (days >> 5) % 13, days & 31)
        if day is None:
            return None, end
        rest = fraction(int.from_bytes(data[middle:end], "big"))
        return f"{day} {time >> 12:02d}:{time >> 6 & 63:02d}:{time & 63:02d}{rest}", end

    return read


def _timestamp2(digits: int) -> Reader:
    width, fraction = _fraction(digits)

    def read(data: bytes, place: int) -> tuple[str | None, int]:
        middle, end = place + 4, place + 4 + width
        seconds = int.from_bytes(data[place:middle], "big")
        parts = int.from_bytes(data[middle:end], "big")
        return _utc(seconds, fraction(parts), bool(parts)), end

    return read


def _utc(seconds: int, fraction: str, has_fraction: bool) -> str | None:
    """The second 0 without a fraction is the zero date."""
    if seconds == 0 and not has_fraction:
        return None
    days, rest = divmod(seconds, 86400)
    minutes, second = divmod(rest, 60)
    time = f"{minutes // 60:02d}:{minutes % 60:02d}:{second:02d}"
    return f"{day_text(days)} {time}{fraction}+00"


def _time2(digits: int) -> Reader:
    width, fraction = _fraction(digits)
    zero = 0x800000 << width * 8

    def read(data: bytes, place: int) -> tuple[str, int]:
        end = place + 3 + width
        number = int.from_bytes(data[place:end], "big") - zero
        sign, number = ("-", -number) if number < 0 else ("", number)
        time, rest = number >> width * 8, fraction(number & ((1 << width * 8) - 1))
        return f"{sign}{time >> 12:02d}:{time >> 6 & 63:02d}:{time & 63:02d}{rest}", end

    return read


_FRACTIONS: dict[int, Callable[[int], Reader]] = {
    wire.DATETIME2: _datetime2, wire.TIMESTAMP2: _timestamp2, wire.TIME2: _time2,
}  # fmt: skip


def _old_time(data: bytes, place: int) -> tuple[str, int]:
    number = int.from_bytes(data[place : place + 3], "little", signed=True)
    sign, number = ("-", -number) if number < 0 else ("", number)
    text = f"{sign}{number // 10000:02d}:{number // 100 % 100:02d}:{number % 100:02d}"
    return text, place + 3


def _old_datetime(data: bytes, place: int) -> tuple[str | None, int]:
    number = int.from_bytes(data[place : place + 8], "little")
    day, time = divmod(number, 1_000_000)
    text = date_text(day // 10000, day // 100 % 100, day % 100)
    if text is not None:
        text = f"{text} {time // 10000:02d}:{time // 100 % 100:02d}:{time % 100:02d}"
    return text, place + 8


def _old_timestamp(data: bytes, place: int) -> tuple[str | None, int]:
    seconds = int.from_bytes(data[place : place + 4], "little")
    return _utc(seconds, "", False), place + 4


# ------------------------------------------------------------------------ strings


def _sized(size_bytes: int, convert: Callable[[bytes], str]) -> Reader:
    if size_bytes == 1:

        def read_short(data: bytes, place: int) -> tuple[str, int]:
            start = place + 1
            end = start + data[place]
            return convert(data[start:end]), end

        return read_short

    def read(data: bytes, place: int) -> tuple[str, int]:
        start = place + size_bytes
        end = start + int.from_bytes(data[place:start], "little")
        return convert(data[start:end]), end

    return read


def _from_bytes(column: WireColumn, shape: Shape, tables: dict[str, str]) -> Callable[[bytes], str]:
    size = shape.size
    match shape.kind:
        case "json" if column.type == wire.JSON:
            return json_from_binary
        case "json":
            decode = decoder(shape.charset, tables)
            return lambda value: json_text(decode(value))
        case "uuid":
            return lambda value: str(UUID(bytes=value.ljust(16, b"\0")))
        case "inet4" | "inet6":
            return lambda value: inet(str(ipaddress.ip_address(value.ljust(size, b"\0"))))
        case "binary":
            return lambda value: hexadecimal(value.ljust(size, b"\0"))
        case "blob" | "geometry" | "unsupported":
            return hexadecimal
        case "char":
            # A query never gives the spaces at the end of a CHAR.
            decode = decoder(shape.charset, tables)
            return lambda value: without_nul(decode(value).rstrip(" "))
        case _:
            return _text(decoder(shape.charset, tables))


def _text(decode: Decode) -> Callable[[bytes], str]:
    def convert(value: bytes) -> str:
        text = decode(value)
        return text.replace("\0", NUL_PICTURE) if "\0" in text else text

    return convert


def _members(column: WireColumn, shape: Shape) -> Reader:
    """An enum is the number of its member, from 1; 0 is the empty text of a wrong value. A set is a
    bit for each member."""
    width, members = column.meta or 1, tuple(map(without_nul, shape.members))
    if column.type == wire.ENUM:
        names = ("", *members)

        def read_enum(data: bytes, place: int) -> tuple[str, int]:
            end = place + width
            return names[int.from_bytes(data[place:end], "little")], end

        return read_enum

    def read_set(data: bytes, place: int) -> tuple[str, int]:
        end = place + width
        mask = int.from_bytes(data[place:end], "little")
        return ",".join(name for i, name in enumerate(members) if mask >> i & 1), end

    return read_set
