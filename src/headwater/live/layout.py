"""How a window stores a row: one flat tuple, the sort key first and the row's values behind it.

Sort keys are unique, so that comparing two entries never reaches the values. A row costs one tuple
instead of a dict and a key, and only the columns somebody needs are held: those selected, those of
the order, and the primary key. Where the database orders, the sort key is a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeAlias

from headwater.live import kinds
from headwater.live.order import OrderBy, Ordering, ordering
from headwater.model import Cursor, Key, Row, Table

Entry: TypeAlias = tuple[Any, ...]


class Layout:
    """The places in an entry, for one order and one choice of columns."""

    __slots__ = ("cursor", "held", "key", "same", "seen", "sort", "values", "width")

    held: tuple[str, ...]
    """The columns an entry holds, in the table's order."""
    width: int
    """How many elements the sort key has."""
    sort: Callable[[Row], Entry]
    """The entry of a row. Only if memory orders; else a rank is put before `values`."""
    values: Callable[[Row], Entry]
    key: Callable[[Entry], Key]
    cursor: Callable[[Entry], Cursor]
    seen: Callable[[Entry], Row]
    """The columns a subscriber sees."""
    same: Callable[[Entry, Entry], bool]
    """Whether a subscriber sees no difference between two entries of a row."""

    def __init__(self, order: Ordering, table: Table, columns: tuple[str, ...] | None) -> None:
        by = tuple(each.column for each in order.by)
        names = [column.name for column in table.columns]
        seen = tuple(names) if columns is None else columns
        self.held = tuple(name for name in names if name in seen or name in by)
        self.sort, self.width = order.entries(self.held) if order.exact else (_no_sort, 1)
        self.values = at(*self.held)
        self.key = at(*self._places(table.key))
        self.cursor = at(*self._places(by))
        self.seen = _seen(seen, self._places(seen))
        self.same = self._sameness(seen, table)

    def row(self, entry: Entry) -> Row:
        """The held columns of an entry."""
        return dict(zip(self.held, entry[self.width :], strict=True))

    def _places(self, names: tuple[str, ...]) -> list[int]:
        return [self.width + self.held.index(name) for name in names]

    def _sameness(self, seen: tuple[str, ...], table: Table) -> Callable[[Entry, Entry], bool]:
        """Python calls 1.0 and 1.00 equal, and 1 and true in JSON; a reader tells them apart."""
        of_column = {column.name: kinds.kind_of(column) for column in table.columns}
        strict = self._places(tuple(name for name in seen if of_column[name].strict))
        loose = self._places(tuple(name for name in seen if not of_column[name].strict))
        width = self.width
        if not strict and len(loose) == len(self.held):
            return lambda one, other: one[width:] == other[width:]
        return lambda one, other: (
            all(one[place] == other[place] for place in loose)
            and all(str(one[place]) == str(other[place]) for place in strict)
        )


@lru_cache(maxsize=1024)
def layout(by: tuple[OrderBy, ...], table: Table, columns: tuple[str, ...] | None) -> Layout:
    """Queries of the same order and columns share it."""
    return Layout(ordering(by, table), table, columns)


def at(*places: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Like itemgetter, but always a tuple."""
    if len(places) == 1:
        (place,) = places
        return lambda values: (values[place],)
    return itemgetter(*places)


def _seen(names: tuple[str, ...], places: list[int]) -> Callable[[Entry], Row]:
    items = (f"{name!r}: entry[{place}]" for name, place in zip(names, places, strict=True))
    return eval(f"lambda entry: {{{', '.join(items)}}}")  # type: ignore[no-any-return]


def _no_sort(row: Row) -> Entry:
    raise AssertionError("this order is the database's to decide")
