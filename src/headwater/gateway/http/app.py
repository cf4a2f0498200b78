"""The ASGI app: paths, methods and status codes. What requests do is in `gateway` and `streams`.

It can be mounted in any ASGI application. Errors become a status and a JSON body with a code.
Unexpected errors become a 500 with an id, and only the gateway's log has the details.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send
from starlette.websockets import WebSocket

from headwater.errors import (
    CaptureError,
    Forbidden,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
    NotFound,
    Refused,
    ResyncRequired,
    TimedOut,
    Unauthorized,
)
from headwater.gateway.auth.admins import LOCAL_ONLY, is_admin, not_admin
from headwater.gateway.connection import GatewayConnection
from headwater.gateway.gateway import Gateway
from headwater.gateway.http import openapi, pages, streams, websocket
from headwater.gateway.http.addresses import host_of, is_local_name
from headwater.gateway.http.bodies import ReanchorBody
from headwater.gateway.http.requests import (
    admit,
    check_deliberate,
    idempotency_key,
    identify,
    parameter,
    read_json,
    shows_metrics_token,
)
from headwater.gateway.http.tracing import parent_of
from headwater.gateway.internal_errors import internal_error
from headwater.gateway.quotas import owner_of
from headwater.gateway.session import error_message
from headwater.protocol import Authenticate, Publish, Reanchor, SetState, Subscribe, Wait

GatewayOf = Callable[[], Gateway]
"""Returns the running gateway, or raises Unavailable: an app may be mounted before the gateway
runs."""

Handler = Callable[[Gateway, Request], Awaitable[ASGIApp]]
"""Handles a request. The response may be a stream."""


def create_app(
    gateway_of: GatewayOf,
    *,
    origins: tuple[str, ...] = (),
    lifespan: Lifespan[Starlette] | None = None,
    more: Sequence[BaseRoute] = (),
) -> Starlette:
    """The app of a gateway. `lifespan` runs if the app is served directly, not if it is mounted.
    `more` are additional routes."""

    def route(path: str, handler: Handler, *methods: str) -> Route:
        return Route(path, Endpoint(gateway_of, handler), methods=methods)

    subscription = "/v1/sessions/{session}/subscriptions/{id:path}"
    routes = [
        route("/v1/live", streams.live, "GET", "POST"),
        route("/v1/changes", streams.changes, "GET"),
        route("/v1/query/{name}", ask, "POST"),
        route("/v1/query/{name}/subscribe", streams.query, "GET", "POST"),
        route("/v1/mutation/{name}", mutate, "POST"),
        route("/v1/stream", streams.session, "GET"),
        route("/v1/sessions/{session}/subscriptions", subscribe, "POST"),
        route(subscription, unsubscribe, "DELETE"),
        route(subscription, reanchor, "PATCH"),
        route("/v1/sessions/{session}/wait", wait, "POST"),
        route("/v1/sessions/{session}/publish", publish, "POST"),
        route("/v1/sessions/{session}/state", set_state, "POST"),
        route("/v1/sessions/{session}/token", refresh, "POST"),
        route("/v1/tickets", ticket, "POST"),
        WebSocketRoute("/v1/ws", _socket(gateway_of)),
        route("/metrics", metrics, "GET"),
        Route("/healthz", healthy),
        route("/readyz", ready, "GET"),
        route("/openapi.json", described, "GET"),
        *more,
        *pages.routes(),
    ]
    allowed = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_credentials="*" not in origins,
        allow_methods=["GET", "POST", "PATCH", "DELETE"],
        allow_headers=[
            "authorization",
            "content-type",
            "idempotency-key",
            "last-event-id",
            "traceparent",
            "tracestate",
        ],
    )
    return Starlette(
        routes=routes,
        middleware=[allowed] if origins else [],
        exception_handlers={HTTPException: _no_such_path},
        lifespan=lifespan,
    )


class Endpoint:
    """A handler as an ASGI app, with errors turned into responses."""

    def __init__(self, gateway_of: GatewayOf, handler: Handler) -> None:
        self._gateway_of = gateway_of
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            response = await self._answer(Request(scope, receive))
            await response(scope, receive, send)

    async def _answer(self, request: Request) -> ASGIApp:
        try:
            return await self._handler(self._gateway_of(), request)
        except HeadwaterError as error:
            return _refused(self._gateway_of, error)
        except ClientDisconnect:
            raise
        except Exception:
            return refusal(internal_error())


class LocalOnly:
    """Serves only requests whose host is an IP address or `localhost`.

    The owner of a web page can let its host name resolve to this machine (DNS rebinding). The page
    would then have the same origin as a gateway without authentication. This does not work with an
    IP address. Only requests through this app can be an admin's without a token
    (`admins.is_local`).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_called_local(scope):
            await self._app({**scope, LOCAL_ONLY: True}, receive, send)
        elif scope["type"] == "websocket":
            await _deny(WebSocket(scope, receive, send), _FOREIGN, refusal(_FOREIGN))
        else:
            await refusal(_FOREIGN)(scope, receive, send)


