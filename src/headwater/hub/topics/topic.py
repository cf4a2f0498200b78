"""A topic with subscribers, and the updates that changes and signals mean for it. Nothing waits.

Changes and signals of a topic become a `TopicUpdate`: each row once, by its key, in the order of
the last change. A changed row is in the log; a row that was only signalled is read later, in a
snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Generic, TypeAlias, TypeVar

from headwater import limits
from headwater.hub.reading.tables import KnownTable
from headwater.hub.subscriptions.catch_up import Place
from headwater.hub.subscriptions.costs import Cost
from headwater.hub.topics.rows import KeyReader
from headwater.log.signals import channel_of, is_signals
from headwater.model import Change, Key, Position, Row, Table
from headwater.protocol import Frame, Gap, Poke, Remove, TopicMessage, Upsert, Wire, plain
from headwater.topics.definitions import TopicDefinition

_RECONCILE_TOPIC_ROWS = 8
"""Rows of a topic that are compared: the last ones sent."""


RowOp: TypeAlias = Upsert | Remove
SubscriptionT = TypeVar("SubscriptionT")


class TopicUpdate:
    """What to send to the subscribers of a topic."""

    __slots__ = ("at", "gap", "ops", "poked")

    def __init__(self) -> None:
        self.ops: dict[Key, RowOp | None] = {}
        """None for a row that must be read."""
        self.at: datetime | None = None
        self.poked = False
        self.gap = False
        """Whether rows are missing: clients must read everything again."""

    def __bool__(self) -> bool:
        return bool(self.ops) or self.poked or self.gap

    def add(self, key: Key, op: RowOp | None) -> None:
        """The last operation on a row replaces earlier ones."""
        self.ops.pop(key, None)
        self.ops[key] = op
        if len(self.ops) > limits.TOPIC_ROWS_MAX:
            self.lose()

    def lose(self) -> None:
        self.gap = True
        self.ops.clear()

    def merge(self, later: TopicUpdate) -> None:
        self.poked |= later.poked
        self.at = later.at or self.at
        if later.gap:
            self.lose()
        elif not self.gap:
            for key, op in later.ops.items():
                self.add(key, op)

    @property
    def unread(self) -> Iterator[Key]:
        return (key for key, op in self.ops.items() if op is None)


class TopicView(Generic[SubscriptionT]):
    """The state that all subscriptions of a topic share. `pending` are signals that are still being
    collected, and `safe` is the place before them."""

    __slots__ = (
        "channel", "cost", "definition", "due", "id", "name", "pending", "safe", "sent",
        "subscribers",
    )  # fmt: skip

    def __init__(self, id: int, name: str, definition: TopicDefinition) -> None:
        self.id = id
        self.name = name
        self.definition = definition
        self.channel = channel_of(name)
        self.subscribers: dict[SubscriptionT, None] = {}
        self.pending: TopicUpdate | None = None
        self.due = 0.0
        self.safe: Place | None = None
        self.sent: dict[Key, RowOp] = {}
        """The rows that were sent last, to be compared with the database. Only for a topic that is
        derived from a table."""
        self.cost = Cost()

    def remember(self, update: TopicUpdate) -> None:
        """Store the rows of an update that is sent next."""
        if self.definition.table is None:
            return
        if update.gap:
            self.sent.clear()
        for key, op in update.ops.items():
            if op is not None:
                self.sent.pop(key, None)
                self.sent[key] = op
        while len(self.sent) > _RECONCILE_TOPIC_ROWS:
            del self.sent[next(iter(self.sent))]

    def has_sent(self, position: Position) -> bool:
        """Whether nothing up to the position is pending."""
        return self.safe is None or self.safe.reached.covers(position)

    def settle(self, update: TopicUpdate, rows: Mapping[Key, Row], known: KnownTable) -> None:
        """Fill in the rows that were read."""
        of_key = KeyReader(known.table).of_key
        for key in list(update.unread):
            row = rows.get(of_key(key))
            update.ops[key] = (
                upsert(known.table, known.wire, row)
                if row is not None and self.carries(row)
                else Remove(known.table.label, tuple(map(plain, key)))
            )

    def carries(self, row: Row) -> bool:
        """Whether a row belongs to this topic: for a derived topic, its columns decide."""
        definition = self.definition
        return definition.table is None or definition.pattern.fill(row) == self.name

    def frame(self, update: TopicUpdate, position: str, parents: Iterable[Upsert] = ()) -> Frame:
        """One message with the whole update."""
        at = update.at or datetime.now(UTC)
        if update.gap:
            return Frame(Gap(self.id, position, None, "resync"))
        if update.poked:
            return Frame(Poke(self.id, position, at))
        ops = tuple(op for op in update.ops.values() if op is not None)
        return Frame(TopicMessage(self.id, position, at, (*parents, *ops)))


def upsert(table: Table, wire: Wire, row: Row) -> Upsert:
    return Upsert(table.label, tuple(map(plain, table.key_of(row))), wire.row(row))


# ------------------------------------------------------------------------ collecting


class UpdateCollector(Generic[SubscriptionT]):
    """Collects changes and signals into updates, by topic."""

    def __init__(
        self,
        views: Mapping[str, TopicView[SubscriptionT]],
        known: Mapping[str, KnownTable],
        wire_of: Callable[[Table], Wire],
    ) -> None:
        self.update: dict[TopicView[SubscriptionT], TopicUpdate] = {}
        self.signals = 0
        self.refused = 0
        """How many ids were not valid keys."""
        self._views = views
        self._known = known
        self._wire_of = wire_of
        self._readers: dict[str, KeyReader] = {}
        self.tables: dict[int, Table] = {}
        """The tables of the changes, by shape."""
        self._meanings: dict[int, tuple[TopicDefinition, ...] | None] = {}
        self._derived: dict[tuple[str, str], dict[TopicDefinition, None]] = {}
        for definition in {view.definition for view in views.values()}:
            if definition.table is not None and definition.table in known:
                table = known[definition.table].table
                self._derived.setdefault((table.schema, table.name), {})[definition] = None

    def wants(self, table: Table) -> bool:
        return is_signals(table) or (table.schema, table.name) in self._derived

    def take(self, changes: Iterable[Change]) -> None:
        for change in changes:
            table = change.table
            if table.id not in self._meanings:
                self.tables[table.id] = table
                derived = self._derived.get((table.schema, table.name), ())
                self._meanings[table.id] = None if is_signals(table) else tuple(derived)
            definitions = self._meanings[table.id]
            if definitions is None:
                self._take_signal(change)
            elif definitions:
                self._take_change(change, definitions)

    def _of(self, view: TopicView[SubscriptionT], change: Change) -> TopicUpdate:
        update = self.update.get(view)
        if update is None:
            update = self.update[view] = TopicUpdate()
        update.at = change.at
        return update

    def _take_signal(self, change: Change) -> None:
        if change.after is None:
            return  # the table of signals was enabled, like any table
        view = self._views.get(change.after["topic"])
        if view is None:
            return
        self.signals += 1
        update = self._of(view, change)
        entity = view.definition.entity
        if entity is None:
            update.poked = True
            return
        reader = self._readers.get(entity)
        if reader is None:
            reader = self._readers[entity] = KeyReader(self._known[entity].table)
        for id in change.after["ids"]:
            key = reader(id)
            if key is None:
                self.refused += 1
            elif not update.gap:
                update.add(key, None)

    def _take_change(self, change: Change, definitions: Sequence[TopicDefinition]) -> None:
        for definition in definitions:
            if change.op in ("truncate", "reset"):
                for view in self._views.values():
                    if view.definition is definition:
                        self._of(view, change).lose()
                continue
            before = self._named(definition, change.before)
            after = self._named(definition, change.after)
            if before is not None and before is not after:
                gone = Remove(change.table.label, tuple(map(plain, change.key)))
                self._add(before, change, gone)
            if after is not None:
                assert change.after is not None
                op = upsert(change.table, self._wire_of(change.table), change.after)
                self._add(after, change, op)

    def _named(
        self, definition: TopicDefinition, row: Row | None
    ) -> TopicView[SubscriptionT] | None:
        """The topic that a row belongs to by its columns, if it has subscribers."""
        if row is None:
            return None
        name = definition.pattern.fill(row)
        view = None if name is None else self._views.get(name)
        return view if view is not None and view.definition is definition else None

    def _add(self, view: TopicView[SubscriptionT], change: Change, op: RowOp) -> None:
        update = self._of(view, change)
        try:
            if not update.gap:
                update.add(change.key, op)
        except TypeError:
            update.lose()  # a key of a composite type, which cannot be compared
