"""BSON values as texts that PostgreSQL reads: whole documents as `jsonb`, single values as the type
that a definition declares.

A document is relaxed extended JSON: numbers are JSON numbers, and what JSON lacks has its `$` form
(`{"$date": "2026-01-01T00:00:00Z"}`, `{"$numberDecimal": "1.10"}`, `{"$oid": "…"}`). Every text
that a conversion here returns is one that PostgreSQL accepts. A value that does not fit the
declared type raises `Misfit`.

    >>> json_text({"_id": 1, "paid": True, "ratio": float("nan")})
    '{"_id":1,"paid":true,"ratio":{"$numberDouble":"NaN"}}'
    >>> conversion("numeric(5,2)")(Decimal128("12.345"))
    '12.345'
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId

from headwater.capture.mongodb.texts import dates
from headwater.capture.mongodb.texts.keys import binary, rare
from headwater.capture.mongodb.texts.scalars import Misfit, scalar_conversion

Conversion = Callable[[Any], str]

REPLACEMENT = "\ufffd"
"""In place of NUL, which PostgreSQL's texts cannot contain."""

_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
"""NUL in JSON, and not a backslash that is followed by the letters."""

_encoder = msgspec.json.Encoder()


def json_text(value: Any) -> str:
    """The relaxed extended JSON of a value, which `jsonb` accepts."""
    text = _encoder.encode(_plain(value)).decode()
    return _NUL.sub(rf"\1{REPLACEMENT}", text) if "\\u0000" in text else text


def conversion(type_: str) -> Conversion | None:
    """How values become texts of this PostgreSQL type; None where we do not know the type.

    >>> conversion("text[]")(["a", None, 'b"c'])
    '{"a",NULL,"b\\\\"c"}'
    """
    name = " ".join(type_.lower().split())
    if name in ("json", "jsonb"):
        return json_text
    if name.endswith("[]"):
        element = scalar_conversion(name.removesuffix("[]").strip())
        return None if element is None else _array(element)
    return scalar_conversion(name)


def _array(element: Conversion) -> Conversion:
    def convert(value: Any) -> str:
        if not isinstance(value, list):
            raise Misfit("not an array")
        return "{" + ",".join("NULL" if v is None else _quoted(element(v)) for v in value) + "}"

    return convert


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _plain(value: Any) -> Any:
    kind = type(value)
    return value if kind in _AS_IN_JSON else _PLAIN.get(kind, rare)(value)


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    return {"$numberDouble": "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"}


def _dict(value: dict[str, Any]) -> dict[str, Any]:
    # Most values are as in JSON, and need no call.
    return {
        name: inner if type(inner) in _AS_IN_JSON else _plain(inner)
        for name, inner in value.items()
    }


def _list(value: list[Any]) -> list[Any]:
    return [_plain(inner) for inner in value]


_AS_IN_JSON = frozenset({str, int, bool, type(None)})
_PLAIN: dict[type, Callable[[Any], Any]] = {
    float: _float,
    dict: _dict,
    list: _list,
    Int64: int,
    ObjectId: lambda value: {"$oid": str(value)},
    DatetimeMS: lambda value: {"$date": dates.extended(int(value))},
    Decimal128: lambda value: {"$numberDecimal": str(value)},
    bytes: binary,
    Binary: binary,
    DBRef: lambda value: _dict(dict(value.as_doc())),
}
