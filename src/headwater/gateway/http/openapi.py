"""The OpenAPI document. The schemas of bodies and messages come from the structs that decode and
encode them; paths, parameters and responses are listed here. Each query and mutation of an
application has its own path, with the types that it declares."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from headwater import limits
from headwater.gateway.http.bodies import LiveBody, ReanchorBody
from headwater.protocol import (
    VERSION,
    Answer,
    Authenticate,
    Authenticated,
    Changes,
    Deltas,
    Error,
    Failed,
    Gap,
    Hello,
    Message,
    Poke,
    Presence,
    Publish,
    ResetMessage,
    Result,
    SetState,
    Snapshot,
    Subscribe,
    Subscribed,
    TopicMessage,
    Unsubscribed,
    Wait,
)
from headwater.queries.functions import Function, Mutation, Query

_BODIES = (LiveBody, Subscribe, ReanchorBody, Wait, Authenticate, Publish, SetState)
_MESSAGES = (
    Hello, Subscribed, Unsubscribed, Snapshot, Deltas, ResetMessage, Gap, Changes, Result, Failed,
    Answer, Error, Authenticated, TopicMessage, Poke, Message, Presence,
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
    "400": "The request is not valid; the code and message name the place.",
    "401": "The token is missing or not valid.",
    "403": "The user may not do this.",
    "404": "There is no such table, query, mutation, topic, session or subscription.",
    "408": "The body was not received in time.",
    "410": "The log no longer reaches back to the position.",
    "413": "The body is too large.",
    "422": "The application refused, with its own code and message; or `idempotency_key_reused`:"
    " the key belongs to another request.",
    "429": "A quota is reached; `retry_after_secs` says when to try again.",
    "500": "An unexpected error. The gateway's log has it under the id in the message.",
    "503": "The gateway is starting, stopping or without its database.",
    "504": "The request took too long.",
}
_ALL = tuple(_REFUSALS)
_USUAL = tuple(status for status in _ALL if status not in ("422", "500", "504"))
"""The error responses of any request. Those left out come only from an application's function."""

_MAY_TIME_OUT = (*_USUAL, "504")


def document(
    queries: Mapping[str, Query] | None = None, mutations: Mapping[str, Mutation] | None = None
) -> dict[str, Any]:
    """The whole document, with these queries and mutations."""
    return _document(tuple((queries or {}).values()), tuple((mutations or {}).values()))


