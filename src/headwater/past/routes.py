"""The paths of the past: `GET /v1/asof/{table}` and `GET /v1/history/{table}`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from headwater.errors import InvalidQuery, ResyncRequired
from headwater.gateway.gateway import Gateway
from headwater.gateway.http.app import Endpoint, GatewayOf, json_answer
from headwater.gateway.http.requests import admit, parameter
from headwater.gateway.quotas import owner_of
from headwater.hub.subscriptions.subscriber import Access
from headwater.limits import PAST_VERSIONS_MAX
from headwater.model import Position, Row, Table
from headwater.past.access import PastVersion, RowGuard, seen_versions
from headwater.past.reads import Check, PastReads, check_size
from headwater.pipeline.lake.moments import Moment, parse_moment
from headwater.pipeline.packages import spark_needed
from headwater.pipeline.reading.requests import AsOfRequest, RowHistoryRequest

_KEY_CHARS_MAX = 10_000


class PastState(msgspec.Struct, frozen=True):
    """A row at a moment; None if it did not exist, or if the user may not see it."""

    table: str
    row: Row | None


class PastVersions(msgspec.Struct, frozen=True):
    """Versions of a row, the newest first; `before` is the parameter of the next request."""

    table: str
    versions: list[PastVersion]
    before: int | None


class _PastRequest(msgspec.Struct, frozen=True):
    """A request that was admitted: the table, the key, and what the user may see."""

    lake: str
    url: str
    table: Table
    key: tuple[str, ...]
    access: Access
    earliest: datetime | None
    """How far back the user may look."""


def routes(gateway_of: GatewayOf) -> list[BaseRoute]:
    """The routes of the past, for a gateway."""
    reads = PastReads()

    def route(path: str, answer: Callable[..., Any]) -> Route:
        handler = partial(_handle, reads=reads, answer=answer)
        return Route(path, Endpoint(gateway_of, handler), methods=["GET"])

    return [
        route("/v1/asof/{table}", _as_of),
        route("/v1/history/{table}", _history),
    ]


async def _handle(
    gateway: Gateway, request: Request, *, reads: PastReads, answer: Callable[..., Any]
) -> Response:
    caller = await admit(gateway, request)
    name = request.path_params["table"]
    known, access = await gateway.past_of(caller.identity, name, local=caller.local)
    earliest = None if access.history is None else datetime.now(UTC) - access.history
    asked = _PastRequest(
        gateway.settings.lake.location,
        gateway.hub.url,
        known.table,
        _key(request),
        access,
        earliest,
    )
    read = partial(answer, asked, _options(request))
    owner = owner_of(caller.identity.account, caller.address)
    found = await reads.run(owner, read)
    return json_answer(found, headers={"cache-control": "no-store"})


# ------------------------------------------------------------------------ parameters


class _Options(msgspec.Struct, frozen=True):
    at: Moment | None
    before: int | None
    limit: int


def _options(request: Request) -> _Options:
    before, limit = (_number(request, name) for name in ("before", "limit"))
    return _Options(
        _moment(parameter(request, "at")),
        before,
        min(PAST_VERSIONS_MAX if limit is None else max(limit, 1), PAST_VERSIONS_MAX),
    )


def _key(request: Request) -> tuple[str, ...]:
    key = tuple(request.query_params.getlist("key"))
    if not key:
        raise InvalidQuery("the key of a row is missing", path="key", hint="Send ?key=42.")
    if sum(map(len, key)) > _KEY_CHARS_MAX or any("\0" in part for part in key):
        raise InvalidQuery("no row can have this key", path="key")
    return key


def _number(request: Request, name: str) -> int | None:
    text = parameter(request, name)
    if text is not None and not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise InvalidQuery(f"expected a number, got {text!r:.100}", path=name)
    return None if text is None else int(text)


def _moment(text: str | None) -> Moment | None:
    try:
        return None if text is None else parse_moment(text)
    except ValueError as error:
        hint = "Send a time as 2026-11-15T10:00:00Z, or a position."
        raise InvalidQuery(str(error), path="at", hint=hint) from None


# ------------------------------------------------------------------------ answers, in threads


def _as_of(asked: _PastRequest, options: _Options, check: Check, seconds: float) -> PastState:
    if options.at is None:
        raise InvalidQuery("the moment is missing", path="at", hint="Send ?at=2026-11-15T10:00Z.")
    _check_age(asked, options.at)
    with spark_needed():
        from headwater.pipeline.reading import changes, choice, points, state

    label, at, relation = asked.table.label, options.at, asked.table.oid
    with points.opened(asked.lake, asked.url, seconds=seconds, check=check) as reader:
        time = at if isinstance(at, datetime) else None
        position = None if time is not None else str(at)
        request = AsOfRequest(label, time, position, key=asked.key)
        check_size(choice.plan(reader, request, relation=relation).bytes)
        ((found, rows),) = reader.images(label, at, [asked.key], relation=relation)
    names = state.names_of(found.passed)
    passed = {table.id: table for table in found.passed}
    guard = RowGuard(partial(changes.known, passed), asked.access.where)
    for image in rows:
        row = guard.decoded(image["image"], image["shape"])
        if image["shape"] in names:
            own = names[image["shape"]]
            row = {c.name: row.get(own.get(c.name, "")) for c in found.table.columns}
        if guard.matches(row, found.table):
            return PastState(label, guard.wire(row, found.table.id))
    return PastState(label, None)


def _check_age(asked: _PastRequest, at: Moment) -> None:
    """ResyncRequired for a moment before the user's right begins, as for a change feed."""
    if asked.earliest is None:
        return
    if isinstance(at, Position):
        raise InvalidQuery(
            "how old a position is cannot be decided here",
            path="at",
            hint="Send a time.",
        )
    if at < asked.earliest:
        raise ResyncRequired(
            f"{at.isoformat()} lies further back than you may look",
            hint="How far back is decided by the setting [gateway] feed_history, or by the"
            " application's authorize hook.",
        )


def _history(asked: _PastRequest, options: _Options, check: Check, seconds: float) -> PastVersions:
    with spark_needed():
        from headwater.pipeline.reading import changes, choice, points

    label, relation = asked.table.label, asked.table.oid
    with points.opened(asked.lake, asked.url, seconds=seconds, check=check) as reader:
        request = RowHistoryRequest(label, asked.key)
        check_size(choice.plan(reader, request, relation=relation).bytes)
        page = reader.newest_versions(
            label,
            asked.key,
            limit=options.limit,
            before=options.before,
            relation=relation,
        )
    guard = RowGuard(partial(changes.known, page.tables), asked.access.where)
    versions = list(seen_versions(page.versions, guard, asked.earliest))
    last = page.versions[-1]["valid_from"] if page.versions else None
    is_over = asked.earliest is not None and (last is None or last < asked.earliest)
    return PastVersions(label, versions, None if is_over else page.before)
