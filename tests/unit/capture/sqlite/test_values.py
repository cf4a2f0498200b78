"""SQLite values as texts of PostgreSQL types."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.capture.sqlite.values import (
    INVALID_TEXT,
    Misfit,
    converter,
    decode_text,
    key_value,
    mirror_type,
)
from headwater.errors import SourceRefused


@pytest.mark.parametrize(
    ("declared", "type", "in_key"),
    [
        ("INTEGER", "bigint", "bigint"),
        ("unsigned big int", "bigint", "bigint"),
        ("VARCHAR(20)", "text", "text"),
        ("clob", "text", "text"),
        ("BLOB", "bytea", "bytea"),
        ("", "text", "text"),
        ("DOUBLE PRECISION", "double precision", "double precision"),
        ("float", "double precision", "double precision"),
        ("NUMERIC", "numeric", "numeric"),
        ("decimal(10, 3)", "numeric(10,3)", "numeric"),
        ("decimal(3, 10)", "numeric", "numeric"),
        ("BOOLEAN", "boolean", "boolean"),
        ("date", "date", "text"),
        ("DateTime", "timestamp", "text"),
        ("timestamp with time zone", "timestamp with time zone", "text"),
        ("JSON", "jsonb", "text"),
        ("UUID", "uuid", "text"),
        ("STRING", "text", "text"),
        ("POINT", "bigint", "bigint"),  # SQLite's own rule: it contains INT
        ("MONEY", "numeric", "numeric"),
    ],
)
def test_declared_types(declared: str, type: str, in_key: str) -> None:
    assert mirror_type(declared, key=False) == type
    assert mirror_type(declared, key=True) == in_key


@pytest.mark.parametrize(
    ("type", "value", "text"),
    [
        ("bigint", 2**63 - 1, "9223372036854775807"),
        ("integer", -(2**31), "-2147483648"),
        ("double precision", 1e300, "1e+300"),
        ("double precision", float("-inf"), "-Infinity"),
        ("numeric", 0.1, "0.1"),
        ("numeric", "12.50", "12.50"),
        ("numeric(4,2)", 99.99, "99.99"),
        ("numeric(4,2)", "99.994", "99.994"),
        ("text", "ü", "ü"),
        ("text", 7, "7"),
        ("bytea", b"", "\\x"),
        ("boolean", 0, "false"),
        ("boolean", "TRUE", "true"),
        ("date", "2026-02-28", "2026-02-28"),
        ("date", "2026-02-28 00:00:00", "2026-02-28"),
        ("time", "23:59:59.5", "23:59:59.500000"),
        ("timestamp", "2026-02-28T01:02:03Z", "2026-02-28 01:02:03"),
        ("timestamptz", "2026-02-28 01:02:03", "2026-02-28 01:02:03+00"),
        ("jsonb", '{"a": 1e400}', '{"a": 1e400}'),
        ("jsonb", 5, "5"),
        ("uuid", b"\x01" * 16, "01010101-0101-0101-0101-010101010101"),
    ],
)
def test_values_that_fit(type: str, value: Any, text: str) -> None:
    assert converter(type)(value) == text


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ("bigint", "12"),
        ("bigint", 1.5),
        ("integer", 2**31),
        ("smallint", -40000),
        ("double precision", "x"),
        ("numeric", float("inf")),
        ("numeric", "1,5"),
        ("numeric", "٣"),  # a digit, but not one that PostgreSQL reads
        ("numeric(4,2)", 100),
        ("numeric(4,2)", 99.999),
        ("text", "a\x00b"),
        ("text", b"bytes"),
        ("text", INVALID_TEXT),
        ("bytea", "text"),
        ("boolean", 2),
        ("boolean", 0.5),
        ("date", "2026-02-30"),
        ("date", "2026-02-28 01:00:00"),
        ("date", 1700000000),
        ("time", "25:00"),
        ("timestamp", "yesterday"),
        ("timestamp", "0001-01-01T00:00:00+01:00"),
        ("jsonb", "{"),
        ("jsonb", "NaN"),
        ("jsonb", '"\\u0000"'),
        ("jsonb", '"\\ud800"'),
        ("jsonb", "[" * 100_000),
        ("uuid", "no"),
    ],
)
def test_values_that_do_not_fit(type: str, value: Any) -> None:
    with pytest.raises(Misfit):
        converter(type)(value)


@pytest.mark.parametrize("type", ["varchar(3)", "int[]", "numeric(2,3)", "text; drop table x"])
def test_types_that_cannot_be_given(type: str) -> None:
    with pytest.raises(SourceRefused, match="not one that a SQLite column can have") as raised:
        converter(type)
    assert "numeric(p,s)" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ("bigint", 2**62),
        ("text", "k"),
        ("bytea", b"\x00\xff"),
        ("numeric", 1.5),
        ("numeric", 3),
        ("double precision", 1e22),
        ("boolean", 1),
    ],
)
def test_a_key_is_read_back(type: str, value: Any) -> None:
    assert key_value(type, converter(type)(value)) == value


def test_texts_that_are_not_utf_8() -> None:
    assert decode_text(b"\xff") is INVALID_TEXT
    assert decode_text("ü".encode()) == "ü"
