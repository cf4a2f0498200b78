"""Which changes a filtered feed carries, and what of them may be seen behind a filter."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headwater.errors import InvalidQuery
from headwater.live.feed import ChangeFilter
from headwater.live.filters.filter import c
from headwater.live.needs import Undecided
from headwater.model import Change, Column, Op, Table

ORDERS = Table(
    1,
    "public",
    "orders",
    (Column("id", "integer", "integer"), Column("region", "integer", "integer")),
    ("id",),
)
AT = datetime(2026, 1, 1, tzinfo=UTC)
CASES: list[tuple[Op, Any, Any, bool]] = [
    ("insert", None, 7, True),
    ("insert", None, 8, False),
    ("insert", None, None, False),
    ("update", 8, 7, True),
    ("update", 7, 8, True),
    ("update", 8, 9, False),
    ("delete", 7, None, True),
    ("delete", 8, None, False),
]


@pytest.mark.parametrize(("op", "before", "after", "carried"), CASES)
def test_carries(op: Op, before: Any, after: Any, carried: bool) -> None:
    was = None if op == "insert" else {"id": 1, "region": before}
    now = None if op == "delete" else {"id": 1, "region": after}
    change = Change(1, 1, AT, ORDERS, op, (1,), was, now)
    assert ChangeFilter(c.region == 7, ORDERS).carries(change) is carried


@pytest.mark.parametrize("op", ["truncate", "reset"])
def test_changes_of_the_whole_table_are_carried(op: Op) -> None:
    assert ChangeFilter(c.region == 7, ORDERS).carries(Change(1, 1, AT, ORDERS, op))


def test_a_column_that_is_not_there() -> None:
    with pytest.raises(InvalidQuery, match="no filterable column 'colour'"):
        ChangeFilter(c.colour == 7, ORDERS)


COLUMNS = (
    Column("id", "integer", "integer"),
    Column("owner", "integer", "integer"),
    Column("span", "interval", "interval"),
)
TABLE = Table(1, "public", "t", COLUMNS, ("id",))
MINE, THEIRS = {"id": 1, "owner": 7, "span": "P1D"}, {"id": 1, "owner": 8, "span": "P1D"}


def change(op: Any, before: Any, after: Any) -> Change:
    return Change(1, 1, datetime(2026, 1, 1, tzinfo=UTC), TABLE, op, (1,), before, after)


@pytest.mark.parametrize(
    ("happened", "seen"),
    [
        (("insert", None, MINE), ("insert", None, MINE)),
        (("insert", None, THEIRS), None),
        (("update", MINE, MINE), ("update", MINE, MINE)),
        (("update", MINE, THEIRS), ("delete", MINE, None)),
        (("update", THEIRS, MINE), ("insert", None, MINE)),
        (("update", THEIRS, THEIRS), None),
        (("delete", MINE, None), ("delete", MINE, None)),
        (("delete", THEIRS, None), None),
        (("truncate", None, None), ("truncate", None, None)),
    ],
)
def test_seen(happened: Any, seen: Any) -> None:
    found = ChangeFilter(c.owner == 7, TABLE).seen(change(*happened))
    assert found == (None if seen is None else change(*seen))


def test_it_never_guesses() -> None:
    with pytest.raises(Undecided):
        ChangeFilter(c.span == "24:00:00", TABLE).seen(change("insert", None, MINE))
    with pytest.raises(InvalidQuery):
        ChangeFilter(c.nowhere == 1, TABLE)
