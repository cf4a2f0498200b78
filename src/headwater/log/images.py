"""Decodes the JSON images of the log into rows of Python values, by the column types that the table
had when the row was written.

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
| json, jsonb, composite types | the JSON value |
| arrays of these | list |
| everything else | str, PostgreSQL's own text |

A value that the Python type cannot hold (`infinity`, a year before 1) stays PostgreSQL's text. So
does JSON that other readers may not be able to decode: nested too deep, or with a number that
Python cannot hold. Decoding never fails: the content of one row must not stop readers of others.
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

from headwater.limits import VALUE_DEPTH_MAX
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
_FLOATS = ("real", "double precision")
_NAN = Decimal("NaN")
_NEGATIVE_ZERO = re.compile(r"[:\[,]\s*-0[,}\]\s]")


class ImageDecoder:
    """Decodes the images of one shape of a table."""

    def __init__(self, table: Table) -> None:
        types = {column.name: _python_type(column.type) for column in table.columns}
        image_type: Any = TypedDict(table.name, types)  # type: ignore[misc]
        self._fast = msgspec.json.Decoder(image_type)
        self._columns = {name: msgspec.json.Decoder(type_) for name, type_ in types.items()}
        of_type = {column.name: column.type.removesuffix("[]") for column in table.columns}
        self._bytes = tuple(name for name, type_ in of_type.items() if type_ == "bytea")
        self._floats = {name for name, type_ in of_type.items() if type_ in _FLOATS}
        self._elements = {
            c.name: msgspec.json.Decoder(_TYPES[of_type[c.name]] | None)
            for c in table.columns
            if c.type.endswith("[]") and of_type[c.name] in _TYPES
        }
        self._numeric_keys = tuple(name for name in table.key if of_type.get(name) == "numeric")

    def __call__(self, image: str) -> Row:
        row: dict[str, Any]
        try:
            row = (
                self._decode_each(image)
                if self._needs_slow_decoding(image)
                else self._fast.decode(image)  # type: ignore[assignment]
            )
        except Exception:
            row = self._decode_each(image)
        for name in self._bytes:
            row[name] = _map(_to_bytes, row[name])
        for name in self._numeric_keys:
            if row[name] != row[name]:
                row[name] = _NAN  # one object: a key with NaN is only found by identity
        return row

    def _needs_slow_decoding(self, image: str) -> bool:
        """Whether the fast decoder may get a value wrong, or a value is nested deeper than later
        readers can decode."""
        if self._floats and "-0" in image and _NEGATIVE_ZERO.search(image):
            return True
        most = VALUE_DEPTH_MAX
        return image.count("[") + image.count("{") > most and _depth(image) > most

    def _decode_each(self, image: str) -> dict[str, Any]:
        """For rows with a value that its Python type cannot hold; slow."""
        return {name: self._decode(name, text) for name, text in split(image).items()}

    def _decode(self, name: str, text: str) -> Any:
        if name in self._floats and (text[:1] == "[" or text == "-0"):
            return _map(_to_special_float, json.loads(text, parse_int=float))
        if len(text) > VALUE_DEPTH_MAX and _depth(text) > VALUE_DEPTH_MAX:
            return text
        try:
            return self._columns[name].decode(text)
        except Exception:
            pass
        if name in self._elements and text[:1] == "[":
            return _map(self._decode_element(name), split_array(text))
        return _special_or_text(text)

    def _decode_element(self, name: str) -> Callable[[str], Any]:
        """For an array of several dimensions, or with an element that its type cannot hold."""
        decode = self._elements[name].decode

        def element(text: str) -> Any:
            try:
                return decode(text)
            except Exception:
                return _special_or_text(text)

        return element


def split(image: str) -> dict[str, str]:
    """The columns of an image, undecoded. Python's own decoder finds their ends: it accepts numbers
    of any size, and nesting as deep as the stack allows. Deeper values are found by counting
    brackets."""
    columns = {}
    decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
    at = 1
    while image[at : at + 1] not in ("}", ""):
        name, at = decoder.raw_decode(image, at)
        start = _behind_blanks(image, at + 1)
        try:
            _, at = decoder.raw_decode(image, start)
        except RecursionError:
            at = _end_of_value(image, start)
        columns[name] = image[start:at]
        at = _behind_blanks(image, at)
        at += image[at : at + 1] == ","
    return columns


def _behind_blanks(image: str, at: int) -> int:
    """A value of type json is stored as it was written, with its blanks and line ends."""
    while image[at : at + 1] in _BLANKS:
        at += 1
    return at


_BLANKS = (" ", "\t", "\n", "\r")


def split_array(text: str) -> list[Any]:
    """The elements of a JSON array, undecoded, in lists of lists for one of several dimensions."""
    found: list[list[Any]] = [[]]
    for match in _ELEMENTS.finditer(text):
        if match[0] == "[":
            found.append([])
        elif match[0] == "]":
            inner = found.pop()
            found[-1].append(inner)
        else:
            found[-1].append(match[0])
    (whole,) = found[0]
    return list(whole)


_ELEMENTS = re.compile(r'[][]|"(?:[^"\\]|\\.)*"|[^][",\s]+')


def _end_of_value(image: str, start: int) -> int:
    """Where a nested value ends, by counting brackets outside of strings."""
    depth = 0
    for match in _BRACKETS.finditer(image, start):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return len(image)


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        deepest = max(deepest, depth)
    return deepest


_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')


def _special_or_text(text: str) -> Any:
    """A value that its Python type cannot hold: a special float, else the text itself."""
    try:
        return _map(_to_special_float, msgspec.json.decode(text))
    except Exception:
        return text


def _python_type(name: str) -> Any:
    if name.endswith("[]"):
        element = _TYPES.get(name.removesuffix("[]"))
        return Any if element is None else list[element | None] | None  # type: ignore[valid-type]
    known = _TYPES.get(name)
    return Any if known is None else known | None


def python_type(name: str) -> Any:
    """The Python type of a column's values; Any for types that stay PostgreSQL's own text."""
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
