"""Change feeds: who follows which tables, and what of each flush they are sent.

Feeds that ask for the same share one view: one frame a flush for all of them. A feed that begins in
the past, or was paused, catches up from the log (`catch_up`) and then joins without a gap. What a
subscriber is told to resume from is the newest position that a crash of the server cannot take
back, so after a reconnect it may see something twice and never misses anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headwater import limits
from headwater.errors import Forbidden, HeadwaterError, InvalidQuery
from headwater.hub.catch_up import FeedSubscription
from headwater.hub.costs import Cost
from headwater.hub.subscriber import Access, Subscriber, not_taken
from headwater.hub.tables import KnownTable
from headwater.hub.visibility import feed_rights
from headwater.live.feed import FeedFilter
from headwater.live.feed_guard import FeedGuard
from headwater.live.filter import EVERYTHING, Filter
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

if TYPE_CHECKING:
    from headwater.hub.hub import Hub

logger = logging.getLogger(__name__)


class FeedQuery(msgspec.Struct, frozen=True):
    """Which changes to hear of: of these tables (none for all), from now on or from a position.
    `where` needs exactly one table."""

    tables: tuple[str, ...] = ()
    where: Filter | None = None
    since: Position | None = None
    format: FeedFormat = "headwater"


class FeedView:
    """What identical feeds share."""

    def __init__(self, id: int, identity: Any, query: FeedQuery, tables: list[KnownTable]) -> None:
        self.id = id
        self.identity = identity
        self.format = query.format
        self.tables = {known.table.oid for known in tables}
        self.names = {(known.table.schema, known.table.name) for known in tables}
        self.everything = not query.tables
        self.filter: FeedFilter | None = None
        self.guard: FeedGuard | None = None
        self.subscribers: dict[FeedSubscription, None] = {}
        self.cost = Cost()

    def wants(self, table: Table) -> bool:
        return table.oid in self.tables

    def may_meet(self, table: Table) -> bool:
        """Whether this is new and its own, if all may read it: it follows everything, or the table
        has the name of one that it follows."""
        if table.oid in self.tables:
            return False
        everything = self.everything and not table.is_system
        return everything or (table.schema, table.name) in self.names

    def seen(self, transaction: Transaction) -> Transaction | None:
        """What of a transaction the feed carries. Raises InvalidQuery or Undecided where that
        cannot be known."""
        changes: list[Change] = []
        for change in transaction.changes:
            if change.table.oid not in self.tables:
                continue
            shown = change if self.guard is None else self.guard.seen(change)
            if shown is not None and (self.filter is None or self.filter.carries(shown)):
                changes.append(shown)
        if not changes:
            return None
        return msgspec.structs.replace(transaction, changes=tuple(changes))


class Feeds:
    """All change feeds of a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._views: dict[Any, FeedView] = {}
        self._wires: dict[int, Wire] = {}
        self.gap_since: Position | None = None
        self._lost = False
        self._told_at = time.monotonic()

    def __iter__(self) -> Iterator[FeedView]:
        return iter(self._views.values())

    def __bool__(self) -> bool:
        return bool(self._views)

    async def open(
        self, query: FeedQuery, subscriber: Subscriber, access: Access
    ) -> FeedSubscription:
        tables = await self._find(query.tables)
        for known in tables:
            table = known.table
            await feed_rights(self._hub.tables, table.oid, table.label, known.secured, access)
        view = self._view(query, access, tables)
        return FeedSubscription(self._hub, view, query, subscriber, access)

    async def _find(self, names: tuple[str, ...]) -> list[KnownTable]:
        hub = self._hub
        if not names:
            rows = await hub.tables.ask(_ENABLED, None)
            names = tuple(name for (name,) in rows)
        return [await hub.tables.find(name) for name in names]

    def _view(self, query: FeedQuery, access: Access, tables: list[KnownTable]) -> FeedView:
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
            view = FeedView(self._hub.lives.views.next_id(), identity, query, tables)
            where, mandatory = filters
            if where is not None:
                view.filter = FeedFilter(where, tables[0].table)
            if mandatory is not None:
                view.guard = FeedGuard(mandatory, tables[0].table)
        view.tables.update(known.table.oid for known in tables)
        return view

    # -------------------------------------------------------------------- who follows

    def join(self, subscription: FeedSubscription) -> None:
        """It is told of every flush from here on."""
        view = self._views.setdefault(subscription.feed.identity, subscription.feed)
        subscription.feed = view
        view.subscribers[subscription] = None

    def leave(self, subscription: FeedSubscription) -> None:
        view = subscription.feed
        view.subscribers.pop(subscription, None)
        if not view.subscribers and self._views.get(view.identity) is view:
            del self._views[view.identity]

    # -------------------------------------------------------------------- what they are sent

    async def meet(self, tables: Iterable[Table]) -> None:
        """Tables that changes come from. One that feeds of everything have not met, or that took
        the name of one, is theirs too, if their role may read all of it."""
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
        rows = await self._hub.tables.ask(_SECURED, (oid,))
        try:
            for label, secured in rows:
                await feed_rights(self._hub.tables, oid, label, secured, subscription.access)
        except Forbidden as error:
            subscription.fail(error)

    def flushed(self, transactions: list[Transaction]) -> None:
        """A flush brought these."""
        if self._lost:
            self._announce_gap()
        now = time.monotonic()
        quiet = now - self._told_at > limits.FEED_POSITION_SECONDS
        if quiet:
            self._told_at = now
        elif not transactions:
            return
        for view in list(self._views.values()):
            if view.subscribers:
                self._hand_out(view, transactions, quiet)

    def _hand_out(self, view: FeedView, transactions: list[Transaction], quiet: bool) -> None:
        """What fails in one feed harms no other; it continues from the log."""
        try:
            seen = [kept for each in transactions if (kept := view.seen(each))]
            frame = self.frame(view, seen, self._hub.progress.durable) if seen or quiet else None
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

    def _read_again(self, view: FeedView) -> None:
        for subscription in tuple(view.subscribers):
            subscription.read_again()

    def read_unsent(self) -> None:
        """The step failed: those that were not handed this flush read it from the log."""
        for view in list(self._views.values()):
            self._read_again(view)

    def frame(
        self, view: FeedView, transactions: Sequence[Transaction], position: Position
    ) -> Frame:
        """Transactions as a message that says where to resume."""
        told = tuple(
            WireTransaction(
                each.xid,
                each.at,
                tuple(self._wire_change(change, view.format) for change in each.changes),
                each.complete,
            )
            for each in transactions
        )
        return Frame(Changes(view.id, str(position), told))

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
        )

    # -------------------------------------------------------------------- what goes wrong

    def fell_behind(self, since: Position, tables: Collection[Table] | None) -> None:
        """The hub passed over changes of these tables, or of any, since then: they are read in the
        log."""
        for view in list(self._views.values()):
            if tables is None or any(map(view.wants, tables)):
                for subscription in list(view.subscribers):
                    subscription.fell_behind(since)

    def end_all(self) -> None:
        """Nothing is known of how far they are: clients continue from the positions they have."""
        for view in list(self._views.values()):
            self.fail(view, not_taken())

    def gap(self) -> None:
        """What happens until the next flush cannot be told."""
        self._lost = True
        self.gap_since = self._hub.position

    def _announce_gap(self) -> None:
        self._lost = False
        for view in list(self._views.values()):
            for subscription in list(view.subscribers):
                subscription.gap()

    def gap_frame(self, view: FeedView, since: Position | None) -> Frame:
        text = None if since is None else str(since)
        return Frame(Gap(view.id, self._hub.position_text, text, "resync"))

    def fail(self, view: FeedView, error: Exception) -> None:
        found = feed_error(view, error)
        for subscription in list(view.subscribers):
            subscription.fail(found)

    def close(self) -> None:
        for view in list(self._views.values()):
            for subscription in list(view.subscribers):
                subscription.close()


def feed_error(view: FeedView, error: Exception) -> HeadwaterError:
    if isinstance(error, Undecided):
        return Forbidden(
            "only the database can decide which of these rows this session may see",
            hint="Let the authorisation hook filter by columns whose equality memory can decide: "
            "numbers, times, uuids, and text in a collation of PostgreSQL's own.",
        )
    assert isinstance(error, HeadwaterError)
    return error


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
