"""Views: identical queries in the same auth scope share one state, one delta, one encoding.

Two queries are identical if their canonical forms are. The scope says who may see what (a tenant, a
user, a set of claims); it is the caller's to choose, and views never cross it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count
from typing import Generic, TypeVar

import msgspec

from headwater.live import kinds
from headwater.live.query import BoundQuery
from headwater.live.router import Router
from headwater.live.state.streamed import Streamed
from headwater.live.state.window import Window
from headwater.model import Change, Table


def new_state(query: BoundQuery) -> Window | Streamed:
    """A state that knows nothing yet."""
    return Window(query) if query.mode == "maintained" else Streamed(query)


class View:
    """The shared state behind identical live queries, and who subscribes to it."""

    __slots__ = ("id", "query", "scope", "state", "subscribers")

    def __init__(self, id: int, query: BoundQuery, scope: Hashable) -> None:
        self.id = id
        self.query = query
        self.scope = scope
        self.state = new_state(query)
        self.subscribers: set[Hashable] = set()

    @property
    def identity(self) -> tuple[bytes, Hashable]:
        return self.query.canonical, self.scope


ViewT = TypeVar("ViewT", bound=View)


class Views(Generic[ViewT]):
    """All views of a process, found by query or by change. `make` makes a new one, with a number of
    `next_id`."""

    def __init__(
        self,
        make: Callable[[int, BoundQuery, Hashable], ViewT],
        next_id: Callable[[], int] | None = None,
    ) -> None:
        self._make = make
        self._next_id = next_id or count(1).__next__
        self._views: dict[tuple[bytes, Hashable], ViewT] = {}
        self._router: Router[ViewT] = Router()
        self._rewritable: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[ViewT]:
        return iter(self._views.values())

    def find(self, query: BoundQuery, scope: Hashable) -> ViewT:
        """The view for a query, made if it is new; a new one has needs before it has rows."""
        view = self._views.get((query.canonical, scope))
        if view is None:
            view = self._make(self._next_id(), query, scope)
            self._views[view.identity] = view
            self._router.add(view, query.where, query.table)
        return view

    def remove(self, view: ViewT) -> None:
        self._router.remove(view)
        del self._views[view.identity]

    def touched(self, changes: Sequence[Change]) -> dict[ViewT, list[Change]]:
        """The views that a transaction may alter, each with the changes that may."""
        touched: dict[ViewT, list[Change]] = {}
        for change in changes:
            for step in self._steps(change):
                for view in self._router.candidates(step):
                    touched.setdefault(view, []).append(step)
        return touched

    def _steps(self, change: Change) -> tuple[Change, ...]:
        """The same, by the keys that memory tells apart: to the database a key may still be equal
        when it is written differently, in a collation without case or as `24 hours` for a day."""
        before, table = change.before, change.table
        if change.op != "update" or before is None or not self._may_be_rewritten(table):
            return (change,)
        key = table.key_of(before)
        if key == change.key:
            return (change,)
        return (
            msgspec.structs.replace(change, op="delete", key=key, after=None),
            msgspec.structs.replace(change, op="insert", before=None),
        )

    def _may_be_rewritten(self, table: Table) -> bool:
        known = self._rewritable.get(table.id)
        if known is None:
            keys = (column for column in table.columns if column.name in table.key)
            known = any(not kinds.kind_of(column).equates for column in keys)
            self._rewritable[table.id] = known
        return known
