"""A client transport to a hub in the same process, for `headwater watch` without a gateway.

It replaces the network: the client behaves as with a gateway, and values are encoded in the same
way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

from headwater.client.transports import Link, Opener
from headwater.errors import HeadwaterError
from headwater.hub.subscriptions.subscriber import Subscriber
from headwater.live.query import LiveQuery
from headwater.protocol import (
    VERSION,
    Answer,
    ClientMessage,
    Error,
    Frame,
    Hello,
    Keepalive,
    Reanchor,
    ResetReason,
    ServerMessage,
    Subscribe,
    Subscribed,
    Unsubscribe,
    read_server,
)

_WATCH_FRAMES_MAX = 1_000
"""Frames that wait to be shown. At the bound a reset replaces them."""


_KEEPALIVE_SECONDS = 15.0


class WatchHandle(Protocol):
    """The handle of a live query, which the hub returns."""

    def close(self) -> None: ...

    def resync(self, reason: ResetReason) -> None: ...

    def reanchor(self, after: list[Any] | None) -> Coroutine[Any, Any, None]: ...


class LiveHub(Protocol):
    """The part of the hub that is used here."""

    async def live(
        self, query: LiveQuery, subscriber: Subscriber, *, since: str | None, verify: bool
    ) -> WatchHandle: ...


def hub_transport(hub: LiveHub) -> Opener:
    """For `connect(…, transport=hub_transport(hub))`: the hub itself instead of a gateway."""

    async def open_link(url: str, token: str | None) -> Link:
        return _HubLink(hub)

    return open_link


class _HubLink:
    """A link without a network."""

    def __init__(self, hub: LiveHub) -> None:
        self._hub = hub
        self._frames: deque[Frame] = deque([Frame(Hello("local", VERSION, _KEEPALIVE_SECONDS))])
        self._arrived = asyncio.Event()
        self._handles: dict[str, WatchHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._behind = False

    async def receive(self) -> ServerMessage:
        try:
            async with asyncio.timeout(_KEEPALIVE_SECONDS):
                while not self._frames:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return Keepalive()
        frame = self._frames.popleft()
        if self._behind and not self._frames:
            self._behind = False
            for handle in self._handles.values():
                handle.resync("overflow")
        # Encoded and decoded, so that values are those that every other client gets.
        return read_server(frame.json)

    def put(self, frame: Frame) -> None:
        """Queue a frame for the client. A client that is too far behind gets a reset instead."""
        if frame.is_step and (self._behind or len(self._frames) >= _WATCH_FRAMES_MAX):
            self._behind = True
            return
        self._frames.append(frame)
        self._arrived.set()

    async def send(self, message: ClientMessage) -> None:
        task = asyncio.create_task(self._handle(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, message: ClientMessage) -> None:
        try:
            match message:
                case Subscribe(id, live=dict(query)):
                    subscriber = _HubSubscriber(self, id)
                    self._handles[id] = await self._hub.live(
                        LiveQuery.from_json(query),
                        subscriber,
                        since=message.since,
                        verify=message.verify,
                    )
                case Unsubscribe(id):
                    if handle := self._handles.pop(id, None):
                        handle.close()
                case Reanchor(id, after, request):
                    await self._handles[id].reanchor(after)
                    if request is not None:
                        self.put(Frame(Answer(request, "")))
        except HeadwaterError as error:
            match message:
                case Subscribe(ended) | Reanchor(request=str(ended)):
                    self.refuse(error, ended)
                case _:
                    self.refuse(error, None)

    def refuse(self, error: HeadwaterError, id: str | None) -> None:
        refusal = Error(error.code, str(error), error.hint, error.retryable, id, error.retry_after)
        self.put(Frame(refusal))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()


class _HubSubscriber:
    def __init__(self, link: _HubLink, id: str) -> None:
        self._link = link
        self._id = id

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None:
        self._link.put(Frame(Subscribed(self._id, view, resumed, key)))

    def deliver(self, frame: Frame) -> None:
        self._link.put(frame)

    def failed(self, error: HeadwaterError) -> None:
        self._link.refuse(error, self._id)

    async def room(self) -> None:
        await asyncio.sleep(0)