def _is_called_local(scope: Scope) -> bool:
    return is_local_name(host_of(HTTPConnection(scope).headers.getlist("host")))


_FOREIGN = Forbidden(
    "this gateway requires no token, so it only answers requests to its own address or localhost",
    code="host",
    hint="Configure authentication, or serve every client with --insecure.",
)


def _socket(gateway_of: GatewayOf) -> Callable[[WebSocket], Awaitable[None]]:
    async def endpoint(socket: WebSocket) -> None:
        try:
            await websocket.serve(gateway_of(), socket)
        except HeadwaterError as error:
            await _deny(socket, error, _refused(gateway_of, error))

    return endpoint


async def _deny(socket: WebSocket, error: HeadwaterError, response: Response) -> None:
    """Refuse a handshake; with the reason, if the server supports that."""
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(response)
    else:
        await socket.close(reason=error.code)


# ------------------------------------------------------------------------ errors


def _refused(gateway_of: GatewayOf, error: HeadwaterError) -> Response:
    """The response for an error, which is counted in the metrics."""
    response = refusal(error)
    with suppress(HeadwaterError):
        gateway = gateway_of()
        gateway.metrics.refused.labels(error.code).inc()
        if error.code == "admin_only" and gateway.settings.auth.has_key:
            response.headers["www-authenticate"] = 'Bearer error="insufficient_scope"'
    return response


def refusal(error: HeadwaterError) -> Response:
    """An error as a response."""
    headers = {}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = f'Bearer error="{error.code}"'
    if error.retry_after is not None:
        headers["retry-after"] = f"{max(1, round(error.retry_after))}"
    if error.code in ("too_slow", "too_large"):
        headers["connection"] = "close"  # the rest of the body is not read
    message = error_message(error)
    fields = {name: getattr(message, name) for name in _ERROR_FIELDS}
    document = {"error": {name: value for name, value in fields.items() if value is not None}}
    return json_answer(document, status=_status(error), headers=headers)


_ERROR_FIELDS = ("code", "message", "hint", "retryable", "retry_after_secs")


def _status(error: HeadwaterError) -> int:
    match error:
        case HeadwaterError(code="outcome_unknown", retryable=False):
            return 500
        case InvalidQuery(code="idempotency_key_reused"):
            return 422
        case InvalidQuery():
            return 400
        case Unauthorized():
            return 401
        case Forbidden():
            return 403
        case CaptureError() | NotFound():
            return 404
        case ResyncRequired():
            return 410
        case LimitExceeded(code="too_slow"):
            return 408
        case LimitExceeded(code="too_large"):
            return 413
        case LimitExceeded():
            return 429
        case Refused():
            return 422
        case TimedOut():
            return 504
        case HeadwaterError(retryable=True):
            return 503
    return 500


async def _no_such_path(request: Request, error: Exception) -> Response:
    """The response for an unknown path, or for a method that a path does not have."""
    assert isinstance(error, HTTPException)
    hint = "docs/reference/protocol.md lists the paths."
    if error.status_code == 405 and (allowed := (error.headers or {}).get("Allow")):
        hint = f"Use {allowed} instead."
    found = NotFound(
        f"this gateway has no {request.method} {request.url.path!r:.200}",
        code="method" if error.status_code == 405 else "path",
        hint=hint,
    )
    response = refusal(found)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


