"""A streamed query: the keys of the rows in its result, without order and without the rows.

A new query reads its members page by page in primary-key order, all in one snapshot. If a change
arrives before the last page, it starts over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwater import limits
from headwater.live.needs import Check, Need, Outcome, Refill, Undecided, Unplaced
from headwater.live.query import BoundQuery
from headwater.live.state.sizes import key_sizes
from headwater.model import Change, Cursor, Delta, Key, Match, Reset, Row, Unmatch, Update

_STREAMED_PAGE_ROWS = 5_000
"""Rows of one page, while a streamed query reads its members."""


class Streamed:
    """The membership of one bound query."""

    __slots__ = ("_doubt", "_edge", "_filled", "_query", "_size", "bytes", "members")

    def __init__(self, query: BoundQuery) -> None:
        self._query = query
        self.members: set[Key] = set()
        self._doubt: dict[Key, None] = {}
        self._edge: Cursor | None = None
        self._filled = False
        self._size = key_sizes(query.table)
        self.bytes = 0
        """Memory of the members."""

    @property
    def needs(self) -> tuple[Need, ...]:
        if not self._filled:
            return (Refill(self._edge, _STREAMED_PAGE_ROWS),)
        return (Check(tuple(self._doubt)),) if self._doubt else ()

    def apply(self, changes: Sequence[Change]) -> Outcome:
        """Apply the changes of one transaction."""
        deltas: list[Delta] = []
        before: dict[Key, Row | None] = {}
        final: dict[Key, Row | None] = {}
        for change in changes:
            if change.op == "reset" or not self._filled:
                return self._start_over()
            if change.op == "truncate":
                deltas = [Reset()]
                self._clear()
                self._doubt.clear()
                final.clear()
            else:
                before.setdefault(change.key, change.before)
                final[change.key] = change.after
        for key, row in final.items():
            deltas += self._step(key, before[key], row)
        if len(self._doubt) > limits.WINDOW_ASK_KEYS_MAX:
            return self._start_over()
        return Outcome(tuple(deltas), self.needs)

    def answer(self, need: Need, rows: Sequence[Row]) -> Outcome:
        """Apply the database's answer to one of `needs`."""
        match need:
            case Refill(after, count):
                return self._fill(rows, first=after is None, last=len(rows) < count)
            case Check(keys):
                return self._settle_doubt(keys, rows)
        raise TypeError(f"a streamed query never asks for {need!r}")

    def _step(self, key: Key, before: Row | None, row: Row | None) -> Iterable[Delta]:
        try:
            matches = row is not None and self._query.matches(row)
        except Undecided:
            self._doubt[key] = None
            return ()
        self._doubt.pop(key, None)
        if row is not None and before is not None and matches and key in self.members:
            return () if self._same(before, row) else (Update(key, self._seen(row)),)
        return self._place(key, row if matches else None)

    def _place(self, key: Key, row: Row | None) -> Iterable[Delta]:
        if row is None:
            if key not in self.members:
                return ()
            self.members.discard(key)
            self.bytes -= self._size(key)
            return (Unmatch(key),)
        if key in self.members:
            return (Update(key, self._seen(row)),)
        self.members.add(key)
        self.bytes += self._size(key)
        return (Match(key, self._seen(row)),)

    def _settle_doubt(self, keys: tuple[Key, ...], rows: Sequence[Row]) -> Outcome:
        found = {self._query.key_of(row): row for row in rows}
        self._doubt.clear()
        deltas = [delta for key in keys for delta in self._place(key, found.get(key))]
        return Outcome(tuple(deltas), self.needs)

    def _fill(self, rows: Sequence[Row], *, first: bool, last: bool) -> Outcome:
        keys = [self._query.key_of(row) for row in rows]
        self.bytes += sum(map(self._size, {*keys} - self.members))
        self.members.update(keys)
        self._filled = last
        if rows:
            self._edge = self._query.order.cursor(rows[-1])
        matches = tuple(map(Match, keys, map(self._seen, rows)))
        return Outcome((Reset(), *matches) if first else matches, self.needs)

    def _start_over(self) -> Outcome:
        self._clear()
        self._doubt.clear()
        self._edge, self._filled = None, False
        return Outcome((), self.needs)

    def _clear(self) -> None:
        self.members.clear()
        self.bytes = 0

    def _same(self, one: Row, other: Row) -> bool:
        layout = self._query.layout
        try:
            return layout.same(layout.sort(one), layout.sort(other))
        except Unplaced:
            return False

    def _seen(self, row: Row) -> Row:
        return row if self._query.select is None else self._query.select(row)
