"""The load of a gateway: its totals, its costliest sessions and its costliest views.

Each is an entry, which is a row of the table `headwater.activity`; when and how rows are written is
in `activity.py`. Nothing here asks the database. Counting yields to the event loop now and then, so
that it does not delay messages to clients.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime
from heapq import nlargest
from typing import Any, TypeAlias, TypeVar

import msgspec

from headwater.gateway.connection import GatewayConnection
from headwater.hub.feeds.view import FeedView
from headwater.hub.hub import Hub
from headwater.hub.live_views.view import LiveView
from headwater.hub.reactive.group import QueryGroup
from headwater.hub.subscriptions.costs import Cost
from headwater.hub.topics.topic import TopicView
from headwater.limits import (
    ACTIVITY_DETAIL_CHARS_MAX,
    ACTIVITY_ROWS_MAX,
    ACTIVITY_VIEWS_SHOWN_MAX,
    LAG_SHOWN_SECONDS,
)
from headwater.metrics import Metrics, Quantiles, total

_ACTIVITY_TURN_ITEMS = 1_000
"""Sessions or views that are counted without yielding to the event loop."""


encode = msgspec.json.encode

AnyView: TypeAlias = LiveView | QueryGroup | FeedView[Any] | TopicView[Any]

Item = TypeVar("Item")


class Entry(msgspec.Struct, frozen=True):
    """A row of the table; `012_activity.sql` describes its columns."""

    kind: str
    id: str
    type: str | None
    name: str | None
    detail: msgspec.Raw
    since: datetime
    subscriptions: int = 0
    rows: int = 0
    sent: int = 0
    bytes: int = 0
    waiting: int = 0
    runs: int = 0
    seconds: float = 0.0

    @property
    def mark(self) -> tuple[str, str]:
        return self.kind, self.id


class UsageReport:
    """The load of one gateway. `connections` are its present sessions."""

    def __init__(
        self,
        gateway: str,
        hub: Hub,
        metrics: Metrics,
        connections: Callable[[], Iterable[GatewayConnection]],
    ) -> None:
        self._gateway = gateway
        self._hub = hub
        self._metrics = metrics
        self._connections = connections
        self._since = datetime.now(UTC)
        self._sent = self._sent_bytes = 0
        """Sent to sessions that have ended."""
        self._lag = Quantiles(metrics.lag_seconds)
        self._flush = Quantiles(metrics.flush_seconds)

    def ended(self, connection: GatewayConnection) -> None:
        """A session has ended. What was sent to it still counts for this gateway."""
        if connection.sink is not None:
            self._sent += connection.sink.sent
            self._sent_bytes += connection.sink.sent_bytes

    async def entries(self) -> list[Entry]:
        connections = list(self._connections())
        views: list[AnyView] = [
            *self._hub.live_views, *self._hub.reactive, *self._hub.feeds, *self._hub.topics
        ]  # fmt: skip
        own = await self._own(connections)
        sessions = await _costliest(connections, _session_weight)
        costly = await _costliest(views, lambda view: view.cost.weight)
        memory = self._hub.memory
        listed = [_session(each, memory.of(each.owner)) for each in sessions]
        lagging = [view for view, _ in self._hub.live_views.lagged()[:ACTIVITY_ROWS_MAX]]
        return [own, *listed, *map(_view, dict.fromkeys([*lagging, *costly]))]

    async def _own(self, connections: list[GatewayConnection]) -> Entry:
        # Those that end while they are counted are among the connections: count them once.
        sent, size = self._sent, self._sent_bytes
        kinds: Counter[str] = Counter()
        waiting = 0
        async for connection in _in_turns(connections):
            kinds.update(each.kind for each in connection.session.subscriptions.values())
            waiting += connection.session.buffered
            if connection.sink is not None:
                sent += connection.sink.sent
                size += connection.sink.sent_bytes
        return Entry(
            "gateway",
            self._gateway,
            None,
            socket.gethostname(),
            msgspec.Raw(encode(self._state(len(connections), kinds))),
            self._since,
            subscriptions=kinds.total(),
            sent=sent,
            bytes=size,
            waiting=waiting,
        )

    def _state(self, sessions: int, kinds: Counter[str]) -> dict[str, Any]:
        metrics = self._metrics
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ready": self._hub.ready,
            "sessions": sessions,
            "subscriptions": kinds,
            "views": len(self._hub.live_views.views),
            "memory": self._hub.memory.total,
            "changes": total(metrics.changes),
            "flushes": total(metrics.flushes),
            "resyncs": total(metrics.resyncs),
            "overflows": total(metrics.overflows),
            "refused": total(metrics.refused),
            "lag": self._lag.since_last(),
            "flush": self._flush.since_last(),
            "at": datetime.now(UTC),  # so that it differs each time: a sign of life
        }


async def _in_turns(items: Sequence[Item]) -> AsyncIterator[Item]:
    """One after the other, yielding to the event loop now and then."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _ACTIVITY_TURN_ITEMS == 0:
            await asyncio.sleep(0)


