"""Topics: who follows which, and what of each flush they are sent.

A flush gathers what changes and signals say, reads every row that was only named with one statement
a table, in its own snapshot, and makes one frame a topic for all who follow it. With a window,
signals of a topic are collected for a while before they are sent; nobody is told a position that
would leave out what is being collected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
import psycopg

from headwater import limits
from headwater.database import Connection
from headwater.errors import CaptureError, Forbidden, HeadwaterError
from headwater.hub.subscriber import Access, Subscriber, not_taken
from headwater.hub.tables import KnownTable, TableIdentity, identities
from headwater.hub.topic import Gathering, News, Place, TopicView, upsert
from headwater.hub.topic_rows import Found, KeyReader, fetch
from headwater.hub.topic_subscription import TopicSubscription
from headwater.hub.visibility import check_own_reading, feed_rights
from headwater.log.listener import Listener
from headwater.log.signals import is_signals
from headwater.model import Key, Position, Table, Transaction
from headwater.protocol import Frame, Remove, Upsert, Wire
from headwater.topics.definitions import TopicDefinition

if TYPE_CHECKING:
    from headwater.hub.hub import Hub

logger = logging.getLogger(__name__)


class Topics:
    """All topics of a hub that somebody follows (`hub.topics`)."""

    def __init__(self, hub: Hub, window: float = 0.0) -> None:
        self._hub = hub
        self._window = window
        """Seconds for which signals are collected; 0 for no longer than it takes."""
        self._views: dict[str, TopicView] = {}
        self._known: dict[str, KnownTable] = {}
        self._stale: set[str] = set()
        self._paused: dict[str, float] = {}
        """Tables that took too long to be read, and until when no flush waits for them again."""
        self._wires: dict[int, Wire] = {}
        self._collecting: dict[TopicView, None] = {}
        """Those with something pending, the oldest first."""
        self._place: Place | None = None
        self._told_at = time.monotonic()
        self._lost = False
        self.ready: dict[TopicSubscription, None] = {}
        """Those that know what they missed, and wait for a flush to read it."""
        self.listener = Listener(hub.url, hub.heard)

    def __iter__(self) -> Iterator[TopicView]:
        return iter(list(self._views.values()))

    def __len__(self) -> int:
        return len(self._views)

    @property
    def place(self) -> Place:
        """How far all who are live were told everything. While a flush is handed out, that is what
        was before it."""
        return self._flushed if self._place is None else self._place

    @property
    def _flushed(self) -> Place:
        """How far the hub has read, until it has handed out the next flush."""
        durable = self._hub.progress.durable
        return Place(self._hub.position or durable, durable)

    # -------------------------------------------------------------------- who follows

    async def subscribe(
        self,
        topic: str,
        definition: TopicDefinition,
        subscriber: Subscriber,
        since: Position | None = None,
        *,
        access: Access = Access(),  # noqa: B008
    ) -> TopicSubscription:
        """Follow a topic, from now on or from a position. Returns when the subscriber was told that
        it is subscribed. The frames are `Topic`, `Poke` and `Gap`; a `Topic` without `ops` says
        where to resume. Whether the application lets the caller in is decided before; `access` has
        the database role that must be allowed to read the rows."""
        if not self._hub.ready:
            raise self._hub.unavailable()
        await self.admit(definition, access)
        if not self._hub.ready:
            raise self._hub.unavailable()
        view = self._view(topic, definition)
        subscription = TopicSubscription(self._hub, view, subscriber, since, access)
        view.subscribers[subscription] = None
        try:
            # Listen first, then read: what is signalled from here on wakes us.
            await self.listener.settled()
            await subscription.begin()
        except BaseException:
            subscription.close()
            raise
        return subscription

    def _view(self, topic: str, definition: TopicDefinition) -> TopicView:
        view = self._views.get(topic)
        if view is None:
            view = TopicView(self._hub.lives.views.next_id(), topic, definition)
            self._views[topic] = view
            self.listener.want(view.channel)
            self._hub.metrics.topics.set(len(self._views))
        return view

    def leave(self, subscription: TopicSubscription) -> None:
        """It is over. With the last one, the topic is forgotten."""
        view = subscription.topic
        view.subscribers.pop(subscription, None)
        if not view.subscribers and self._views.get(view.name) is view:
            del self._views[view.name]
            self._collecting.pop(view, None)
            self.listener.leave(view.channel)
            self._hub.metrics.topics.set(len(self._views))

    # -------------------------------------------------------------------- tables and rights

    async def admit(self, definition: TopicDefinition, access: Access) -> None:
        """Look its tables up; Forbidden unless all of their rows may be seen."""
        for name in definition.tables:
            known = await self._learn(name, captured=name == definition.table)
            _check_columns(definition, name, known)
            await check_own_reading(self._hub.tables, known)
            if not definition.trusted:
                table = known.table
                await feed_rights(
                    self._hub.tables, table.oid, table.label, known.secured, access, _no_topic
                )

    async def _learn(self, name: str, *, captured: bool) -> KnownTable:
        known = await self._hub.tables.find(name, captured=captured)
        self._known[name] = known
        self._stale.discard(name)
        return known

    async def recheck(self) -> None:
        """Look again at tables and rights, once for each declaration and role; a right that is gone
        ends what rests on it."""
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
        """Tables that did not answer as they should: they may have been altered."""
        for name in list(self._stale):
            try:
                await self._learn(name, captured=False)
            except HeadwaterError as error:
                logger.warning("topics cannot read table %s: %s", name, error)
                if isinstance(error, CaptureError):
                    self._stale.discard(name)  # whoever follows it next looks it up

    # -------------------------------------------------------------------- a flush

    def gathering(self, views: Mapping[str, TopicView]) -> Gathering:
        return Gathering(views, self._known, self._wire_of)

    def _wire_of(self, table: Table) -> Wire:
        wire = self._wires.get(table.id)
        if wire is None:
            wire = self._wires[table.id] = Wire(table)
        return wire

    async def prepare(
        self,
        transactions: Iterable[Transaction],
        connection: Connection,
        allow_any_plan: Callable[[], Awaitable[None]],
    ) -> Handout | None:
        """What a flush means to topics, with the rows that were named read in its snapshot; None
        for nothing. Nothing is changed yet. A fault here harms nobody else."""
        if not self._views and not self._lost:
            return None
        try:
            handout = self._gather(transactions)
            if handout.is_unread:
                await allow_any_plan()
                await self._read(connection, handout)
        except (psycopg.Error, HeadwaterError):
            raise
        except Exception:
            logger.exception("topics cannot take a flush")
            self.gap()
            return Handout(self.gathering({}), self.place, self._flushed)
        return handout

    def _gather(self, transactions: Iterable[Transaction]) -> Handout:
        transactions = tuple(transactions)
        gathering = self.gathering(self._views)
        for transaction in transactions:
            gathering.take(transaction.changes)
        self._notice_altered(gathering.tables.values())
        handout = Handout(gathering, self.place, self._flushed, transactions)
        handout.views.update(self._views.values())
        now = asyncio.get_running_loop().time()
        for view in {**self._collecting, **gathering.news}:
            if not self._window or (view.pending is not None and view.due <= now + _EARLY):
                handout.sending[view] = _merged(view.pending, gathering.news.get(view))
        for subscription in self.ready:
            news = _merged(subscription.owed, gathering.news.get(subscription.topic))
            handout.joining[subscription] = news
        return handout

    def _notice_altered(self, tables: Iterable[Table]) -> None:
        shapes: dict[int, set[int]] = {}
        for table in tables:
            shapes.setdefault(table.oid, set()).add(table.id)
        for name, known in self._known.items():
            if shapes.get(known.table.oid, set()) - {known.table.id}:
                self._stale.add(name)

    async def _read(self, connection: Connection, handout: Handout) -> None:
        """Read the rows that were named, in the snapshot of the flush."""
        if self._stale:
            await self._refresh()
        wanted: dict[str, dict[Key, None]] = {}
        for view, news in handout.all:
            if (entity := view.definition.entity) is not None:
                wanted.setdefault(entity, {}).update(dict.fromkeys(news.unread))
        found = await self._fetch(connection, wanted, "topic")
        for view, news in handout.all:
            entity = view.definition.entity
            if entity is None or not any(True for _ in news.unread):
                continue
            rows = found[entity]
            if isinstance(rows, Exception):
                news.lose()
            else:
                view.settle(news, rows, self._known[entity])
        await self._read_parents(connection, handout)

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
        found, statements = await fetch(
            connection, [(self._known[name], keys) for name, keys in asked.items()]
        )
        self._hub.metrics.questions.labels(kind).inc(statements)
        for name, rows in zip(asked, found, strict=True):
            if isinstance(rows, Exception):
                logger.warning("topics could not read table %s: %s", name, rows)
                self._stale.add(name)
                if isinstance(rows, psycopg.errors.QueryCanceled):
                    self._paused[name] = time.monotonic() + limits.TOPIC_PAUSE_SECONDS
        return found_slow | dict(zip(asked, found, strict=True))

    async def _read_parents(self, connection: Connection, handout: Handout) -> None:
        wanted: dict[str, dict[Key, None]] = {}
        pointing: list[tuple[News, str, Key]] = []
        for view, news in handout.all:
            for parent, column in view.definition.parents.items():
                reader = KeyReader(self._known[parent].table)
                for value in _values(news, column):
                    if (key := reader(str(value))) is not None:
                        wanted.setdefault(parent, {})[key] = None
                        pointing.append((news, parent, key))
        if not wanted:
            return
        found = await self._fetch(connection, wanted, "parent")
        for news, parent, key in pointing:
            rows, known = found[parent], self._known[parent]
            if isinstance(rows, Exception):
                news.lose()
            elif (row := rows.get(key)) is not None:
                handout.add_parent(news, parent, key, upsert(known.table, known.wire, row))

    def hand_out(self, handout: Handout | None) -> None:
        """Send it to all, within the step of the flush. What fails here harms nothing else."""
        if handout is None:
            self._place = None
            return
        self._place = handout.before
        try:
            self._hand_out(handout)
        except Exception:
            logger.exception("topics cannot take a flush, and are read from the log")
            self.fell_behind(None)
        handout.done = True

    def read_unsent(self, handout: Handout | None) -> None:
        """The step failed, maybe before this was handed out: it is read from the log then."""
        if handout is not None and not handout.done:
            self._place = handout.before
            self.fell_behind(None)

    def _hand_out(self, handout: Handout) -> None:
        metrics = self._hub.metrics
        metrics.signals.inc(handout.gathering.signals)
        metrics.signal_ids_refused.inc(handout.gathering.refused)
        if self._lost:
            handout.sending.clear()
            self._forget_pending()
        else:
            self._collect(handout)
        place = self._reached()
        if self._lost:
            self._announce_loss(handout, place)
        text = str(place.durable)
        for view, news in (*handout.gathering.news.items(), *self._late(handout)):
            for subscription in tuple(view.subscribers):
                if subscription not in handout.joining:
                    subscription.missed(news)
        for view, news in handout.sending.items():
            if news:
                view.remember(news)
                self._send(view, handout.frame(view, news, text), handout.before)
        for subscription, news in handout.joining.items():
            joining = handout.frame(subscription.topic, news, text)
            if joining is None:
                subscription.fail(not_taken())
            else:
                subscription.join(joining)
        self._tell_positions(handout, text)
        self._place = place

    def _send(self, view: TopicView, frame: Frame | None, before: Place) -> None:
        """A topic whose rows cannot be sent harms no other: it is read from the log."""
        if frame is None:
            view.sent.clear()
        for subscription in tuple(view.subscribers):
            if frame is None:
                subscription.fell_behind(before)
            else:
                subscription.deliver(frame)
        if frame is not None:
            view.cost.sent(frame, len(view.subscribers))

    def _late(self, handout: Handout) -> Iterable[tuple[TopicView, News]]:
        """What the flush brought for topics that somebody began to follow while it read rows: who
        catches up with one of them does so up to the position before the flush."""
        late = {name: view for name, view in self._views.items() if view not in handout.views}
        if not late:
            return ()
        gathering = self.gathering(late)
        for transaction in handout.transactions:
            gathering.take(transaction.changes)
        return gathering.news.items()

    def _collect(self, handout: Handout) -> None:
        """What is sent is no longer pending; what is not, is."""
        for view in handout.sending:
            view.pending = view.safe = None
            self._collecting.pop(view, None)
        loop = asyncio.get_running_loop()
        for view, news in handout.gathering.news.items():
            if view in handout.sending or view.name not in self._views:
                continue
            if view.pending is None:
                view.pending, view.safe = News(), handout.start
                view.due = loop.time() + self._window
                self._collecting[view] = None
                loop.call_at(view.due, self._hub.wake)
            view.pending.merge(news)

    def _reached(self) -> Place:
        """How far everything is told with this flush."""
        oldest = next(iter(self._collecting), None)
        if oldest is not None and oldest.safe is not None:
            return oldest.safe
        assert self._hub.position is not None
        return Place(self._hub.position, self._hub.progress.durable)

    def _tell_positions(self, handout: Handout, text: str) -> None:
        """Now and then, also without news: one that was quiet for long must not lose its place when
        the log is trimmed."""
        now = time.monotonic()
        if now - self._told_at <= limits.FEED_POSITION_SECONDS:
            return
        self._told_at = now
        for view in self:
            if view not in handout.sending:
                frame = view.frame(News(), text)
                for subscription in tuple(view.subscribers):
                    if subscription not in handout.joining:
                        subscription.deliver(frame)

    async def compare(self, connection: Connection, view: TopicView) -> News | None:
        """The rows of a topic that were sent last, and that the database does not have as they were
        sent, as they are. None where that cannot be known."""
        name = view.definition.table
        assert name is not None, "it is derived from a table"
        known, news = self._known[name], News()
        if name in self._stale:
            return None
        news.ops = dict.fromkeys(view.sent)
        (rows,), statements = await fetch(connection, [(known, list(news.ops))])
        self._hub.metrics.questions.labels("reconcile").inc(statements)
        if isinstance(rows, Exception):
            return None
        view.settle(news, rows, known)
        same = [key for key, op in news.ops.items() if _sent_as(op) == _sent_as(view.sent.get(key))]
        for key in same:
            del news.ops[key]
        return news

    def table_of(self, view: TopicView) -> Table:
        """The table that a topic is derived from."""
        assert view.definition.table is not None
        return self._known[view.definition.table].table

    def correct(self, view: TopicView, news: News) -> None:
        """Send rows again as they are."""
        view.remember(news)
        frame = view.frame(news, str(self.place.durable))
        for subscription in tuple(view.subscribers):
            subscription.deliver(frame)

    def position_frame(self, view: TopicView) -> Frame:
        """Says no more than where to resume."""
        return view.frame(News(), str(self.place.durable))

    # -------------------------------------------------------------------- what goes wrong

    def fell_behind(self, tables: Collection[Table] | None) -> None:
        """The hub passes over changes of these tables, or of any: they are read in the log."""
        since = self.place
        if tables is None:
            self._stale.update(self._known)
        else:
            self._notice_altered(tables)
        for view in self._resting_on(tables):
            view.pending = view.safe = None
            view.sent.clear()  # what each is sent from here on, it reads from the log
            self._collecting.pop(view, None)
            for subscription in list(view.subscribers):
                subscription.fell_behind(since)
        if not self._collecting:
            self._place = None

    def _resting_on(self, tables: Iterable[Table] | None) -> Iterable[TopicView]:
        if tables is None or any(map(is_signals, tables)):
            return list(self)
        changed = {identity for table in tables for identity in identities(table)}
        return [view for view in self if not changed.isdisjoint(self._identities(view.definition))]

    def _identities(self, definition: TopicDefinition) -> tuple[TableIdentity, ...]:
        """Of the table whose changes are a topic's own."""
        known = None if definition.table is None else self._known.get(definition.table)
        return () if known is None else identities(known.table)

    def restarted(self) -> None:
        """The server began anew: a position that was not on disk may mean something else now."""
        durable = self.place.durable
        self._place = Place(durable, durable)
        for view in self._collecting:
            if view.safe is not None:
                view.safe = Place(view.safe.durable, view.safe.durable)

    def gap(self) -> None:
        """What happens until the next flush cannot be told."""
        self._lost, self._place = True, None
        for view in self:
            # Viewers read everything again; the rows of before may be of another history.
            view.sent.clear()

    def _announce_loss(self, handout: Handout, place: Place) -> None:
        self._lost = False
        handout.joining.clear()
        for view in self:
            for subscription in list(view.subscribers):
                subscription.lose(place.durable)

    def _forget_pending(self) -> None:
        for view in self._collecting:
            view.pending = view.safe = None
        self._collecting.clear()

    def close(self) -> None:
        for view in self:
            for subscription in list(view.subscribers):
                subscription.close()


