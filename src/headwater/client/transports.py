"""One connection to a gateway, over WebSocket or SSE: the same messages, and the same errors.

A link is opened with a URL and a token. It receives the gateway's messages and sends the client's.
It raises only Headwater's errors: for a refusal, the error that the gateway sent; for a lost
connection, `ConnectionFailed`. Reconnecting and timeouts are in `connection`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Protocol, TypeAlias, assert_never
from urllib.parse import quote, urlsplit, urlunsplit
from weakref import WeakValueDictionary

import httpx
import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    WebSocketException,
)

from headwater.client.errors import (
    error_in_body,
    error_of,
    error_of_close,
    error_of_mutation,
    too_large,
)  # fmt: skip
from headwater.client.sse import SseParser
from headwater.errors import ConfigError, ConnectionFailed, HeadwaterError
from headwater.limits import (
    CLIENT_ANSWER_SECONDS,
    CLIENT_MESSAGE_BYTES_MAX,
    CLIENT_REQUESTS_AT_ONCE,
    CONNECT_TIMEOUT_SECONDS,
)
from headwater.protocol import (
    Answer,
    Ask,
    Authenticate,
    Authenticated,
    ClientMessage,
    Error,
    Hello,
    Keepalive,
    Mutate,
    Publish,
    Reanchor,
    ServerMessage,
    SetState,
    Subscribe,
    Unsubscribe,
    Wait,
    read_server,
)

_CLIENT_CLOSE_SECONDS = 1.0
"""How long a client waits for the gateway's close frame over WebSocket; then it disconnects."""


class Link(Protocol):
    """An open connection."""

    async def receive(self) -> ServerMessage:
        """The next message. Raises a HeadwaterError when there are no more."""

    async def send(self, message: ClientMessage) -> None:
        """Send a message. The answer, also an error, is returned by `receive`."""

    async def close(self) -> None:
        """End it. Safe to call again."""


Opener: TypeAlias = Callable[[str, str | None], Awaitable[Link]]
"""Opens a link to a URL with a token."""


def gateway_url(url: str, *, websocket: bool) -> str:
    """The URL of the API of a gateway, which may be mounted at any path.

    >>> gateway_url("https://shop.example/data/", websocket=True)
    'wss://shop.example/data/v1'
    """
    parts = urlsplit(url)
    secure = {"http": "", "ws": "", "https": "s", "wss": "s"}.get(parts.scheme)
    if secure is None or not parts.netloc:
        raise ConfigError(
            f"{url!r} is not the URL of a gateway", hint="It looks like http://localhost:8484."
        )
    path = f"{parts.path.rstrip('/')}/v1"
    return urlunsplit((("ws" if websocket else "http") + secure, parts.netloc, path, "", ""))


# Not brotli: httpx would hold back the end of an event until the next one arrives.
_ENCODINGS = {"Accept-Encoding": "zstd, gzip"}


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _read(data: bytes) -> ServerMessage | None:
    """Decode a message; None for a type that this client does not know."""
    try:
        return read_server(data)
    except msgspec.ValidationError as error:
        if "Invalid value" in str(error) and "$.type" in str(error):
            return None
        raise ConnectionFailed(f"the gateway sent an invalid message: {error}") from error
    except msgspec.DecodeError as error:
        raise ConnectionFailed(f"the gateway sent invalid JSON: {error}") from error


# ------------------------------------------------------------------------ WebSocket


async def open_websocket(url: str, token: str | None) -> Link:
    """Connect to `/v1/ws`."""
    with _websocket_errors(url):
        connection = await connect_websocket(
            f"{gateway_url(url, websocket=True)}/ws",
            additional_headers=_headers(token),
            open_timeout=CONNECT_TIMEOUT_SECONDS,
            max_size=CLIENT_MESSAGE_BYTES_MAX,
            # The gateway's keepalives show that it is alive; the library must not take a slow
            # reader for a dead connection.
            ping_interval=None,
            close_timeout=_CLIENT_CLOSE_SECONDS,
        )
    return _WebSocketLink(connection, url)


class _WebSocketLink:
    def __init__(self, connection: ClientConnection, url: str) -> None:
        self._connection = connection
        self._url = url

    async def receive(self) -> ServerMessage:
        with _websocket_errors(self._url):
            while (message := _read(await self._connection.recv(decode=False))) is None:
                pass
            return message

    async def send(self, message: ClientMessage) -> None:
        with _websocket_errors(self._url):
            await self._connection.send(msgspec.json.encode(message).decode())

    async def close(self) -> None:
        await self._connection.close()


