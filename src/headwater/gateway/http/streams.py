"""The streaming endpoints: live queries, reactive queries, change feeds and sessions, over SSE and
NDJSON.

A stream is refused before it opens: with an HTTP status and a JSON body with a code, never with an
event in a stream of status 200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headwater.errors import InvalidQuery
from headwater.gateway.connection import GatewayConnection
from headwater.gateway.gateway import Gateway, read_position
from headwater.gateway.http.bodies import LIVE_QUERY_PAGE, LiveBody
from headwater.gateway.http.compression import negotiate
from headwater.gateway.http.requests import (
    HttpCaller,
    admit,
    flag,
    parameter,
    parse_json,
    read_json,
)
from headwater.gateway.http.topic_streams import follow, topic_names
from headwater.gateway.http.tracing import parent_of
from headwater.gateway.http.transports import ContentType, open_stream
from headwater.live.filters.filter import to_json
from headwater.live.filters.text import parse_conditions
from headwater.protocol import ChangesQuery, FeedFormat, Overflow, QueryCall, Subscribe

EVENTS: ContentType = "text/event-stream"
LINES: ContentType = "application/x-ndjson"


class StreamResponse:
    """A response that streams the messages of a connection, until one of them ends."""

    __slots__ = ("_connection", "_content_type", "_encoding", "_gateway", "_marked")

    def __init__(
        self,
        gateway: Gateway,
        connection: GatewayConnection,
        content_type: ContentType,
        encoding: str | None,
        marked: bool,
    ) -> None:
        self._gateway = gateway
        self._marked = marked
        self._connection = connection
        self._content_type = content_type
        self._encoding = encoding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sink = await open_stream(
                scope,
                receive,
                send,
                content_type=self._content_type,
                encoding=self._encoding,
                marked=self._marked,
            )
            self._connection.attach(sink)
            await sink.closed()
        finally:
            self._gateway.release(self._connection)


async def _open(
    gateway: Gateway,
    request: Request,
    caller: HttpCaller,
    message: Subscribe | None,
    content_type: ContentType = EVENTS,
    topics: Sequence[str] = (),
) -> StreamResponse:
    """A stream, with a subscription that has begun or with topics to open, if any. Nothing else of
    the request stays in memory: there may be very many streams, which last for days."""
    transport = "sse" if content_type == EVENTS else "ndjson"
    connection = gateway.open(
        caller.identity,
        address=caller.address,
        transport=transport,
        local=caller.local,
        by_ticket=caller.by_ticket,
    )
    try:
        if message is not None:
            connection.session.resumed = message.id
            await gateway.subscribe(connection, message, parent=parent_of(request.headers))
    except BaseException:
        gateway.release(connection)
        raise
    offered = gateway.settings.gateway.compression
    encoding = negotiate(request.headers.get("accept-encoding", ""), offered)
    if topics:
        since = request.headers.get("last-event-id") or parameter(request, "since")
        after = parameter(request, "after")
        follow(gateway, connection, topics, since, after, parent_of(request.headers))
    return StreamResponse(gateway, connection, content_type, encoding, marked=bool(topics))


async def live(gateway: Gateway, request: Request) -> Response | StreamResponse:
    """`POST /v1/live` with a query in the body, or `GET /v1/live?q=…` for EventSource."""
    if request.method == "HEAD":
        return Response(media_type=EVENTS)
    caller = await admit(gateway, request, opens_stream=request.method == "GET")
    if request.method == "POST":
        message = _live_message(await read_json(request, dict))
    else:
        message = _live_message(parse_json(_required(request, "q"), dict, path="q"))
        message = msgspec.structs.replace(
            message,
            verify=flag(request, "verify", message.verify),
            since=parameter(request, "since") or message.since,
            after=parameter(request, "after") or message.after,
        )
    message = msgspec.structs.replace(
        message, since=request.headers.get("last-event-id") or message.since
    )
    return await _open(gateway, request, caller, message)


def _live_message(value: dict[str, Any]) -> Subscribe:
    """A live query alone, or with options."""
    if "live" not in value:
        return Subscribe("live", live=value)
    try:
        body = msgspec.convert(value, LiveBody)
    except msgspec.ValidationError as error:
        raise InvalidQuery(str(error), hint=LIVE_QUERY_PAGE) from None
    return Subscribe(
        "live",
        live=body.live,
        since=body.since,
        after=body.after,
        verify=body.verify,
    )


async def query(gateway: Gateway, request: Request) -> Response | StreamResponse:
    """`POST /v1/query/{name}/subscribe` with the arguments in the body, or `GET` with `args=…` for
    EventSource."""
    if request.method == "HEAD":
        return Response(media_type=EVENTS)
    caller = await admit(gateway, request, opens_stream=request.method == "GET")
    if request.method == "POST":
        args = await read_json(request, dict, empty={})
    else:
        args = parse_json(parameter(request, "args") or "{}", dict, path="args")
    call = QueryCall(request.path_params["name"], args, flag(request, "delta", False))
    message = Subscribe(
        "query",
        query=call,
        since=request.headers.get("last-event-id") or parameter(request, "since"),
        after=parameter(request, "after"),
    )
    return await _open(gateway, request, caller, message)


async def changes(gateway: Gateway, request: Request) -> Response | StreamResponse:
    """`GET /v1/changes?tables=…&where=…&since=…`: SSE, or NDJSON for clients that accept it."""
    content_type = LINES if LINES in request.headers.get("accept", "") else EVENTS
    if request.method == "HEAD":
        return Response(media_type=content_type)
    caller = await admit(gateway, request, opens_stream=request.method == "GET")
    message = Subscribe(
        "changes",
        changes=_feed_message(request),
        after=parameter(request, "after"),
        overflow=_choice(request, "overflow", Overflow),
    )
    return await _open(gateway, request, caller, message, content_type)


def _feed_message(request: Request) -> ChangesQuery:
    tables = parameter(request, "tables") or ""
    since = request.headers.get("last-event-id") or parameter(request, "since")
    return ChangesQuery(
        tuple(name.strip() for name in tables.split(",") if name.strip()),
        _where(parameter(request, "where")),
        since,
        _choice(request, "format", FeedFormat) or "headwater",
    )


def _where(text: str | None) -> Any:
    """A filter in JSON, or as people write it: `amount > 100`."""
    if text is None:
        return None
    if text.lstrip()[:1] in "[{":
        return parse_json(text, list | dict, path="where")  # type: ignore[arg-type]
    return to_json(parse_conditions([text]))


def _choice(request: Request, name: str, choices: Any) -> Any:
    """A parameter that must be one of these words."""
    value = parameter(request, name)
    if value is not None and value not in get_args(choices):
        words = " or ".join(get_args(choices))
        raise InvalidQuery(f"expected {words}, got {value!r:.100}", path=name)
    return value


async def session(gateway: Gateway, request: Request) -> Response | StreamResponse:
    """`GET /v1/stream`: a connection whose subscriptions are added and removed by other requests.
    With `topics=chat:42,org:7` it begins with these topics; a refused topic is an `error` in the
    stream."""
    if request.method == "HEAD":
        return Response(media_type=EVENTS)
    caller = await admit(gateway, request, opens_stream=request.method == "GET")
    topics = topic_names(parameter(request, "topics"))
    read_position(request.headers.get("last-event-id") or parameter(request, "since"))
    read_position(parameter(request, "after"), "after")
    return await _open(gateway, request, caller, None, topics=topics)


def _required(request: Request, name: str) -> str:
    value = parameter(request, name)
    if value is None:
        raise InvalidQuery("expected a live query in JSON", path=name, hint=LIVE_QUERY_PAGE)
    return str(value)
