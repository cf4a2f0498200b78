"""Views: identical queries in the same scope share one state, one delta, one encoding.

Two queries are identical if their canonical forms are. The scope decides what may be seen (a
tenant, a user, a set of claims). The caller chooses it, and views are never shared between scopes.
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
    """A new state without rows."""
    return Window(query) if query.mode == "maintained" else Streamed(query)


class View:
    """The state that identical live queries share, and its subscribers."""

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
        """The view of a query. A new one is made if there is none: it has needs, and no rows."""
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
        """The views that a transaction may affect, each with its changes."""
        touched: dict[ViewT, list[Change]] = {}
        for change in changes:
            for step in self._steps(change):
                for view in self._router.candidates(step):
                    touched.setdefault(view, []).append(step)
        return touched

    def _steps(self, change: Change) -> tuple[Change, ...]:
        """The change, as a delete and an insert if memory sees another key. In the database, keys
        that are written differently can be equal: in a collation without case, or `24 hours` and a
        day."""
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
