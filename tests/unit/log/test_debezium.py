"""Debezium's shape, there and back."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from headwater.errors import InvalidQuery
from headwater.log.debezium import (
    from_debezium,
    from_debezium_records,
    snapshot_envelopes,
    to_debezium,
    to_debezium_records,
)
from headwater.model import Actor, Change, Column, Op, Origin, Position, Table
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


COMMITTED = datetime(2026, 1, 2, 3, 4, 4, 999999, UTC)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (
            Origin("shop", "0-1-4711", COMMITTED, "mysql"),
            {"connector": "mysql", "name": "shop", "position": "0-1-4711"},
        ),
        (
            Origin("shop", "0-1-4711", COMMITTED),
            {"connector": "headwater", "name": "shop", "position": "0-1-4711"},
        ),
        (Origin("shop", None, None, "sqlite"), {"connector": "sqlite", "name": "shop"}),
    ],
)
def test_a_mirrored_change(origin: Origin, expected: dict[str, Any]) -> None:
    change = Change(7, 99, AT, TABLE, "insert", (2**60,), None, row(), origin=origin)
    envelope = msgspec.json.decode(msgspec.json.encode(to_debezium(change, Wire(TABLE).row)))
    source = envelope["source"]
    assert {name: source[name] for name in expected} == expected
    committed = 0 if origin.committed_at is None else int(COMMITTED.timestamp() * 1000)
    assert source["ts_ms"] == committed
    assert envelope["ts_ms"] == int(AT.timestamp() * 1000)
    assert from_debezium(envelope, TABLE) == change


def test_the_rows_of_a_snapshot() -> None:
    position = Position("9f3a61c2", 748, 752, (749,))
    origin = Origin("shop", "0-1-4711", COMMITTED, "mysql")
    (first, second) = snapshot_envelopes(
        [row(id=1), row(id=2)], TABLE, position, AT, origin=origin, write=Wire(TABLE).row
    )
    assert (first["op"], first["before"], first["after"]["id"]) == ("r", None, 1)
    assert first["source"]["snapshot"] == "true"
    assert Position.parse(first["source"]["log_position"]) == position
    assert (second["source"]["name"], second["source"]["position"]) == ("shop", "0-1-4711")
    read = from_debezium(msgspec.json.decode(msgspec.json.encode(second)), TABLE)
    assert (read.op, read.key, read.after, read.origin) == ("insert", (2,), row(id=2), origin)


def test_a_delete_is_followed_by_a_tombstone() -> None:
    change = Change(7, 99, AT, TABLE, "delete", (2**60,), row(), None)
    (key, envelope), tombstone = to_debezium_records(change)
    assert (key, envelope and envelope["op"]) == ({"id": 2**60}, "d")
    assert tombstone == (key, None)


def test_a_changed_key_is_a_delete_a_tombstone_and_a_create() -> None:
    pair = [
        Change(7, 99, AT, TABLE, "delete", (1,), row(id=1), None),
        Change(8, 99, AT, TABLE, "insert", (2,), None, row(id=2)),
    ]
    update = Change(7, 99, AT, TABLE, "update", (2,), row(id=1), row(id=2))
    for changes in (pair, update):
        records = to_debezium_records(changes, Wire(TABLE).row)
        assert [(key, value and value["op"]) for key, value in records] == [
            ({"id": 1}, "d"), ({"id": 1}, None), ({"id": 2}, "c"),
        ]  # fmt: skip
    assert from_debezium_records(to_debezium_records(pair, Wire(TABLE).row), TABLE) == pair


def test_records_of_a_whole_table_have_no_key() -> None:
    change = Change(7, 99, AT, TABLE, "truncate")
    ((key, envelope),) = to_debezium_records(change)
    assert (key, envelope and envelope["op"]) == (None, "t")


def test_an_envelope_of_debezium_itself() -> None:
    table = Table(1, "public", "items", COLUMNS[:1], ("id",), 5)
    envelope = {"before": None, "after": {"id": 1}, "op": "r", "ts_ms": 1000, "source": {}}
    change = from_debezium(envelope, table)
    assert (change.op, change.key, change.after) == ("insert", (1,), {"id": 1})
    assert change.at == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert change.origin is None
    source = {"connector": "mysql", "name": "dbserver1", "ts_ms": 500, "file": "bin.1", "pos": 4}
    change = from_debezium(envelope | {"source": source}, table)
    half = datetime(1970, 1, 1, microsecond=500_000, tzinfo=UTC)
    assert change.origin == Origin("dbserver1", None, half, "mysql")


def test_an_unknown_operation() -> None:
    with pytest.raises(InvalidQuery, match="not an operation"):
        from_debezium({"op": "x"}, TABLE)
