"""Changes in the shape that Debezium's consumers expect, and back. Pure.

    {"before": …, "after": …, "op": "u", "ts_ms": …, "source": {"table": "orders", "txId": 751, …}}

`op` is c, u, d, t (truncate), r (a row of a snapshot) or m, a message without rows, for `reset`,
which Debezium does not have. The actor and the sequence number, for which Debezium has no field,
are in `source`. For a mirrored change, `source` also has the name of its source, the source's own
position and the time of the commit there, and `connector` is the source's kind; `ts_us` of the
envelope is when the change was written here.

A *record* is what Debezium writes to a topic: a key and an envelope, or a key and None (a
tombstone, which says that no earlier record of the key is needed). A delete is followed by its
tombstone. A changed key is a delete, its tombstone and a create, as it is in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import msgspec

from headwater.errors import InvalidQuery
from headwater.log.images import ImageDecoder
from headwater.model import NO_ACTOR, Actor, Change, Key, Op, Origin, Position, Row, Table

Envelope: TypeAlias = dict[str, Any]

DebeziumRecord: TypeAlias = tuple[dict[str, Any] | None, Envelope | None]
"""The key by column, None for a change of a whole table; and the envelope, None for a tombstone."""

_OPS: dict[Op, str] = {"insert": "c", "update": "u", "delete": "d", "truncate": "t", "reset": "m"}
_READ: dict[str, Op] = {"r": "insert", **{letter: op for op, letter in _OPS.items()}}
_CONNECTOR = "headwater"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _unchanged(row: Row) -> Row:
    return row


# ------------------------------------------------------------------------ envelopes


def to_debezium(change: Change, write: Callable[[Row], Row] = _unchanged) -> Envelope:
    """The envelope of a change; `write` converts its rows to their form on the wire."""
    source = _source(change.table, change.origin, change.at)
    source |= {"txId": change.xid, "seq": change.seq}
    source |= {
        name: value
        for name, value in msgspec.structs.asdict(change.actor).items()
        if value is not None
    }
    return _envelope(
        _OPS[change.op],
        None if change.before is None else write(change.before),
        None if change.after is None else write(change.after),
        source,
        change.at,
    )


def snapshot_envelopes(
    rows: Iterable[Row],
    table: Table,
    position: Position,
    at: datetime,
    *,
    origin: Origin | None = None,
    write: Callable[[Row], Row] = _unchanged,
) -> Iterator[Envelope]:
    """The rows of a table at a position, as a consumer gets them before the changes after that
    position. `origin` is where the source of a mirror was then."""
    for row in rows:
        source = _source(table, origin, at)
        source |= {"snapshot": "true", "log_position": str(position)}
        yield _envelope("r", None, write(row), source, at)


def _envelope(
    op: str, before: Row | None, after: Row | None, source: dict[str, Any], at: datetime
) -> Envelope:
    microseconds = _microseconds(at)
    return {
        "before": before,
        "after": after,
        "source": source,
        "op": op,
        "ts_ms": microseconds // 1000,
        "ts_us": microseconds,
    }


def _source(table: Table, origin: Origin | None, at: datetime) -> dict[str, Any]:
    """Which table, and when the change was committed: 0 where the source did not say."""
    source: dict[str, Any] = {"connector": _CONNECTOR, "schema": table.schema, "table": table.name}
    committed_at: datetime | None = at
    if origin is not None:
        source |= {"connector": origin.kind or _CONNECTOR, "name": origin.source}
        source |= {} if origin.position is None else {"position": origin.position}
        committed_at = origin.committed_at
    microseconds = 0 if committed_at is None else _microseconds(committed_at)
    return source | {"ts_ms": microseconds // 1000, "ts_us": microseconds}


def from_debezium(envelope: Mapping[str, Any], table: Table) -> Change:
    """The change in an envelope, with the types of its table. Envelopes of Debezium itself are read
    too, if their values are plain JSON. A row of a snapshot is an insert."""
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
        _moment(envelope) or _moment(source) or _EPOCH,
        table,
        op,
        () if image is None else table.key_of(image),
        before,
        after,
        NO_ACTOR if actor == NO_ACTOR else actor,
        _origin(source),
    )


def _origin(source: Mapping[str, Any]) -> Origin | None:
    if not source.get("name"):
        return None
    connector = source.get("connector")
    kind = None if connector == _CONNECTOR else connector
    return Origin(source["name"], source.get("position"), _moment(source), kind)


def _moment(stamps: Mapping[str, Any]) -> datetime | None:
    microseconds = stamps.get("ts_us")
    if microseconds is None:
        microseconds = int(stamps.get("ts_ms") or 0) * 1000
    return _EPOCH + timedelta(microseconds=int(microseconds)) if microseconds else None


def _microseconds(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)


def _row(row: dict[str, Any] | None, table: Table) -> Row | None:
    return None if row is None else ImageDecoder(table)(msgspec.json.encode(row).decode())


# ------------------------------------------------------------------------ records


def to_debezium_records(
    changes: Change | Iterable[Change], write: Callable[[Row], Row] = _unchanged
) -> list[DebeziumRecord]:
    """The records of a change, or of consecutive changes such as the delete and the insert that a
    changed key is in the log."""
    listed = (changes,) if isinstance(changes, Change) else changes
    return [
        record for each in listed for change in _by_key(each) for record in _records(change, write)
    ]


def _records(change: Change, write: Callable[[Row], Row]) -> Iterator[DebeziumRecord]:
    key = _key(change.table, change.key, write) if change.key else None
    yield key, to_debezium(change, write)
    if change.op == "delete":
        yield key, None


def _by_key(change: Change) -> Iterator[Change]:
    """An update that changed the key is two changes: each has one key."""
    before, after = change.before, change.after
    if before is None or after is None or change.table.key_of(before) == change.table.key_of(after):
        yield change
        return
    key = change.table.key_of(before)
    yield msgspec.structs.replace(change, op="delete", key=key, after=None)
    yield msgspec.structs.replace(change, op="insert", before=None)


def _key(table: Table, key: Key, write: Callable[[Row], Row]) -> dict[str, Any]:
    return dict(write(dict(zip(table.key, key, strict=True))))


def from_debezium_records(records: Iterable[DebeziumRecord], table: Table) -> list[Change]:
    """The changes of records of one table, in their order. Tombstones repeat what the delete before
    them said, and are left out."""
    return [from_debezium(envelope, table) for _, envelope in records if envelope is not None]
