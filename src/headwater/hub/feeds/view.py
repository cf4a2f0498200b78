"""The view that identical change feeds share: which changes they get."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from headwater.hub.reading.tables import KnownTable
from headwater.hub.subscriptions.costs import Cost
from headwater.live.feed import ChangeFilter
from headwater.live.filters.filter import Filter
from headwater.model import Change, Position, Table, Transaction
from headwater.protocol import FeedFormat

SubscriptionT = TypeVar("SubscriptionT")


class FeedQuery(msgspec.Struct, frozen=True):
    """Which changes to receive: of these tables (none for all), from now on or from a position.
    `where` needs exactly one table."""

    tables: tuple[str, ...] = ()
    where: Filter | None = None
    since: Position | None = None
    format: FeedFormat = "headwater"


class FeedView(Generic[SubscriptionT]):
    """The state that identical feeds share."""

    def __init__(self, id: int, identity: Any, query: FeedQuery, tables: list[KnownTable]) -> None:
        self.id = id
        self.identity = identity
        self.format = query.format
        self.tables = {known.table.oid for known in tables}
        self.names = {(known.table.schema, known.table.name) for known in tables}
        self.everything = not query.tables
        self.filter: ChangeFilter | None = None
        self.guard: ChangeFilter | None = None
        self.subscribers: dict[SubscriptionT, None] = {}
        self.cost = Cost()

    def wants(self, table: Table) -> bool:
        return table.oid in self.tables

    def may_meet(self, table: Table) -> bool:
        """Whether the table is new to this feed and may belong to it: the feed follows all tables,
        or the table has the name of a followed one."""
        if table.oid in self.tables:
            return False
        everything = self.everything and not table.is_system
        return everything or (table.schema, table.name) in self.names

    def seen(self, transaction: Transaction) -> Transaction | None:
        """The part of a transaction that the feed gets. Raises InvalidQuery or Undecided if that
        cannot be decided."""
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
