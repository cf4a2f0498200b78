"""All change feeds of a hub: their views, and the frames they are sent in each flush.

Identical feeds share one view: one frame in a flush for all of them. A feed that begins in the
past, or was paused, catches up from the log (`catch_up`) and then joins without a gap. A subscriber
may resume from the newest position that is on the server's disk. So after a reconnect it may get
changes twice, but never misses one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from headwater import limits
from headwater.errors import Forbidden, InvalidQuery
from headwater.hub.feeds.subscription import FeedSubscription, explained
from headwater.hub.feeds.view import FeedQuery, FeedView
from headwater.hub.flush_state import FlushState
from headwater.hub.part import Flush, Part
from headwater.hub.reading.row_security import feed_rights
from headwater.hub.reading.tables import KnownTable
from headwater.hub.resources import Resources
from headwater.hub.subscriptions.subscriber import Access, Subscriber
from headwater.hub.subscriptions.subscription import not_taken
from headwater.live.feed import ChangeFilter
from headwater.live.filters.filter import EVERYTHING
from headwater.live.needs import Undecided
from headwater.log.debezium import to_debezium
from headwater.model import Change, Position, Table, Transaction
from headwater.protocol import (
    Changes,
    FeedFormat,
    Frame,
    Gap,
    Wire,
    WireChange,
    WireTransaction,
)

logger = logging.getLogger(__name__)


_FeedView: TypeAlias = FeedView[FeedSubscription]


class FeedRegistry(Part):
    """All change feeds of a hub."""

    def __init__(self, resources: Resources, flushes: FlushState) -> None:
        self._resources = resources
        self._flushes = flushes
        self._views: dict[Any, _FeedView] = {}
        self._wires: dict[int, Wire] = {}
        self.gap_since: Position | None = None
        self._lost = False
        self._positions_sent_at = time.monotonic()

    def __iter__(self) -> Iterator[_FeedView]:
        return iter(self._views.values())

    def __bool__(self) -> bool:
        return bool(self._views)

    async def follow(
        self,
        query: FeedQuery,
        subscriber: Subscriber,
        access: Access,
        known: Collection[KnownTable] = (),
    ) -> FeedSubscription:
        """Follow a change feed; see `Hub.feed`."""
        if not self._flushes.ready:
            raise self._flushes.unavailable()
        tables = list(known) or await self._find(query.tables)
        subscription = await self._open(query, subscriber, access, tables)
        if not self._flushes.ready:
            raise self._flushes.unavailable()
        await subscription.begin()
        return subscription

    async def _open(
        self, query: FeedQuery, subscriber: Subscriber, access: Access, tables: list[KnownTable]
    ) -> FeedSubscription:
        for known in tables:
            table = known.table
            await feed_rights(self._resources.tables, table.oid, table.label, known.secured, access)
        view = self._view(query, access, tables)
        return FeedSubscription(
            self._resources, self._flushes, self, view, query, subscriber, access
        )

    async def _find(self, names: tuple[str, ...]) -> list[KnownTable]:
        tables = self._resources.tables
        if not names:
            rows = await tables.ask(_ENABLED, None)
            names = tuple(name for (name,) in rows)
        return [await tables.find(name) for name in names]

    def _view(self, query: FeedQuery, access: Access, tables: list[KnownTable]) -> _FeedView:
        filters = [query.where, None if access.where == EVERYTHING else access.where]
        if any(where is not None for where in filters) and len(query.tables) != 1:
            raise InvalidQuery(
                "a filter needs exactly one table", path="where", hint="Open a feed for each."
            )
        identity = (
            frozenset(known.table.oid for known in tables)
            if query.tables
            else (access.role, access.whole),
            repr(filters),
            query.format,
        )
        view = self._views.get(identity)
        if view is None:
            view = _FeedView(self._resources.next_id(), identity, query, tables)
            where, mandatory = filters
            if where is not None:
                view.filter = ChangeFilter(where, tables[0].table)
            if mandatory is not None:
                view.guard = ChangeFilter(mandatory, tables[0].table)
        view.tables.update(known.table.oid for known in tables)
        return view

    # -------------------------------------------------------------------- subscriptions

    def join(self, subscription: FeedSubscription) -> None:
        """Send it every flush from here on."""
        view = self._views.setdefault(subscription.feed.identity, subscription.feed)
        subscription.feed = view
        view.subscribers[subscription] = None

    def leave(self, subscription: FeedSubscription) -> None:
        view = subscription.feed
        view.subscribers.pop(subscription, None)
        if not view.subscribers and self._views.get(view.identity) is view:
            del self._views[view.identity]

    # -------------------------------------------------------------------- a flush

    async def prepare(self, flush: Flush) -> None:
        if self._views:
            await self.meet({change.table for each in flush.changes for change in each.changes})

    async def prepare_skip(self, tables: Collection[Table]) -> None:
        await self.meet(tables)

    async def send(self, flush: Flush) -> None:
        self.flushed(flush.changes)

    def unsent(self, flush: Flush) -> None:
        """Feeds that were not sent this flush read it from the log."""
        for view in list(self._views.values()):
            self._read_again(view)

    async def meet(self, tables: Iterable[Table]) -> None:
        """The tables of the changes. A table that is new to a feed of all tables, or has the name
        of a followed table, is added to the feed if its role may read all of the table."""
        for table in tables:
            for view in [view for view in self._views.values() if view.may_meet(table)]:
                asked: set[FeedSubscription] = set()
                while more := view.subscribers.keys() - asked:
                    for subscription in more:
                        await self.admit(subscription, table.oid)
                    asked |= more
                view.tables.add(table.oid)

    async def admit(self, subscription: FeedSubscription, oid: int) -> None:
        """End it unless it may read all of the table."""
        rows = await self._resources.tables.ask(_SECURED, (oid,))
        try:
            for label, secured in rows:
                await feed_rights(self._resources.tables, oid, label, secured, subscription.access)
        except Forbidden as error:
            subscription.fail(error)

    def flushed(self, transactions: Sequence[Transaction]) -> None:
        """Send the transactions of a flush."""
        if self._lost:
            self._announce_gap()
        now = time.monotonic()
        quiet = now - self._positions_sent_at > limits.FEED_POSITION_SECONDS
        if quiet:
            self._positions_sent_at = now
        elif not transactions:
            return
        for view in list(self._views.values()):
            if view.subscribers:
                self._hand_out(view, transactions, quiet)

    def _hand_out(self, view: _FeedView, transactions: Sequence[Transaction], quiet: bool) -> None:
        """A feed that fails continues from the log; other feeds are not affected."""
        try:
            seen = [part for each in transactions if (part := view.seen(each))]
            frame = self.frame(view, seen, self._flushes.durable) if seen or quiet else None
            if frame is not None:
                _ = frame.json
        except (InvalidQuery, Undecided) as error:
            self.fail(view, error)
            return
        except Exception:
            logger.exception("feed %d cannot take a flush, and is read from the log", view.id)
            self._read_again(view)
            return
        for subscription in tuple(view.subscribers):
            subscription.flushed(seen, frame)
        if frame is not None and seen:
            view.cost.sent(frame, len(view.subscribers))

    def _read_again(self, view: _FeedView) -> None:
        for subscription in tuple(view.subscribers):
            subscription.read_again()

    def frame(
        self, view: _FeedView, transactions: Sequence[Transaction], position: Position
    ) -> Frame:
        """The message with these transactions, and the position to resume from."""
        sent = tuple(
            WireTransaction(
                each.xid,
                each.at,
                tuple(self._wire_change(change, view.format) for change in each.changes),
                each.complete,
            )
            for each in transactions
        )
        return Frame(Changes(view.id, str(position), sent))

    def _wire_change(self, change: Change, format: FeedFormat) -> Any:
        table = change.table
        wire = self._wires.get(table.id)
        if wire is None:
            wire = self._wires[table.id] = Wire(table)
        if format == "debezium":
            return to_debezium(change, wire.row)
        key = dict(zip(table.key, change.key, strict=True)) if change.key else None
        return WireChange(
            change.seq,
            table.label,
            change.op,
            None if key is None else dict(wire.row(key)),
            None if change.before is None else wire.row(change.before),
            None if change.after is None else wire.row(change.after),
            change.changed if change.op == "update" else None,
            change.actor.user_id,
            change.actor.function_name,
            change.actor.trace_id,
            change.origin,
        )

    # -------------------------------------------------------------------- failures

    def skipped(self, since: Position, until: Position, tables: Collection[Table] | None) -> None:
        for view in list(self._views.values()):
            if tables is None or any(map(view.wants, tables)):
                for subscription in list(view.subscribers):
                    subscription.fell_behind(since)

    def skip_failed(self) -> None:
        """End all feeds: their places are not known. Clients resume from their own positions."""
        for view in list(self._views.values()):
            self.fail(view, not_taken())

    def resync(self) -> None:
        self._lost = True
        self.gap_since = self._flushes.position

    def _announce_gap(self) -> None:
        self._lost = False
        for view in list(self._views.values()):
            for subscription in list(view.subscribers):
                subscription.gap()

    def gap_frame(self, view: _FeedView, since: Position | None) -> Frame:
        text = None if since is None else str(since)
        return Frame(Gap(view.id, self._flushes.position_text, text, "resync"))

    def fail(self, view: _FeedView, error: Exception) -> None:
        found = explained(error)
        for subscription in list(view.subscribers):
            subscription.fail(found)

    async def recheck(self, seconds: float) -> None:
        for view in list(self._views.values()):
            for subscription in list(view.subscribers):
                for oid in list(view.tables):
                    await self.admit(subscription, oid)

    async def close(self) -> None:
        for view in list(self._views.values()):
            for subscription in list(view.subscribers):
                subscription.close()


_ENABLED = """
    select format('%I.%I', n.nspname, c.relname)
    from headwater.tables t
    join pg_class c on c.oid = t.relid join pg_namespace n on n.oid = c.relnamespace
    where t.enabled and n.nspname <> 'headwater'
"""
_SECURED = """
    select case when n.nspname = 'public' then relname else n.nspname || '.' || relname end,
           relrowsecurity
    from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = %s
"""
