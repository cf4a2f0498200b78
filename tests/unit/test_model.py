"""Positions as a set of transactions, and the changed columns of a change."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.model import Change, Column, Position, Table


@st.composite
def positions(draw: st.DrawFn) -> Position:
    xmin = draw(st.integers(3, 30))
    xmax = draw(st.integers(xmin, 40))
    running = draw(st.sets(st.integers(xmin, xmax - 1))) if xmax > xmin else set()
    return Position("a", xmin, xmax, tuple(sorted(running)))


def members(position: Position) -> set[int]:
    """Far enough beyond every xmax that nothing is left out."""
    return {xid for xid in range(50) if position.contains(xid)}


@given(positions())
def test_prints_and_parses(position: Position) -> None:
    assert Position.parse(str(position)) == position


@given(positions(), positions())
def test_covers_is_inclusion(one: Position, two: Position) -> None:
    if one.covers(two):
        assert members(one) >= members(two)
    if members(one) >= members(two) and one.xmax >= two.xmax:
        assert one.covers(two)


@pytest.mark.parametrize(
    "text", ["", "a", "a-1:2", "a-2:1:", "a-1:5:7", "a-1:5:3,2", "a-1:5:2,2", "G-1:2:", "a-1:2:\n"]
)
def test_an_invalid_position_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        Position.parse(text)


def test_positions_of_two_logs_do_not_cover_each_other() -> None:
    assert not Position("a", 9, 9).covers(Position("b", 3, 3))


CHANGED: list[tuple[Any, Any, bool]] = [
    (1, 1, False),
    (1, 2, True),
    (None, 1, True),
    (Decimal("5.0"), Decimal("5.00"), True),
    (Decimal("NaN"), Decimal("NaN"), False),
    (math.nan, math.nan, False),
    (math.nan, 1.0, True),
    ([1, 2], [1, 2], False),
    ({"a": 1}, {"a": 2}, True),
]


@pytest.mark.parametrize(("before", "after", "differs"), CHANGED)
def test_changed_columns(before: Any, after: Any, differs: bool) -> None:
    columns = (Column("id", "integer", "integer"), Column("v", "x", "x"))
    table = Table(1, "public", "t", columns, ("id",))
    now = datetime.now(UTC)
    change = Change(1, 1, now, table, "update", (1,), {"id": 1, "v": before}, {"id": 1, "v": after})
    assert change.changed == (("v",) if differs else ())
