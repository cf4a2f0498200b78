"""How a window stores a row: one flat tuple, first the sort key, then the row's values.

Sort keys are unique, so comparing two entries never compares the values. A row is one tuple instead
of a dict and a key. Only the selected columns, those of the order and the primary key are stored.
If only the database knows the order, the sort key ends with a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import eq, itemgetter
from typing import Any, TypeAlias

from headwater.live import kinds
from headwater.live.order import OrderBy, Ordering, ordering
from headwater.live.state.sizes import ENTRY_BYTES, VALUE_BYTES, sizes
from headwater.model import Cursor, Key, Row, Table

Entry: TypeAlias = tuple[Any, ...]


class Layout:
    """The places in an entry, for one order and one choice of columns."""

    __slots__ = (
        "cursor", "held", "key", "places", "row", "same", "seen", "size", "sort", "width",
    )  # fmt: skip

    held: tuple[str, ...]
    """The columns an entry holds, in the table's order."""
    width: int
    """How many elements the sort key has."""
    places: dict[str, int]
    """The index of a column's value in an entry: in the sort key, if that has it unchanged."""
    sort: Callable[..., Entry]
    """The entry of a row; with its rank if the database decides the order."""
    key: Callable[[Entry], Key]
    cursor: Callable[[Entry], Cursor]
    row: Callable[[Entry], Row]
    """The held columns."""
    seen: Callable[[Entry], Row]
    """The columns a subscriber sees."""
    size: Callable[[Entry], int]
    """Bytes of memory that an entry takes."""
    same: Callable[[Entry, Entry], bool]
    """Whether a subscriber sees no difference between two entries of a row."""

    def __init__(self, order: Ordering, table: Table, columns: tuple[str, ...] | None) -> None:
        by = tuple(each.column for each in order.by)
        names = [column.name for column in table.columns]
        seen = tuple(names) if columns is None else columns
        self.held = tuple(name for name in names if name in seen or name in by)
        self.sort, self.width, self.places = order.entries(self.held)
        self.key = at(*self._places(table.key))
        self.cursor = at(*self._places(by))
        self.row = _row_of(self.held, self._places(self.held))
        self.seen = _row_of(seen, self._places(seen))
        self.same = self._sameness(seen, table)
        self.size = self._sizes(by, table)

    def _places(self, names: tuple[str, ...]) -> list[int]:
        return [self.places[name] for name in names]

    def _sizes(self, by: tuple[str, ...], table: Table) -> Callable[[Entry], int]:
        # A value that the sort key has in another form is stored twice.
        twice = {name for name in by if self.places[name] >= self.width}
        places = {name: (self.places[name], 1 + (name in twice)) for name in self.held}
        fixed = ENTRY_BYTES + VALUE_BYTES * (self.width + len(self.held))
        return sizes(table, fixed, self.held, places)

    def _sameness(self, seen: tuple[str, ...], table: Table) -> Callable[[Entry, Entry], bool]:
        """In Python 1.0 equals 1.00, and 1 equals true in JSON; subscribers see a difference."""
        of_column = {column.name: kinds.kind_of(column) for column in table.columns}
        strict = self._places(tuple(name for name in seen if of_column[name].strict))
        loose = self._places(tuple(name for name in seen if not of_column[name].strict))
        if not strict and len(loose) == len(self.held):
            return eq
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
        return itemgetter(slice(place, place + 1)) if isinstance(place, int) else _one(place)
    return itemgetter(*places)


def _one(name: str) -> Callable[[Any], tuple[Any, ...]]:
    return lambda row: (row[name],)


def _row_of(names: tuple[str, ...], places: list[int]) -> Callable[[Entry], Row]:
    items = (f"{name!r}: entry[{place}]" for name, place in zip(names, places, strict=True))
    return eval(f"lambda entry: {{{', '.join(items)}}}")  # type: ignore[no-any-return]
