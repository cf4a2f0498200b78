"""Asks the application what a user may see of a table: all of it, some rows, or nothing.

Access is denied after any error: when the hook raises, takes too long, or returns something other
than a bool, a filter or `Allow`. The gateway's log has the reason under a number; the user gets
only that number.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import msgspec

from headwater.errors import ConfigError, Forbidden
from headwater.hub.subscriptions.subscriber import Access
from headwater.identity import Identity
from headwater.limits import AUTHORIZE_SECONDS_MAX, DURATION_SECONDS_MAX
from headwater.live.filters.filter import EVERYTHING, Filter
from headwater.live.order import OrderBy
from headwater.live.query import Mode
from headwater.model import Position, Value

logger = logging.getLogger(__name__)


class AccessRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a client, which is passed to the authorize hook.

    `table` is the table's name as Headwater prints it: `orders`, `sales.orders`. A live query has
    `columns` (None for all), `where`, `order`, `limit` (None for the default), `mode`, and `after`,
    the cursor after which its window begins, which the client can move later. A feed has `where`,
    and `since`, the position at which it begins (None for now). A topic has its name and `since`.
    """

    kind: Literal["live", "feed", "topic"]
    table: str
    columns: tuple[str, ...] | None = None
    where: Filter = EVERYTHING
    order: tuple[OrderBy, ...] = ()
    limit: int | None = None
    after: tuple[Value, ...] | None = None
    mode: Mode = "maintained"
    since: Position | None = None
    topic: str | None = None


class Allow(msgspec.Struct, frozen=True):
    """Access with conditions: only to rows that match `where`, and a feed may begin at most
    `history` ago (None for the setting `[gateway] feed_history`)."""

    where: Filter = EVERYTHING
    history: timedelta | None = None


HookAnswer: TypeAlias = bool | Filter | Allow

Authorize: TypeAlias = Callable[[Identity, AccessRequest], HookAnswer | Awaitable[HookAnswer]]
"""Called with the identity and the request. True: all rows that the database allows the user's
role; a filter: only rows that match it; False: no access; `Allow`: access with conditions. May be a
coroutine function; otherwise it must not block."""


def check_hook(hook: Callable[..., Any]) -> None:
    """Raise ConfigError for a hook with the signature of earlier releases, which took a table's
    name."""
    try:
        parameters = list(inspect.signature(hook).parameters.values())
    except (TypeError, ValueError):
        return
    second = parameters[1] if len(parameters) > 1 else None
    if second is not None and (second.annotation in (str, "str") or second.name == "table"):
        raise ConfigError(
            "authorize: the function takes an AccessRequest, not the name of a table",
            hint="Write: def rule(identity: Identity, request: AccessRequest), and use"
            " request.table.",
        )


async def decide(
    hook: Authorize | None,
    identity: Identity,
    request: AccessRequest,
    *,
    history: timedelta | None = None,
) -> Access:
    """What this user may read of this table; Forbidden for no access. Without a hook: all rows. A
    feed may begin at most `history` ago, unless the hook sets another time."""
    answer = True if hook is None else await _asked(hook, identity, request)
    if answer is False:
        raise Forbidden(
            f"you may not read table {request.table}",
            hint="The application's authorize hook denied it.",
        )
    allowed = Allow() if answer is True else answer
    if isinstance(allowed, Filter):
        allowed = Allow(allowed)
    if allowed.history is not None:
        # Longer than any log, and short enough for the database to subtract.
        too_long = allowed.history.total_seconds() > DURATION_SECONDS_MAX
        history = None if too_long else allowed.history
    return Access(identity.role, identity.claims_json, allowed.where, history=history)


async def _asked(hook: Authorize, identity: Identity, request: AccessRequest) -> HookAnswer:
    table = request.table
    try:
        async with asyncio.timeout(AUTHORIZE_SECONDS_MAX):
            answer = hook(identity, request)
            if inspect.isawaitable(answer):
                answer = await answer
    except Exception:
        number = _number()
        logger.exception("error %s: authorize(%r, %r) failed", number, identity.user, table)
        raise _failed(table, number) from None
    if isinstance(answer, bool | Filter | Allow):
        return answer
    number = _number()
    logger.error(
        "error %s: authorize(%r, %r) returned %s; it must be True, False, a filter or Allow",
        number, identity.user, table, type(answer).__name__,
    )  # fmt: skip
    raise _failed(table, number)


def _number() -> str:
    """The number that is both in the user's error and in the log entry."""
    return secrets.token_hex(4)


def _failed(table: str, number: str) -> Forbidden:
    return Forbidden(
        f"access to table {table} could not be decided (error {number})",
        hint="The gateway's log has the reason under this number.",
        code="authorize_failed",
    )
