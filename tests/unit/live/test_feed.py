"""Which changes a filtered feed carries."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headwater.errors import InvalidQuery
from headwater.live.feed import FeedFilter
from headwater.live.filter import c
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
    assert FeedFilter(c.region == 7, ORDERS).carries(change) is carried


@pytest.mark.parametrize("op", ["truncate", "reset"])
def test_changes_of_the_whole_table_are_carried(op: Op) -> None:
    assert FeedFilter(c.region == 7, ORDERS).carries(Change(1, 1, AT, ORDERS, op))


def test_a_column_that_is_not_there() -> None:
    with pytest.raises(InvalidQuery, match="no filterable column 'colour'"):
        FeedFilter(c.colour == 7, ORDERS)
