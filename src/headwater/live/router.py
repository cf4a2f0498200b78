"""Decides which queries a change may affect. May say yes too often; must never say no wrongly.

Each query is stored under its index terms: equality, IN and IS NULL in hash maps, ranges in an
interval tree, and the rest in a list that every change visits. A change looks up its row before and
after, so that it also finds queries that the row no longer matches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from headwater.live import kinds
from headwater.live.filters.filter import Filter
from headwater.live.filters.terms import Between, Equal, Term, Terms, bound, terms
from headwater.live.intervals import Intervals
from headwater.model import Change, Row, Table

Item = TypeVar("Item", bound=Hashable)

_ABSENT = object()


class Router(Generic[Item]):
    """An index over the filters of many queries. An item stands for a query."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, str], _TableIndex[Item]] = {}
        self._filed: dict[Item, tuple[Filter, Table]] = {}

    def __len__(self) -> int:
        return len(self._filed)

    def add(self, item: Item, where: Filter, table: Table) -> None:
        """Add a query with its checked filter."""
        index = self._tables.setdefault((table.schema, table.name), _TableIndex())
        self._filed[item] = (where, table)
        index.add(item, terms(where, table), table)

    def remove(self, item: Item) -> None:
        where, table = self._filed.pop(item)
        self._tables[table.schema, table.name].remove(item, terms(where, table))

    def candidates(self, change: Change) -> set[Item]:
        """The queries whose results the change may affect."""
        index = self._tables.get((change.table.schema, change.table.name))
        if index is None:
            return set()
        if change.op in ("truncate", "reset") or (change.op != "insert" and change.before is None):
            return set(index.items)
        try:
            return index.candidates(change.before, change.after)
        except Exception:  # a value that cannot be looked up: any query may match it
            return set(index.items)


class _TableIndex(Generic[Item]):
    """The queries of one table."""

    __slots__ = ("columns", "items", "unfiled")

    def __init__(self) -> None:
        self.items: set[Item] = set()
        self.unfiled: set[Item] = set()
        self.columns: dict[str, _ColumnIndex[Item]] = {}

    def add(self, item: Item, found: Terms, table: Table) -> None:
        self.items.add(item)
        if found is None:
            self.unfiled.add(item)
            return
        for term in found:
            if term.column not in self.columns:
                self.columns[term.column] = _ColumnIndex(table, term.column)
            self.columns[term.column].add(term, item)

    def remove(self, item: Item, found: Terms) -> None:
        self.items.discard(item)
        self.unfiled.discard(item)
        for term in found or ():
            index = self.columns[term.column]
            index.remove(term, item)
            if not index:
                del self.columns[term.column]

    def candidates(self, before: Row | None, after: Row | None) -> set[Item]:
        found = set(self.unfiled)
        for column, index in self.columns.items():
            was = _ABSENT if before is None else before.get(column, index)
            now = _ABSENT if after is None else after.get(column, index)
            if now is not _ABSENT:
                found.update(*index.lookup(now))
            if was is not _ABSENT and was is not now and was != now:
                found.update(*index.lookup(was))
        return found


class _ColumnIndex(Generic[Item]):
    """The terms on one column."""

    __slots__ = ("_comparable", "equal", "ranges")

    def __init__(self, table: Table, name: str) -> None:
        kind = next(kinds.kind_of(column) for column in table.columns if column.name == name)
        self._comparable: Callable[[Any], Any] | None = kind.to_comparable
        if not kind.equates:
            # Only IS NULL can be looked up, and the values may not be hashable.
            self._comparable = lambda value: None if kind.may_be_null(value) else _ABSENT
        elif kind.comparable == "{v}":
            self._comparable = None
        self.equal: dict[Any, set[Item]] = {}
        self.ranges: Intervals[Item] = Intervals()

    def __bool__(self) -> bool:
        return bool(self.equal) or bool(self.ranges)

    def add(self, term: Term, item: Item) -> None:
        match term:
            case Equal(_, value):
                self.equal.setdefault(value, set()).add(item)
            case Between(_, low, high):
                self.ranges.add(low, high, item)

    def remove(self, term: Term, item: Item) -> None:
        match term:
            case Equal(_, value):
                filed = self.equal[value]
                filed.discard(item)
                if not filed:
                    del self.equal[value]
            case Between(_, low, high):
                self.ranges.remove(low, high, item)

    def lookup(self, value: Any) -> Iterable[set[Item]]:
        """The items whose terms the value meets; all of them if the image lacks the column (then
        the value is this index itself)."""
        if value is self:
            return [*self.equal.values(), *self.ranges.everything()]
        if value is None:
            return (self.equal.get(None, set()),)
        comparable = value if self._comparable is None else self._comparable(value)
        found = self.ranges.containing(bound(comparable)) if self.ranges else []
        exact = self.equal.get(comparable)
        return found if exact is None else (*found, exact)
