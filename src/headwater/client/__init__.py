"""Using a gateway from afar: its live queries, change feeds, reactive queries and mutations.

    sse              reads Server-Sent Events
    replica          the rows of a live query, folded from deltas
    rows_state       what is known of rows that are followed by their deltas
    query_state      what is known of a reactive query whose results come whole
    feed_state       what is known of a change feed
    session          every subscription: messages in, what they mean out
    requests         what is asked once, and what becomes of it when the connection is lost
    refusals         what a gateway says went wrong, as our errors
    arguments        what programs pass, as the messages have it
    backoff          how long to wait, and when to give up
    links            one connection, over WebSocket or SSE
    subscriptions    what a program holds: Live and Feed
    results          what a program holds of queries and mutations: Results and Mutated
    calls            waits for the answers to what is asked once
    connection       keeps connected: `connect`
    blocking         the same without an event loop: `connect_sync`

All but the last six are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.client.backoff import Backoff
    from headwater.client.blocking import (
        BlockingConnection,
        BlockingFeed,
        BlockingLive,
        BlockingResults,
        connect_sync,
    )
    from headwater.client.connection import Connection, connect
    from headwater.client.feed_state import FeedTransaction
    from headwater.client.results import Mutated, Results
    from headwater.client.rows_state import Batch
    from headwater.client.subscriptions import Feed, Live

_HOMES = {
    "Backoff": "backoff",
    "Batch": "rows_state",
    "BlockingConnection": "blocking",
    "BlockingFeed": "blocking",
    "BlockingLive": "blocking",
    "BlockingResults": "blocking",
    "Connection": "connection",
    "Feed": "subscriptions",
    "FeedTransaction": "feed_state",
    "Live": "subscriptions",
    "Mutated": "results",
    "Results": "results",
    "connect": "connection",
    "connect_sync": "blocking",
}

__all__ = [
    "Backoff",
    "Batch",
    "BlockingConnection",
    "BlockingFeed",
    "BlockingLive",
    "BlockingResults",
    "Connection",
    "Feed",
    "FeedTransaction",
    "Live",
    "Mutated",
    "Results",
    "connect",
    "connect_sync",
]


def __getattr__(name: str) -> Any:
    """Load what is used: the hub needs `replica`, and neither httpx nor websockets."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
