"""Whole documents as JSON, and values of array and JSON types."""

from __future__ import annotations

import json
import re
from typing import Any

import bson
import pytest
from bson import json_util
from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.timestamp import Timestamp

from headwater.capture.mongodb.connection import CODEC
from headwater.capture.mongodb.texts.scalars import Misfit
from headwater.capture.mongodb.texts.values import conversion, json_text

VALUES: list[tuple[Any, Any]] = [
    (1, 1),
    (Int64(2**63 - 1), 2**63 - 1),
    (1.5, 1.5),
    (float("nan"), {"$numberDouble": "NaN"}),
    (float("-inf"), {"$numberDouble": "-Infinity"}),
    (Decimal128("1.10"), {"$numberDecimal": "1.10"}),
    ("Zoë", "Zoë"),
    ("a\0b", "a\ufffdb"),
    ("\0\0\\\0", "\ufffd\ufffd\\\ufffd"),
    ("\\u0000\0", "\\u0000\ufffd"),
    (True, True),
    (None, None),
    (DatetimeMS(1500), {"$date": "1970-01-01T00:00:01.500Z"}),
    (DatetimeMS(-1), {"$date": {"$numberLong": "-1"}}),
    (DatetimeMS(2**62), {"$date": {"$numberLong": str(2**62)}}),
    (ObjectId("507f1f77bcf86cd799439011"), {"$oid": "507f1f77bcf86cd799439011"}),
    (b"\x01", {"$binary": {"base64": "AQ==", "subType": "00"}}),
    (Binary(b"\x01", 128), {"$binary": {"base64": "AQ==", "subType": "80"}}),
    (Binary(b"\0" * 16, 4), {"$uuid": "00000000-0000-0000-0000-000000000000"}),
    (Timestamp(5, 1), {"$timestamp": {"t": 5, "i": 1}}),
    (Regex("^a", re.IGNORECASE), {"$regularExpression": {"pattern": "^a", "options": "i"}}),
    (Code("f()"), {"$code": "f()"}),
    (MinKey(), {"$minKey": 1}),
    (MaxKey(), {"$maxKey": 1}),
    (DBRef("orders", 1), {"$ref": "orders", "$id": 1}),
    ([1, {"a": [b""]}], [1, {"a": [{"$binary": {"base64": "", "subType": "00"}}]}]),
]


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=str)
def test_a_value_in_a_document(value: Any, expected: Any) -> None:
    document = bson.decode(bson.encode({"v": value}), CODEC)
    assert json.loads(json_text(document)) == {"v": expected}


def test_invalid_text_is_replaced() -> None:
    raw = bson.encode({"v": "abc"}).replace(b"abc", b"a\xffc")
    assert json_text(bson.decode(raw, CODEC)) == '{"v":"a\ufffdc"}'


def test_the_text_is_extended_json() -> None:
    document = {name: value for name, (value, _) in enumerate(VALUES)}
    decoded = bson.decode(bson.encode({str(k): v for k, v in document.items()}), CODEC)
    options = json_util.JSONOptions(datetime_conversion=CODEC.datetime_conversion)
    assert json_util.loads(json_text(decoded), json_options=options).keys() == decoded.keys()


@pytest.mark.parametrize(
    ("type_", "value", "text"),
    [
        ("jsonb", {"a": [1]}, '{"a":[1]}'),
        ("JSON", "a", '"a"'),
        ("integer[]", [1, None, 2.0], '{"1",NULL,"2"}'),
        ("text []", ['a"b\\c', ""], '{"a\\"b\\\\c",""}'),
        ("character   varying", "a", "a"),
    ],
)
def test_types(type_: str, value: Any, text: str) -> None:
    convert = conversion(type_)
    assert convert is not None
    assert convert(value) == text


@pytest.mark.parametrize("value", ["a", {"a": 1}, [["a"]]])
def test_an_array_needs_an_array(value: Any) -> None:
    convert = conversion("integer[]")
    assert convert is not None
    with pytest.raises(Misfit):
        convert(value)


@pytest.mark.parametrize("type_", ["inet[]", "text[][]", "[]", "hstore"])
def test_unknown_types(type_: str) -> None:
    assert conversion(type_) is None
