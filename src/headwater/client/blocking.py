"""The client for programs without an event loop: the same methods as blocking calls and iterators.

An event loop in its own thread runs the asynchronous client; no logic is duplicated here. Leaving a
`for` loop ends its subscription, leaving the `with` block ends everything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from headwater.client.connection import Connection, Token, Transport, connect
from headwater.client.state.channel import ChannelMessage
from headwater.client.state.feed import FeedTransaction
from headwater.client.state.rows import RowsBatch
from headwater.client.state.topic import Ops
from headwater.client.subscriptions.channels import Channel
from headwater.client.subscriptions.results import Results
from headwater.client.subscriptions.subscription import Feed, Live, Subscription
from headwater.client.subscriptions.topics import Topic
from headwater.client.transports import Opener
from headwater.errors import ConfigError, HeadwaterError
from headwater.model import Cursor, Key, Row
from headwater.protocol import Member

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Inner = TypeVar("_Inner", bound=Subscription)
_Outer = TypeVar("_Outer")
_Self = TypeVar("_Self", bound="_Blocking[Any]")


class _Loop:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="headwater client", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()

    def _work(self) -> None:
        async def until_stopped() -> None:
            self._loop = asyncio.get_running_loop()
            self._started.set()
            await self._stop.wait()
            self._loop = None

        asyncio.run(until_stopped())

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in that thread, and wait for it. An interrupt of the wait (Ctrl-C)
        cancels it."""
        loop = self._loop
        if loop is None:
            work.close()
            raise ConfigError("the connection is closed", hint="Use `with connect_sync(…)`.")
        done: Future[_T] = Future()
        tasks: list[asyncio.Task[_T]] = []

        def start() -> None:
            tasks.append(loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _copy(task, done))

        loop.call_soon_threadsafe(start)
        try:
            return done.result()
        except BaseException:
            if not done.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                wait([done])
            raise

    def iterate(self, items: AsyncGenerator[_T, None]) -> Iterator[_T]:
        """The items of an asynchronous iterator."""

        async def following() -> tuple[_T, ...]:
            async for item in items:
                return (item,)
            return ()

        try:
            while self._loop is not None and (found := self.call(following())):
                yield found[0]
        finally:
            self._finish(items)

    def _finish(self, items: AsyncGenerator[Any, None]) -> None:
        if self._loop is None:
            return
        if threading.current_thread() is self._thread:
            # The garbage collector runs in the loop's thread, which must not wait for itself.
            self._loop.create_task(_close(items))
        else:
            self.call(_close(items))

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


def _copy(task: asyncio.Task[_T], done: Future[_T]) -> None:
    if task.cancelled():
        done.cancel()
        done.set_running_or_notify_cancel()  # without it, waiting threads are not woken
    elif error := task.exception():
        done.set_exception(error)
    else:
        done.set_result(task.result())


class _Blocking(Generic[_Inner]):
    """A subscription that is entered and left from another thread than the event loop's."""

    def __init__(self, loop: _Loop, inner: _Inner) -> None:
        self._loop = loop
        self._inner = inner

    def __enter__(self: _Self) -> _Self:
        self._loop.call(self._inner.__aenter__())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call(self._inner.__aexit__())


class BlockingLive(_Blocking[Live]):
    """`headwater.client.Live`, blocking."""

    @property
    def rows(self) -> list[Row]:
        return self._inner.rows

    @property
    def keys(self) -> list[Key]:
        return self._inner.keys

    @property
    def key_columns(self) -> tuple[str, ...]:
        return self._inner.key_columns

    @property
    def position(self) -> str | None:
        return self._inner.position

    def cursor(self, key: Key) -> Cursor:
        return self._inner.cursor(key)

    def __iter__(self) -> Iterator[list[Row]]:
        return self._loop.iterate(self._inner.__aiter__())

    def deltas(self) -> Iterator[RowsBatch]:
        return self._loop.iterate(self._inner.deltas())

    def reanchor(self, after: Sequence[Any] | None) -> None:
        self._loop.call(self._inner.reanchor(after))


class BlockingResults(_Blocking[Results]):
    """`headwater.client.Results`, blocking."""

    @property
    def value(self) -> Any:
        return self._inner.value

    @property
    def position(self) -> str | None:
        return self._inner.position

    @property
    def error(self) -> HeadwaterError | None:
        return self._inner.error

    def __iter__(self) -> Iterator[Any]:
        return self._loop.iterate(self._inner.__aiter__())


