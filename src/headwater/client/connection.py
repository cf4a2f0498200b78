"""A client of a gateway: one open connection, with every subscription on it.

`session` has the state of the subscriptions, `transports` sends and receives messages; this module
connects the two. When the connection is lost it opens another, to the next of its URLs if there are
several, and resumes every subscription from its position. It gives up after
`limits.CLIENT_FAILURES_MAX` failures in a row, or at once after a refusal that is not retryable.
Then every reader of a subscription and every waiting call gets the error.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from headwater.client.arguments import (
    Order,
    Where,
    call_arguments,
    filter_of,
    live_query,
    position_of,
)  # fmt: skip
from headwater.client.backoff import Backoff
from headwater.client.calls import PendingCalls
from headwater.client.errors import error_of
from headwater.client.requests import Attempts
from headwater.client.session import (
    Changed,
    ClientSession,
    Event,
    MessageReceived,
    PresenceChanged,
    Ready,
    Replaced,
    RowsDiverged,
    Send,
    Stale,
    State,
    SubscriptionFailed,
    TopicUpdated,
    TransactionsReceived,
)
from headwater.client.state.rows import RowsBatch
from headwater.client.subscriptions.channels import Channel
from headwater.client.subscriptions.results import Mutated, Results
from headwater.client.subscriptions.subscription import Feed, Live, Subscription
from headwater.client.subscriptions.topics import Topic
from headwater.client.transports import Link, Opener, gateway_url, open_sse, open_websocket
from headwater.errors import (
    ConfigError,
    ConnectionFailed,
    Forbidden,
    HeadwaterError,
    LimitExceeded,
    ResyncRequired,
    Unauthorized,
)
from headwater.idempotency import check_key, new_key
from headwater.limits import (
    CLIENT_BACKOFF_SECONDS,
    CONNECT_TIMEOUT_SECONDS,
)
from headwater.live.filters.filter import to_json
from headwater.live.query import LiveQuery, Mode
from headwater.model import Position
from headwater.protocol import (
    Answer,
    Ask,
    Authenticate,
    Authenticated,
    ChangesQuery,
    ChannelCall,
    ClientMessage,
    Error,
    FeedFormat,
    Hello,
    Mutate,
    Publish,
    QueryCall,
    ServerMessage,
    SetState,
    Wait,
)
from headwater.tasks import ended

_CLIENT_REFRESH_SECONDS = 30.0
"""A token is renewed this long before it expires, or at half of its remaining time if that is
later."""


Token: TypeAlias = str | Callable[[], str | Awaitable[str]] | None
"""A token, or a function that returns one: called at every connect, and shortly before a token
expires."""

Transport: TypeAlias = Literal["ws", "sse"]

logger = logging.getLogger("headwater.client")


def connect(
    url: str | Sequence[str],
    *,
    token: Token = None,
    transport: Transport | Opener = "ws",
    backoff: Callable[[], Backoff] = Backoff,
) -> Connection:
    """A client of the gateway at `url`, used with `async with`.

    Several URLs are gateways of the same database: when one is lost, the next is tried.
    """
    urls = [url] if isinstance(url, str) else list(url)
    if not urls:
        raise ConfigError("no gateway URL is given", hint='connect("http://localhost:8484")')
    openers: dict[Any, Opener] = {"ws": open_websocket, "sse": open_sse}
    if callable(transport):
        return Connection(urls, token, transport, backoff)
    if transport not in openers:
        raise ConfigError(f"there is no transport {transport!r}", hint="Use 'ws' or 'sse'.")
    for each in urls:
        gateway_url(each, websocket=False)
    return Connection(urls, token, openers[transport], backoff)


class Connection:
    """A connection to a gateway, made by `connect`.

    ```python
    async with connect("http://localhost:8484", token=token) as hw:
        async for rows in hw.live("orders", where=c.region == 7, order="amount desc", limit=20):
            ...

        placed = await hw.mutate("place_order", region=7, amount=5)
        orders = await hw.query("open_orders", region=7)
    ```
    """

    def __init__(
        self, urls: list[str], token: Token, opener: Opener, backoff: Callable[[], Backoff]
    ) -> None:
        self.reconnects = 0
        """How often a lost connection was replaced."""
        self.session: str | None = None
        """The gateway's id of the current connection; None while there is none."""
        self._urls = urls
        self._token = token
        self._token_requested = False
        self._open = opener
        self._new_backoff = backoff
        self._session = ClientSession()
        self._calls = PendingCalls(self._send, self._check_open, backoff)
        self._holding: Feed | None = None  # the feed that blocks reading
        self._written: Position | None = None
        self._progress = asyncio.Event()  # set when the state of a subscription may have changed
        self._subscriptions: dict[State, Subscription] = {}
        self._outbox: asyncio.Queue[ClientMessage] | None = None
        self._again: dict[State, asyncio.TimerHandle] = {}
        self._task: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._error: Exception | None = None
        self._reanchor_lock = asyncio.Lock()
        self._reanchoring: Live | None = None
        self._slides = 0
        self._refusal: HeadwaterError | None = None
        self._expires_at: datetime | None = None
        self._renewed = asyncio.Event()

    # -------------------------------------------------------------------- for programs

    @property
    def diverged(self) -> int:
        """How often the rows of a replica were wrong and were requested again. Expected: 0."""
        return self._session.diverged

    async def __aenter__(self) -> Connection:
        if self._task is not None:
            raise ConfigError("a connection can be entered only once", hint="Call connect() again.")
        self._task = asyncio.create_task(self._run(), name="headwater client")
        try:
            await self._started.wait()
        except BaseException:
            await self.__aexit__()
            raise
        if self._error is not None:
            await self.__aexit__()
            raise self._error
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            if self._task is not None:
                await ended(self._task)
        finally:
            self._end_all()

    def _end_all(self) -> None:
        for subscription in list(self._subscriptions.values()):
            self.end(subscription)
            subscription.finish()
        self._over(ConnectionFailed("the connection was closed before the gateway answered"))

    def live(
        self,
        query: str | dict[str, Any] | LiveQuery,
        *,
        where: Where | None = None,
        order: Order = (),
        limit: int | None = None,
        after: Sequence[Any] | None = None,
        columns: Sequence[str] | None = None,
        mode: Mode = "maintained",
        verify: bool = False,
    ) -> Live:
        """Follow a live query, given by a table and the other arguments, or as a whole.

        With `verify`, every batch has the hash of the result, and is checked.
        """
        if isinstance(query, str):
            query = live_query(query, where, order, limit, after, columns, mode)
        elif isinstance(query, dict):
            query = LiveQuery.from_json(query)
        return Live(self, query.to_json(), verify)

    def changes(
        self,
        *tables: str,
        where: Where | None = None,
        since: str | Position | None = None,
        format: FeedFormat = "headwater",
    ) -> Feed:
        """Follow the changes of tables, none for all: from now on, or from a position."""
        condition = None if where is None else to_json(filter_of(where))
        position = None if since is None else str(position_of(since, "since"))
        return Feed(self, ChangesQuery(tables, condition, position, format))

    async def query(
        self,
        name: str,
        args: Mapping[str, Any] | None = None,
        /,
        *,
        after: str | Position | None = None,
        **named: Any,
    ) -> Any:
        """The result of a reactive query, once. It contains the writes of this connection's own
        mutations; with `after`, everything up to that position instead.

        Arguments are passed by name; in a mapping, if one of them is called `after`.
        """
        arguments = call_arguments(args, named)
        wanted = self._written if after is None else position_of(after, "after")
        if wanted is None:
            return (await self._calls.ask(Ask("", name, arguments))).value
        try:
            return (await self._calls.ask(Ask("", name, arguments, str(wanted)))).value
        except ResyncRequired:
            if after is not None:
                raise
        # The database was restored, or lost our writes in a crash: there is nothing to wait for.
        if self._written == wanted:
            self._written = None
        return await self.query(name, arguments)

    async def mutate(
        self,
        name: str,
        args: Mapping[str, Any] | None = None,
        /,
        *,
        idempotency_key: str | None = None,
        **named: Any,
    ) -> Mutated:
        """Run a mutation, once. It is sent again after a lost connection, and while the gateway
        refuses it with a retryable error; the gateway recognizes the repetition by its key. If no
        gateway can be reached within `limits.CLIENT_MUTATION_SECONDS`, ConnectionFailed with the
        code `outcome_unknown` is raised.

        With your own `idempotency_key`, calls with the same key are one mutation, also from
        different processes. Arguments are passed by name; in a mapping, if one of them is called
        `idempotency_key`.
        """
        key = new_key() if idempotency_key is None else check_key(idempotency_key)
        call = Mutate("", name, call_arguments(args, named), key)
        answer = await self._calls.ask_once(call)
        self._wrote(Position.parse(answer.position))
        return Mutated(answer.value, answer.position)

    async def wait_for(self, position: str | Position) -> None:
        """Wait until every subscription of this connection contains the position. Also waits for
        subscriptions that are being requested again."""
        wanted = str(position_of(position, "position"))
        due = list(self._subscriptions)
        while True:
            due = await self._all_started(due)
            subscribe_count = self._session.subscribe_count
            await self._calls.ask(Wait("", wanted))
            self._session.saw(wanted)
            # A subscription that was requested again meanwhile may have begun after the answer.
            if subscribe_count == self._session.subscribe_count and not any(map(self._is_due, due)):
                return

    def subscribe(
        self,
        name: str,
        args: Mapping[str, Any] | None = None,
        /,
        *,
        delta: bool = False,
        **named: Any,
    ) -> Results:
        """Follow a reactive query. With `delta`, only changed rows are sent.

        Arguments are passed by name; in a mapping, if one of them is called `delta`.
        """
        return Results(self, QueryCall(name, call_arguments(args, named), delta))

    def topic(self, name: str, /) -> Topic:
        """Follow a topic from now on: the rows that are signalled, or pokes."""
        return Topic(self, name)

    def channel(self, name: str, *, present: bool = False, state: Any = None) -> Channel:
        """Follow a channel. With `present`, or with a `state` that others see, as one of its
        members."""
        return Channel(self, ChannelCall(name, present or state is not None, state))

    # -------------------------------------------------------------------- for subscriptions

    def begin(self, subscription: Subscription) -> None:
        self._check_open()
        self._subscriptions[subscription.state] = subscription
        self._session.add(subscription.state)
        self._request(subscription.state)

    def end(self, subscription: Subscription) -> None:
        state = subscription.state
        if self._subscriptions.pop(state, None) is None:
            return
        if timer := self._again.pop(state, None):
            timer.cancel()
        if message := self._session.remove(state):
            self._send(message)
        self._progress.set()

    async def reanchor(self, live: Live, after: list[Any] | None) -> None:
        async with self._reanchor_lock:
            self._reanchoring, self._refusal = live, None
            self._slides += 1
            try:
                self._send(live.state.move(after, f"s{self._slides}"))
                while live.state.is_moving and await live.waiting():
                    pass
            finally:
                self._reanchoring = None
            if self._refusal is not None:
                raise self._refusal

    def _request(self, state: State) -> None:
        """Subscribe now if there is a connection, else when there is one."""
        self._again.pop(state, None)
        if self._outbox is not None:
            self._send(self._session.subscribe(state))

    def _send(self, message: ClientMessage) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(message)
        if self._holding is not None:
            self._holding.wake()

    async def send_to_channel(
        self, message: Publish | SetState, attempts: Attempts | None = None
    ) -> None:
        await self._calls.ask(message, attempts)

    def resume(self, feed: Feed) -> None:
        if not self._session.is_requested(feed.state):
            self._request(feed.state)

    # -------------------------------------------------------------------- for calls

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._task is None or self._task.done():
            raise ConfigError("the connection is not open", hint="Use `async with connect(…)`.")

    def _wrote(self, position: Position) -> None:
        """Concurrent mutations may be answered in any order: the latest position counts."""
        if self._written is None or not self._written.covers(position):
            self._written = position

    async def _all_started(self, states: list[State]) -> list[State]:
        """Wait until these subscriptions have begun or were resumed. Returns those that have not
        ended."""
        while True:
            states = [state for state in states if state in self._subscriptions]
            if not any(map(self._is_due, states)):
                return states
            self._progress.clear()
            await self._progress.wait()
            self._check_open()

    def _is_due(self, state: State) -> bool:
        """Whether a subscription has not begun, was not resumed yet, or will be requested again."""
        return state in self._again or self._session.is_due(state)

    def _over(self, error: Exception) -> None:
        """There will be no more answers."""
        self._calls.over(error)
        self._progress.set()

    # -------------------------------------------------------------------- keeping connected

    async def _run(self) -> None:
        try:
            await self._stay_connected()
        except Exception as error:
            self._error = error
            for subscription in list(self._subscriptions.values()):
                subscription.fail(error)
            self._over(error)
        finally:
            self._started.set()

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        backoff, turn, tried = self._new_backoff(), 0, 0
        while True:
            url, began = self._urls[turn % len(self._urls)], loop.time()
            error = await self._one_connection(url, backoff)
            # After a connection that lasted, the next gateway is tried without a pause.
            lasted = loop.time() - began > CLIENT_BACKOFF_SECONDS[0]
            self._token_requested = self._token_requested and not lasted
            turn, tried = turn + 1, 1 if lasted else tried + 1
            if tried < len(self._urls):
                continue
            tried = 0
            pause = backoff.failed(random.random(), at_least=error.retry_after or 0.0)
            if pause is None:
                raise _given_up(backoff.failures, error) from error
            logger.warning("%s; trying again in %.1f s", error, pause)
            await asyncio.sleep(pause)

    async def _one_connection(self, url: str, backoff: Backoff) -> HeadwaterError:
        """Connect and run until the connection is lost; returns the error. Raises a final error."""
        greeted = False
        try:
            async with self._linked(url) as (link, hello):
                greeted = True
                backoff.succeeded()
                await _until_one_ends(
                    self._reading(link, hello.keepalive, backoff),
                    self._writing(link),
                    self._refreshing(),
                )
        except HeadwaterError as error:
            if self._is_final(error, greeted=greeted):
                raise
            return error
        raise AssertionError("the tasks of a connection end with an error only")

    @asynccontextmanager
    async def _linked(self, url: str) -> AsyncIterator[tuple[Link, Hello]]:
        """An open connection after its hello, on which every subscription was requested."""
        link = await self._open(url, await self._current_token())
        try:
            hello = await _greeting(link, url)
            self._connected(hello)
            yield link, hello
        finally:
            self._outbox = self.session = None
            self._calls.lost()
            await link.close()

    def _connected(self, hello: Hello) -> None:
        if self._started.is_set():
            self.reconnects += 1
        self._outbox, self.session = asyncio.Queue(), hello.session
        self._expires_at = hello.expires_at
        for timer in self._again.values():
            timer.cancel()
        self._again.clear()
        for event in self._session.connected():
            self._act(event)
        self._calls.connected()
        self._started.set()

    # -------------------------------------------------------------------- while connected

    async def _reading(self, link: Link, keepalive: float, backoff: Backoff) -> None:
        last_error: HeadwaterError | None = None
        while True:
            try:
                async with asyncio.timeout(2 * keepalive):
                    message = await link.receive()
            except TimeoutError:
                raise ConnectionFailed(
                    f"nothing was received from the gateway for {2 * keepalive:g} s"
                ) from None
            except HeadwaterError as error:
                # The last error that the gateway sent explains more than the error of the closed
                # connection.
                raise last_error or error from error
            backoff.succeeded()
            last_error = None
            if isinstance(message, Error) and message.id is None:
                found = error_of(message)
                # Any other error is about a message without an id, not about the connection.
                last_error = found if found.retryable or _is_denial(found) else None
            await self._take(message)

    async def _writing(self, link: Link) -> None:
        outbox = self._outbox
        assert outbox is not None
        while True:
            message = await outbox.get()
            if self._calls.sending(message):
                await link.send(message)

    async def _take(self, message: ServerMessage) -> None:
        match message:
            case Authenticated(expires_at):
                self._expires_at = expires_at
                self._renewed.set()
            case Error(id=None):
                # No call waits for it, or the connection ends with it: then `_reading` raises it.
                logger.warning("the gateway sent an error: %s", error_of(message))
            case Answer() | Error() if message.id == f"s{self._slides}":
                self._slid(message)
            case Answer() | Error() if self._calls.received(message):
                if isinstance(message, Answer) and message.position:
                    self._session.saw(message.position)
            case Error(code="behind", id=str()) if len(self._urls) > 1:
                raise error_of(message)  # another gateway may have read more of the log
            case _:
                for event in self._session.receive(message):
                    if isinstance(event, TransactionsReceived):
                        await self._deliver(event)
                    else:
                        self._act(event)
                self._progress.set()

    async def _deliver(self, event: TransactionsReceived) -> None:
        feed = self._subscriptions.get(event.state)
        if not isinstance(feed, Feed):
            return
        self._holding = feed
        try:
            while feed.is_full and not self._is_awaited():
                await feed.waiting()
        finally:
            self._holding = None
        # The program may wait for something else, which must then be read.
        if feed.is_full and (message := self._session.pause(feed.state)):
            feed.left = True
            self._send(message)
        feed.received(event.transactions)

    def _is_awaited(self) -> bool:
        """Whether the program may be waiting for a message that is not read yet."""
        due = map(self._session.is_due, self._subscriptions)
        return self._calls.under_way or self._reanchoring is not None or any(due)

    def _act(self, event: Event) -> None:
        match event:
            case Send(message):
                self._send(message)
            case Ready(state):
                if isinstance(begun := self._subscriptions.get(state), Feed | Topic):
                    begun.ready(self._new_backoff())
            case MessageReceived(state, message):
                if isinstance(channel := self._subscriptions.get(state), Channel):
                    channel.received(message)
            case PresenceChanged(state):
                if isinstance(channel := self._subscriptions.get(state), Channel):
                    channel.gathered()
                    channel.ready(self._new_backoff())
            case Changed(state, batch):
                self._changed(state, batch)
            case Replaced(state):
                self._changed(state)
            case TopicUpdated(state, ops):
                if isinstance(topic := self._subscriptions.get(state), Topic):
                    topic.received(ops)
            case Stale(state, error):
                logger.warning("%s may be out of date: %s", state.name, error)
            case RowsDiverged(state, error):
                logger.warning("%s diverged and is requested again: %s", state.name, error)
            case SubscriptionFailed(state, error):
                self._failed(state, error)

    def _changed(self, state: State, batch: RowsBatch | None = None) -> None:
        subscription = self._subscriptions.get(state)
        if isinstance(subscription, Live) and batch is not None:
            subscription.received(batch)
        elif isinstance(subscription, Results):
            subscription.changed()
        if subscription is not None:
            subscription.ready(self._new_backoff())

    def _failed(self, state: State, error: HeadwaterError) -> None:
        subscription = self._subscriptions.get(state)
        if subscription is None:
            return
        at_least = error.retry_after or 0.0
        pause = subscription.backoff.failed(random.random(), at_least) if error.retryable else None
        if pause is None:
            self.end(subscription)
            subscription.fail(error)
        else:
            loop = asyncio.get_running_loop()
            self._again[state] = loop.call_later(pause, self._request, state)

    def _slid(self, message: Answer | Error) -> None:
        """The window was moved, or the gateway refused to move it."""
        if self._reanchoring is None:
            return
        if isinstance(message, Error):
            self._refusal = error_of(message)
            self._reanchoring.state.stay()
        else:
            self._reanchoring.state.moved()
        self._reanchoring.wake()

    # -------------------------------------------------------------------- tokens

    def _is_final(self, error: HeadwaterError, *, greeted: bool) -> bool:
        """Whether connecting again cannot help. A token that is a text would be refused again; a
        token function is called once more. Without a token, a cookie may have been refused."""
        if error.retryable:
            return False
        if not _is_about_token(error) or self._token is None:
            # The user may have lost access: the answer to the next connect shows it.
            return not (greeted and _is_denial(error))
        if isinstance(self._token, str):
            error.hint = error.hint or "Give a function that returns a new token: token=…"
            return True
        requested, self._token_requested = self._token_requested, True
        return requested

    async def _current_token(self) -> str | None:
        if self._token is None or isinstance(self._token, str):
            return self._token
        try:
            found = self._token()
            return await found if inspect.isawaitable(found) else found
        except HeadwaterError:
            raise
        except Exception as error:
            raise ConnectionFailed(
                f"the token function failed: {error}",
                hint="Correct the function that you gave as token=….",
            ) from error

    async def _refreshing(self) -> None:
        """Renew the token on the open connection before it expires. A token that is a text cannot
        be renewed: then this waits forever."""
        while True:
            self._renewed.clear()
            while self._expires_at is None or not callable(self._token):
                await self._renewed.wait()
                self._renewed.clear()
            left = (self._expires_at - datetime.now(UTC)).total_seconds()
            await asyncio.sleep(max(left - min(_CLIENT_REFRESH_SECONDS, left / 2), 1.0))
            self._expires_at = None
            try:
                self._send(Authenticate(await self._current_token() or ""))
            except ConnectionFailed as error:
                logger.warning("%s", error)


def _is_about_token(error: HeadwaterError) -> bool:
    return error.code == Unauthorized.code or error.code.startswith("token_")


def _is_denial(error: HeadwaterError) -> bool:
    return isinstance(error, Unauthorized | Forbidden)


async def _greeting(link: Link, url: str) -> Hello:
    """The first message: a hello, or an error that is raised."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            message = await link.receive()
            while not isinstance(message, Hello | Error):
                message = await link.receive()
    except TimeoutError:
        raise ConnectionFailed(
            f"the gateway {url} did not answer: it sent no hello",
            hint="Check that the URL is that of a Headwater gateway.",
        ) from None
    if isinstance(message, Error):
        raise error_of(message)
    return message


def _given_up(failures: int, error: HeadwaterError) -> HeadwaterError:
    if isinstance(error, LimitExceeded):
        return error
    return ConnectionFailed(
        f"gave up after {failures} failures in a row: {error}",
        hint=error.hint or "Check that the gateway runs and the URL is right.",
    )


async def _until_one_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Run them concurrently until one has ended; then cancel the others, and raise its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for result in ended:
        if isinstance(result, Exception):
            raise result
