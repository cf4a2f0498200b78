"""The OpenAPI document. Bodies and messages are described by the very structs that read and write
them; paths, parameters and answers are written down here."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from headwater import limits
from headwater.gateway.bodies import LiveBody, ReanchorBody
from headwater.protocol import (
    VERSION,
    Authenticate,
    Authenticated,
    Changes,
    Deltas,
    Error,
    Gap,
    Hello,
    Reset,
    Snapshot,
    Subscribe,
    Subscribed,
    Unsubscribed,
)

_BODIES = (LiveBody, Subscribe, ReanchorBody, Authenticate)
_MESSAGES = (
    Hello, Subscribed, Unsubscribed, Snapshot, Deltas, Reset, Gap, Changes, Error, Authenticated,
)  # fmt: skip
_REF = "#/components/schemas/{name}"

_LIVE_QUERY: dict[str, Any] = {
    "type": "object",
    "description": "docs/reference/live-query.md explains the fields.",
    "required": ["table"],
    "additionalProperties": False,
    "properties": {
        "table": {"type": "string"},
        "where": {
            "description": "A condition [column, operator, value], a list of filters, or an object "
            "with `and`, `or` or `not`.",
            "oneOf": [{"type": "array"}, {"type": "object"}],
        },
        "order": {
            "type": "array",
            "maxItems": limits.ORDER_COLUMNS_MAX,
            "items": {
                "oneOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
                ]
            },
        },
        "limit": {"type": "integer", "minimum": 1},
        "after": {"oneOf": [{"type": "array"}, {"type": "null"}]},
        "columns": {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "mode": {"enum": ["maintained", "streamed"]},
    },
}

_REFUSAL: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "retryable"],
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "hint": {"type": "string"},
                "retryable": {"type": "boolean"},
                "retry_after_secs": {"type": "number"},
            },
        }
    },
}

_REFUSALS = {
    "400": "The request does not make sense; the code and message say where.",
    "401": "The token is missing or does not hold.",
    "403": "The user may not do this.",
    "404": "There is no such table, session or subscription.",
    "408": "The body took too long to come.",
    "410": "The log no longer reaches back to the position.",
    "413": "The body is too large.",
    "429": "A quota is reached; `retry_after_secs` says when to try again.",
    "503": "The gateway is starting, stopping or without its database.",
}


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    _, schemas = msgspec.json.schema_components((*_BODIES, *_MESSAGES), ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headwater",
            "version": str(VERSION),
            "description": "Live queries and change feeds over a database.",
        },
        "paths": _paths(),
        "components": {
            "schemas": {**schemas, "LiveQuery": _LIVE_QUERY, "Refusal": _REFUSAL},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"},
                "ticket": {"type": "apiKey", "in": "query", "name": "ticket"},
            },
        },
        "security": [{}, {"bearer": []}, {"ticket": []}],
    }


def _paths() -> dict[str, Any]:
    session = _parameter("session", "path", "The session, from `hello`.")
    subscription = _parameter("id", "path", "The subscription's id.")
    live = {"oneOf": [_ref("LiveQuery"), _ref("LiveBody")]}
    return {
        "/v1/live": {
            "post": _operation("Follow a live query", _stream(), body=live),
            "get": _operation(
                "Follow a live query, for EventSource",
                _stream(),
                parameters=[
                    _json_parameter("q", live),
                    _parameter("batch", "query", "One event per flush.", _FLAG),
                    _parameter("verify", "query", "Have batches carry a hash.", _FLAG),
                    *_RESUME,
                ],
            ),
        },
        "/v1/changes": {
            "get": _operation(
                "Follow the changes of tables",
                _stream("application/x-ndjson"),
                parameters=[
                    _parameter("tables", "query", "Names, separated by commas."),
                    _parameter("where", "query", "A filter, in JSON or as `amount > 100`."),
                    _parameter(
                        "format", "query", "The shape of changes.",
                        {"enum": ["headwater", "debezium"]},
                    ),
                    _parameter(
                        "overflow", "query", "What happens when the client is slow.",
                        {"enum": ["drop", "pause"]},
                    ),
                    *_RESUME,
                ],
            )
        },
        "/v1/stream": {"get": _operation("Open a session", _stream())},
        "/v1/sessions/{session}/subscriptions": {
            "post": _operation(
                "Add a subscription to a session",
                _answer("201", "It is subscribed; its messages come through the stream."),
                parameters=[session],
                body=_ref("Subscribe"),
            )
        },
        "/v1/sessions/{session}/subscriptions/{id}": {
            "delete": _operation(
                "End a subscription", _empty("204"), parameters=[session, subscription]
            ),
            "patch": _operation(
                "Slide a live query's window",
                _empty("204"),
                parameters=[session, subscription],
                body=_ref("ReanchorBody"),
            ),
        },
        "/v1/sessions/{session}/token": {
            "post": _operation(
                "Go on with a new token",
                _answer("200", "The new token holds.", _ref("Authenticated")),
                parameters=[session],
                body=_ref("Authenticate"),
            )
        },
        "/v1/tickets": {
            "post": _operation(
                "Get a ticket that opens one stream",
                _answer("201", "The ticket, for the parameter `ticket`."),
            )
        },
        "/metrics": {"get": _plain_operation("Metrics for Prometheus", "text/plain")},
        "/healthz": {"get": _plain_operation("Whether the process answers", "application/json")},
        "/readyz": {
            "get": _operation("Whether to send clients here", _answer("200", "Yes."), only=("503",))
        },
    }  # fmt: skip


_FLAG = {"type": "boolean"}


def _parameter(
    name: str, where: str, description: str, schema: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "in": where,
        "required": where == "path",
        "description": description,
        "schema": schema or {"type": "string"},
    }


_RESUME = [
    _parameter("since", "query", "The position to resume from."),
    _parameter("Last-Event-ID", "header", "The same, as EventSource sends it."),
]


def _json_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"name": name, "in": "query", "required": True, "content": content}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}


def _operation(
    summary: str,
    answers: dict[str, Any],
    *,
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
    only: tuple[str, ...] = tuple(_REFUSALS),
) -> dict[str, Any]:
    refusal = {"application/json": {"schema": _ref("Refusal")}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": answers
        | {status: {"description": _REFUSALS[status], "content": refusal} for status in only},
    }
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        content = {"application/json": {"schema": body}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _plain_operation(summary: str, content_type: str) -> dict[str, Any]:
    answer = {"description": "As it says.", "content": {content_type: {}}}
    return {"summary": summary, "responses": {"200": answer}, "security": [{}]}


def _stream(*more: str) -> dict[str, Any]:
    messages = {"oneOf": [_ref(message.__name__) for message in _MESSAGES]}
    content = {kind: {"schema": messages} for kind in ("text/event-stream", *more)}
    return {"200": {"description": "Messages, without end.", "content": content}}


def _answer(status: str, description: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {"application/json": {"schema": schema or {"type": "object"}}}
    return {status: {"description": description, "content": content}}


def _empty(status: str) -> dict[str, Any]:
    return {status: {"description": "Done."}}
