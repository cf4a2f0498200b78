"""Using a gateway from afar: its live queries, change feeds, queries, mutations, topics, channels.

    sse              reads Server-Sent Events
    replica          the rows of a live query, folded from deltas
    rows_state       what is known of rows that are followed by their deltas
    query_state      what is known of a reactive query whose results come whole
    feed_state       what is known of a change feed
    channel_state    what is known of a channel
    topic_state      what is known of a topic
    session          every subscription: messages in, what they mean out
    requests         what is asked once, and what becomes of it when the connection is lost
    refusals         what a gateway says went wrong, as our errors
    arguments        what programs pass, as the messages have it
    backoff          how long to wait, and when to give up
    links            one connection, over WebSocket or SSE
    subscriptions    what a program holds: Live and Feed
    results          what a program holds of queries and mutations: Results and Mutated
    channels         what a program holds of a channel: Channel
    topics           what a program holds of a topic: Topic
    calls            waits for the answers to what is asked once
    connection       keeps connected: `connect`
    blocking         the same without an event loop: `connect_sync`

All but the last eight are pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.client.backoff import Backoff
    from headwater.client.blocking import (
        BlockingChannel,
        BlockingConnection,
        BlockingFeed,
        BlockingLive,
        BlockingResults,
        BlockingTopic,
        connect_sync,
    )
    from headwater.client.channel_state import ChannelMessage
    from headwater.client.channels import Channel
    from headwater.client.connection import Connection, connect
    from headwater.client.feed_state import FeedTransaction
    from headwater.client.results import Mutated, Results
    from headwater.client.rows_state import Batch
    from headwater.client.subscriptions import Feed, Live
    from headwater.client.topic_state import Ops
    from headwater.client.topics import Topic

_HOMES = {
    "Backoff": "backoff",
    "Batch": "rows_state",
    "BlockingChannel": "blocking",
    "BlockingConnection": "blocking",
    "BlockingFeed": "blocking",
    "BlockingLive": "blocking",
    "BlockingResults": "blocking",
    "BlockingTopic": "blocking",
    "Channel": "channels",
    "ChannelMessage": "channel_state",
    "Connection": "connection",
    "Feed": "subscriptions",
    "FeedTransaction": "feed_state",
    "Live": "subscriptions",
    "Mutated": "results",
    "Ops": "topic_state",
    "Results": "results",
    "Topic": "topics",
    "connect": "connection",
    "connect_sync": "blocking",
}

__all__ = [
    "Backoff",
    "Batch",
    "BlockingChannel",
    "BlockingConnection",
    "BlockingFeed",
    "BlockingLive",
    "BlockingResults",
    "BlockingTopic",
    "Channel",
    "ChannelMessage",
    "Connection",
    "Feed",
    "FeedTransaction",
    "Live",
    "Mutated",
    "Ops",
    "Results",
    "Topic",
    "connect",
    "connect_sync",
]


def __getattr__(name: str) -> Any:
    """Load what is used: the hub needs `replica`, and neither httpx nor websockets."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