@contextmanager
def _websocket_errors(url: str) -> Iterator[None]:
    try:
        yield
    except InvalidStatus as error:
        response = error.response
        refusal = error_in_body(response.status_code, bytes(response.body or b""))
        raise error_of(refusal, response.status_code) from error
    except ConnectionClosed as error:
        raise _closed(error, url) from error
    except (OSError, InvalidHandshake, WebSocketException) as error:
        raise _unreachable(url, error) from error


def _closed(error: ConnectionClosed, url: str) -> HeadwaterError:
    if error.sent is not None and error.sent.code == 1009:
        return too_large(CLIENT_MESSAGE_BYTES_MAX)
    if error.rcvd is not None and (reason := error_of_close(error.rcvd.code, error.rcvd.reason)):
        return reason
    return ConnectionFailed(f"the connection to {url} was lost: {error}")


def _unreachable(url: str, error: Exception) -> ConnectionFailed:
    reason = str(error) or type(error).__name__
    return ConnectionFailed(
        f"cannot reach the gateway {url}: {reason}",
        hint="Check that it runs and the URL is right.",
    )


# ------------------------------------------------------------------------ SSE


async def open_sse(url: str, token: str | None) -> Link:
    """Open the stream; the client's messages are sent as separate requests."""
    async with AsyncExitStack() as stack:
        timeout = httpx.Timeout(CONNECT_TIMEOUT_SECONDS, read=None)
        client = await stack.enter_async_context(
            httpx.AsyncClient(timeout=timeout, headers=_headers(token) | _ENCODINGS)
        )
        address = gateway_url(url, websocket=False)
        with _http_errors(url):
            response = await stack.enter_async_context(client.stream("GET", f"{address}/stream"))
            if response.status_code != 200:
                refusal = error_in_body(response.status_code, await response.aread())
                raise error_of(refusal, response.status_code)
        return _SseLink(url, address, client, response.aiter_bytes(), stack.pop_all())


