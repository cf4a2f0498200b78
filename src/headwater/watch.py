"""`headwater watch`: a live query in the terminal, as lines, or as JSON.

All three read the same deltas of the same client. Without a gateway, a link to a hub in this very
process takes the place of the network, so that whatever holds for the client holds here too.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live as Screen

from headwater import render
from headwater.client.connection import Connection
from headwater.client.links import Link, Opener
from headwater.client.rows_state import Batch
from headwater.client.subscriptions import Live
from headwater.errors import HeadwaterError
from headwater.hub.subscriber import Subscriber
from headwater.limits import (
    WATCH_FRAMES_MAX,
    WATCH_FRAMES_PER_SECOND_MAX,
    WATCH_HIGHLIGHT_SECONDS,
)
from headwater.live.query import LiveQuery
from headwater.model import Enter, Key, Match, Move, Reset, Update
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

# ------------------------------------------------------------------------ showing


async def watch_on_screen(connection: Connection, live: Live, title: str, console: Console) -> None:
    """A table that follows the rows; what is new in it is marked for a moment."""
    marks = Marks()
    async with live, aclosing(live.deltas()) as batches:
        with Screen(console=console, auto_refresh=False) as screen:
            following = asyncio.create_task(anext(batches))
            try:
                while True:
                    fading = marks.fades_in(time.monotonic())
                    done, _ = await asyncio.wait({following}, timeout=fading)
                    if done:
                        marks.note(following.result(), time.monotonic())
                        following = asyncio.create_task(anext(batches))
                    rows = list(zip(live.keys, live.rows, strict=True))
                    styles = marks.styles(time.monotonic())
                    note = "" if connection.session else "reconnecting …"
                    screen.update(render.rows_view(title, rows, styles, note), refresh=True)
                    await asyncio.sleep(1 / WATCH_FRAMES_PER_SECOND_MAX)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


async def watch_as_lines(live: Live, print_line: Callable[[str], None], *, json: bool) -> None:
    """A line for each delta, or as JSON for each batch of them."""
    async with aclosing(live.deltas()) as batches:
        async for batch in batches:
            for line in [render.batch_as_json(batch)] if json else render.batch_lines(batch):
                print_line(line)


class Marks:
    """Which rows were new or changed a moment ago. Pure: the time comes from the caller."""

    def __init__(self) -> None:
        self._marks: dict[Key, tuple[str, float]] = {}

    def note(self, batch: Batch, now: float) -> None:
        entered = {key for key, style in self.styles(now).items() if style == "green"}
        until = now + WATCH_HIGHLIGHT_SECONDS
        for delta in batch.deltas:
            match delta:
                case Reset():
                    self._marks = {}
                    return
                case Enter(key) | Match(key):
                    self._marks[key] = ("green", until)
                case Update(key) | Move(key) if key not in entered:
                    self._marks[key] = ("yellow", until)

    def styles(self, now: float) -> dict[Key, str]:
        self._marks = {key: mark for key, mark in self._marks.items() if mark[1] > now}
        return {key: style for key, (style, _) in self._marks.items()}

    def fades_in(self, now: float) -> float | None:
        """When something will look different by itself; None for never."""
        if not self._marks:
            return None
        return max(min(until for _, until in self._marks.values()) - now, 0.0)


# ------------------------------------------------------------------------ without a gateway


class LiveHandle(Protocol):
    """What the hub gives for a live query."""

    def close(self) -> None: ...

    def resync(self, reason: ResetReason) -> None: ...

    def reanchor(self, after: list[Any] | None) -> Coroutine[Any, Any, None]: ...


class LiveHub(Protocol):
    """What of the hub is used here."""

    async def live(
        self, query: LiveQuery, subscriber: Subscriber, *, since: str | None, verify: bool
    ) -> LiveHandle: ...


def link_to(hub: LiveHub) -> Opener:
    """For `connect(…, transport=link_to(hub))`: the hub itself instead of a gateway."""

    async def open_link(url: str, token: str | None) -> Link:
        return _HubLink(hub)

    return open_link


class _HubLink:
    """A link without a network between."""

    def __init__(self, hub: LiveHub) -> None:
        self._hub = hub
        self._frames: deque[Frame] = deque([Frame(Hello("local", VERSION, _KEEPALIVE_SECONDS))])
        self._arrived = asyncio.Event()
        self._handles: dict[str, LiveHandle] = {}
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
        # Over the wire's own encoding: values look as they do to every other client.
        return read_server(frame.json)

    def put(self, frame: Frame) -> None:
        """Keep a frame for the client. What is too much for it gives way to a reset."""
        if frame.is_step and (self._behind or len(self._frames) >= WATCH_FRAMES_MAX):
            self._behind = True
            return
        self._frames.append(frame)
        self._arrived.set()

    async def send(self, message: ClientMessage) -> None:
        task = asyncio.create_task(self._obey(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _obey(self, message: ClientMessage) -> None:
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
        said = Error(error.code, str(error), error.hint, error.retryable, id, error.retry_after)
        self.put(Frame(said))

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


_KEEPALIVE_SECONDS = 15.0