def json_answer(
    document: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    body = msgspec.json.encode(document)
    return Response(body, status, headers, media_type="application/json")


# ------------------------------------------------------------------------ queries and mutations


async def ask(gateway: Gateway, request: Request) -> Response:
    """Return the result of a reactive query. The body has the arguments."""
    caller = await admit(gateway, request)
    answer = await gateway.calls.ask(
        request.path_params["name"],
        await read_json(request, dict, empty={}),
        caller.identity,
        after=parameter(request, "after"),
        parent=parent_of(request.headers),
        owner=owner_of(caller.identity.account, caller.address),
    )
    return json_answer(answer)


async def mutate(gateway: Gateway, request: Request) -> Response:
    """Run a mutation. The body has the arguments."""
    caller = await admit(gateway, request)
    check_deliberate(request, caller)
    answer = await gateway.calls.mutate(
        request.path_params["name"],
        await read_json(request, dict, empty={}),
        caller.identity,
        key=idempotency_key(request),
        parent=parent_of(request.headers),
        owner=owner_of(caller.identity.account, caller.address),
    )
    return json_answer(answer)


# ------------------------------------------------------------------------ sessions


async def _connection(gateway: Gateway, request: Request) -> GatewayConnection:
    caller = await admit(gateway, request)
    return gateway.find(request.path_params["session"], caller.identity)


async def subscribe(gateway: Gateway, request: Request) -> Response:
    """Add a subscription. Its messages are sent through the session's stream."""
    connection = await _connection(gateway, request)
    message = await read_json(request, Subscribe)
    await gateway.subscribe_once(connection, message, parent=parent_of(request.headers))
    subscription = connection.session.subscriptions.get(message.id)
    return json_answer(
        {"id": message.id, "view": subscription.view if subscription else None}, status=201
    )


async def unsubscribe(gateway: Gateway, request: Request) -> Response:
    connection = await _connection(gateway, request)
    connection.session.remove(request.path_params["id"])
    return Response(status_code=204)


async def reanchor(gateway: Gateway, request: Request) -> Response:
    """Move a live query's window. Its rows are sent through the session's stream, and the answer
    after them."""
    connection = await _connection(gateway, request)
    body = await read_json(request, ReanchorBody)
    message = Reanchor(request.path_params["id"], body.after, body.request)
    await gateway.reanchor(connection, message)
    return Response(status_code=204)


async def wait(gateway: Gateway, request: Request) -> Response:
    """Send an answer through the session's stream when it has sent everything up to a position."""
    connection = await _connection(gateway, request)
    message = await read_json(request, Wait)
    connection.start(gateway.calls.begin(connection, message))
    return Response(status_code=202)


async def publish(gateway: Gateway, request: Request) -> Response:
    """Publish on the channel of a subscription. Responds when the message is delivered to all
    gateways."""
    connection = await _connection(gateway, request)
    message = await read_json(request, Publish)
    key = idempotency_key(request, message.idempotency_key)
    await gateway.channels.publish(connection, message.id, message.data, key)
    return Response(status_code=204)


async def set_state(gateway: Gateway, request: Request) -> Response:
    """Change the state on the channel of a subscription."""
    connection = await _connection(gateway, request)
    message = await read_json(request, SetState)
    gateway.channels.set_state(connection, message.id, message.state)
    return Response(status_code=204)


async def refresh(gateway: Gateway, request: Request) -> Response:
    """Replace the token of a session. The session's id is enough, because only its client knows it:
    the old token may have just expired."""
    body = await read_json(request, Authenticate)
    identity = await identify(gateway, request, body.token)
    connection = gateway.find(request.path_params["session"], identity)
    return json_answer(await gateway.authenticate(connection, body.token))


async def ticket(gateway: Gateway, request: Request) -> Response:
    """Issue a ticket, which opens one stream, for clients that cannot send headers."""
    caller = await admit(gateway, request)
    made = await gateway.issue_ticket(caller.identity, caller.token)
    return json_answer({"ticket": made.text, "expires_at": made.expires_at}, status=201)


# ------------------------------------------------------------------------ for operators


async def metrics(gateway: Gateway, request: Request) -> Response:
    settings = gateway.settings
    token = settings.gateway.metrics_token
    if settings.is_closed(settings.gateway.metrics) and not shows_metrics_token(request, token):
        caller = await admit(gateway, request)
        if not is_admin(settings.auth, caller.identity, local=caller.local):
            raise not_admin(settings.auth, "/metrics")
    return Response(await gateway.measure(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def healthy(request: Request) -> Response:
    """Whether the process runs."""
    return json_answer({"status": "ok"})


async def ready(gateway: Gateway, request: Request) -> Response:
    """Whether this gateway is ready for clients."""
    if gateway.not_ready_reason is not None:
        return json_answer(
            {"status": "unavailable", "reason": gateway.not_ready_reason}, status=503
        )
    return json_answer({"status": "ok", "position": str(gateway.hub.position)})


async def described(gateway: Gateway, request: Request) -> Response:
    auth = gateway.settings.auth
    if gateway.settings.is_closed(gateway.settings.gateway.openapi):
        caller = await admit(gateway, request)
        if not auth.has_key and not is_admin(auth, caller.identity, local=caller.local):
            raise not_admin(auth, "/openapi.json")
    return json_answer(openapi.document(gateway.calls.queries, gateway.calls.mutations))
