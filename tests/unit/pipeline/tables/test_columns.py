"""The names and types of columns, and the values in them."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from headwater.errors import ConfigError
from headwater.model import Column, Table
from headwater.pipeline.lake.schemas import NUMERIC
from headwater.pipeline.tables.columns import (
    TypedColumn,
    columns_of,
    common_type,
    schema_of,
    stored_columns,
)
from headwater.pipeline.tables.options import TableOptions
from headwater.pipeline.tables.values import RowReader, converted, scale_of


def table(*columns: tuple[str, str], key: str = "id") -> Table:
    made = tuple(Column(name, kind.partition("(")[0], kind) for name, kind in columns)
    return Table(1, "public", "orders", made, (key,), 7)


def names(shape: Table, stored: pa.Schema | None = None) -> dict[str, str]:
    return {c.source: c.name for c in columns_of(shape, TableOptions(), stored)}


def test_names_that_engines_distinguish() -> None:
    shape = table(("id", "integer"), ("ID", "text"), ("a b", "text"), ("a_b", "text"),
                  ("_op", "text"), ("größe", "text"))  # fmt: skip
    found = names(shape)
    assert found == {"id": "id", "ID": "ID_2", "a b": "a_b", "a_b": "a_b_2", "_op": "_op_2",
                     "größe": "größe"}  # fmt: skip
    stored = schema_of("history", columns_of(shape, TableOptions()))
    later = table(("ID", "text"), ("a_b", "text"), ("id", "integer"))
    assert names(later, stored) == found, "a column keeps its name"
    assert stored_columns(stored).keys() == found.keys()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pa.int16(), pa.int32(), pa.int32()),
        (pa.int64(), pa.int32(), pa.int64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.decimal128(12, 2), pa.decimal128(10, 4), pa.decimal128(14, 4)),
        (pa.decimal128(38, 0), pa.decimal128(38, 18), pa.string()),
        (pa.int32(), pa.decimal128(12, 2), pa.string()),
        (pa.date32(), pa.timestamp("us"), pa.string()),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), pa.string()),
    ],
)
def test_a_type_that_holds_both(one: Any, other: Any, expected: Any) -> None:
    assert common_type(one, other) == common_type(other, one) == expected


@pytest.mark.parametrize(
    ("values", "kind", "texts"),
    [
        ([1, None, -5], pa.int32(), ["1", None, "-5"]),
        ([Decimal("1.50"), Decimal("3.00")], pa.decimal128(12, 2), ["1.50", "3.00"]),
        ([Decimal("2.5"), Decimal(3)], NUMERIC, ["2.5", "3"]),
        ([[Decimal("1.50"), None]], pa.list_(pa.decimal128(5, 2)), ["[1.50,null]"]),
        ([[Decimal("2.5")], []], pa.list_(NUMERIC), ["[2.5]", "[]"]),
        ([True, False], pa.bool_(), ["true", "false"]),
        ([date(1, 1, 1)], pa.date32(), ["0001-01-01"]),
        ([datetime(2026, 1, 1, 2, 0, 0, 120_000)], pa.timestamp("us"), ["2026-01-01T02:00:00.12"]),
        (
            [datetime(2026, 1, 1, tzinfo=UTC)],
            pa.timestamp("us", tz="UTC"),
            ["2026-01-01T00:00:00+00:00"],
        ),
        ([b"\x00\xff"], pa.binary(), ["\\x00ff"]),
        ([1.5, float("nan"), float("-inf")], pa.float64(), ["1.5", "NaN", "-Infinity"]),
        ([1.0, -0.0, 1e15, 1e-5], pa.float64(), ["1", "-0", "1e+15", "1e-05"]),
        ([0.1, 3.4e38, 1e6, None], pa.float32(), ["0.1", "3.4e+38", "1e+06", None]),
        ([[0.1, 1.0, float("nan")]], pa.list_(pa.float32()), ['[0.1,1,"NaN"]']),
        ([["a", None, '"'], []], pa.list_(pa.string()), ['["a",null,"\\""]', "[]"]),
    ],
)
def test_values_that_become_text(values: list[Any], kind: Any, texts: list[str | None]) -> None:
    """As PostgreSQL prints them."""
    gone = TypedColumn("amount", pa.string(), "amount", None)
    found = converted(pa.array(values, kind), pa.string(), scale_of(gone, kind))
    assert found.to_pylist() == texts


@pytest.mark.parametrize(
    ("declared", "stored", "texts"),
    [
        ("numeric(12,2)", NUMERIC, ["2.50", "3.00", "0.125"]),
        ("numeric(12,2)", pa.decimal128(14, 4), ["2.50", "3.00", "0.125"]),
        ("numeric", NUMERIC, ["2.5", "3", "0.125"]),
        ("numeric", pa.decimal128(12, 3), ["2.500", "3.000", "0.125"]),
        ("text", pa.decimal128(12, 3), ["2.500", "3.000", "0.125"]),
        ("numeric(50,4)", pa.decimal128(12, 3), ["2.500", "3.000", "0.125"]),
    ],
)
def test_a_numeric_is_printed_with_the_scale_of_its_column(
    declared: str, stored: Any, texts: list[str]
) -> None:
    column = TypedColumn("a", pa.string(), "a", Column("a", declared.partition("(")[0], declared))
    values = pa.array([Decimal("2.5"), Decimal(3), Decimal("0.125")], stored)
    found = converted(values, pa.string(), scale_of(column, stored))
    assert found.to_pylist() == texts


def test_a_value_beyond_its_type_is_named() -> None:
    shape = table(("id", "integer"), ("until", "date"), ("amount", "numeric"))
    reader = RowReader(columns_of(shape, TableOptions()), TableOptions())
    image = '{"id":1,"until":"infinity","amount":"NaN"}'
    arrays, beyond = reader.read([image, '{"id":2,"until":"2026-01-01","amount":1.5}', None])
    assert beyond == [["until", "amount"], None, None]
    assert [array.to_pylist() for array in arrays] == [
        [1, 2, None], [None, date(2026, 1, 1), None], [None, Decimal("1.5"), None],
    ]  # fmt: skip
    text = columns_of(shape, TableOptions(), text={"until", "amount"})
    arrays, beyond = RowReader(text, TableOptions()).read([image])
    assert ([array.to_pylist() for array in arrays], beyond) == (
        [[1], ["infinity"], ["NaN"]], [None],
    )  # fmt: skip


def test_a_dropped_column_becomes_text_too() -> None:
    both = table(("id", "integer"), ("until", "date"))
    stored = schema_of("history", columns_of(both, TableOptions()))
    later = columns_of(table(("id", "integer")), TableOptions(), stored, {"until"})
    assert {c.name: c.type for c in later}["until"] == pa.string()


def test_only_the_columns_that_are_included() -> None:
    shape = table(("id", "integer"), ("email", "text"), ("note", "text"), ("card", "text"))

    def treated(options: TableOptions) -> dict[str, str]:
        return {c.name: c.treatment for c in columns_of(shape, options)}

    every = ["id", "email", "note", "card"]
    assert list(treated(TableOptions())) == every
    assert list(treated(TableOptions(exclude=("note", "id")))) == ["email", "card"]
    chosen = TableOptions(include=("note", "email", "gone"), mask=("email", "card"))
    assert treated(chosen) == {"id": "value", "email": "mask", "note": "value"}
    assert list(treated(TableOptions(include=("gone",)))) == ["id"], "the key"
    assert chosen.fingerprint() != msgspec.structs.replace(chosen, include=()).fingerprint()
    both = [TableOptions(include=names).fingerprint() for names in (("a", "b"), ("b", "a"))]
    assert both[0] == both[1]


def test_a_column_that_leaves_the_included_key_stays_in_the_history() -> None:
    """Its values are in the versions of the time at which it belonged to the key."""
    before = table(("id", "integer"), ("code", "text"), ("note", "text"), key="code")
    options = TableOptions(include=("note",))
    stored = schema_of("history", columns_of(before, options))
    after = columns_of(
        table(("id", "integer"), ("code", "text"), ("note", "text")), options, stored
    )
    assert {c.name: c.column is not None for c in after} == {
        "code": False, "note": True, "id": True,
    }  # fmt: skip


def test_a_key_that_is_hidden_needs_a_secret() -> None:
    shape = table(("id", "integer"), ("note", "text"))
    TableOptions(mask=("note",)).check(shape)
    for options in (TableOptions(mask=("id",)), TableOptions(hash=("note",))):
        with pytest.raises(ConfigError, match="typed tables of orders need a secret"):
            options.check(shape)