class BlockingFeed(_Blocking[Feed]):
    """`headwater.client.Feed`, blocking."""

    @property
    def position(self) -> str | None:
        return self._inner.position

    def __iter__(self) -> Iterator[FeedTransaction]:
        return self._loop.iterate(self._inner.__aiter__())


class BlockingTopic(_Blocking[Topic]):
    """`headwater.client.Topic`, blocking."""

    @property
    def position(self) -> str | None:
        return self._inner.position

    def rows(self, entity: str) -> list[Row]:
        async def rows() -> list[Row]:
            return self._inner.rows(entity)

        return self._loop.call(rows())

    def fill(self, entity: str, rows: Iterable[Row], key: str | Sequence[str] = "id") -> None:
        async def fill() -> None:
            self._inner.fill(entity, rows, key)

        self._loop.call(fill())

    def __iter__(self) -> Iterator[Ops]:
        return self._loop.iterate(self._inner.__aiter__())


class BlockingChannel(_Blocking[Channel]):
    """`headwater.client.Channel`, blocking."""

    @property
    def member(self) -> str | None:
        return self._inner.member

    @property
    def members(self) -> tuple[Member, ...]:
        return self._inner.members

    @property
    def missed(self) -> int:
        return self._inner.missed

    def __iter__(self) -> Iterator[ChannelMessage]:
        return self._loop.iterate(self._inner.__aiter__())

    def presence(self) -> Iterator[tuple[Member, ...]]:
        return self._loop.iterate(self._inner.presence())

    def publish(self, data: Any, *, idempotency_key: str | None = None) -> None:
        self._loop.call(self._inner.publish(data, idempotency_key=idempotency_key))

    def set_state(self, state: Any) -> None:
        self._loop.call(self._inner.set_state(state))


def _blocking(
    method: Callable[Concatenate[Connection, _P], _Inner],
    outer: Callable[[_Loop, _Inner], _Outer],
) -> Callable[Concatenate[BlockingConnection, _P], _Outer]:
    """The same method of a blocking connection, with the same arguments."""

    def wrapped(self: BlockingConnection, /, *args: _P.args, **kwargs: _P.kwargs) -> _Outer:
        return outer(self.running(), method(self.inner, *args, **kwargs))

    wrapped.__doc__ = method.__doc__
    return wrapped


def _answered(
    method: Callable[Concatenate[Connection, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[BlockingConnection, _P], _T]:
    """The same for an asynchronous method: waits for its result."""

    def wrapped(self: BlockingConnection, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.running().call(method(self.inner, *args, **kwargs))

    wrapped.__doc__ = method.__doc__
    return wrapped


class BlockingConnection:
    """`headwater.client.Connection`, blocking."""

    def __init__(self, inner: Connection) -> None:
        self.inner = inner
        self._loop: _Loop | None = None

    def running(self) -> _Loop:
        if self._loop is None:
            raise ConfigError("the connection is not open", hint="Use `with connect_sync(…)`.")
        return self._loop

    def __enter__(self) -> BlockingConnection:
        self._loop = _Loop()
        try:
            self._loop.call(self.inner.__aenter__())
        except BaseException:
            self._loop.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        loop = self.running()
        try:
            loop.call(self.inner.__aexit__())
        finally:
            loop.stop()

    @property
    def diverged(self) -> int:
        return self.inner.diverged

    @property
    def reconnects(self) -> int:
        return self.inner.reconnects

    @property
    def session(self) -> str | None:
        return self.inner.session

    live = _blocking(Connection.live, BlockingLive)
    changes = _blocking(Connection.changes, BlockingFeed)
    subscribe = _blocking(Connection.subscribe, BlockingResults)
    topic = _blocking(Connection.topic, BlockingTopic)
    channel = _blocking(Connection.channel, BlockingChannel)
    query = _answered(Connection.query)
    mutate = _answered(Connection.mutate)
    wait_for = _answered(Connection.wait_for)


def connect_sync(
    url: str | Sequence[str],
    *,
    token: Token = None,
    transport: Transport | Opener = "ws",
) -> BlockingConnection:
    """`connect` for programs without an event loop, used with `with`."""
    return BlockingConnection(connect(url, token=token, transport=transport))
