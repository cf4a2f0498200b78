"""A topic as a client knows it: where it is, and the rows that it was told of.

Pure. The position is where to go on after a lost connection. What is told twice does no harm: a row
is always told whole, as it is then. What was there before the topic was followed is for the program
to read (`fill`); of a row that the topic has told of since, what the topic said counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TypeAlias

import msgspec

from headwater import limits
from headwater.errors import ConfigError
from headwater.model import Key, Row
from headwater.protocol import Gap, Poke, Remove, Subscribe, Subscribed, Topic, Upsert

Op: TypeAlias = Upsert | Remove
Place: TypeAlias = tuple[str, Key]


class Ops(msgspec.Struct, frozen=True):
    """What a topic brought at once. Iterating over it yields its `ops`, the latest word about each
    row: `Upsert` or `Remove`."""

    ops: tuple[Op, ...]
    position: str | None
    """What has been told is complete up to here."""
    at: datetime | None = None
    """When the last of it was signalled."""
    pull: bool = False
    """Whether to read again what one shows: a poke, or more happened than could be told."""

    def __iter__(self) -> Iterator[Op]:
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
        """It was asked for and has not begun."""
        return self.view is None

    def subscribe(self, wire_id: str) -> Subscribe:
        self.wire_id, self.view = wire_id, None
        # It has begun at a place that it was never told: there is no way to go on from there.
        self._lost = self._begun and self.position is None
        return Subscribe(wire_id, topic=self.name, since=self.position)

    def subscribed(self, message: Subscribed) -> Ops | None:
        """What follows from it, if anything."""
        self.view, self._begun = message.view, True
        if not self._lost:
            return None
        self._lost = False
        return self._doubt(None)

    def receive(self, message: Topic | Poke | Gap) -> Ops | None:
        """What the message brings; None where it tells no more than the position."""
        self.position = message.position
        match message:
            case Topic(_, position, at, ops):
                self.rows.take(ops)
                return Ops(ops, position, at) if ops else None
            case Poke(_, position, at):
                return Ops((), position, at, pull=True)
        return self._doubt(message.position)

    def _doubt(self, position: str | None) -> Ops:
        self.rows.doubt()
        return Ops((), position, pull=True)


class TopicRows:
    """The rows that a topic told of, and those that the program has read itself."""

    def __init__(self) -> None:
        self._rows: dict[Place, Row | None] = {}
        """None for one that is gone."""
        self._told: dict[Place, None] = {}
        """What the topic said something about since nothing was missed."""

    def of(self, entity: str) -> list[Row]:
        """In the order in which they were first heard of."""
        return [row for (name, _), row in self._rows.items() if name == entity and row is not None]

    def take(self, ops: Iterable[Op]) -> None:
        for op in ops:
            place = op.entity, tuple(op.key)
            self._rows[place] = op.row if isinstance(op, Upsert) else None
            self._told[place] = None
        self._forget()

    def fill(self, entity: str, rows: Iterable[Row], key: Sequence[str]) -> None:
        """These are the rows that there are, but for what the topic has told."""
        read: dict[Place, Row | None] = {(entity, _key(row, key)): row for row in rows}
        told = {place: self._rows.get(place) for place in self._told}
        others = {place: row for place, row in self._rows.items() if place[0] != entity}
        # Those that were read keep their order, also where the topic has newer ones.
        self._rows = others | read | told
        self._forget()

    def doubt(self) -> None:
        """Something was missed: what the topic has told may be out of date."""
        self._told.clear()

    def _forget(self) -> None:
        if len(self._rows) <= limits.CLIENT_TOPIC_ROWS_MAX:
            return
        # Those that are gone first: nobody shows them.
        for place in [place for place, row in self._rows.items() if row is None]:
            del self._rows[place]
            self._told.pop(place, None)
        while len(self._rows) > limits.CLIENT_TOPIC_ROWS_MAX:
            oldest = next(iter(self._rows))
            del self._rows[oldest]
            self._told.pop(oldest, None)


def _key(row: Row, names: Sequence[str]) -> Key:
    try:
        return tuple(row[name] for name in names)
    except KeyError as error:
        raise ConfigError(
            f"a row has no column {error.args[0]}, which is to be its key",
            hint='Name the primary key: topic.fill("messages", rows, key="id").',
        ) from None


class Waiting:
    """What waits for one reader of a topic: each row once. Too much of it gives way to a pull."""

    def __init__(self) -> None:
        self._ops: dict[Place, Op] = {}
        self._position: str | None = None
        self._at: datetime | None = None
        self._pull = False

    def __bool__(self) -> bool:
        return self._pull or bool(self._ops)

    def add(self, news: Ops) -> None:
        self._position, self._at = news.position, news.at or self._at
        self._pull |= news.pull
        for op in news:
            place = op.entity, tuple(op.key)
            self._ops.pop(place, None)
            self._ops[place] = op
        if len(self._ops) > limits.CLIENT_TOPIC_ROWS_MAX:
            self._ops.clear()
            self._pull = True

    def take(self) -> Ops:
        taken = Ops(tuple(self._ops.values()), self._position, self._at, self._pull)
        self._ops, self._pull = {}, False
        return taken
