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

import math
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
        self._fast = msgspec.json.Decoder(image_type | None)
        self._columns = {name: msgspec.json.Decoder(type_) for name, type_ in types.items()}
        self._bytes = tuple(c.name for c in table.columns if c.type in ("bytea", "bytea[]"))

    def __call__(self, image: msgspec.Raw) -> Row | None:
        """The row, or None for the JSON null that stands for no image."""
        row: dict[str, Any] | None
        try:
            row = self._fast.decode(image)
        except msgspec.ValidationError:
            row = self._decode_each(image)
        if row is None:
            return None
        for name in self._bytes:
            row[name] = _map(_to_bytes, row[name])
        return row

    def _decode_each(self, image: msgspec.Raw) -> dict[str, Any]:
        """The slow way, for rows with a value beyond its Python type."""
        row: dict[str, Any] = {}
        for name, raw in msgspec.json.decode(image, type=dict[str, msgspec.Raw]).items():
            try:
                row[name] = self._columns[name].decode(raw)
            except (msgspec.ValidationError, KeyError):
                row[name] = _map(_to_special_float, msgspec.json.decode(raw))
        return row


def _python_type(name: str) -> Any:
    if name.endswith("[]"):
        element = _TYPES.get(name.removesuffix("[]"))
        return Any if element is None else list[element | None] | None  # type: ignore[valid-type]
    known = _TYPES.get(name)
    return Any if known is None else known | None


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