class _SseLink:
    """One task reads the stream, others send requests; all put what they receive into one queue."""

    def __init__(
        self,
        url: str,
        address: str,
        client: httpx.AsyncClient,
        chunks: AsyncIterator[bytes],
        stack: AsyncExitStack,
    ) -> None:
        self._url = url
        self._address = address
        self._client = client
        self._chunks = chunks
        self._stack = stack
        self._session = ""
        self._read: deque[ServerMessage] = deque()
        # Reads one chunk ahead at most, so that a slow reader slows down the gateway.
        self._arrived: asyncio.Queue[list[ServerMessage] | Exception] = asyncio.Queue(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._mutations: set[asyncio.Task[None]] = set()
        self._order: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._requests = asyncio.Semaphore(CLIENT_REQUESTS_AT_ONCE)
        self._start(self._pump())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._reporting(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reporting(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            await self._arrived.put(error)

    async def receive(self) -> ServerMessage:
        while not self._read:
            arrived = await self._arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            self._read.extend(arrived)
        message = self._read.popleft()
        if isinstance(message, Hello):
            self._session = message.session
        return message

    async def _pump(self) -> None:
        parser = SseParser()
        try:
            async for chunk in self._chunks:
                messages = [_read(event.data) for event in parser.feed(chunk)]
                # Any data, also a comment, shows that the gateway is alive.
                known = [message for message in messages if message is not None]
                await self._arrived.put(known or [Keepalive()])
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise ConnectionFailed(f"the connection to {self._url} was lost: {error}") from error
        # A stopping gateway still answers the requests that it has begun.
        if self._mutations:
            await asyncio.wait(set(self._mutations), timeout=CLIENT_ANSWER_SECONDS)
        raise ConnectionFailed(f"the gateway {self._url} ended the stream")

    async def send(self, message: ClientMessage) -> None:
        task = self._start(self._request(message))
        if isinstance(message, Mutate):
            self._mutations.add(task)
            task.add_done_callback(self._mutations.discard)

    async def _request(self, message: ClientMessage) -> None:
        # Requests run concurrently, because a subscription is answered when its rows are read.
        # Requests for the same subscription are sent in order.
        name = "" if isinstance(message, Authenticate) else message.id
        lock = self._order.setdefault(name, asyncio.Lock())
        async with lock, self._requests:
            with _http_errors(self._url):
                response = await self._send_request(message)
        if response.is_success:
            await self._received_body(message, response.content)
            return
        if response.status_code == 429 and isinstance(message, Unsubscribe):
            # An unsubscribe that is refused must be repeated, or the subscription would never end.
            refusal = error_in_body(response.status_code, response.content)
            await asyncio.sleep(refusal.retry_after_secs or 1.0)
            self._start(self._request(message))
            return
        await self._refused(message, response)

    async def _received_body(self, message: ClientMessage, body: bytes) -> None:
        """Queue what the gateway answered in the response instead of the stream."""
        match message:
            case Ask(id) | Mutate(id):
                await self._arrived.put([_answer(id, body)])
            case Authenticate():
                await self._arrived.put([_authenticated(body)])
            case Publish(request=str(id)) | SetState(request=str(id)):
                await self._arrived.put([Answer(id, "")])

    async def _refused(self, message: ClientMessage, response: httpx.Response) -> None:
        read = error_of_mutation if isinstance(message, Mutate) else error_in_body
        refusal = read(response.status_code, response.content)
        hung_up = response.status_code == 401 or refusal.code == "session_unknown"
        # Queries and mutations need no session: an error is their answer.
        if hung_up and not isinstance(message, Ask | Mutate):
            raise _session_lost(refusal, response.status_code)
        if isinstance(message, Subscribe | Ask | Mutate | Wait):
            refusal = msgspec.structs.replace(refusal, id=message.id)
        elif isinstance(message, Reanchor | Publish | SetState):
            refusal = msgspec.structs.replace(refusal, id=message.request)
        if not isinstance(message, Unsubscribe):
            await self._arrived.put([refusal])

    async def _send_request(self, message: ClientMessage) -> httpx.Response:
        session = f"{self._address}/sessions/{_quoted(self._session)}"
        match message:
            case Subscribe():
                fields: dict[str, Any] = msgspec.to_builtins(message)
                del fields["type"]
                return await self._post(f"{session}/subscriptions", fields)
            case Unsubscribe(id):
                return await self._client.delete(f"{session}/subscriptions/{id}")
            case Reanchor(id, after, request):
                url = f"{session}/subscriptions/{id}"
                window = {"after": after, "request": request}
                return await self._post(url, window, method="PATCH")
            case Authenticate(token):
                self._client.headers.update(_headers(token))
                return await self._post(f"{session}/token", {"token": token})
            case Ask(_, name, args, after):
                url = f"{self._address}/query/{_quoted(name)}"
                return await self._post(url if after is None else f"{url}?after={after}", args)
            case Mutate(_, name, args, key):
                url = f"{self._address}/mutation/{_quoted(name)}"
                return await self._post(url, args, key=key)
            case Wait(id, position):
                return await self._post(f"{session}/wait", {"id": id, "position": position})
            case Publish(id, data, _, key):
                body = {"id": id, "data": data}
                return await self._post(f"{session}/publish", body, key=key)
            case SetState(id, state):
                return await self._post(f"{session}/state", {"id": id, "state": state})
            case _:
                assert_never(message)

    async def _post(
        self, url: str, body: object, *, method: str = "POST", key: str | None = None
    ) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Idempotency-Key"] = key
        content = msgspec.json.encode(body)
        return await self._client.request(method, url, content=content, headers=headers)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()


def _quoted(name: str) -> str:
    return quote(name, safe="")


class _AnswerBody(msgspec.Struct):
    position: str
    value: Any = None


def _answer(id: str, body: bytes) -> Answer:
    try:
        answer = msgspec.json.decode(body, type=_AnswerBody)
    except msgspec.DecodeError as error:
        raise ConnectionFailed(f"the gateway sent an invalid answer: {error}") from error
    return Answer(id, answer.position, answer.value)


def _authenticated(body: bytes) -> Authenticated:
    try:
        return msgspec.json.decode(body, type=Authenticated)
    except msgspec.DecodeError:
        return Authenticated()


def _session_lost(refusal: Error, status: int) -> HeadwaterError:
    """The session has ended, and its stream will end: connect again."""
    error = error_of(refusal, status)
    return error if status == 401 else ConnectionFailed(str(error), hint=error.hint)


@contextmanager
def _http_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
        raise _unreachable(url, error) from error