_EARLY = 0.001
"""How much before its time a window may end: clocks and timers are not exact."""


class Handout:
    """What a flush is to tell: to all who follow a topic, and to those who join after they have
    caught up."""

    def __init__(
        self,
        gathering: Gathering,
        before: Place,
        start: Place,
        transactions: tuple[Transaction, ...] = (),
    ) -> None:
        self.gathering = gathering
        self.before = before
        """How far all who are live have been told everything."""
        self.start = start
        """Where the flush begins. That is later, where topics are collecting."""
        self.transactions = transactions
        self.done = False
        """Whether it was handed out, or is read from the log."""
        self.views: set[TopicView] = set()
        """Those that it was gathered for."""
        self.sending: dict[TopicView, News] = {}
        self.joining: dict[TopicSubscription, News] = {}
        self._parents: dict[News, dict[tuple[str, Key], Upsert]] = {}

    @property
    def all(self) -> Iterator[tuple[TopicView, News]]:
        yield from self.sending.items()
        for subscription, news in self.joining.items():
            yield subscription.topic, news

    def add_parent(self, news: News, parent: str, key: Key, op: Upsert) -> None:
        self._parents.setdefault(news, {})[parent, key] = op

    def frame(self, view: TopicView, news: News, position: str) -> Frame | None:
        """The message, encoded; None for one that cannot be sent."""
        try:
            frame = view.frame(news, position, self._parents.get(news, {}).values())
            _ = frame.json
            return frame
        except Exception:
            logger.exception("topic %s has rows that cannot be sent", view.name)
            return None

    @property
    def is_unread(self) -> bool:
        """Whether the database must be asked."""
        return any(
            next(news.unread, None) is not None or view.definition.parents
            for view, news in self.all
        )


def _values(news: News, column: str) -> Iterator[object]:
    """What the rows that are sent have in a column."""
    for op in news.ops.values():
        if isinstance(op, Upsert) and (value := op.row.get(column)) is not None:
            yield value


def _sent_as(op: Upsert | Remove | None) -> bytes:
    return msgspec.json.encode(op)


def _merged(earlier: News | None, later: News | None) -> News:
    news = News()
    for each in (earlier, later):
        if each is not None:
            news.merge(each)
    return news


def _check_columns(definition: TopicDefinition, name: str, known: KnownTable) -> None:
    """ConfigError where the declaration does not fit the table. Its user is told; so is the log."""
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
