"""A window: the true first N rows of a filtered, ordered table, after every transaction.

The rule: a window has every matching row between its anchor (the cursor it starts after) and its
horizon, and no others: `buffer == matching rows in (anchor, horizon]`. A row in this range is
inserted. A row after the horizon is dropped, because unknown rows may come before it. Only a
complete window, whose horizon is the end of the table, grows at its end. The buffer has a cushion
after the N visible rows. When fewer than N rows are left, one bounded `Refill` reads rows after the
horizon. A new window is empty, so its first need is a refill, too.

If memory cannot decide the filter, or which of two rows comes first, the keys in doubt become one
`Order` need. Until its answer arrives, the keys of further changes are added to the doubt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import assert_never

from headwater import limits
from headwater.live.needs import NOTHING, Need, Order, Outcome, Refill, Undecided, Unplaced
from headwater.live.query import BoundQuery
from headwater.live.state.layout import Entry
from headwater.live.state.steps import Enters, Leaves, ListStep, Moves, Stays, steps
from headwater.model import Change, Cursor, Delta, Enter, Key, Leave, Move, Reset, Row, Update

_WINDOW_CUSHION_ROWS_MIN = 5
"""Rows of the cushion, at least: this many may leave before the database is read again."""

_WINDOW_CUSHION_ROWS_MAX = 100
"""Rows of the cushion, at most. Between the two bounds it is a quarter of the window."""


class _Beyond:
    """Greater than anything: a sort key with it appended sorts directly after its row."""

    def __gt__(self, other: object) -> bool:
        return True

    def __lt__(self, other: object) -> bool:
        return False


_BEYOND = _Beyond()
_START: Entry = ()
_END: Entry = (_BEYOND,)


def cushion_for(limit: int) -> int:
    """Rows of the cushion of a window of this size."""
    return min(max(limit // 4, _WINDOW_CUSHION_ROWS_MIN), _WINDOW_CUSHION_ROWS_MAX)


class Window:
    """The maintained result of one bound query.

    `apply` applies the changes of a transaction, `answer` the rows for a need. Both return the
    deltas from the last result to the new one. `needs` has what must be read.
    """

    __slots__ = (
        "_anchor", "_at", "_cursor", "_doubt", "_edge", "_entries", "_exact", "_horizon", "_key",
        "_layout", "_limit", "_matches", "_query", "_room", "_same", "_select", "_settled",
        "_shown", "_size", "_sort", "_stale", "bytes", "refills",
    )  # fmt: skip

    def __init__(self, query: BoundQuery, *, cushion: int | None = None) -> None:
        self._bind(query)
        self._limit = query.limit
        self._room = query.limit + (cushion_for(query.limit) if cushion is None else cushion)
        self._anchor = _START
        self._entries: list[Entry] = []
        self._at: dict[Key, Entry] = {}
        self._horizon: Entry = _START
        self._edge: Entry | None = None
        self._doubt: dict[Key, None] | None = None
        self._shown: list[Entry] | None = None
        self._stale = True
        self._settled = False
        self.refills = 0
        self.bytes = 0
        """Memory of the rows in the buffer."""
        self._start_over()

    def _bind(self, query: BoundQuery) -> None:
        """Copy what every change needs to attributes, for speed."""
        self._query = query
        self._matches = query.matches
        self._exact = query.order.exact
        self._layout = query.layout
        self._sort = query.layout.sort
        self._key = query.layout.key
        self._cursor = query.layout.cursor
        self._same = query.layout.same
        self._size = query.layout.size
        self._select = query.select

    # -------------------------------------------------------------------- contents

    @property
    def rows(self) -> list[Row]:
        """The visible rows in order, with every column the window holds."""
        return [self._layout.row(entry) for entry in self._visible()]

    @property
    def buffer(self) -> list[Row]:
        """The visible rows and the cushion."""
        return [self._layout.row(entry) for entry in self._entries]

    @property
    def buffered(self) -> int:
        return len(self._entries)

    @property
    def keys(self) -> list[Key]:
        """The keys of all rows in the buffer, in no order."""
        return list(self._at)

    @property
    def ordered_keys(self) -> list[Key]:
        """The same, in the order of `buffer`."""
        return list(map(self._key, self._entries))

    @property
    def limit(self) -> int:
        """How many rows are visible at most."""
        return self._limit

    @property
    def complete(self) -> bool:
        """Whether every matching row after the anchor is in the buffer."""
        return self._horizon is _END

    def snapshot(self) -> Reset:
        """The visible rows, for a new subscriber."""
        visible = enumerate(self._visible())
        return Reset(tuple(self._enter(entry, index) for index, entry in visible))

    @property
    def needs(self) -> tuple[Need, ...]:
        """What must be read from the database. Usually empty."""
        if self._doubt is not None:
            return (self._order(self._doubt),)
        if self._horizon is _END or len(self._entries) >= self._limit:
            return ()
        return (Refill(self._bound(), self._room - len(self._entries)),)

    # -------------------------------------------------------------------- changes and answers

    def apply(self, changes: Sequence[Change]) -> Outcome:
        """Apply the changes of one transaction."""
        try:
            if len(changes) == 1 and self._settled:
                change = changes[0]
                if change.key:
                    try:
                        return self._step(change.key, change.after)
                    except Undecided:
                        pass
            return self._take(changes)
        except Unplaced:
            return self._leave_order_to_database()

    def answer(self, need: Need, rows: Sequence[Row]) -> Outcome:
        """Apply the database's answer to one of `needs`."""
        try:
            match need:
                case Refill(_, count):
                    return self._refill(rows, count)
                case Order():
                    return self._settle_doubt(rows)
        except Unplaced:
            return self._leave_order_to_database()
        raise TypeError(f"a window never asks for {need!r}")

    # -------------------------------------------------------------------- one row: the common case

    def _step(self, key: Key, row: Row | None) -> Outcome:
        old = self._at.get(key)
        new = self._place(row, old)
        if old is None:
            return NOTHING if new is None else self._insert(key, new)
        if new is None:
            return self._remove(key, old)
        assert row is not None
        return self._replace(key, old, new, row)

    def _place(self, row: Row | None, old: Entry | None) -> Entry | None:
        """The entry of a row in the range of the window; None if it is not. May raise Undecided."""
        if row is None or not self._matches(row):
            return None
        entry = self._sort(row)
        if not self._exact:
            if old is not None and self._cursor(old) == self._query.order.cursor(row):
                return self._sort(row, old[self._layout.width - 1])
            if self._tied(entry, old):
                raise Undecided
        known = self._anchor < entry and (self._horizon is _END or entry < self._horizon)
        return entry if known else None

    def _tied(self, entry: Entry, old: Entry | None) -> bool:
        """Whether a rank decides between this entry and another, the anchor or the horizon."""
        width = self._layout.width - 1
        prefix = entry[:width]
        near = bisect_left(self._entries, prefix)
        same = (other for other in self._entries[near : near + 2] if other is not old)
        marks = [self._anchor] if self._anchor is not _START else []
        marks += [self._horizon] if self._horizon is not _END else []
        return any(other[:width] == prefix for other in (*same, *marks))

    def _insert(self, key: Key, new: Entry) -> Outcome:
        entries, limit = self._entries, self._limit
        index = bisect_left(entries, new)
        entries.insert(index, new)
        self._at[key] = new
        self.bytes += self._size(new)
        deltas: tuple[Delta, ...] = ()
        if index < limit:
            deltas = (self._enter(new, index),)
            if len(entries) > limit:
                deltas = (self._leave(entries[limit], limit - 1), *deltas)
        if len(entries) > self._room:
            self._trim()
        return Outcome(deltas)

    def _remove(self, key: Key, old: Entry) -> Outcome:
        entries, limit = self._entries, self._limit
        index = bisect_left(entries, old)
        del entries[index]
        del self._at[key]
        self.bytes -= self._size(old)
        if index >= limit:
            return NOTHING
        if len(entries) >= limit:
            return Outcome((Leave(key, index), self._enter(entries[limit - 1], limit - 1)))
        return self._outcome((Leave(key, index),))

    def _replace(self, key: Key, old: Entry, new: Entry, row: Row) -> Outcome:
        entries, limit = self._entries, self._limit
        source = bisect_left(entries, old)
        self._at[key] = new
        self.bytes += self._size(new) - self._size(old)
        if (source == 0 or entries[source - 1] < new) and (
            source + 1 == len(entries) or new < entries[source + 1]
        ):
            entries[source] = new
            if source >= limit or self._same(old, new):
                return NOTHING
            seen = row if self._select is None else self._select(row)
            return Outcome((Update(key, seen, source, self._cursor(new)),))
        del entries[source]
        index = bisect_left(entries, new)
        entries.insert(index, new)
        if source < limit and index < limit:
            return Outcome((self._move(key, new, source, index),))
        if source < limit:
            return Outcome((Leave(key, source), self._enter(entries[limit - 1], limit - 1)))
        if index < limit:
            pushed = self._leave(entries[limit], limit - 1)
            return Outcome((pushed, self._enter(new, index)))
        return NOTHING

    # -------------------------------------------------------------------- many rows at once

    def _take(self, changes: Sequence[Change]) -> Outcome:
        shown = self._visible() if self._shown is None else self._shown
        final: dict[Key, Row | None] = {}
        for change in changes:
            if change.op == "reset":
                self._start_over()
                final.clear()
            elif change.op == "truncate":
                self._empty()
                final.clear()
            else:
                final[change.key] = change.after
        if self._stale and self._horizon is _START:
            return self._outcome(())
        return self._merge(final, shown)

    def _merge(self, final: dict[Key, Row | None], shown: list[Entry]) -> Outcome:
        placed: dict[Key, Entry | None] = {}
        try:
            if self._doubt is not None:
                raise Undecided
            for key, row in final.items():
                placed[key] = self._place(row, self._at.get(key))
            if not self._exact and self._tied_among(placed.values()):
                raise Undecided
        except Undecided:
            return self._doubt_all(final, shown)
        self._put(placed)
        return self._outcome(self._deltas(shown, placed))

    def _tied_among(self, placed: Iterable[Entry | None]) -> bool:
        """Whether only a rank decides between two rows of one transaction."""
        width = self._layout.width - 1
        prefixes = [entry[:width] for entry in placed if entry is not None]
        return len(set(prefixes)) < len(prefixes)

    def _put(self, placed: dict[Key, Entry | None]) -> None:
        """Sort once at the end: a transaction may have a hundred thousand rows."""
        for key, entry in placed.items():
            old = self._at.pop(key, None)
            if old is not None:
                del self._entries[bisect_left(self._entries, old)]
                self.bytes -= self._size(old)
            if entry is not None:
                self._at[key] = entry
                self.bytes += self._size(entry)
        self._entries.extend(entry for entry in placed.values() if entry is not None)
        self._entries.sort()
        if len(self._entries) > self._room:
            self._trim()

    # -------------------------------------------------------------------- doubt and refills

    def _doubt_all(self, keys: Iterable[Key], shown: list[Entry]) -> Outcome:
        if self._doubt is None:
            self._doubt, self._shown = {}, shown
        self._doubt.update(dict.fromkeys(keys))
        if len(self._doubt) > limits.WINDOW_ASK_KEYS_MAX:
            self._start_over()
        return self._outcome(())

    def _order(self, doubt: dict[Key, None]) -> Order:
        """If memory decides the order, only the filter is in doubt, and only for these keys."""
        keys = doubt if self._exact else {**self._at, **doubt}
        return Order(tuple(keys), self._bound() if self._horizon is not _END else None)

    def _settle_doubt(self, rows: Sequence[Row]) -> Outcome:
        doubt, shown = self._doubt, self._shown
        assert doubt is not None, "the window has no doubt to settle"
        assert shown is not None
        self._doubt, self._shown = None, None
        if self._exact:
            found = {self._query.key_of(row): self._sort(row) for row in rows}
            self._put({key: found.get(key) for key in doubt})
        else:
            self._entries = self._ranked(rows, 0)
            self._at = {self._key(entry): entry for entry in self._entries}
            self.bytes = sum(map(self._size, self._entries))
            if len(self._entries) > self._room:
                self._trim()
        return self._outcome(self._deltas(shown, doubt))

    def _ranked(self, rows: Sequence[Row], first: int) -> list[Entry]:
        return [self._sort(row, rank) for rank, row in enumerate(rows, first)]

    def _refill(self, rows: Sequence[Row], count: int) -> Outcome:
        self.refills += 1
        entries, known = self._entries, len(self._entries)
        if self._exact:
            entries.extend(map(self._sort, rows))
        else:
            rank = entries[-1][self._layout.width - 1] + 1 if entries else 0
            entries.extend(self._ranked(rows, rank))
        self._at.update((self._key(entry), entry) for entry in entries[known:])
        self.bytes += sum(map(self._size, entries[known:]))
        if len(rows) < count:
            self._horizon, self._edge = _END, None
        else:
            self._set_horizon()
        if self._stale:
            self._stale = False
            return self._outcome((self.snapshot(),))
        entered = enumerate(entries[known : self._limit], known)
        return self._outcome(tuple(self._enter(entry, index) for index, entry in entered))

    # -------------------------------------------------------------------- anchor and horizon

    def _start_over(self) -> None:
        """Drop all rows. The next refill begins at the anchor, and is sent as a reset."""
        self._anchor = self._anchor_of(self._query.after)
        self._empty()
        self._horizon = _START
        self._stale = True

    def _leave_order_to_database(self) -> Outcome:
        """A row has a value that memory cannot order: from here on the database orders the rows."""
        self._bind(self._query.ranked())
        self._start_over()
        return self._outcome(())

    def _anchor_of(self, after: Cursor | None) -> Entry:
        return _START if after is None else _behind(self._query.order.key(after))

    def _empty(self) -> None:
        """The table is empty: a complete window without rows."""
        self._entries = []
        self._at = {}
        self.bytes = 0
        self._doubt, self._shown = None, None
        self._horizon, self._edge = _END, None

    def _trim(self) -> None:
        """Drop the rows beyond the cushion, and move the horizon."""
        for entry in self._entries[self._room :]:
            del self._at[self._key(entry)]
            self.bytes -= self._size(entry)
        del self._entries[self._room :]
        self._set_horizon()

    def _set_horizon(self) -> None:
        last = self._entries[-1]
        self._horizon, self._edge = _behind(last[: self._layout.width]), last

    def _bound(self) -> Cursor | None:
        """The cursor after which rows are not known; None for the start of the table."""
        return self._query.after if self._edge is None else self._cursor(self._edge)

    # -------------------------------------------------------------------- deltas

    def _outcome(self, deltas: tuple[Delta, ...]) -> Outcome:
        needs = self.needs
        self._settled = not needs
        return Outcome(deltas, needs)

    def _visible(self) -> list[Entry]:
        return self._entries[: self._limit]

    def _deltas(self, shown: list[Entry], touched: Collection[Key]) -> tuple[Delta, ...]:
        """The deltas from the rows shown before to the rows visible now."""
        if not self._stale:
            before = {self._key(entry): entry for entry in shown}
            now = [self._key(entry) for entry in self._visible()]
            found = steps(list(before), now, touched)
            if found is not None:
                return tuple(self._delta(step) for step in found if not self._idle(step, before))
        self._stale = False
        return (self.snapshot(),)

    def _idle(self, step: ListStep, before: dict[Key, Entry]) -> bool:
        """Whether a touched row has the same values and place as before."""
        return isinstance(step, Stays) and self._same(before[step.key], self._at[step.key])

    def _delta(self, step: ListStep) -> Delta:
        match step:
            case Leaves(key, index):
                return Leave(key, index)
            case Moves(key, source, index):
                return self._move(key, self._at[key], source, index)
            case Enters(key, index):
                return self._enter(self._at[key], index)
            case Stays(key, index):
                return self._update(key, self._at[key], index)
            case _:
                assert_never(step)

    def _enter(self, entry: Entry, index: int) -> Enter:
        return Enter(self._key(entry), self._layout.seen(entry), index, self._cursor(entry))

    def _leave(self, entry: Entry, index: int) -> Leave:
        return Leave(self._key(entry), index)

    def _move(self, key: Key, entry: Entry, source: int, index: int) -> Move:
        return Move(key, self._layout.seen(entry), source, index, self._cursor(entry))

    def _update(self, key: Key, entry: Entry, index: int) -> Update:
        return Update(key, self._layout.seen(entry), index, self._cursor(entry))


def _behind(key: Entry) -> Entry:
    return (*key, _BEYOND)
