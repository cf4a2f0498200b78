"""Asks the application what a user may see of a table: all of it, some rows, or nothing.

Whatever goes wrong means nothing. A hook that raises, takes too long, or answers with something
that is neither yes, no nor a filter has not said yes. The log tells the application's people why,
under a number that the user is told; the user is told no more than that.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from headwater.errors import Forbidden
from headwater.hub.subscriber import Access
from headwater.identity import Identity
from headwater.limits import AUTHORIZE_SECONDS_MAX
from headwater.live.filter import EVERYTHING, Filter

logger = logging.getLogger(__name__)

Authorize: TypeAlias = Callable[[Identity, str], bool | Filter | Awaitable[bool | Filter]]
"""Asked with who and which table (`orders`, `sales.orders`). True: all rows, as far as the database
lets the user's role; a filter: only rows that match it; False: none. May be a coroutine function;
one that is not must not block."""


async def decide(hook: Authorize | None, identity: Identity, table: str) -> Access:
    """What this user may see of this table; Forbidden for nothing. Without a hook: all."""
    answer = True if hook is None else await _asked(hook, identity, table)
    if answer is False:
        raise Forbidden(
            f"you may not read table {table}", hint="The application's authorize hook said no."
        )
    where = EVERYTHING if answer is True else answer
    return Access(identity.role, identity.claims_json, where)


async def _asked(hook: Authorize, identity: Identity, table: str) -> bool | Filter:
    try:
        async with asyncio.timeout(AUTHORIZE_SECONDS_MAX):
            answer = hook(identity, table)
            if inspect.isawaitable(answer):
                answer = await answer
    except Exception:
        number = _number()
        logger.exception("error %s: authorize(%r, %r) failed", number, identity.user, table)
        raise _failed(table, number) from None
    if isinstance(answer, bool | Filter):
        return answer
    number = _number()
    logger.error(
        "error %s: authorize(%r, %r) returned %s; it must be True, False or a filter",
        number, identity.user, table, type(answer).__name__,
    )  # fmt: skip
    raise _failed(table, number)


def _number() -> str:
    """By which a user's report and a line of the log find each other."""
    return secrets.token_hex(4)


def _failed(table: str, number: str) -> Forbidden:
    return Forbidden(
        f"whether you may read table {table} could not be decided (error {number})",
        hint="The gateway's log has the reason under this number.",
        code="authorize_failed",
    )
