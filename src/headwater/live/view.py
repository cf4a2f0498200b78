"""Views: identical queries in the same auth scope share one state, one delta, one encoding.

Two queries are identical if their canonical forms are. The scope says who may see what (a tenant, a
user, a set of claims); it is the caller's to choose, and views never cross it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

from headwater.live.needs import NOTHING, Outcome
from headwater.live.query import BoundQuery
from headwater.live.router import Router
from headwater.live.streamed import Streamed
from headwater.live.window import Window
from headwater.model import Change, Cursor

Scope: TypeAlias = Hashable
Subscriber: TypeAlias = Hashable


class View:
    """The shared state behind identical live queries, and who subscribes to it."""

    __slots__ = ("id", "query", "scope", "state", "subscribers")

    def __init__(self, id: int, query: BoundQuery, scope: Scope) -> None:
        self.id = id
        self.query = query
        self.scope = scope
        self.state: Window | Streamed = (
            Window(query) if query.mode == "maintained" else Streamed(query)
        )
        self.subscribers: set[Subscriber] = set()

    @property
    def identity(self) -> tuple[bytes, Scope]:
        return self.query.canonical, self.scope


class Views:
    """All views of a process, found by query or by change."""

    def __init__(self) -> None:
        self._views: dict[tuple[bytes, Scope], View] = {}
        self._router: Router[View] = Router()
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._views)

    def subscribe(self, query: BoundQuery, scope: Scope, subscriber: Subscriber) -> View:
        """The view for a query, made if it is new; a new one has needs before it has rows."""
        view = self._views.get((query.canonical, scope))
        if view is None:
            self._last_id += 1
            view = View(self._last_id, query, scope)
            self._views[view.identity] = view
            self._router.add(view, query.where, query.table)
        view.subscribers.add(subscriber)
        return view

    def unsubscribe(self, view: View, subscriber: Subscriber) -> None:
        """The last one to leave takes the view away."""
        view.subscribers.discard(subscriber)
        if not view.subscribers:
            self._router.remove(view)
            del self._views[view.identity]

    def reanchor(
        self, view: View, subscriber: Subscriber, after: Cursor | None
    ) -> tuple[View, Outcome]:
        """Slide one subscriber's window. A view of its own slides along; from a shared one the
        subscriber changes over to another, and starts there with a snapshot."""
        assert isinstance(view.state, Window)
        query = view.query.moved(after)
        if view.subscribers != {subscriber} or (query.canonical, view.scope) in self._views:
            other = self.subscribe(query, view.scope, subscriber)
            if other is not view:
                self.unsubscribe(view, subscriber)
            return other, NOTHING
        del self._views[view.identity]
        view.query = query
        self._views[view.identity] = view
        return view, view.state.reanchor(after)

    def apply(self, changes: Sequence[Change]) -> list[tuple[View, Outcome]]:
        """Take one transaction to every view it may touch."""
        touched: dict[View, list[Change]] = {}
        for change in changes:
            for view in self._router.candidates(change):
                touched.setdefault(view, []).append(change)
        return [(view, view.state.apply(changes)) for view, changes in touched.items()]
