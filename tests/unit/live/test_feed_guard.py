"""What of a change may be seen behind a mandatory filter."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headwater.errors import InvalidQuery
from headwater.live.feed_guard import FeedGuard
from headwater.live.filter import c
from headwater.live.needs import Undecided
from headwater.model import Change, Column, Table

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
    found = FeedGuard(c.owner == 7, TABLE).seen(change(*happened))
    assert found == (None if seen is None else change(*seen))


def test_it_never_guesses() -> None:
    with pytest.raises(Undecided):
        FeedGuard(c.span == "24:00:00", TABLE).seen(change("insert", None, MINE))
    with pytest.raises(InvalidQuery):
        FeedGuard(c.nowhere == 1, TABLE)
