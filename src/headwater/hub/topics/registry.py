"""All topics of a hub: their subscriptions, and the frames they are sent in each flush.

A flush collects the changes and signals of each topic. Rows that were only signalled are read in
its snapshot, with one statement for each table. Then each topic gets one frame for all subscribers.
With a window, signals of a topic are collected for a while before they are sent; subscribers are
not sent a position after signals that are still being collected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
import psycopg

from headwater import limits
from headwater.database import Connection
from headwater.errors import CaptureError, Forbidden, HeadwaterError
from headwater.hub.flush_state import FlushState
from headwater.hub.part import Flush, Part
from headwater.hub.reading.row_security import check_own_reading, feed_rights
from headwater.hub.reading.tables import KnownTable, TableIdentity, identities
from headwater.hub.resources import Resources
from headwater.hub.subscriptions.catch_up import Place
from headwater.hub.subscriptions.subscriber import Access, Subscriber
from headwater.hub.subscriptions.subscription import not_taken
from headwater.hub.topics.rows import Fetch, Found, KeyReader, fetch
from headwater.hub.topics.subscription import TopicSubscription
from headwater.hub.topics.topic import TopicUpdate, TopicView, UpdateCollector, upsert
from headwater.log.signals import is_signals
from headwater.log.waking.listener import NotifyListener
from headwater.model import Key, Position, Table, Transaction
from headwater.protocol import Frame, Remove, Upsert, Wire
from headwater.topics.definitions import TopicDefinition

logger = logging.getLogger(__name__)


_TopicView: TypeAlias = TopicView[TopicSubscription]


class TopicRegistry(Part):
    """All topics of a hub that have subscribers. `listener` and `fetch` use the database; a unit
    test passes others."""

    def __init__(
        self,
        resources: Resources,
        flushes: FlushState,
        window: float = 0.0,
        *,
        listener: NotifyListener | None = None,
        fetch: Fetch = fetch,
    ) -> None:
        self._resources = resources
        self._flushes = flushes
        self._window = window
        """Seconds for which signals are collected; 0 to send them with each flush."""
        self._views: dict[str, _TopicView] = {}
        self._known: dict[str, KnownTable] = {}
        self._stale: set[str] = set()
        self._paused: dict[str, float] = {}
        """Tables that were slow to read, and the time until which flushes do not read them."""
        self._wires: dict[int, Wire] = {}
        self._collecting: dict[_TopicView, None] = {}
        """Topics with pending signals, the oldest first."""
        self._place: Place | None = None
        self._positions_sent_at = time.monotonic()
        self._lost = False
        self.ready: dict[TopicSubscription, None] = {}
        """Subscriptions that have caught up, and wait for a flush to read their rows."""
        self._updates: FlushUpdates | None = None
        self.listener = listener or NotifyListener(resources.url, flushes.notified)
        self._fetch_rows = fetch

    def __iter__(self) -> Iterator[_TopicView]:
        return iter(list(self._views.values()))

    def __len__(self) -> int:
        return len(self._views)

    @property
    def place(self) -> Place:
        """All live subscriptions were sent everything up to here. During a flush, this is the place
        before it."""
        return self._flushed if self._place is None else self._place

    @property
    def _flushed(self) -> Place:
        """The place of the last flush."""
        durable = self._flushes.durable
        return Place(self._flushes.position or durable, durable)

    # -------------------------------------------------------------------- subscriptions

    async def subscribe(
        self,
        topic: str,
        definition: TopicDefinition,
        subscriber: Subscriber,
        since: Position | None = None,
        *,
        access: Access = Access(),  # noqa: B008
    ) -> TopicSubscription:
        """Follow a topic, from now on or from a position. Returns when the subscriber was sent that
        it is subscribed. The frames are `TopicMessage`, `Poke` and `Gap`; a `TopicMessage` without
        `ops` only says where to resume. The caller has checked that the application allows it;
        `access` has the database role that must be allowed to read the rows."""
        if not self._flushes.ready:
            raise self._flushes.unavailable()
        await self.admit(definition, access)
        if not self._flushes.ready:
            raise self._flushes.unavailable()
        view = self._view(topic, definition)
        subscription = TopicSubscription(
            self._resources, self._flushes, self, view, subscriber, since, access
        )
        view.subscribers[subscription] = None
        try:
            # Listen before the first read: later signals wake the hub.
            await self.listener.settled()
            await subscription.begin()
        except BaseException:
            subscription.close()
            raise
        return subscription

    def _view(self, topic: str, definition: TopicDefinition) -> _TopicView:
        view = self._views.get(topic)
        if view is None:
            view = _TopicView(self._resources.next_id(), topic, definition)
            self._views[topic] = view
            self.listener.want(view.channel)
            self._resources.metrics.topics.set(len(self._views))
        return view

    def leave(self, subscription: TopicSubscription) -> None:
        """A subscription is over. A topic without subscriptions is removed."""
        view = subscription.topic
        view.subscribers.pop(subscription, None)
        if not view.subscribers and self._views.get(view.name) is view:
            del self._views[view.name]
            self._collecting.pop(view, None)
            self.listener.leave(view.channel)
            self._resources.metrics.topics.set(len(self._views))

    # -------------------------------------------------------------------- tables and rights

    async def admit(self, definition: TopicDefinition, access: Access) -> None:
        """Look up its tables. Forbidden unless the role may read all of their rows."""
        for name in definition.tables:
            known = await self._learn(name, captured=name == definition.table)
            if not definition.poke:
                known.check_has_rows()
            _check_columns(definition, name, known)
            await check_own_reading(self._resources.tables, known)
            if not definition.trusted:
                table = known.table
                await feed_rights(
                    self._resources.tables, table.oid, table.label, known.secured, access, _no_topic
                )

    async def _learn(self, name: str, *, captured: bool) -> KnownTable:
        known = await self._resources.tables.find(name, captured=captured)
        self._known[name] = known
        self._stale.discard(name)
        return known

    async def recheck(self, seconds: float) -> None:
        """Check tables and rights again, once for each definition and role. A lost right ends its
        subscriptions."""
        resting: dict[tuple[TopicDefinition, str | None], list[TopicSubscription]] = {}
        for view in self:
            for subscription in view.subscribers:
                who = view.definition, subscription.access.role
                resting.setdefault(who, []).append(subscription)
        for (definition, _), subscriptions in resting.items():
            try:
                await self.admit(definition, subscriptions[0].access)
            except (Forbidden, CaptureError) as error:
                for subscription in subscriptions:
                    subscription.fail(error)

    async def _refresh(self) -> None:
        """Look up tables again that could not be read: they may have been altered."""
        for name in list(self._stale):
            try:
                await self._learn(name, captured=False)
            except HeadwaterError as error:
                logger.warning("topics cannot read table %s: %s", name, error)
                if isinstance(error, CaptureError):
                    self._stale.discard(name)  # the next subscription looks it up

    # -------------------------------------------------------------------- a flush

    def collector_of(self, view: _TopicView) -> UpdateCollector[TopicSubscription]:
        return self.collector({view.name: view})

    def collector(self, views: Mapping[str, _TopicView]) -> UpdateCollector[TopicSubscription]:
        return UpdateCollector(views, self._known, self._wire_of)

    def _wire_of(self, table: Table) -> Wire:
        wire = self._wires.get(table.id)
        if wire is None:
            wire = self._wires[table.id] = Wire(table)
        return wire

    def start(self) -> None:
        self._resources.spawn(self.listener.run())

    async def prepare(self, flush: Flush) -> None:
        """Collect the changes and signals, and read the signalled rows in the snapshot."""
        self._updates = await self._prepared(flush)

    async def _prepared(self, flush: Flush) -> FlushUpdates | None:
        """The updates of a flush; None if there are none. Changes no state."""
        if not self._views and not self._lost:
            return None
        try:
            updates = self._collect_updates(flush.transactions)
            if updates.is_unread:
                await flush.allow_any_plan()
                await self._read(flush.connection, updates)
        except (psycopg.Error, HeadwaterError):
            raise
        except Exception:
            logger.exception("topics cannot take a flush")
            self.resync()
            return FlushUpdates(self.collector({}), self.place, self._flushed)
        return updates

    def _collect_updates(self, transactions: Sequence[Transaction]) -> FlushUpdates:
        collector = self.collector(self._views)
        for transaction in transactions:
            collector.take(transaction.changes)
        self._notice_altered(collector.tables.values())
        updates = FlushUpdates(collector, self.place, self._flushed, transactions)
        updates.views.update(self._views.values())
        now = asyncio.get_running_loop().time()
        for view in {**self._collecting, **collector.update}:
            if not self._window or (view.pending is not None and view.due <= now + _EARLY):
                updates.sending[view] = _merged(view.pending, collector.update.get(view))
        for subscription in self.ready:
            update = _merged(subscription.owed, collector.update.get(subscription.topic))
            updates.joining[subscription] = update
        return updates

    def _notice_altered(self, tables: Iterable[Table]) -> None:
        shapes: dict[int, set[int]] = {}
        for table in tables:
            shapes.setdefault(table.oid, set()).add(table.id)
        for name, known in self._known.items():
            if shapes.get(known.table.oid, set()) - {known.table.id}:
                self._stale.add(name)

    async def _read(self, connection: Connection, updates: FlushUpdates) -> None:
        """Read the signalled rows, in the snapshot of the flush."""
        if self._stale:
            await self._refresh()
        wanted: dict[str, dict[Key, None]] = {}
        for view, update in updates.all:
            if (entity := view.definition.entity) is not None:
                wanted.setdefault(entity, {}).update(dict.fromkeys(update.unread))
        found = await self._fetch(connection, wanted, "topic")
        for view, update in updates.all:
            entity = view.definition.entity
            if entity is None or not any(True for _ in update.unread):
                continue
            rows = found[entity]
            if isinstance(rows, Exception):
                update.lose()
            else:
                view.settle(update, rows, self._known[entity])
        await self._read_parents(connection, updates)

    async def _fetch(
        self, connection: Connection, wanted: dict[str, dict[Key, None]], kind: str
    ) -> dict[str, Found]:
        now = time.monotonic()
        found_slow: dict[str, Found] = {
            name: psycopg.errors.QueryCanceled("it took too long a moment ago")
            for name in wanted
            if self._paused.get(name, 0.0) > now
        }
        asked = {
            name: list(keys) for name, keys in wanted.items() if keys and name not in found_slow
        }
        found, statements = await self._fetch_rows(
            connection, [(self._known[name], keys) for name, keys in asked.items()]
        )
        self._resources.metrics.questions.labels(kind).inc(statements)
        for name, rows in zip(asked, found, strict=True):
            if isinstance(rows, Exception):
                logger.warning("topics could not read table %s: %s", name, rows)
                self._stale.add(name)
                if isinstance(rows, psycopg.errors.QueryCanceled):
                    self._paused[name] = time.monotonic() + limits.TOPIC_PAUSE_SECONDS
        return found_slow | dict(zip(asked, found, strict=True))

    async def _read_parents(self, connection: Connection, updates: FlushUpdates) -> None:
        wanted: dict[str, dict[Key, None]] = {}
        pointing: list[tuple[TopicUpdate, str, Key]] = []
        for view, update in updates.all:
            for parent, column in view.definition.parents.items():
                reader = KeyReader(self._known[parent].table)
                for value in _values(update, column):
                    if (key := reader(str(value))) is not None:
                        wanted.setdefault(parent, {})[key] = None
                        pointing.append((update, parent, key))
        if not wanted:
            return
        found = await self._fetch(connection, wanted, "parent")
        for update, parent, key in pointing:
            rows, known = found[parent], self._known[parent]
            if isinstance(rows, Exception):
                update.lose()
            elif (row := rows.get(key)) is not None:
                updates.add_parent(update, parent, key, upsert(known.table, known.wire, row))

    async def send(self, flush: Flush) -> None:
        updates = self._updates
        if updates is None:
            self._place = None
            return
        self._place = updates.before
        try:
            self._send_updates(updates)
        except Exception:
            logger.exception("topics cannot take a flush, and are read from the log")
            self._read_from_log(None)
        updates.done = True

    def unsent(self, flush: Flush) -> None:
        """Subscriptions read the flush from the log."""
        updates = self._updates
        if updates is not None and not updates.done:
            self._place = updates.before
            self._read_from_log(None)

    def ended(self, flush: Flush) -> None:
        self._updates = None

    def _send_updates(self, updates: FlushUpdates) -> None:
        metrics = self._resources.metrics
        metrics.signals.inc(updates.collector.signals)
        metrics.signal_ids_refused.inc(updates.collector.refused)
        if self._lost:
            updates.sending.clear()
            self._forget_pending()
        else:
            self._collect(updates)
        place = self._reached()
        if self._lost:
            self._announce_loss(updates, place)
        text = str(place.durable)
        for view, update in (*updates.collector.update.items(), *self._late(updates)):
            for subscription in tuple(view.subscribers):
                if subscription not in updates.joining:
                    subscription.missed(update)
        for view, update in updates.sending.items():
            if update:
                view.remember(update)
                self._send(view, updates.frame(view, update, text), updates.before)
        for subscription, update in updates.joining.items():
            joining = updates.frame(subscription.topic, update, text)
            if joining is None:
                subscription.fail(not_taken())
            else:
                subscription.join(joining)
        self._send_positions(updates, text)
        self._place = place

    def _send(self, view: _TopicView, frame: Frame | None, before: Place) -> None:
        """If the frame cannot be encoded, the subscriptions of this topic read from the log."""
        if frame is None:
            view.sent.clear()
        for subscription in tuple(view.subscribers):
            if frame is None:
                subscription.fell_behind(before)
            else:
                subscription.deliver(frame)
        if frame is not None:
            view.cost.sent(frame, len(view.subscribers))

    def _late(self, updates: FlushUpdates) -> Iterable[tuple[_TopicView, TopicUpdate]]:
        """The updates for topics that got their first subscriber while the flush read rows. Such a
        subscription catches up to the position before this flush only."""
        late = {name: view for name, view in self._views.items() if view not in updates.views}
        if not late:
            return ()
        collector = self.collector(late)
        for transaction in updates.transactions:
            collector.take(transaction.changes)
        return collector.update.items()

    def _collect(self, updates: FlushUpdates) -> None:
        """Updates that are sent are no longer pending; the others are."""
        for view in updates.sending:
            view.pending = view.safe = None
            self._collecting.pop(view, None)
        loop = asyncio.get_running_loop()
        for view, update in updates.collector.update.items():
            if view in updates.sending or view.name not in self._views:
                continue
            if view.pending is None:
                view.pending, view.safe = TopicUpdate(), updates.start
                view.due = loop.time() + self._window
                self._collecting[view] = None
                loop.call_at(view.due, self._flushes.wake)
            view.pending.merge(update)

    def _reached(self) -> Place:
        """Everything up to here is sent with this flush."""
        oldest = next(iter(self._collecting), None)
        if oldest is not None and oldest.safe is not None:
            return oldest.safe
        assert self._flushes.position is not None
        return Place(self._flushes.position, self._flushes.durable)

    def _send_positions(self, updates: FlushUpdates, text: str) -> None:
        """Send positions from time to time, also without an update: so a quiet topic can still
        resume after the log was trimmed."""
        now = time.monotonic()
        if now - self._positions_sent_at <= limits.FEED_POSITION_SECONDS:
            return
        self._positions_sent_at = now
        for view in self:
            if view not in updates.sending:
                frame = view.frame(TopicUpdate(), text)
                for subscription in tuple(view.subscribers):
                    if subscription not in updates.joining:
                        subscription.deliver(frame)

    async def compare(self, connection: Connection, view: _TopicView) -> TopicUpdate | None:
        """The rows of a topic that were sent last and now differ from the database, as the database
        has them. None if they cannot be compared."""
        name = view.definition.table
        assert name is not None, "it is derived from a table"
        known, update = self._known[name], TopicUpdate()
        if name in self._stale:
            return None
        update.ops = dict.fromkeys(view.sent)
        wanted = [(known, list(update.ops))]
        (rows,), statements = await self._fetch_rows(connection, wanted)
        self._resources.metrics.questions.labels("reconcile").inc(statements)
        if isinstance(rows, Exception):
            return None
        view.settle(update, rows, known)
        same = [
            key for key, op in update.ops.items() if _sent_as(op) == _sent_as(view.sent.get(key))
        ]
        for key in same:
            del update.ops[key]
        return update

    def table_of(self, view: _TopicView) -> Table:
        """The table that a topic is derived from."""
        assert view.definition.table is not None
        return self._known[view.definition.table].table

    def correct(self, view: _TopicView, update: TopicUpdate) -> None:
        """Send these rows again."""
        view.remember(update)
        frame = view.frame(update, str(self.place.durable))
        for subscription in tuple(view.subscribers):
            subscription.deliver(frame)

    def position_frame(self, view: _TopicView) -> Frame:
        """A frame with only the position to resume from."""
        return view.frame(TopicUpdate(), str(self.place.durable))

    # -------------------------------------------------------------------- failures

    def skipped(self, since: Position, until: Position, tables: Collection[Table] | None) -> None:
        self._read_from_log(tables)

    def skip_failed(self) -> None:
        self.resync()

    def _read_from_log(self, tables: Collection[Table] | None) -> None:
        """Each subscription reads the changes of these tables, or of any table, from the log."""
        since = self.place
        if tables is None:
            self._stale.update(self._known)
        else:
            self._notice_altered(tables)
        for view in self._resting_on(tables):
            view.pending = view.safe = None
            view.sent.clear()  # subscriptions read the next rows from the log
            self._collecting.pop(view, None)
            for subscription in list(view.subscribers):
                subscription.fell_behind(since)
        if not self._collecting:
            self._place = None

    def _resting_on(self, tables: Iterable[Table] | None) -> Iterable[_TopicView]:
        if tables is None or any(map(is_signals, tables)):
            return list(self)
        changed = {identity for table in tables for identity in identities(table)}
        return [view for view in self if not changed.isdisjoint(self._identities(view.definition))]

    def _identities(self, definition: TopicDefinition) -> tuple[TableIdentity, ...]:
        """The identities of the table that the topic is derived from."""
        known = None if definition.table is None else self._known.get(definition.table)
        return () if known is None else identities(known.table)

    def restarted(self) -> None:
        """The server was restarted: only durable places are still valid."""
        durable = self.place.durable
        self._place = Place(durable, durable)
        for view in self._collecting:
            if view.safe is not None:
                view.safe = Place(view.safe.durable, view.safe.durable)

    def resync(self) -> None:
        """The changes until the next flush are lost."""
        self._lost, self._place = True, None
        for view in self:
            # Clients read everything again; these rows may be of another history.
            view.sent.clear()

    def _announce_loss(self, updates: FlushUpdates, place: Place) -> None:
        self._lost = False
        updates.joining.clear()
        for view in self:
            for subscription in list(view.subscribers):
                subscription.lose(place.durable)

    def _forget_pending(self) -> None:
        for view in self._collecting:
            view.pending = view.safe = None
        self._collecting.clear()

    async def close(self) -> None:
        for view in self:
            for subscription in list(view.subscribers):
                subscription.close()


_EARLY = 0.001
"""A window may end this many seconds early, because timers are not exact."""


class FlushUpdates:
    """The updates of one flush: for all subscriptions of a topic, and for those that join after
    they have caught up."""

    def __init__(
        self,
        collector: UpdateCollector[TopicSubscription],
        before: Place,
        start: Place,
        transactions: Sequence[Transaction] = (),
    ) -> None:
        self.collector = collector
        self.before = before
        """All live subscriptions were sent everything up to here."""
        self.start = start
        """The place where the flush begins. It is later than `before` if signals are pending."""
        self.transactions = transactions
        self.done = False
        """Whether it was sent, or is read from the log."""
        self.views: set[_TopicView] = set()
        """The topics that existed when it was collected."""
        self.sending: dict[_TopicView, TopicUpdate] = {}
        self.joining: dict[TopicSubscription, TopicUpdate] = {}
        self._parents: dict[TopicUpdate, dict[tuple[str, Key], Upsert]] = {}

    @property
    def all(self) -> Iterator[tuple[_TopicView, TopicUpdate]]:
        yield from self.sending.items()
        for subscription, update in self.joining.items():
            yield subscription.topic, update

    def add_parent(self, update: TopicUpdate, parent: str, key: Key, op: Upsert) -> None:
        self._parents.setdefault(update, {})[parent, key] = op

    def frame(self, view: _TopicView, update: TopicUpdate, position: str) -> Frame | None:
        """The encoded message; None if it cannot be encoded."""
        try:
            frame = view.frame(update, position, self._parents.get(update, {}).values())
            _ = frame.json
            return frame
        except Exception:
            logger.exception("topic %s has rows that cannot be sent", view.name)
            return None

    @property
    def is_unread(self) -> bool:
        """Whether rows must be read from the database."""
        return any(
            next(update.unread, None) is not None or view.definition.parents
            for view, update in self.all
        )


def _values(update: TopicUpdate, column: str) -> Iterator[object]:
    """The values of a column in the rows of an update."""
    for op in update.ops.values():
        if isinstance(op, Upsert) and (value := op.row.get(column)) is not None:
            yield value


def _sent_as(op: Upsert | Remove | None) -> bytes:
    return msgspec.json.encode(op)


def _merged(earlier: TopicUpdate | None, later: TopicUpdate | None) -> TopicUpdate:
    update = TopicUpdate()
    for each in (earlier, later):
        if each is not None:
            update.merge(each)
    return update


def _check_columns(definition: TopicDefinition, name: str, known: KnownTable) -> None:
    """CaptureError if the definition does not fit the table."""
    columns = {column.name for column in known.table.columns}
    wanted = set(definition.pattern.names) if name == definition.table else set()
    if name == definition.entity:
        wanted |= set(definition.parents.values())
    elif len(known.table.key) > 1:
        raise CaptureError(
            f"topic {definition.pattern.text}: parent {name} has a key of several columns",
            hint="A parent is found by a key of one column.",
        )
    if missing := wanted - columns:
        raise CaptureError(
            f"topic {definition.pattern.text}: table {name} has no column {min(missing)}",
            hint="Correct the pattern, or the parents.",
        )


def _no_topic(label: str) -> Forbidden:
    return Forbidden(
        f"{label} is guarded by row-level security, and a topic sends all who follow it the same",
        hint="Use a live query; or declare the topic with trusted=True, and let its access function"
        " decide.",
    )
