"""The text of a key is the same exactly if MongoDB says that the keys are the same."""

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId
from bson.timestamp import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from headwater.capture.mongodb.connection import CODEC
from headwater.capture.mongodb.texts.keys import key_text, key_value
from tests.support.mongodb.ordering import order

INTEGERS = st.integers(-(2**63), 2**63 - 1)
DECIMALS = st.decimals(allow_nan=False, places=4, min_value=-(10**20), max_value=10**20)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    INTEGERS,
    st.integers(-3, 3),
    st.integers(-3, 3).map(float),
    st.integers(-3, 3).map(lambda number: Decimal128(Decimal(number))),
    st.floats(allow_nan=False),
    DECIMALS.map(Decimal128),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.sampled_from(["1", "-1", "true", "null", '"', "{", "507f1f77bcf86cd799439011", "a\0b"]),
    st.binary(max_size=3),
    st.binary(max_size=16).map(lambda data: Binary(data, 128)),
    st.uuids().map(lambda value: Binary(value.bytes, 4)),
    st.binary(min_size=12, max_size=12).map(ObjectId),
    st.integers(-(2**62), 2**62).map(DatetimeMS),
    st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: Timestamp(*pair)),
)
NAMES = st.sampled_from("abc")
KEYS = st.one_of(SCALARS, st.dictionaries(NAMES, SCALARS, max_size=2))


def stored(value: Any) -> Any:
    """As the driver decodes it."""
    return bson.decode(bson.encode({"_id": value}), CODEC)["_id"]


@given(KEYS, KEYS)
def test_texts_are_equal_exactly_if_keys_are(one: Any, other: Any) -> None:
    one, other = stored(one), stored(other)
    assert (key_text(one) == key_text(other)) == (order(one) == order(other))


@given(KEYS)
def test_a_text_leads_back_to_its_key(key: Any) -> None:
    key = stored(key)
    assert order(stored(key_value(key_text(key)))) == order(key)


@given(KEYS)
def test_postgresql_can_store_the_text(key: Any) -> None:
    assert "\0" not in key_text(stored(key))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (ObjectId("507f1f77bcf86cd799439011"), "507f1f77bcf86cd799439011"),
        ("507f1f77bcf86cd799439011", '"507f1f77bcf86cd799439011"'),
        ("order-7", "order-7"),
        ("", ""),
        (7, "7"),
        (Int64(7), "7"),
        (7.0, "7"),
        (-0.0, "0"),
        (Decimal128("7.00"), "7"),
        (Decimal128("0.5"), '{"$numberDouble":"0.5"}'),
        (Decimal128("0.1"), '{"$numberDecimal":"0.1"}'),
        (Decimal128("NaN"), '{"$numberDouble":"NaN"}'),
        ("7", '"7"'),
        (True, "true"),
        (None, "null"),
        (
            Binary(uuid.UUID("c5f7b3ba-5c5e-4a8a-9d0a-111111111111").bytes, 4),
            '{"$uuid":"c5f7b3ba-5c5e-4a8a-9d0a-111111111111"}',
        ),
        (b"\x01", '{"$binary":{"base64":"AQ==","subType":"00"}}'),
        (DatetimeMS(5), '{"$date":{"$numberLong":"5"}}'),
        ({"b": 1, "a": "x"}, '{"b":1,"a":"x"}'),
    ],
)
def test_texts(key: Any, text: str) -> None:
    assert key_text(stored(key)) == text
