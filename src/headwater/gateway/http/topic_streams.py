"""A stream that begins with topics: `GET /v1/stream?topics=chat:42,org:7`, for EventSource.

Each topic is opened separately: a refused one is an `error` in the stream, and does not affect the
others. An EventSource resumes all topics from one position, its `Last-Event-ID`. So events have no
`id`: a mark with an `id` is sent periodically, when everything up to it has been sent for every
topic. A client that resumes from it may get some events twice, and misses none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache

from opentelemetry.context import Context

from headwater.errors import DatabaseError, HeadwaterError, InvalidQuery, Unavailable
from headwater.gateway.connection import GatewayConnection
from headwater.gateway.gateway import Gateway
from headwater.gateway.internal_errors import internal_error
from headwater.gateway.session import Session, SessionTopic, error_message
from headwater.limits import RECONNECT_SECONDS, STREAM_TOPICS_MAX
from headwater.protocol import Mark, Subscribe

_STREAM_TOPICS_AT_ONCE = 8
"""How many topics of one stream are opened at the same time."""

_STREAM_MARK_SECONDS = 0.5
"""Seconds between two marks in a stream of topics. A client that resumes gets all events since the
last mark again."""


def topic_names(text: str | None) -> list[str]:
    """The names in a parameter, each once.

    >>> topic_names("chat:42, org:7,chat:42")
    ['chat:42', 'org:7']
    """
    found = [name for each in (text or "").split(",") if (name := each.strip(" "))]
    names = list(dict.fromkeys(found))
    if len(names) > STREAM_TOPICS_MAX:
        raise InvalidQuery(
            f"expected at most {STREAM_TOPICS_MAX} topics, got {len(names):,}",
            path="topics",
            hint="Add the others to the session: POST /v1/sessions/{session}/subscriptions.",
        )
    return names


def follow(
    gateway: Gateway,
    connection: GatewayConnection,
    topics: Sequence[str],
    since: str | None,
    after: str | None = None,
    parent: Context | None = None,
) -> None:
    """Subscribe a connection to these topics. The id of each subscription is the name of its
    topic."""
    marks = TopicMarks(connection.session, topics)
    if since is None and gateway.hub.ready:
        # No topic begins before this position: a client that is cut off before the first mark
        # resumes here.
        connection.session.outlet.send(_mark_at(str(gateway.hub.topics.place.durable)))
    at_once = asyncio.Semaphore(_STREAM_TOPICS_AT_ONCE)

    async def subscribe(message: Subscribe) -> None:
        async with at_once:
            await gateway.subscribe(connection, message, parent=parent)

    async def begin(message: Subscribe) -> None:
        error = await _until_decided(subscribe, message)
        if error is not None:
            id = None if connection.uses(message.id) else message.id
            connection.session.send(error_message(error, id=id))
        marks.decided(message.id)

    for topic in topics:
        connection.start(begin(Subscribe(topic, topic=topic, since=since, after=after)))


async def _until_decided(
    subscribe: Callable[[Subscribe], Awaitable[None]], message: Subscribe
) -> HeadwaterError | None:
    """Subscribe; returns the error, if any. Tried again while the database cannot be reached,
    because an EventSource cannot repeat the request for one topic."""
    pause, longest = RECONNECT_SECONDS
    while True:
        try:
            await subscribe(message)
        except (Unavailable, DatabaseError) as error:
            if not error.retryable:
                return error
        except HeadwaterError as error:
            return error
        except Exception:
            return internal_error()
        else:
            return None
        await asyncio.sleep(pause)
        pause = min(2 * pause, longest)


class TopicMarks:
    """Sends the position from which all topics of a session can be resumed together."""

    def __init__(self, session: Session, topics: Iterable[str]) -> None:
        self._session = session
        self._awaited = set(topics)
        self._position: str | None = None
        self._is_due = False
        self._pause = 0.0
        session.on_sent = self._on_sent

    def decided(self, topic: str) -> None:
        """A topic has begun, or was refused."""
        self._awaited.discard(topic)
        if self._position is not None:
            self._on_sent(self._position)

    def _on_sent(self, position: str) -> None:
        # A flush sends to all topics without a pause: the mark is sent after all of them. The first
        # mark has no delay: a client that is cut off before it cannot resume.
        self._position = position
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(self._pause, self._mark)

    def _mark(self) -> None:
        self._is_due = False
        assert self._position is not None
        subscriptions = self._session.subscriptions.values()
        topics = [each for each in subscriptions if isinstance(each, SessionTopic)]
        if not self._awaited and topics and all(each.is_complete for each in topics):
            self._session.outlet.send(_mark_at(self._position))
            self._pause = _STREAM_MARK_SECONDS


_mark_at = lru_cache(maxsize=64)(Mark)
"""The same for all streams, encoded once."""
