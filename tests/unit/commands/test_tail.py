"""A change as `headwater tail` prints it."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from headwater.commands.output import change_as_json
from headwater.commands.tail import change_line
from headwater.model import Change, Column, Origin, Position, Table, Transaction

AT = datetime(2026, 11, 18, 9, 30, 0, 120000, UTC)
COLUMNS = (Column("id", "integer", "integer"), Column("name", "text", "text"))
TABLE = Table(1, "shop", "customers", COLUMNS, ("id",))


def change(origin: Origin | None) -> Change:
    return Change(7, 99, AT, TABLE, "insert", (8,), None, {"id": 8, "name": "Ann"}, origin=origin)


@pytest.mark.parametrize(
    ("origin", "end"),
    [
        (None, "name=Ann"),
        (Origin("shop"), "name=Ann  from shop"),
        (Origin("shop", "0-1-4711", AT, "mysql"), "name=Ann  from shop at 0-1-4711"),
        (Origin("shop", "a\x1b[31m"), "name=Ann  from shop at a·[31m"),
    ],
)
def test_the_origin_for_people(origin: Origin | None, end: str) -> None:
    assert change_line(change(origin)).plain.endswith(end)


def test_the_origin_for_programs() -> None:
    transaction = Transaction(99, (), Position("a", 5, 9))
    found = json.loads(change_as_json(change(Origin("shop", "0-1-4711", AT)), transaction))
    assert found["origin"] == {
        "source": "shop", "position": "0-1-4711", "committed_at": "2026-11-18T09:30:00.120000Z",
        "kind": None,
    }  # fmt: skip
    assert json.loads(change_as_json(change(None), transaction))["origin"] is None
