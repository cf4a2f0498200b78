"""Topics: who follows which, and what of each flush they are sent.

A flush gathers what changes and signals say, reads every row that was only named with one statement
a table, in its own snapshot, and makes one frame a topic for all who follow it. With a window,
signals of a topic are collected for a while before they are sent; no subscriber is sent a position
that would leave out what is being collected.
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
from headwater.hub.topics.topic import Gathering, News, TopicView, upsert
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
        """Seconds for which signals are collected; 0 for no longer than it takes."""
        self._views: dict[str, _TopicView] = {}
        self._known: dict[str, KnownTable] = {}
        self._stale: set[str] = set()
        self._paused: dict[str, float] = {}
        """Tables that took too long to be read, and until when no flush waits for them again."""
        self._wires: dict[int, Wire] = {}
        self._collecting: dict[_TopicView, None] = {}
        """Those with something pending, the oldest first."""
        self._place: Place | None = None
        self._positions_sent_at = time.monotonic()
        self._lost = False
        self.ready: dict[TopicSubscription, None] = {}
        """Those that know what they missed, and wait for a flush to read it."""
        self._handout: Handout | None = None
        self.listener = listener or NotifyListener(resources.url, flushes.notified)
        self._fetch_rows = fetch

    def __iter__(self) -> Iterator[_TopicView]:
        return iter(list(self._views.values()))

    def __len__(self) -> int:
        return len(self._views)

    @property
    def place(self) -> Place:
        """How far all live subscriptions were sent everything. While a flush is sent, that is what
        was before it."""
        return self._flushed if self._place is None else self._place

    @property
    def _flushed(self) -> Place:
        """How far the hub has read, until it has handed out the next flush."""
        durable = self._flushes.durable
        return Place(self._flushes.position or durable, durable)

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
        """Follow a topic, from now on or from a position. Returns when the subscriber was sent that
        it is subscribed. The frames are `Topic`, `Poke` and `Gap`; a `Topic` without
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
            # Listen first, then read: what is signalled from here on wakes us.
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
        """It is over. With the last one, the topic is forgotten."""
        view = subscription.topic
        view.subscribers.pop(subscription, None)
        if not view.subscribers and self._views.get(view.name) is view:
            del self._views[view.name]
            self._collecting.pop(view, None)
            self.listener.leave(view.channel)
            self._resources.metrics.topics.set(len(self._views))

    # -------------------------------------------------------------------- tables and rights

    async def admit(self, definition: TopicDefinition, access: Access) -> None:
        """Look its tables up; Forbidden unless all of their rows may be seen."""
        for name in definition.tables:
            known = await self._learn(name, captured=name == definition.table)
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
                    self._stale.discard(name)  # the next subscription looks it up

    # -------------------------------------------------------------------- a flush

    def gathering_of(self, view: _TopicView) -> Gathering[TopicSubscription]:
        return self.gathering({view.name: view})

    def gathering(self, views: Mapping[str, _TopicView]) -> Gathering[TopicSubscription]:
        return Gathering(views, self._known, self._wire_of)

    def _wire_of(self, table: Table) -> Wire:
        wire = self._wires.get(table.id)
        if wire is None:
            wire = self._wires[table.id] = Wire(table)
        return wire

    def start(self) -> None:
        self._resources.spawn(self.listener.run())

    async def prepare(self, flush: Flush) -> None:
        """The rows that were named are read in the snapshot of the flush."""
        self._handout = await self._prepared(flush)

    async def _prepared(self, flush: Flush) -> Handout | None:
        """What a flush means to topics; None for nothing. No state is changed yet."""
        if not self._views and not self._lost:
            return None
        try:
            handout = self._gather(flush.transactions)
            if handout.is_unread:
                await flush.allow_any_plan()
                await self._read(flush.connection, handout)
        except (psycopg.Error, HeadwaterError):
            raise
        except Exception:
            logger.exception("topics cannot take a flush")
            self.resync()
            return Handout(self.gathering({}), self.place, self._flushed)
        return handout

    def _gather(self, transactions: Sequence[Transaction]) -> Handout:
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

    async def send(self, flush: Flush) -> None:
        handout = self._handout
        if handout is None:
            self._place = None
            return
        self._place = handout.before
        try:
            self._hand_out(handout)
        except Exception:
            logger.exception("topics cannot take a flush, and are read from the log")
            self._read_from_log(None)
        handout.done = True

    def unsent(self, flush: Flush) -> None:
        """It is read from the log."""
        handout = self._handout
        if handout is not None and not handout.done:
            self._place = handout.before
            self._read_from_log(None)

    def ended(self, flush: Flush) -> None:
        self._handout = None

    def _hand_out(self, handout: Handout) -> None:
        metrics = self._resources.metrics
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
        self._send_positions(handout, text)
        self._place = place

    def _send(self, view: _TopicView, frame: Frame | None, before: Place) -> None:
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

    def _late(self, handout: Handout) -> Iterable[tuple[_TopicView, News]]:
        """What the flush brought for topics that got subscribers while it read rows: one that
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
                loop.call_at(view.due, self._flushes.wake)
            view.pending.merge(news)

    def _reached(self) -> Place:
        """How far everything is sent with this flush."""
        oldest = next(iter(self._collecting), None)
        if oldest is not None and oldest.safe is not None:
            return oldest.safe
        assert self._flushes.position is not None
        return Place(self._flushes.position, self._flushes.durable)

    def _send_positions(self, handout: Handout, text: str) -> None:
        """Now and then, also without news: one that was quiet for long must not lose its place when
        the log is trimmed."""
        now = time.monotonic()
        if now - self._positions_sent_at <= limits.FEED_POSITION_SECONDS:
            return
        self._positions_sent_at = now
        for view in self:
            if view not in handout.sending:
                frame = view.frame(News(), text)
                for subscription in tuple(view.subscribers):
                    if subscription not in handout.joining:
                        subscription.deliver(frame)

    async def compare(self, connection: Connection, view: _TopicView) -> News | None:
        """The rows of a topic that were sent last, and that the database does not have as they were
        sent, as they are. None where that cannot be known."""
        name = view.definition.table
        assert name is not None, "it is derived from a table"
        known, news = self._known[name], News()
        if name in self._stale:
            return None
        news.ops = dict.fromkeys(view.sent)
        wanted = [(known, list(news.ops))]
        (rows,), statements = await self._fetch_rows(connection, wanted)
        self._resources.metrics.questions.labels("reconcile").inc(statements)
        if isinstance(rows, Exception):
            return None
        view.settle(news, rows, known)
        same = [key for key, op in news.ops.items() if _sent_as(op) == _sent_as(view.sent.get(key))]
        for key in same:
            del news.ops[key]
        return news

    def table_of(self, view: _TopicView) -> Table:
        """The table that a topic is derived from."""
        assert view.definition.table is not None
        return self._known[view.definition.table].table

    def correct(self, view: _TopicView, news: News) -> None:
        """Send rows again as they are."""
        view.remember(news)
        frame = view.frame(news, str(self.place.durable))
        for subscription in tuple(view.subscribers):
            subscription.deliver(frame)

    def position_frame(self, view: _TopicView) -> Frame:
        """Says no more than where to resume."""
        return view.frame(News(), str(self.place.durable))

    # -------------------------------------------------------------------- what goes wrong

    def skipped(self, since: Position, until: Position, tables: Collection[Table] | None) -> None:
        self._read_from_log(tables)

    def skip_failed(self) -> None:
        self.resync()

    def _read_from_log(self, tables: Collection[Table] | None) -> None:
        """Changes of these tables, or of any, are read in the log by each subscription."""
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

    def _resting_on(self, tables: Iterable[Table] | None) -> Iterable[_TopicView]:
        if tables is None or any(map(is_signals, tables)):
            return list(self)
        changed = {identity for table in tables for identity in identities(table)}
        return [view for view in self if not changed.isdisjoint(self._identities(view.definition))]

    def _identities(self, definition: TopicDefinition) -> tuple[TableIdentity, ...]:
        """Of the table whose changes are a topic's own."""
        known = None if definition.table is None else self._known.get(definition.table)
        return () if known is None else identities(known.table)

    def restarted(self) -> None:
        """The server was restarted: a position that was not on disk may mean something else now."""
        durable = self.place.durable
        self._place = Place(durable, durable)
        for view in self._collecting:
            if view.safe is not None:
                view.safe = Place(view.safe.durable, view.safe.durable)

    def resync(self) -> None:
        """What happens until the next flush cannot be known."""
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

    async def close(self) -> None:
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
        gathering: Gathering[TopicSubscription],
        before: Place,
        start: Place,
        transactions: Sequence[Transaction] = (),
    ) -> None:
        self.gathering = gathering
        self.before = before
        """How far all live subscriptions were sent everything."""
        self.start = start
        """Where the flush begins. That is later, where topics are collecting."""
        self.transactions = transactions
        self.done = False
        """Whether it was handed out, or is read from the log."""
        self.views: set[_TopicView] = set()
        """Those that it was gathered for."""
        self.sending: dict[_TopicView, News] = {}
        self.joining: dict[TopicSubscription, News] = {}
        self._parents: dict[News, dict[tuple[str, Key], Upsert]] = {}

    @property
    def all(self) -> Iterator[tuple[_TopicView, News]]:
        yield from self.sending.items()
        for subscription, news in self.joining.items():
            yield subscription.topic, news

    def add_parent(self, news: News, parent: str, key: Key, op: Upsert) -> None:
        self._parents.setdefault(news, {})[parent, key] = op

    def frame(self, view: _TopicView, news: News, position: str) -> Frame | None:
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
    """ConfigError where the declaration does not fit the table. The client gets the error, and so
    does the log."""
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