@cache
def _document(queries: tuple[Query, ...], mutations: tuple[Mutation, ...]) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components((*_BODIES, *_MESSAGES), ref_template=_REF)
    paths = _paths()
    for query in queries:
        arguments, returned = _described(f"query.{query.name}", query, schemas)
        paths[f"/v1/query/{query.name}"] = _query_path(query.name, [], arguments, returned)
        paths[f"/v1/query/{query.name}/subscribe"] = _subscribe_path(query.name, [], arguments)
    for mutation in mutations:
        arguments, returned = _described(f"mutation.{mutation.name}", mutation, schemas)
        paths[f"/v1/mutation/{mutation.name}"] = _mutation_path(
            mutation.name, [], arguments, returned
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headwater",
            "version": str(VERSION),
            "description": "Live queries, reactive queries, change feeds and topics over a "
            "database.",
        },
        "paths": paths,
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
                    _parameter("verify", "query", "Add a hash to each batch.", _FLAG),
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
        "/v1/query/{name}": _query_path("a reactive query", [_NAME], _ANY_ARGUMENTS, {}),
        "/v1/query/{name}/subscribe": _subscribe_path(
            "a reactive query", [_NAME], _ANY_ARGUMENTS
        ),
        "/v1/mutation/{name}": _mutation_path("a mutation", [_NAME], _ANY_ARGUMENTS, {}),
        "/v1/stream": {
            "get": _operation(
                "Open a session",
                _stream(),
                parameters=[
                    _parameter("topics", "query", "Topics to begin with, separated by commas."),
                    *_RESUME,
                ],
            )
        },
        "/v1/sessions/{session}/subscriptions": {
            "post": _operation(
                "Add a subscription to a session",
                _answer("201", "It is subscribed; its messages come through the stream."),
                parameters=[session],
                body=_ref("Subscribe"),
                only=_ALL,
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
        "/v1/sessions/{session}/wait": {
            "post": _operation(
                "Be answered through the stream once it has sent everything up to a position",
                {"202": {"description": "The answer comes through the stream."}},
                parameters=[session],
                body=_ref("Wait"),
            )
        },
        "/v1/sessions/{session}/publish": {
            "post": _operation(
                "Publish on a channel that the session follows",
                _empty("204"),
                parameters=[session, _KEY],
                body=_ref("Publish"),
                only=_ALL,
            )
        },
        "/v1/sessions/{session}/state": {
            "post": _operation(
                "Change the state on a channel",
                _empty("204"),
                parameters=[session],
                body=_ref("SetState"),
            )
        },
        "/v1/sessions/{session}/token": {
            "post": _operation(
                "Replace the token of a session",
                _answer("200", "The new token is accepted.", _ref("Authenticated")),
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
        "/v1/admin/overview": {
            "get": _operation(
                "For admins: the gateway, the log and current problems",
                _answer("200", "The current status."),
                only=_MAY_TIME_OUT,
            )
        },
        "/v1/admin/tables": {
            "get": _operation(
                "For admins: every table, captured or not",
                _answer("200", "The tables."),
                only=_MAY_TIME_OUT,
            )
        },
        "/v1/admin/log": {
            "get": _operation(
                "For admins: search the log, newest first",
                _answer("200", "The changes found; `before` continues from there."),
                parameters=[
                    _parameter("table", "query", "Changes of this table."),
                    _parameter(
                        "op", "query", "Of this kind.",
                        {"enum": ["insert", "update", "delete", "truncate", "reset"]},
                    ),
                    _parameter("key", "query", "Of the row with this key: `7`, or `7,2026`."),
                    _parameter("user", "query", "Made by this user."),
                    _parameter("text", "query", "With this text anywhere in the row."),
                    *_SEARCH,
                ],
                only=_MAY_TIME_OUT,
            )
        },
        "/v1/admin/history/{table}/{key}": {
            "get": _operation(
                "For admins: the history of a row",
                _answer("200", "Its changes in the log, and its history in the lake."),
                parameters=[
                    _parameter("table", "path", "The table."),
                    _parameter("key", "path", "The row's key: `7`, or `7,2026`."),
                    _parameter("log", "query", "Whether to search the log: `true`.", _FLAG),
                    _parameter("lake", "query", "Whether to search the lake as well.", _FLAG),
                    *_SEARCH,
                ],
                only=_MAY_TIME_OUT,
            )
        },
        "/v1/admin/explain": {
            "get": _operation(
                "For admins: how a live query is served",
                _answer("200", "Its place in the router, its first read, the index for it."),
                parameters=[_json_parameter("q", _ref("LiveQuery"))],
                only=_MAY_TIME_OUT,
            )
        },
        "/v1/asof/{table}": {
            "get": _operation(
                "A row as it was at a moment",
                _answer("200", "The row; null if it did not exist."),
                parameters=[
                    _parameter("table", "path", "The table."),
                    _KEY,
                    _parameter("at", "query", "A time (UTC without an offset) or a position."),
                ],
                only=_MAY_TIME_OUT,
            )
        },
        "/v1/history/{table}": {
            "get": _operation(
                "The versions of a row, newest first",
                _answer("200", "The versions; `before` continues from there."),
                parameters=[
                    _parameter("table", "path", "The table."),
                    _KEY,
                    _parameter("before", "query", "Where the previous answer ended."),
                    _parameter(
                        "limit", "query", "At most this many.",
                        {"type": "integer", "minimum": 1, "maximum": limits.PAST_VERSIONS_MAX},
                    ),
                ],
                only=_MAY_TIME_OUT,
            )
        },
        "/metrics": {"get": _plain_operation("Metrics for Prometheus", "text/plain")},
        "/healthz": {"get": _plain_operation("Whether the process is alive", "application/json")},
        "/readyz": {
            "get": _operation("Whether the gateway is ready", _answer("200", "Yes."), only=("503",))
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
    _parameter("after", "query", "A position that it must contain from the beginning."),
]


def _json_parameter(name: str, schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"name": name, "in": "query", "required": required, "content": content}


_KEY = _parameter(
    "key", "query", "The row's key: one value for each of its columns.",
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
)  # fmt: skip

_SEARCH = [
    _parameter("before", "query", "Where the previous answer ended."),
    _parameter(
        "limit", "query", "At most this many.",
        {"type": "integer", "minimum": 1, "maximum": limits.ADMIN_LOG_ROWS_MAX},
    ),
]  # fmt: skip

_NAME = _parameter("name", "path", "The name it is registered under.")
_ANY_ARGUMENTS = {"type": "object"}
_KEY = _parameter(
    "Idempotency-Key",
    "header",
    "A random text for this request. A request with the same text does not run again: it gets "
    "the first answer.",
    {"type": "string", "pattern": "^[!-~]+$", "maxLength": limits.IDEMPOTENCY_KEY_CHARS_MAX},
)
_TRACE = _parameter("traceparent", "header", "The trace that it belongs to (W3C Trace Context).")


def _query_path(
    name: str, named: list[Any], arguments: dict[str, Any], returned: dict[str, Any]
) -> dict[str, Any]:
    after = _parameter("after", "query", "Return a result that contains this position.")
    answer = _answer("200", "The result, complete up to the position.", _answered(returned))
    return {"post": _call(f"Get the result of {name}", answer, [*named, after], arguments)}


def _mutation_path(
    name: str, named: list[Any], arguments: dict[str, Any], returned: dict[str, Any]
) -> dict[str, Any]:
    answer = _answer(
        "200", "What it returned, and a position that contains its writes.", _answered(returned)
    )
    return {"post": _call(f"Run {name}", answer, [*named, _KEY], arguments)}


def _subscribe_path(name: str, named: list[Any], arguments: dict[str, Any]) -> dict[str, Any]:
    options = [
        *named,
        _parameter("delta", "query", "Send rows as deltas by their key.", _FLAG),
        *_RESUME,
    ]
    args = _json_parameter("args", arguments, required=False)
    return {
        "post": _call(f"Follow {name}", _stream(), options, arguments),
        "get": _call(f"Follow {name}, for EventSource", _stream(), [*options, args]),
    }


def _call(
    summary: str,
    answers: dict[str, Any],
    parameters: list[dict[str, Any]],
    arguments: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The operation that calls a function of the application; without a body it has no
    arguments."""
    operation = _operation(
        summary, answers, parameters=[*parameters, _TRACE], body=arguments, only=_ALL
    )
    if arguments is not None:
        operation["requestBody"]["required"] = False
    return operation


def _answered(returned: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["value", "position"],
        "properties": {"value": returned, "position": {"type": "string"}},
    }


def _described(
    prefix: str, function: Function, schemas: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of a function's arguments and result. Types of different functions may have the
    same name, so each function has its own copies."""
    try:
        found, components = msgspec.json.schema_components(
            (function.signature.struct, function.returns.type),
            ref_template=_REF.format(name=prefix + ".{name}"),
        )
    except (TypeError, ValueError):
        return _ANY_ARGUMENTS, {}  # a type of the application's own
    schemas.update({f"{prefix}.{name}": schema for name, schema in components.items()})
    arguments, returned = found
    return arguments, returned


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}


def _operation(
    summary: str,
    answers: dict[str, Any],
    *,
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
    only: tuple[str, ...] = _USUAL,
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
    answer = {"description": "The response.", "content": {content_type: {}}}
    return {"summary": summary, "responses": {"200": answer}, "security": [{}]}


def _stream(*more: str) -> dict[str, Any]:
    messages = {"oneOf": [_ref(message.__name__) for message in _MESSAGES]}
    content = {kind: {"schema": messages} for kind in ("text/event-stream", *more)}
    return {"200": {"description": "A stream of messages.", "content": content}}


def _answer(status: str, description: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {"application/json": {"schema": schema or {"type": "object"}}}
    return {status: {"description": description, "content": content}}


def _empty(status: str) -> dict[str, Any]:
    return {status: {"description": "Done."}}
