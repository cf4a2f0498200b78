"""Changes in the shape that Debezium's consumers expect, and back. Pure.

    {"before": …, "after": …, "op": "u", "ts_ms": …, "source": {"table": "orders", "txId": 751, …}}

`op` is c, u, d, t (truncate) or m, a message without rows, for `reset`, which Debezium does not
have. The actor and the sequence number, for which Debezium has no field, are in `source`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from headwater.errors import InvalidQuery
from headwater.log.images import ImageDecoder
from headwater.model import NO_ACTOR, Actor, Change, Op, Row, Table

_OPS: dict[Op, str] = {"insert": "c", "update": "u", "delete": "d", "truncate": "t", "reset": "m"}
_READ: dict[str, Op] = {"r": "insert", **{letter: op for op, letter in _OPS.items()}}


def _unchanged(row: Row) -> Row:
    return row


def to_debezium(change: Change, write: Callable[[Row], Row] = _unchanged) -> dict[str, Any]:
    """The envelope of a change; `write` converts its rows to their form on the wire."""
    milliseconds = int(change.at.timestamp() * 1000)
    source: dict[str, Any] = {
        "connector": "headwater",
        "schema": change.table.schema,
        "table": change.table.name,
        "txId": change.xid,
        "seq": change.seq,
        "ts_ms": milliseconds,
        "ts_us": int(change.at.timestamp() * 1_000_000 + 0.5),
    }
    source |= {
        name: value
        for name, value in msgspec.structs.asdict(change.actor).items()
        if value is not None
    }
    return {
        "before": None if change.before is None else write(change.before),
        "after": None if change.after is None else write(change.after),
        "source": source,
        "op": _OPS[change.op],
        "ts_ms": milliseconds,
    }


def from_debezium(envelope: dict[str, Any], table: Table) -> Change:
    """The change in an envelope, with the types of its table. Envelopes of Debezium itself are read
    too, if their values are plain JSON."""
    op = _READ.get(envelope.get("op", ""))
    if op is None:
        raise InvalidQuery(f"{envelope.get('op')!r} is not an operation", path="op")
    source = envelope.get("source") or {}
    before, after = (_row(envelope.get(side), table) for side in ("before", "after"))
    image = after if after is not None else before
    actor = Actor(*(source.get(name) for name in ("user_id", "function_name", "trace_id")))
    return Change(
        int(source.get("seq") or 0),
        int(source.get("txId") or 0),
        _moment(envelope, source),
        table,
        op,
        () if image is None else table.key_of(image),
        before,
        after,
        NO_ACTOR if actor == NO_ACTOR else actor,
    )


def _moment(envelope: dict[str, Any], source: dict[str, Any]) -> datetime:
    microseconds = source.get("ts_us")
    if microseconds is None:
        microseconds = int(envelope.get("ts_ms") or source.get("ts_ms") or 0) * 1000
    return datetime.fromtimestamp(int(microseconds) // 1_000_000, UTC).replace(
        microsecond=int(microseconds) % 1_000_000
    )


def _row(row: dict[str, Any] | None, table: Table) -> Row | None:
    return None if row is None else ImageDecoder(table)(msgspec.json.encode(row).decode())
