"""Following a gateway's live queries and change feeds from afar.

    sse              reads Server-Sent Events
    replica          the rows of a live query, folded from deltas
    session          the state of every subscription: messages in, what they mean out
    refusals         what a gateway says went wrong, as our errors
    backoff          how long to wait, and when to give up
    links            one connection, over WebSocket or SSE
    subscriptions    what a program holds: Live and Feed
    connection       keeps connected: `connect`
    blocking         the same without an event loop: `connect_sync`

All but the last four are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.client.backoff import Backoff
    from headwater.client.blocking import (
        BlockingConnection,
        BlockingFeed,
        BlockingLive,
        connect_sync,
    )
    from headwater.client.connection import Connection, connect
    from headwater.client.session import Batch, FeedTransaction
    from headwater.client.subscriptions import Feed, Live

_HOMES = {
    "Backoff": "backoff",
    "Batch": "session",
    "BlockingConnection": "blocking",
    "BlockingFeed": "blocking",
    "BlockingLive": "blocking",
    "Connection": "connection",
    "Feed": "subscriptions",
    "FeedTransaction": "session",
    "Live": "subscriptions",
    "connect": "connection",
    "connect_sync": "blocking",
}

__all__ = [
    "Backoff",
    "Batch",
    "BlockingConnection",
    "BlockingFeed",
    "BlockingLive",
    "Connection",
    "Feed",
    "FeedTransaction",
    "Live",
    "connect",
    "connect_sync",
]


def __getattr__(name: str) -> Any:
    """Load what is used: the hub needs `replica`, and neither httpx nor websockets."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
