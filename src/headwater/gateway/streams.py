"""The streaming endpoints: live queries, change feeds and sessions over SSE and NDJSON.

A stream is refused before it opens: by its status and a JSON body with a code, never by an event
in a stream of status 200.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from headwater.errors import InvalidQuery
from headwater.gateway.bodies import LiveBody
from headwater.gateway.compression import negotiate
from headwater.gateway.connection import Connection
from headwater.gateway.gateway import Gateway
from headwater.gateway.requests import admit, flag, parameter, parse_json, read_json
from headwater.gateway.sinks import ContentType, open_stream
from headwater.live.filter import to_json
from headwater.live.filter_text import parse_conditions
from headwater.protocol import ChangesQuery, FeedFormat, Overflow, Subscribe

EVENTS: ContentType = "text/event-stream"
LINES: ContentType = "application/x-ndjson"


async def live(gateway: Gateway, request: Request, send: Send) -> Response | None:
    """`POST /v1/live` with a query in the body, or `GET /v1/live?q=…` for EventSource."""
    if request.method == "HEAD":
        return Response(media_type=EVENTS)
    caller = await admit(gateway, request)
    if request.method == "POST":
        wish = _live_wish(await read_json(request, dict))
    else:
        wish = _live_wish(parse_json(_required(request, "q"), dict, path="q"))
        wish = msgspec.structs.replace(
            wish,
            batch=flag(request, "batch", wish.batch),
            verify=flag(request, "verify", wish.verify),
            since=parameter(request, "since") or wish.since,
        )
    wish = msgspec.structs.replace(wish, since=request.headers.get("last-event-id") or wish.since)
    async with gateway.connection(caller.identity, address=caller.address, transport="sse") as it:
        await gateway.subscribe(it, wish)
        await _stream(gateway, it, request, send, EVENTS)
    return None


def _live_wish(value: dict[str, Any]) -> Subscribe:
    """A bare query, or one with options around it."""
    if "live" not in value:
        return Subscribe("live", live=value)
    try:
        body = msgspec.convert(value, LiveBody)
    except msgspec.ValidationError as error:
        raise InvalidQuery(str(error)) from None
    return Subscribe("live", live=body.live, since=body.since, batch=body.batch, verify=body.verify)


async def changes(gateway: Gateway, request: Request, send: Send) -> Response | None:
    """`GET /v1/changes?tables=…&where=…&since=…`: SSE, or NDJSON for those who accept that."""
    lines = LINES in request.headers.get("accept", "")
    content_type, transport = (LINES, "ndjson") if lines else (EVENTS, "sse")
    if request.method == "HEAD":
        return Response(media_type=content_type)
    caller = await admit(gateway, request)
    wish = Subscribe(
        "changes", changes=_feed_wish(request), overflow=_choice(request, "overflow", Overflow)
    )
    async with gateway.connection(
        caller.identity, address=caller.address, transport=transport
    ) as it:
        await gateway.subscribe(it, wish)
        await _stream(gateway, it, request, send, content_type)
    return None


def _feed_wish(request: Request) -> ChangesQuery:
    tables = parameter(request, "tables") or ""
    since = request.headers.get("last-event-id") or parameter(request, "since")
    return ChangesQuery(
        tuple(name.strip() for name in tables.split(",") if name.strip()),
        _where(parameter(request, "where")),
        since,
        _choice(request, "format", FeedFormat) or "headwater",
    )


def _where(text: str | None) -> Any:
    """A filter as JSON, or as one types it: `amount > 100`."""
    if text is None:
        return None
    if text.lstrip()[:1] in "[{":
        return parse_json(text, list | dict, path="where")  # type: ignore[arg-type]
    return to_json(parse_conditions([text]))


def _choice(request: Request, name: str, choices: Any) -> Any:
    """A parameter that must be one of a few words."""
    value = parameter(request, name)
    if value is not None and value not in get_args(choices):
        words = " or ".join(get_args(choices))
        raise InvalidQuery(f"expected {words}, got {value!r:.100}", path=name)
    return value


async def session(gateway: Gateway, request: Request, send: Send) -> Response | None:
    """`GET /v1/stream`: a connection whose subscriptions come and go by other requests."""
    if request.method == "HEAD":
        return Response(media_type=EVENTS)
    caller = await admit(gateway, request)
    async with gateway.connection(caller.identity, address=caller.address, transport="sse") as it:
        await _stream(gateway, it, request, send, EVENTS)
    return None


def _required(request: Request, name: str) -> str:
    value = parameter(request, name)
    if value is None:
        raise InvalidQuery("a live query in JSON is expected", path=name)
    return str(value)


async def _stream(
    gateway: Gateway,
    connection: Connection,
    request: Request,
    send: Send,
    content_type: ContentType,
) -> None:
    encoding = negotiate(request.headers.get("accept-encoding", ""), gateway.settings.compression)
    sink = await open_stream(
        request.scope, request.receive, send, content_type=content_type, encoding=encoding
    )
    connection.attach(sink)
    await sink.closed()
