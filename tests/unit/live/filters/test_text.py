"""Conditions as people type them."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import InvalidQuery
from headwater.live.filters.filter import to_json
from headwater.live.filters.text import parse_conditions

READ: list[tuple[str, Any]] = [
    ("region = 7", ["region", "=", "7"]),
    ("region=7", ["region", "=", "7"]),
    ("  amount >=  10.50 ", ["amount", ">=", "10.50"]),
    ("a <> b", ["a", "!=", "b"]),
    ("a != 'b c'", ["a", "!=", "b c"]),
    ('"Order Id" = 5', ["Order Id", "=", "5"]),
    ("status IN open, 'held', \"x y\"", ["status", "in", ["open", "held", "x y"]]),
    ("status not in a,b", ["status", "not in", ["a", "b"]]),
    ("price between 1,5", ["price", "between", ["1", "5"]]),
    ("note like a=%", ["note", "like", "a=%"]),
    ("note not  ilike %x%", ["note", "not ilike", "%x%"]),
    ("note IS NULL", ["note", "is null"]),
    ("note is not null", ["note", "is not null"]),
    ("note = ", ["note", "=", ""]),
    ('["region", "=", 7]', ["region", "=", 7]),
    ('{"or": [["a", "=", 1], ["b", "=", 2]]}', {"or": [["a", "=", 1], ["b", "=", 2]]}),
]


@pytest.mark.parametrize(("text", "meant"), READ)
def test_read(text: str, meant: Any) -> None:
    from headwater.live.filters.filter import from_json

    assert parse_conditions([text]).parts == (from_json(meant),)  # type: ignore[union-attr]
    assert to_json(parse_conditions([text, text]))


@pytest.mark.parametrize("text", ["", "region", "= 7", "region 7", "a is null b", "[1", "{}x"])
def test_not_read(text: str) -> None:
    with pytest.raises(InvalidQuery):
        parse_conditions([text])
