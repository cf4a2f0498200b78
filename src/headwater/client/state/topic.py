"""The state of a topic in a client: its position, and the rows that were received.

Pure. The position is where to resume after a lost connection. Receiving a row twice does no harm: a
row is always sent whole, as it is at that time. The rows that existed before are read by the
program (`fill`); if the topic has sent a row since then, the topic's version is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TypeAlias

import msgspec

from headwater import limits
from headwater.errors import ConfigError
from headwater.model import Key, Row
from headwater.protocol import Gap, Poke, Remove, Subscribe, Subscribed, TopicMessage, Upsert

RowOp: TypeAlias = Upsert | Remove
RowId: TypeAlias = tuple[str, Key]


class Ops(msgspec.Struct, frozen=True):
    """A message of a topic. Iterating over it yields its `ops`, the latest one for each row:
    `Upsert` or `Remove`."""

    ops: tuple[RowOp, ...]
    position: str | None
    """The position that this message reaches."""
    at: datetime | None = None
    """When the last of the signals was sent."""
    pull: bool = False
    """Whether the program must read its rows again: after a poke, or after too many changes to
    send."""

    def __iter__(self) -> Iterator[RowOp]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    def __bool__(self) -> bool:
        return self.pull or bool(self.ops)


class TopicState:
    """A topic as the client knows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wire_id = ""
        self.view: int | None = None
        self.position: str | None = None
        self.rows = TopicRows()
        self._begun = False
        self._lost = False

    @property
    def is_due(self) -> bool:
        """It was requested and has not begun."""
        return self.view is None

    def subscribe(self, wire_id: str) -> Subscribe:
        self.wire_id, self.view = wire_id, None
        # It has begun, but its position was never received: it cannot be resumed.
        self._lost = self._begun and self.position is None
        return Subscribe(wire_id, topic=self.name, since=self.position)

    def subscribed(self, message: Subscribed) -> Ops | None:
        """Apply a message of the gateway. Returns what the program gets, if anything."""
        self.view, self._begun = message.view, True
        if not self._lost:
            return None
        self._lost = False
        return self._mark_stale(None)

    def receive(self, message: TopicMessage | Poke | Gap) -> Ops | None:
        """The ops in the message; None if it has only a position."""
        self.position = message.position
        match message:
            case TopicMessage(_, position, at, ops):
                self.rows.take(ops)
                return Ops(ops, position, at) if ops else None
            case Poke(_, position, at):
                return Ops((), position, at, pull=True)
        return self._mark_stale(message.position)

    def _mark_stale(self, position: str | None) -> Ops:
        self.rows.mark_stale()
        return Ops((), position, pull=True)


class TopicRows:
    """The rows that a topic sent, and those that the program has read itself."""

    def __init__(self) -> None:
        self._rows: dict[RowId, Row | None] = {}
        """None for a deleted row."""
        self._reported: dict[RowId, None] = {}
        """The rows that the topic has sent since it last missed something."""

    def of(self, entity: str) -> list[Row]:
        """In the order in which they were first received."""
        return [row for (name, _), row in self._rows.items() if name == entity and row is not None]

    def take(self, ops: Iterable[RowOp]) -> None:
        for op in ops:
            row_id = op.entity, tuple(op.key)
            self._rows[row_id] = op.row if isinstance(op, Upsert) else None
            self._reported[row_id] = None
        self._forget()

    def fill(self, entity: str, rows: Iterable[Row], key: Sequence[str]) -> None:
        """Replace the rows by these, except those that the topic has sent."""
        read: dict[RowId, Row | None] = {(entity, _key(row, key)): row for row in rows}
        reported = {row_id: self._rows.get(row_id) for row_id in self._reported}
        others = {row_id: row for row_id, row in self._rows.items() if row_id[0] != entity}
        # The rows that were read stay in their order, also if the topic has newer versions.
        self._rows = others | read | reported
        self._forget()

    def mark_stale(self) -> None:
        """Something was missed: the rows that the topic sent may be out of date."""
        self._reported.clear()

    def _forget(self) -> None:
        if len(self._rows) <= limits.CLIENT_TOPIC_ROWS_MAX:
            return
        # Deleted rows first: programs do not show them.
        for row_id in [row_id for row_id, row in self._rows.items() if row is None]:
            del self._rows[row_id]
            self._reported.pop(row_id, None)
        while len(self._rows) > limits.CLIENT_TOPIC_ROWS_MAX:
            oldest = next(iter(self._rows))
            del self._rows[oldest]
            self._reported.pop(oldest, None)


def _key(row: Row, names: Sequence[str]) -> Key:
    try:
        return tuple(row[name] for name in names)
    except KeyError as error:
        raise ConfigError(
            f"a row has no column {error.args[0]}, which is named as its key",
            hint='Name the primary key: topic.fill("messages", rows, key="id").',
        ) from None


class Waiting:
    """The ops that wait for one reader of a topic: each row once. Too many become a pull."""

    def __init__(self) -> None:
        self._ops: dict[RowId, RowOp] = {}
        self._position: str | None = None
        self._at: datetime | None = None
        self._pull = False

    def __bool__(self) -> bool:
        return self._pull or bool(self._ops)

    def add(self, update: Ops) -> None:
        self._position, self._at = update.position, update.at or self._at
        self._pull |= update.pull
        for op in update:
            row_id = op.entity, tuple(op.key)
            self._ops.pop(row_id, None)
            self._ops[row_id] = op
        if len(self._ops) > limits.CLIENT_TOPIC_ROWS_MAX:
            self._ops.clear()
            self._pull = True

    def take(self) -> Ops:
        taken = Ops(tuple(self._ops.values()), self._position, self._at, self._pull)
        self._ops, self._pull = {}, False
        return taken
