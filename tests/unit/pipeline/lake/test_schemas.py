"""Images into typed columns, and keys into the text that events have."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from headwater.commands.lake.rows import as_csv
from headwater.errors import InvalidQuery
from headwater.model import Column, Table
from headwater.pipeline.lake.keys import key_text
from headwater.pipeline.lake.schemas import ImageReader, arrow_type, as_text


def one(type_: str, declared: str | None = None, name: str = "c") -> Table:
    return Table(1, "public", "t", (Column(name, type_, declared or type_),), (name,))


def read(table: Table, text: str) -> Any:
    return ImageReader(table).rows([f'{{"c":{text}}}'], [1]).to_pylist()[0]["c"]


@pytest.mark.parametrize(
    ("type_", "declared", "text", "value"),
    [
        ("bigint", None, "9223372036854775807", 9223372036854775807),
        ("numeric", "numeric(38,2)", "-1.10", Decimal("-1.10")),
        ("numeric", None, "12345678901234567890.123456789012345678",
         Decimal("12345678901234567890.123456789012345678")),
        ("numeric", None, "1.5000000000000000000000", Decimal("1.5")),
        ("numeric", "numeric(3,-2)", "12300", Decimal(12300)),
        ("numeric", "numeric(2,5)", "0.00012", Decimal("0.00012")),
        ("numeric", "numeric(60,2)", "1.10", "1.10"),
        ("double precision", None, '"-Infinity"', float("-inf")),
        ("double precision", None, "1e-07", 1e-7),
        ("boolean", None, "true", True),
        ("text", None, '"null"', "null"),
        ("text", None, "null", None),
        ("timestamp with time zone", None, '"2026-01-02T03:04:05.678+00:00"',
         datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)),
        ("timestamp without time zone", None, '"2026-01-02T03:04:05"',
         datetime(2026, 1, 2, 3, 4, 5)),
        ("date", None, '"0001-01-01"', date(1, 1, 1)),
        ("bytea", None, '"\\\\x00ff"', b"\x00\xff"),
        ("jsonb", None, '"text"', '"text"'),
        ("json", None, '{"a":1.50}', '{"a":1.50}'),
        ("interval", None, '"P1D"', "P1D"),
        ("mood", None, '{"x":1}', '{"x":1}'),
        ("text[]", None, '["a\\"",null]', ['a"', None]),
        ("numeric[]", "numeric(5,1)[]", "[1.5,null]", [Decimal("1.5"), None]),
        ("jsonb[]", None, '["a", [1], {"b":2}]', InvalidQuery),
        ("integer[]", None, "[[1,2],[3,4]]", InvalidQuery),
        ("date", None, '"infinity"', InvalidQuery),
        ("timestamp with time zone", None, '"0044-03-15T00:00:00+00:00 BC"', InvalidQuery),
        ("numeric", None, '"NaN"', InvalidQuery),
        ("numeric", None, "0.1234567890123456789", InvalidQuery),
        ("numeric", None, "123456789012345678901", InvalidQuery),
    ],
)  # fmt: skip
def test_values(type_: str, declared: str | None, text: str, value: Any) -> None:
    table = one(type_, declared)
    if value is InvalidQuery:
        with pytest.raises(InvalidQuery, match=r"t\.c is .* which Spark's .* cannot"):
            read(table, text)
        assert isinstance(read(as_text(table, ["c"]), text), str)
    else:
        assert read(table, text) == value


def test_shapes_on_the_way() -> None:
    table = Table(
        3,
        "public",
        "t",
        (Column("id", "integer", "integer"), Column("x", "text", "text")),
        ("id",),
    )
    images = ['{"id":1,"a":"old"}', None, '{"id":2,"x":"new"}', '{"id":3}']
    rows = ImageReader(table, {1: {"id": "id", "x": "a"}}).rows(images, [1, 1, 3, 3])
    assert rows.to_pylist() == [
        {"id": 1, "x": "old"},
        None,
        {"id": 2, "x": "new"},
        {"id": 3, "x": None},
    ]


@pytest.mark.parametrize(
    ("type_", "declared", "key", "text"),
    [
        ("integer", None, "42", "42"),
        ("text", None, 'ä"\n', '"ä\\"\\n"'),
        ("uuid", None, UUID(int=5), '"00000000-0000-0000-0000-000000000005"'),
        ("numeric", "numeric(8,2)", "7", "7.00"),
        ("numeric", None, "1.50", "1.50"),
        ("numeric", "numeric(60,2)", "7" * 50, f"{'7' * 50}.00"),
        ("numeric", "price", "1.5", "1.5"),  # a domain
        ("numeric", "numeric(8,2)", "-0", "0.00"),
        # A column of this type has no such value: it is not rounded to one.
        ("numeric", "numeric(8,2)", "1.004", "1.004"),
        ("numeric", "numeric(8,2)", "1e30", f"1{'0' * 30}.00"),
        ("numeric", "numeric(8,2)", "1e2000", f"1{'0' * 2000}"),
        ("numeric", "numeric(8,2)", "NaN", '"NaN"'),
        ("numeric", "numeric(8,2)", "-Infinity", '"-Infinity"'),
        ("boolean", None, True, "true"),
        ("character", "character(4)", "ab", '"ab  "'),
        ("date", None, "2026-01-02", '"2026-01-02"'),
        ("timestamp with time zone", None, "2026-01-02T03:04:05.5+01:00",
         '"2026-01-02T02:04:05.5+00:00"'),
        ("timestamp without time zone", None, datetime(2026, 1, 2), '"2026-01-02T00:00:00"'),
        ("time without time zone", None, "10:00:00.5", '"10:00:00.5"'),
        ("time without time zone", None, time(10), '"10:00:00"'),
        ("bytea", None, b"\xff", '"\\\\xff"'),
    ],
)  # fmt: skip
def test_keys(type_: str, declared: str | None, key: Any, text: str) -> None:
    assert key_text(one(type_, declared), key) == f'{{"c":{text}}}'


def test_a_key_of_two_columns() -> None:
    columns = (Column("a", "integer", "integer"), Column("b", "text", "text"))
    table = Table(1, "public", "t", columns, ("b", "a"))
    assert key_text(table, ("x", 1)) == key_text(table, {"a": 1, "b": "x"}) == '{"b":"x","a":1}'
    for wrong in ("x", ("x", 1, 2), {"a": 1}):
        with pytest.raises(InvalidQuery, match=r"the key of t is \(b, a\)"):
            key_text(table, wrong)
    with pytest.raises(InvalidQuery, match=r"key\.a: expected an integer"):
        key_text(table, ("x", "y"))


def test_types_that_are_text() -> None:
    assert arrow_type(Column("m", "mood", "mood", enum=True)) == pa.string()


def test_csv_tells_null_from_an_empty_text() -> None:
    table = pa.table({"a": [None, "", 'x,"y"'], "b": [True, None, False]})
    assert as_csv(table) == 'a,b\n,true\n"",\n"x,""y""",false\n'
