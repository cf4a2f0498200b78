"""Turns the log's JSON images into rows of Python values, by the column types of their time.

| PostgreSQL | Python |
|---|---|
| smallint, integer, bigint | int |
| numeric | Decimal |
| real, double precision | float |
| boolean | bool |
| text, varchar, char, name | str |
| timestamp with time zone | datetime in UTC |
| timestamp, date, time | datetime, date, time |
| uuid, bytea | UUID, bytes |
| json, jsonb, composite types | what the JSON says |
| arrays of these | list |
| everything else | str, PostgreSQL's own text |

A value that the Python type cannot hold (`infinity`, a year before 1) stays PostgreSQL's text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, TypedDict
from uuid import UUID

import msgspec

from headwater.model import Row, Table

_TYPES: dict[str, Any] = {
    "smallint": int,
    "integer": int,
    "bigint": int,
    "numeric": Decimal,
    "real": float,
    "double precision": float,
    "boolean": bool,
    "text": str,
    "character varying": str,
    "character": str,
    "name": str,
    "timestamp with time zone": datetime,
    "timestamp without time zone": datetime,
    "date": date,
    "time without time zone": time,
    "uuid": UUID,
    "bytea": str,
}


class ImageDecoder:
    """Decodes the images of one table shape; made once a shape."""

    def __init__(self, table: Table) -> None:
        types = {column.name: _python_type(column.type) for column in table.columns}
        image_type: Any = TypedDict(table.name, types)  # type: ignore[misc]
        self._fast = msgspec.json.Decoder(image_type)
        self._columns = {name: msgspec.json.Decoder(type_) for name, type_ in types.items()}
        self._bytes = tuple(c.name for c in table.columns if c.type in ("bytea", "bytea[]"))

    def __call__(self, image: str) -> Row:
        row: dict[str, Any]
        try:
            row = self._fast.decode(image)  # type: ignore[assignment]
        except (msgspec.DecodeError, RecursionError):
            row = self._decode_each(image)
        for name in self._bytes:
            row[name] = _map(_to_bytes, row[name])
        return row

    def _decode_each(self, image: str) -> dict[str, Any]:
        """The slow way, for rows with a value beyond its Python type."""
        row: dict[str, Any] = {}
        for name, text in split(image).items():
            try:
                row[name] = self._columns[name].decode(text)
            except (msgspec.DecodeError, RecursionError, KeyError):
                row[name] = _as_it_stands(text)
        return row


def split(image: str) -> dict[str, str]:
    """The columns of an image, undecoded. Python's own decoder finds their ends: it takes numbers
    of any size and nesting as deep as the stack allows; deeper, the image is one text."""
    columns = {}
    decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
    at = 1
    while image[at : at + 1] not in ("}", ""):
        name, at = decoder.raw_decode(image, at)
        start = at + 1
        try:
            _, at = decoder.raw_decode(image, start)
        except RecursionError:
            at = _end_of_value(image, start)
        columns[name] = image[start:at]
        at += image[at : at + 1] == ","
    return columns


def _end_of_value(image: str, start: int) -> int:
    """Where a nested value ends, counting brackets outside of texts."""
    depth = 0
    for match in _BRACKETS.finditer(image, start):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return len(image)


_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')


def _as_it_stands(text: str) -> Any:
    """A value that no Python type of ours holds: numbers that are none, else the text itself."""
    try:
        return _map(_to_special_float, msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError):
        return text


def _python_type(name: str) -> Any:
    if name.endswith("[]"):
        element = _TYPES.get(name.removesuffix("[]"))
        return Any if element is None else list[element | None] | None  # type: ignore[valid-type]
    known = _TYPES.get(name)
    return Any if known is None else known | None


def python_type(name: str) -> Any:
    """The type in Python of a column's values; Any for those that PostgreSQL's own text stands
    for."""
    return _TYPES.get(name, Any)


def _map(convert: Callable[[Any], Any], value: Any) -> Any:
    return [_map(convert, item) for item in value] if isinstance(value, list) else convert(value)


def _to_bytes(value: str | None) -> bytes | None:
    return None if value is None else bytes.fromhex(value[2:])


def _to_special_float(value: Any) -> Any:
    match value:
        case "NaN":
            return math.nan
        case "Infinity":
            return math.inf
        case "-Infinity":
            return -math.inf
    return value
