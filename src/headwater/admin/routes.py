"""The paths below `/v1/admin/`, for admins only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TypeAlias

import msgspec
import psycopg
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from headwater.admin import sources
from headwater.admin.explain import explain as explained
from headwater.admin.history import Record, command, from_lake
from headwater.admin.search import Search, search
from headwater.admin.status import LogStatus, log_status
from headwater.admin.tables import list_tables
from headwater.capture.postgres import doctor, triggers
from headwater.capture.postgres.doctor import Finding
from headwater.database import Connection, connect, translated
from headwater.errors import HeadwaterError, InvalidQuery, TimedOut
from headwater.gateway.auth.admins import is_admin, not_admin
from headwater.gateway.gateway import Gateway
from headwater.gateway.http.app import Endpoint, GatewayOf, Handler, json_answer
from headwater.gateway.http.bodies import LIVE_QUERY_PAGE
from headwater.gateway.http.requests import HttpCaller, admit, flag, parameter, parse_json
from headwater.limits import (
    ADMIN_HISTORY_ROWS_MAX,
    ADMIN_LAKE_REQUESTS_AT_ONCE,
    ADMIN_REQUESTS_AT_ONCE,
    ADMIN_SECONDS_MAX,
)
from headwater.live.query import LiveQuery
from headwater.log import cursors
from headwater.log.cursors import SavedCursor

AdminHandler: TypeAlias = Callable[["AdminRequest"], Awaitable[object]]
"""Handles a request of an admin. The result is encoded as JSON."""

Completion: TypeAlias = Callable[[Gateway, Request, object], Awaitable[object]]
"""Completes the result of a handler after its database connection is closed."""


def routes(gateway_of: GatewayOf) -> list[BaseRoute]:
    """The routes of the API, for a gateway."""
    at_once = asyncio.Semaphore(ADMIN_REQUESTS_AT_ONCE)
    lake_slots = asyncio.Semaphore(ADMIN_LAKE_REQUESTS_AT_ONCE)

    async def with_lake(gateway: Gateway, request: Request, answer: object) -> object:
        assert isinstance(answer, Record)
        return await query_lake(gateway, request, answer, lake_slots)

    def route(path: str, handler: AdminHandler, complete: Completion | None = None) -> Route:
        endpoint = Endpoint(gateway_of, _for_admins(handler, at_once, complete))
        return Route(f"/v1/admin{path}", endpoint, methods=["GET"])

    return [
        route("/overview", overview),
        route("/tables", tables),
        route("/log", log),
        route("/history/{table}/{key:path}", history, with_lake),
        route("/explain", explain),
    ]


class AdminRequest:
    """A request of an admin, and a database connection for it."""

    def __init__(
        self, gateway: Gateway, request: Request, caller: HttpCaller, connection: Connection
    ) -> None:
        self.gateway = gateway
        self.request = request
        self.caller = caller
        self.connection = connection

    def parameter(self, name: str) -> str | None:
        """A parameter of the URL; None if it is missing or empty."""
        found: str | None = parameter(self.request, name)
        if found is not None and "\0" in found:
            raise _contains_nul(name)
        return found


def _contains_nul(path: str) -> InvalidQuery:
    return InvalidQuery(
        "the value contains a NUL character, which no row can contain",
        path=path,
        hint="Send the value without it.",
    )


def _for_admins(
    handler: AdminHandler, at_once: asyncio.Semaphore, complete: Completion | None
) -> Handler:
    async def handle(gateway: Gateway, request: Request) -> Response:
        caller = await admit(gateway, request)
        if not is_admin(gateway.settings.auth, caller.identity, local=caller.local):
            raise not_admin(gateway.settings.auth, "the console's data")
        async with at_once, _connected(gateway.hub.url) as connection:
            try:
                with translated():
                    answer = await handler(AdminRequest(gateway, request, caller, connection))
            except HeadwaterError as error:
                if isinstance(error.__cause__, psycopg.errors.QueryCanceled):
                    raise TimedOut(
                        f"the database took longer than {2 * ADMIN_SECONDS_MAX:.0f} seconds",
                        hint="Try again when the database is less busy.",
                    ) from error
                raise
        if complete is not None:
            answer = await complete(gateway, request, answer)
        return json_answer(answer, headers={"cache-control": "no-store"})

    return handle


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Connection]:
    options = f"-c statement_timeout={ADMIN_SECONDS_MAX * 2000:.0f} -c jit=off"
    connection = await connect(url, purpose="admin", options=options)
    try:
        yield connection
    finally:
        await connection.close()


# ------------------------------------------------------------------------ answers


class Overview(msgspec.Struct, frozen=True):
    """This gateway, the log, and the problems that `headwater doctor` finds."""

    version: str
    gateway: str
    user: str | None
    authentication: bool
    activity_seconds: float
    lake: str
    log: LogStatus
    cursors: list[SavedCursor]
    findings: list[Finding]


async def overview(call: AdminRequest) -> Overview:
    """The first page of the console. Also enables the tables that the console follows with live
    queries, unless an admin has disabled them."""
    gateway, connection = call.gateway, call.connection
    findings = await doctor.examine(connection)
    findings.append(await doctor.of_questions(connection, gateway.settings.question_url))
    findings.append(doctor.of_clients(gateway.settings, gateway.has_hook))
    findings += await sources.examine(connection)
    findings = [found for found in findings if found.level != "ok"]
    for name in ("headwater.activity", "headwater.pipeline", "headwater.sources"):
        findings += await _captured(connection, name)
    return Overview(
        version("headwater"),
        gateway.activity.gateway,
        call.caller.identity.user,
        gateway.settings.auth.has_key,
        gateway.activity.period.total_seconds(),
        gateway.settings.lake.location,
        await log_status(connection),
        await cursors.list_all(connection),
        findings,
    )


async def _captured(connection: Connection, name: str) -> list[Finding]:
    cursor = await connection.execute(
        "select from headwater.tables where relid = %s::regclass", (name,)
    )
    if await cursor.fetchone() is not None:
        return []
    try:
        await triggers.enable(connection, name)
    except HeadwaterError as error:
        return [Finding(f"table {name}", "warn", f"cannot be followed: {error}", error.hint)]
    return []


async def tables(call: AdminRequest) -> object:
    """Every table, captured or not."""
    return await list_tables(call.connection)


async def log(call: AdminRequest) -> object:
    """The newest changes that match."""
    names = ("table", "op", "key", "user", "text", "before")
    criteria = Search(**{name: call.parameter(name) for name in names}, limit=_limit(call, 100))
    return await search(call.connection, criteria)


def _limit(call: AdminRequest, default: int) -> int:
    text = call.parameter("limit")
    if text is not None and not text.isdecimal():
        raise InvalidQuery(f"expected a number, got {text!r:.100}", path="limit")
    return default if text is None else int(text[:9])


async def history(call: AdminRequest) -> Record:
    """The history of a row from the log; with `log=false`, the log is not searched."""
    table, key = call.request.path_params["table"], call.request.path_params["key"]
    if "\0" in table + key:
        raise _contains_nul("key")
    limit = _limit(call, ADMIN_HISTORY_ROWS_MAX)
    criteria = Search(table=table, key=key, before=call.parameter("before"), limit=limit)
    flag(call.request, "lake", False)  # An invalid value is an error before the log is searched.
    searches_log = flag(call.request, "log", True)
    found = await search(call.connection, criteria) if searches_log else None
    return Record(found, None, command(table, tuple(key.split(","))))


async def query_lake(
    gateway: Gateway, request: Request, record: Record, slots: asyncio.Semaphore
) -> Record:
    """With `lake=true`, add the versions from the lake. This may take a minute, so it runs without
    a database connection and outside the limit on other requests."""
    if not flag(request, "lake", False):
        return record
    table, key = request.path_params["table"], tuple(request.path_params["key"].split(","))
    try:
        location, url = gateway.settings.lake.location, gateway.hub.url
        lake = await from_lake(location, url, table, key, slots)
    except HeadwaterError as error:
        return msgspec.structs.replace(record, lake_error=str(error))
    return msgspec.structs.replace(record, lake=lake)


async def explain(call: AdminRequest) -> object:
    """How a live query is served."""
    text = call.parameter("q")
    if text is None:
        raise InvalidQuery("expected a live query in JSON", path="q", hint=LIVE_QUERY_PAGE)
    query = LiveQuery.from_json(parse_json(text, dict, path="q"))
    return await explained(call.gateway.hub, call.connection, query)
