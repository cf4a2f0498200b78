"""Debezium's shape, there and back."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from headwater.errors import InvalidQuery
from headwater.log.debezium import from_debezium, to_debezium
from headwater.model import Actor, Change, Column, Op, Table
from headwater.protocol import Wire

COLUMNS = tuple(
    Column(name, type_, type_)
    for name, type_ in [("id", "bigint"), ("price", "numeric"), ("at", "timestamp with time zone"),
                        ("data", "bytea"), ("ratio", "double precision")]
)  # fmt: skip
TABLE = Table(1, "shop", "items", COLUMNS, ("id",), 5)
AT = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)


def row(**values: Any) -> dict[str, Any]:
    return {
        "id": 2**60,
        "price": Decimal("1.50"),
        "at": AT,
        "data": b"\x00",
        "ratio": 0.5,
        **values,
    }


@pytest.mark.parametrize(
    ("op", "letter", "before", "after"),
    [
        ("insert", "c", None, row()),
        ("update", "u", row(), row(price=None, ratio=float("inf"))),
        ("delete", "d", row(), None),
        ("truncate", "t", None, None),
        ("reset", "m", None, None),
    ],
)
def test_there_and_back(op: Op, letter: str, before: Any, after: Any) -> None:
    key = (2**60,) if before or after else ()
    change = Change(7, 99, AT, TABLE, op, key, before, after, Actor("ann", None, "t1"))
    envelope = msgspec.json.decode(msgspec.json.encode(to_debezium(change, Wire(TABLE).row)))
    assert envelope["op"] == letter
    assert envelope["source"]["table"] == "items"
    assert envelope["ts_ms"] == int(AT.timestamp() * 1000)
    assert from_debezium(envelope, TABLE) == change


def test_an_envelope_of_debezium_itself() -> None:
    table = Table(1, "public", "items", COLUMNS[:1], ("id",), 5)
    envelope = {"before": None, "after": {"id": 1}, "op": "r", "ts_ms": 1000, "source": {}}
    change = from_debezium(envelope, table)
    assert (change.op, change.key, change.after) == ("insert", (1,), {"id": 1})
    assert change.at == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)


def test_an_unknown_operation() -> None:
    with pytest.raises(InvalidQuery, match="not an operation"):
        from_debezium({"op": "x"}, TABLE)