async def _costliest(items: Sequence[Item], weight: Callable[[Item], float]) -> list[Item]:
    weights = [weight(item) async for item in _in_turns(items)]
    found = nlargest(ACTIVITY_ROWS_MAX, range(len(items)), key=weights.__getitem__)
    return [items[index] for index in found]


def _session_weight(connection: GatewayConnection) -> int:
    sink = connection.sink
    return connection.session.buffered + (0 if sink is None else sink.sent_bytes)


def _session(connection: GatewayConnection, memory: int) -> Entry:
    """`memory` is that of all subscriptions of its user."""
    session, sink = connection.session, connection.sink
    identity = session.identity
    views = sorted(each.view for each in session.subscriptions.values() if each.view)
    detail = {
        "address": connection.address,
        "tenant": identity.tenant,
        "role": identity.role,
        "expires_at": identity.expires_at,
        "behind": session.is_behind,
        "memory": memory,
        "views": views[:ACTIVITY_VIEWS_SHOWN_MAX],
    }
    return Entry(
        "session",
        # Its own id is a secret of its client, and enough to act for it.
        hashlib.sha256(session.id.encode()).hexdigest()[:12],
        connection.transport,
        identity.user,
        _raw(detail),
        connection.since,
        subscriptions=len(session.subscriptions),
        sent=0 if sink is None else sink.sent,
        bytes=0 if sink is None else sink.sent_bytes,
        waiting=session.buffered,
    )


def _view(view: AnyView) -> Entry:
    detail: dict[str, Any]
    match view:
        case LiveView():
            role = None if view.scope is None else view.scope.role
            lag = view.lag
            shown = lag is not None and lag.seconds >= LAG_SHOWN_SECONDS
            detail = {
                "query": view.request.to_json(),
                "role": role,
                "live": view.live,
                "lagging_since": lag.since if lag is not None and shown else None,
                "memory": view.bytes,
            }
            return _costly(view, "live", view.query.table.label, detail, view.followers, view.held)
        case QueryGroup():
            identity = view.identity
            detail = {
                "args": view.arguments.values,
                "user": identity.user,
                "tenant": identity.tenant,
                "error": None if view.error is None else str(view.error),
            }
            followers = len(view.subscribers) + len(view.joining)
            return _costly(view, "query", view.query.name, detail, followers, 0)
        case FeedView():
            names = sorted(name if schema == "public" else f"{schema}.{name}"
                           for schema, name in view.names)  # fmt: skip
            of = "everything" if view.everything else ", ".join(names)
            return _costly(view, "changes", of, {"format": view.format}, len(view.subscribers), 0)
        case TopicView():
            return _costly(view, "topic", view.name, {}, len(view.subscribers), 0)


def _costly(
    view: AnyView, type: str, name: str, detail: dict[str, Any], followers: int, rows: int
) -> Entry:
    cost: Cost = view.cost
    return Entry(
        "view", str(view.id), type, name, _raw(detail), cost.since,
        subscriptions=followers, rows=rows, sent=cost.deltas, bytes=cost.bytes, runs=cost.runs,
        seconds=round(cost.seconds, 6),
    )  # fmt: skip


def _raw(detail: dict[str, Any]) -> msgspec.Raw:
    """As JSON, of bounded length: a query may be a long list of keys."""
    try:
        text = encode({name: value for name, value in detail.items() if value is not None})
    except (TypeError, ValueError):
        text = encode({"cut": repr(detail)[:ACTIVITY_DETAIL_CHARS_MAX]})
    if len(text) > ACTIVITY_DETAIL_CHARS_MAX:
        cut = text[:ACTIVITY_DETAIL_CHARS_MAX].decode("utf-8", "ignore")
        text = encode({"cut": cut, "lagging_since": detail.get("lagging_since")})
    return msgspec.Raw(text)
