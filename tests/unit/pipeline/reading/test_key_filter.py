"""Filters that name rows by their whole key."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from headwater.errors import InvalidQuery
from headwater.live.filters.text import parse_conditions
from headwater.model import Column, Table
from headwater.pipeline.reading.key_filter import keys_of


def table(*key: tuple[str, str]) -> Table:
    columns = [Column(name, kind.partition("(")[0], kind) for name, kind in key]
    note = Column("note", "text", "text")
    return Table(1, "public", "t", (*columns, note), tuple(name for name, _ in key), 7)


ID, PAIR = table(("id", "integer")), table(("a", "bigint"), ("b", "text"))


@pytest.mark.parametrize(
    ("found", "where", "keys"),
    [
        (ID, ["id = 7"], [(7,)]),
        (ID, ["id = 7.0"], [(7,)]),
        (ID, ["id in 7, 8, 7"], [(7,), (8,)]),
        (ID, ["id in " + ",".join(map(str, range(21)))], None),
        (ID, ["id = 7.5"], None),
        (ID, ["id = 7", "id = 7"], None),
        (ID, ["id = 7", "note = x"], None),
        (ID, ["id >= 7"], None),
        (ID, ["id not in 7"], None),
        (ID, ["id is null"], None),
        (ID, ['{"or": [["id", "=", 7], ["id", "=", 8]]}'], None),
        (ID, [], None),
        (PAIR, ["b in x, y", "a = 1"], [(1, "x"), (1, "y")]),
        (PAIR, ["a = 1"], None),
        (table(("id", "uuid")), [f"id = {UUID(int=5)}"], [(UUID(int=5),)]),
        (table(("id", "date")), ["id = 2026-01-02"], [(date(2026, 1, 2),)]),
        (table(("id", "date")), ["id = infinity"], None),
        (table(("id", "boolean")), ["id = true"], [(True,)]),
        (table(("id", "numeric(9,2)")), ["id = 1.5"], [(Decimal("1.5"),)]),
        (table(("id", "numeric(9,2)")), ["id in 1.50, 1.5"], [(Decimal("1.5"),)]),
        (table(("id", "numeric(60,2)")), ["id = 1.5"], None),
        # Values of these types that are equal may be written differently.
        (table(("id", "numeric")), ["id = 1.5"], None),
        (table(("id", "double precision")), ["id = 1.5"], None),
        (table(("id", "real")), ["id = 1.5"], None),
        (table(("id", "character(4)")), ["id = a"], None),
    ],
)
def test_the_keys_of_a_filter(found: Table, where: list[str], keys: list[Any] | None) -> None:
    assert keys_of(parse_conditions(where), found) == keys


def test_columns_that_are_read_as_text_are_compared_as_text() -> None:
    assert keys_of(parse_conditions(["id = 7"]), ID, ["id"]) is None
    assert keys_of(parse_conditions(["id = 7"]), ID, ["note"]) == [(7,)]


@pytest.mark.parametrize("where", [["nothing = 7"], ["id = 7", "nothing = 7"], ["id like 7"]])
def test_other_columns_and_operators_are_for_spark(where: list[str]) -> None:
    """The table may have had such a column, or this one another type."""
    assert keys_of(parse_conditions(where), ID) is None


def test_a_value_that_cannot_be_compared_with_the_key() -> None:
    with pytest.raises(InvalidQuery, match="expected an integer"):
        keys_of(parse_conditions(["id = a"]), ID)
