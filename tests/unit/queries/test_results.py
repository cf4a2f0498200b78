"""What functions return, as JSON."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import uuid
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest
from psycopg.types.range import Range

from headwater import limits
from headwater.errors import ResultError
from headwater.queries.results import Returns


class Order(msgspec.Struct):
    id: int
    amount: Decimal


@dataclasses.dataclass
class Line:
    text: str


class Total(TypedDict):
    total: float


class Customer(pydantic.BaseModel):
    name: str


class Row:
    """As an object-relational mapper has them."""

    id = 1
    amount = Decimal("2.50")


AN_ID = uuid.UUID("0b0e8a1c-6f0e-4d3a-9a63-2f5a3c1f9d11")
ORDER = {"id": 1, "amount": Decimal("2.50")}


@pytest.mark.parametrize(
    ("declared", "value", "json"),
    [
        (Any, None, "null"),
        (Any, [ORDER], '[{"id":1,"amount":"2.50"}]'),
        (Any, 2**60, str(2**60)),
        (Any, datetime(2026, 1, 2, 3, 4, 5, 6, UTC), '"2026-01-02T03:04:05.000006Z"'),
        (Any, [date(2026, 1, 2), time(1, 2), AN_ID], f'["2026-01-02","01:02:00","{AN_ID}"]'),
        (Any, timedelta(seconds=90), '"PT90S"'),
        (Any, {"a": (1, {2})}, '{"a":[1,[2]]}'),
        (Any, ipaddress.ip_address("10.0.0.1"), '"10.0.0.1"'),
        (Any, [math.nan, math.inf, -math.inf, 1.5], '["NaN","Infinity","-Infinity",1.5]'),
        (Any, {"a": {"b": [b"\x00\xff"]}}, '{"a":{"b":["\\\\x00ff"]}}'),
        (Any, bytearray(b"\x01"), '"\\\\x01"'),
        (Any, Order(1, Decimal("NaN")), '{"id":1,"amount":"NaN"}'),
        (Any, Line("a"), '{"text":"a"}'),
        (list[Order], [ORDER], '[{"id":1,"amount":"2.50"}]'),
        (list[Order], [ORDER | {"note": "left out"}], '[{"id":1,"amount":"2.50"}]'),
        (list[Order], [Row()], '[{"id":1,"amount":"2.50"}]'),
        (Sequence[Order], (Order(1, Decimal(2)),), '[{"id":1,"amount":"2"}]'),
        (Order | None, None, "null"),
        (Order | None, ORDER, '{"id":1,"amount":"2.50"}'),
        (Total, {"total": math.inf}, '{"total":"Infinity"}'),
        (list[Customer], [{"name": "Ann"}], '[{"name":"Ann"}]'),
        (Customer, Customer(name="Ann"), '{"name":"Ann"}'),
        (dict[str, int], {"a": 1}, '{"a":1}'),
        (None, None, "null"),
    ],
)
def test_encoding(declared: Any, value: Any, json: str) -> None:
    assert Returns("query q", declared).encode(value).decode() == json


@pytest.mark.parametrize(
    ("declared", "value", "reason"),
    [
        (list[Order], [ORDER] * 3 + [{"id": "x"}], "$[3].id: expected int, got str"),
        (list[Order], [{"id": 1}], "$[0]: missing required field amount"),
        (int, "5", "$: expected int, got str"),
        (None, 5, "$: expected null, got int"),
        (list[Customer], [{}], "$[0]: name: Field required"),
    ],
)
def test_a_result_that_does_not_fit_its_type(declared: Any, value: Any, reason: str) -> None:
    with pytest.raises(ResultError) as caught:
        Returns("query q", declared).encode(value)
    assert str(caught.value) == f"query q returned what it does not declare: {reason}"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (object(), "$: object"),
        ([{"a": 1}, {"a": [Range(1, 2)]}], "$[1].a[0]: Range"),
        ({"a": Line(object())}, "$.a.text: object"),  # type: ignore[arg-type]
        ({(1, 2): 3}, "$: dict"),
        ([1 + 2j], "$[0]: complex"),
    ],
)
def test_a_result_that_json_cannot_hold(value: Any, place: str) -> None:
    with pytest.raises(ResultError) as caught:
        Returns("query q").encode(value)
    assert str(caught.value).startswith(f"query q returned what cannot be sent: {place}:")


def test_a_result_that_contains_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ResultError, match="nested too deeply"):
        Returns("query q").encode(endless)


def test_a_result_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.queries.results.QUERY_RESULT_BYTES_MAX", 100)
    Returns("query q").encode("a" * 98)
    with pytest.raises(ResultError) as caught:
        Returns("query q").encode("a" * 99)
    assert caught.value.code == "result_too_large"
    assert "returned 101 bytes; at most 100 are sent" in str(caught.value)
    assert limits.QUERY_RESULT_BYTES_MAX == 32 * 1024 * 1024
