"""Texts that PostgreSQL reads."""

from __future__ import annotations

import json

import pytest

from headwater.capture.mysql.types import Shape
from headwater.capture.mysql.values import (
    checked_date,
    datetime_text,
    decimal,
    decoder,
    from_query,
    inet,
    json_text,
    select_expression,
    timestamp_text,
)


@pytest.mark.parametrize(
    "text", ["{}", '{"a": [1, 2]}', '"\\\\u0000"', '"\\ud83e\\udd8a"', "[1,\n\t2]", '"\\n"']
)
def test_json_that_is_right_stays(text: str) -> None:
    assert json_text(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"\\u0000"', "\u2400"),
        ('"a\\\\\\u0000"', "a\\\u2400"),
        ('"\\ud800x"', "\ufffdx"),
        ('"\\udd8a"', "\ufffd"),
        ('"a\tb"', "a\tb"),
        ('"a\0b"', "a\u2400b"),
        ('{"\\u0000": "\\u00e9"}', {"\u2400": "é"}),
    ],
)
def test_json_that_postgresql_refuses(text: str, expected: object) -> None:
    assert json.loads(json_text(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-02-29", "2024-02-29"),
        ("0001-01-01", "0001-01-01"),
        ("2023-02-29", None),
        ("0000-01-01", None),
        ("2024-00-01", None),
        ("", None),
    ],
)
def test_dates(text: str, expected: str | None) -> None:
    assert checked_date(text) == expected


def test_times() -> None:
    assert datetime_text("2024-01-01 10:00:00.5") == "2024-01-01 10:00:00.5"
    assert timestamp_text("2024-01-01 10:00:00") == "2024-01-01 10:00:00+00"
    assert timestamp_text("0000-00-00 00:00:00") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("000.50", "0.50"), ("-001", "-1"), ("0000", "0"), ("12.00", "12.00"), ("0.00", "0.00")],
)
def test_decimals(text: str, expected: str) -> None:
    assert decimal(text) == expected


def test_charsets() -> None:
    table = "".join(chr(i) for i in range(128)) + "€" + "".join(chr(i) for i in range(129, 256))
    assert decoder("latin1", {"latin1": table})(b"a\x80\xe9") == "a€é"
    assert decoder("utf16", {})("é日".encode("utf-16-be")) == "é日"
    assert decoder("utf8mb4", {})(b"\xff") == "\ufffd"


def test_from_query() -> None:
    for kind, value, expected in (
        ("binary", b"\0a", "\\x0061"),
        ("text", b"a\0", "a\u2400"),
        ("float", "0.10000000149011612", "0.10000000149011612"),
        ("double", "1e20", "1e+20"),
        ("boolean", "-5", "t"),
        ("enum", "a", "a"),
        ("inet6", "::FFFF:1.2.3.4", "::ffff:102:304"),
    ):
        shape = Shape("c", kind)  # type: ignore[arg-type]
        assert from_query(shape, {})(value) == expected
    assert from_query(Shape("c", "bit", size=4), {})("5") == "0101"


def test_expressions() -> None:
    assert select_expression(Shape("c", "float"), "`c`") == "`c` * 1e0"
    assert select_expression(Shape("c", "text", charset="latin1"), "`c`") == "cast(`c` as binary)"
    assert select_expression(Shape("c", "text", charset="utf8mb3"), "`c`") == "`c`"


def test_addresses_have_one_spelling() -> None:
    assert inet("::1.2.3.4") == inet("::102:304") == "::102:304"
