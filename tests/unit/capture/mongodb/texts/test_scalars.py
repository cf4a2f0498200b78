"""Values of a declared type: what fits, how it is written, and what does not fit."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId
from bson.timestamp import Timestamp

from headwater.capture.mongodb.texts.scalars import Misfit, scalar_conversion

UUID = "c5f7b3ba-5c5e-4a8a-9d0a-111111111111"

FITS: list[tuple[str, Any, str]] = [
    ("text", "Zoë", "Zoë"),
    ("text", "a\0b", "a\ufffdb"),
    ("text", 7, "7"),
    ("text", True, "true"),
    ("text", ObjectId("507f1f77bcf86cd799439011"), "507f1f77bcf86cd799439011"),
    ("text", DatetimeMS(0), "1970-01-01 00:00:00+00"),
    ("varchar(3)", "Zoë", "Zoë"),
    ("smallint", 7.0, "7"),
    ("integer", "12", "12"),
    ("bigint", Int64(2**63 - 1), "9223372036854775807"),
    ("numeric", 0.1, "0.1"),
    ("numeric", Decimal128("1.10"), "1.10"),
    ("numeric", float("nan"), "NaN"),
    ("numeric(5,2)", "999.994", "999.994"),
    ("double precision", Decimal128("0.1"), "0.1"),
    ("real", 0.5, "0.5"),
    ("boolean", False, "false"),
    ("boolean", "true", "true"),
    ("timestamptz", DatetimeMS(1500), "1970-01-01 00:00:01.500+00"),
    ("timestamptz", DatetimeMS(-62_167_219_200_001), "0002-12-31 23:59:59.999+00 BC"),
    ("timestamptz", "2026-01-01T01:00:00+01:00", "2026-01-01 00:00:00+00"),
    ("timestamptz", Timestamp(2, 1), "1970-01-01 00:00:02+00"),
    ("timestamp", DatetimeMS(0), "1970-01-01 00:00:00"),
    ("date", DatetimeMS(-1), "1969-12-31"),
    ("uuid", Binary(uuid.UUID(UUID).bytes, 4), UUID),
    ("uuid", UUID, UUID),
    ("bytea", b"\x01\xff", "\\x01ff"),
]

MISFITS: list[tuple[str, Any]] = [
    ("text", {"a": 1}),
    ("text", ["a"]),
    ("varchar(3)", "abcd"),
    ("integer", 7.5),
    ("integer", 2**31),
    ("integer", True),
    ("integer", "12x"),
    ("bigint", 1e300),
    ("bigint", float("nan")),
    ("numeric", "1,5"),
    ("numeric(5,2)", "999.995"),
    ("numeric(5,2)", float("inf")),
    ("double precision", Decimal128("1E+4000")),
    ("real", 1e300),
    ("real", 1e-300),
    ("boolean", 1),
    ("timestamptz", 0),
    ("timestamptz", DatetimeMS(2**62)),
    ("timestamptz", "yesterday"),
    ("date", "0001-01-01T00:00:00+23:59"),
    ("uuid", Binary(b"x" * 16, 3)),
    ("uuid", "c5f7b3ba"),
    ("bytea", "text"),
]


@pytest.mark.parametrize(("type_", "value", "text"), FITS)
def test_fits(type_: str, value: Any, text: str) -> None:
    convert = scalar_conversion(type_)
    assert convert is not None
    assert convert(value) == text


@pytest.mark.parametrize(("type_", "value"), MISFITS)
def test_does_not_fit(type_: str, value: Any) -> None:
    convert = scalar_conversion(type_)
    assert convert is not None
    with pytest.raises(Misfit):
        convert(value)


@pytest.mark.parametrize(
    "type_", ["", "inet", "numeric(0)", "numeric(3,4)", "varchar(0)", "text; drop table x", "char"]
)
def test_an_unknown_type_has_no_conversion(type_: str) -> None:
    assert scalar_conversion(type_) is None
