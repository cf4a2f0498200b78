"""PostgreSQL accepts every text that a conversion returns, for documents and declared types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bson
import psycopg
import pytest
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.capture.mongodb.columns import Layout
from headwater.capture.mongodb.connection import CODEC
from headwater.capture.mongodb.texts import dates
from headwater.capture.source import TableSpec

TYPES = [
    "text", "varchar(3)", "smallint", "integer", "bigint", "numeric", "numeric(5,2)",
    "numeric(3,3)", "double precision", "real", "boolean", "timestamptz", "timestamp", "date",
    "uuid", "bytea", "jsonb", "json", "text[]", "numeric(5,2)[]", "timestamptz[]", "bytea[]",
]  # fmt: skip

HARD: list[Any] = [
    0.1, -0.0, 5e-324, 1e308, 3.5e38, 1e-46, 1e-40, float("nan"), float("inf"), float("-inf"),
    999.994999,     Decimal128("9.999999999999999999999999999999999E+6144"), Decimal128("1E-6176"),
    Decimal128("0E+6111"), Decimal128("NaN"), Decimal128("-Infinity"), Decimal128("-0"),
    Int64(2**63 - 1), Int64(-(2**63)), 2**31 - 1, "1e9999", "1e-9999", "9" * 1000, "-.5", "5.", "١",
    "2026-02-30", "2026-01-01", "0001-01-01T00:00:00+14:00", "infinity", "now", "\0", "{", "\\",
    '"', DatetimeMS(dates.FIRST), DatetimeMS(dates.END - 1), DatetimeMS(dates.END),
    DatetimeMS(2**62),
    DatetimeMS(-(2**62)), DatetimeMS(-62_135_596_800_001), Timestamp(2**32 - 1, 1), True, None,
    ObjectId("6afda89eef476aa2530d758b"),
    b"", b"\x00\xff", Binary(b"x" * 16, 3), Binary(b"x" * 16, 4), Binary(b"x", 4),
    Regex("a"), Code("f()", {"a": 1}), MinKey(), MaxKey(), DBRef("a", 1, "b"), {"": {"$a": "\0"}},
    ["a", None, '"\\,{}'], [1, 2.5], [[1]], [], [DatetimeMS(0)], [b"\x01"],
]  # fmt: skip

SCALARS = st.one_of(
    st.sampled_from(HARD),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.from_regex(r"[+-]?[0-9]{1,30}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,4})?", fullmatch=True),
    st.datetimes().map(lambda moment: moment.isoformat()),
    st.integers(-(2**63), 2**63 - 1).map(DatetimeMS),
    st.integers(dates.FIRST, dates.END - 1).map(DatetimeMS),
    st.binary(max_size=20),
    st.decimals(allow_nan=False, places=3, max_value=10**9, min_value=-(10**9)).map(Decimal128),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.text(st.characters(codec="utf-8", exclude_characters="\0")), inner, max_size=3
        ),
    ),
    max_leaves=4,
)
LAYOUT = Layout(TableSpec("all", types={f"c{n}": type_ for n, type_ in enumerate(TYPES)}))


@pytest.fixture(scope="module")
def database(postgres: Any) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        columns = ", ".join(f'"{c.name}" {c.type}' for c in LAYOUT.table.columns)
        connection.execute(f"create temporary table mirror ({columns})".encode())
        yield connection


def stored(database: psycopg.Connection[Any], value: Any) -> tuple[Any, ...]:
    """The row of a document that has the value in every field, as PostgreSQL prints it."""
    document: dict[str, Any] = {"_id": 1} | {f"c{n}": value for n in range(len(TYPES))}
    decoded: dict[str, Any] = bson.decode(bson.encode(document), CODEC)
    row = LAYOUT.row(decoded)
    casts = ", ".join(f"%s::{column.type}" for column in LAYOUT.table.columns)
    texts = ", ".join(f'"{column.name}"::text' for column in LAYOUT.table.columns)
    database.execute("truncate mirror")
    database.execute(f"insert into mirror values ({casts})".encode(), row)
    found: tuple[Any, ...] | None = database.execute(
        f"select {texts} from mirror".encode()
    ).fetchone()
    assert found is not None
    return found[2:]


@pytest.mark.parametrize("value", HARD, ids=repr)
def test_hard_values_are_accepted(database: psycopg.Connection[Any], value: Any) -> None:
    stored(database, value)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(VALUES)
def test_any_value_is_accepted(database: psycopg.Connection[Any], value: Any) -> None:
    stored(database, value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, {"text": "7", "integer": "7", "numeric(5,2)": "7.00", "real": "7", "jsonb": "7"}),
        (0.1, {"numeric": "0.1", "double precision": "0.1", "real": "0.1", "integer": None}),
        (
            Decimal128("1.10"),
            {"numeric": "1.10", "numeric(5,2)": "1.10", "double precision": "1.1"},
        ),
        ("2026-01-01", {"date": "2026-01-01", "timestamp": "2026-01-01 00:00:00", "uuid": None}),
        (DatetimeMS(-1), {"date": "1969-12-31", "timestamp": "1969-12-31 23:59:59.999"}),
        (b"\x01", {"bytea": "\\x01", "text": None}),
        (True, {"boolean": "true", "text": "true", "integer": None}),
        (["a", None], {"text[]": "{a,NULL}", "jsonb": '["a", null]', "text": None}),
        ("a\0b", {"text": "a\ufffdb", "jsonb": '"a\ufffdb"'}),
    ],
)
def test_what_postgresql_prints(
    database: psycopg.Connection[Any], value: Any, expected: dict[str, str | None]
) -> None:
    found = dict(zip(TYPES, stored(database, value), strict=True))
    assert {type_: found[type_] for type_ in expected} == expected
