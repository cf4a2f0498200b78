"""Finds the executions that a change may affect. May find too many; must never miss one.

Pure. The cost of a change does not depend on the number of executions that it does not affect:
items are stored by table, then by the set of columns they use, then by their predicate. An update
that alters no column of a set skips all of its items at once. For the others, the router finds the
items whose terms the row meets, and their exact filter decides. Items that read the same share one
entry.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeAlias, TypeVar

from headwater.live.filters.compile import Matches, compile_filter
from headwater.live.filters.filter import EVERYTHING, Filter
from headwater.live.needs import Undecided
from headwater.live.router import Router
from headwater.model import Change, Row, Table
from headwater.queries.analysis.alteration import may_differ
from headwater.queries.analysis.statements import Read

_READS_PER_TABLE_MAX = 16
"""Ways in which one execution may read a table. With more, every change of a used column counts."""


Item = TypeVar("Item", bound=Hashable)

_Columns: TypeAlias = frozenset[str] | None


class Watches(Generic[Item]):
    """What every item reads."""

    def __init__(self) -> None:
        self._tables: dict[int, _TableWatches[Item]] = {}
        self._oids: dict[tuple[str, str], set[int]] = {}
        self._filed: dict[Item, tuple[_Watch[Item], ...]] = {}
        self._everything: dict[Item, None] = {}

    def __len__(self) -> int:
        return len(self._filed.keys() | self._everything.keys())

    def put(self, item: Item, reads: Iterable[Read], *, everything: bool = False) -> None:
        """Replace what the item reads."""
        self.remove(item)
        if everything:
            self._everything[item] = None
            return
        entries = {self._table(read.table).entry(read): None for read in _bounded(reads)}
        for entry in entries:
            entry.items.add(item)
        self._filed[item] = tuple(entries)

    def remove(self, item: Item) -> None:
        """Remove the item, if it is there."""
        self._everything.pop(item, None)
        for entry in self._filed.pop(item, ()):
            entry.items.discard(item)
            if not entry.items:
                self._drop(entry)

    def touched(self, changes: Iterable[Change]) -> set[Item]:
        """The items that the changes may affect."""
        found: set[Item] = set()
        any_change = False
        for change in changes:
            any_change = True
            for watches in self._concerned(change.table):
                watches.touched(change, found)
        if any_change:
            found.update(self._everything)
        return found

    def _concerned(self, table: Table) -> Iterator[_TableWatches[Item]]:
        """The table, and another one that had its name."""
        by_name = self._oids.get((table.schema, table.name), _NONE)
        for oid in by_name if table.oid in by_name else {table.oid, *by_name}:
            watches = self._tables.get(oid)
            if watches is not None:
                yield watches

    def _table(self, table: Table) -> _TableWatches[Item]:
        watches = self._tables.get(table.oid)
        if watches is None:
            watches = self._tables[table.oid] = _TableWatches()
        self._oids.setdefault((table.schema, table.name), set()).add(table.oid)
        return watches

    def _drop(self, entry: _Watch[Item]) -> None:
        table = entry.table
        watches = self._tables[table.oid]
        watches.drop(entry)
        if not watches.shapes:
            del self._tables[table.oid]
            for name in [name for name, oids in self._oids.items() if table.oid in oids]:
                self._oids[name].discard(table.oid)
                if not self._oids[name]:
                    del self._oids[name]


_NONE: frozenset[int] = frozenset()


def _bounded(reads: Iterable[Read]) -> Iterable[Read]:
    """For a table that is read in very many ways, one read that covers all of them."""
    by_table: dict[int, list[Read]] = {}
    for read in reads:
        by_table.setdefault(read.table.oid, []).append(read)
    for of_table in by_table.values():
        if len(of_table) <= _READS_PER_TABLE_MAX:
            yield from of_table
        else:
            yield Read(of_table[-1].table, _union(read.columns for read in of_table))


def _union(columns: Iterable[_Columns]) -> _Columns:
    union: set[str] = set()
    for each in columns:
        if each is None:
            return None
        union |= each
    return frozenset(union)


class _Watch(Generic[Item]):
    """One way of reading a table, and the items that use it."""

    __slots__ = ("_matches", "columns", "items", "table", "where")

    def __init__(self, table: Table, columns: _Columns, where: Filter) -> None:
        self.table = table
        self.columns = columns
        self.where = where
        self.items: set[Item] = set()
        self._matches: Matches | None = None

    def concerns(self, change: Change) -> bool:
        """Whether the row matches, before or after."""
        if self.where == EVERYTHING:
            return True
        if self._matches is None:
            self._matches = compile_filter(self.where, self.table)
        return _may_match(self._matches, change.after) or _may_match(self._matches, change.before)


def _may_match(matches: Matches, row: Row | None) -> bool:
    if row is None:
        return False
    try:
        return matches(row)
    except (Undecided, KeyError, TypeError):  # an image may lack a column, or have an older shape
        return True


class _ColumnSet(Generic[Item]):
    """The entries that use the same columns of one shape of a table."""

    __slots__ = ("entries", "router", "unfiltered")

    def __init__(self) -> None:
        self.entries: dict[Filter, _Watch[Item]] = {}
        self.router: Router[_Watch[Item]] = Router()
        self.unfiltered: _Watch[Item] | None = None

    def entry(self, table: Table, columns: _Columns, where: Filter) -> _Watch[Item]:
        entry = self.entries.get(where)
        if entry is None:
            entry = self.entries[where] = _Watch(table, columns, where)
            if where == EVERYTHING:
                self.unfiltered = entry
            else:
                self.router.add(entry, where, table)
        return entry

    def drop(self, entry: _Watch[Item]) -> None:
        del self.entries[entry.where]
        if entry is self.unfiltered:
            self.unfiltered = None
        else:
            self.router.remove(entry)

    def all_items(self) -> Iterator[set[Item]]:
        return (entry.items for entry in self.entries.values())

    def touched(self, change: Change, found: set[Item]) -> None:
        if self.unfiltered is not None:
            found.update(self.unfiltered.items)
        if self.router:
            for entry in self.router.candidates(change):
                if not entry.items <= found and entry.concerns(change):
                    found.update(entry.items)


class _TableWatches(Generic[Item]):
    """All entries of one table, by its shape and by the columns they use."""

    __slots__ = ("shapes",)

    def __init__(self) -> None:
        self.shapes: dict[int, dict[_Columns, _ColumnSet[Item]]] = {}

    def entry(self, read: Read) -> _Watch[Item]:
        sets = self.shapes.setdefault(read.table.id, {})
        if read.columns not in sets:
            sets[read.columns] = _ColumnSet()
        return sets[read.columns].entry(read.table, read.columns, read.where)

    def drop(self, entry: _Watch[Item]) -> None:
        sets = self.shapes[entry.table.id]
        sets[entry.columns].drop(entry)
        if not sets[entry.columns].entries:
            del sets[entry.columns]
        if not sets:
            del self.shapes[entry.table.id]

    def touched(self, change: Change, found: set[Item]) -> None:
        for shape, sets in self.shapes.items():
            if shape != change.table.id or _names_no_rows(change):
                for each in sets.values():
                    found.update(*each.all_items())
            else:
                self._touched(sets, change, found)

    def _touched(
        self, sets: dict[_Columns, _ColumnSet[Item]], change: Change, found: set[Item]
    ) -> None:
        altered = _altered(change) if change.op == "update" else None
        for columns, each in sets.items():
            if altered is None or columns is None or not columns.isdisjoint(altered):
                each.touched(change, found)


def _altered(change: Change) -> frozenset[str] | None:
    """The columns that an update may have altered; None if that may be any."""
    before, after = change.before, change.after
    if before is None or after is None:
        return None
    columns = {column.name: column for column in change.table.columns}
    altered = frozenset(
        name
        for name, value in after.items()
        if name not in before or may_differ(before[name], value, columns.get(name))
    )
    # It is in the log because something has changed.
    return altered or None


def _names_no_rows(change: Change) -> bool:
    """Whether the change has no rows, so that any row may have changed."""
    return (
        change.op in ("truncate", "reset")
        or (change.op != "insert" and change.before is None)
        or (change.op != "delete" and change.after is None)
    )


def concerns(reads: Iterable[Read], changes: Iterable[Change]) -> bool:
    """Whether the changes may affect an execution that is not in `Watches`."""
    all_reads = tuple(reads)
    return any(_concerns(read, change) for change in changes for read in all_reads)


def _concerns(read: Read, change: Change) -> bool:
    table = change.table
    if table.oid != read.table.oid and (table.schema, table.name) != (
        read.table.schema,
        read.table.name,
    ):
        return False
    if table.id != read.table.id or _names_no_rows(change):
        return True
    if change.op == "update" and read.columns is not None:
        altered = _altered(change)
        if altered is not None and read.columns.isdisjoint(altered):
            return False
    return _Watch[Hashable](read.table, read.columns, read.where).concerns(change)
