"""As whom a transaction acts: its database role, its claims and its actor. All of it ends with it.

One statement sets everything, and travels together with the one that begins the transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Literal, TypeAlias

import psycopg
from opentelemetry import trace
from psycopg import errors

from headwater.database import Connection
from headwater.errors import Forbidden
from headwater.identity import Identity

Setting: TypeAlias = tuple[str, str]

Begin: TypeAlias = Literal["begin", "begin isolation level repeatable read read only"]


def as_whom(identity: Identity) -> list[Setting]:
    """The settings under which row-level security knows a user; none without a database role."""
    if identity.role is None:
        return []
    return [("request.jwt.claims", identity.claims_json), ("role", identity.role)]


def actor(identity: Identity, function: str, trace_id: str) -> list[Setting]:
    """The settings that capture writes into the log."""
    return [
        ("headwater.user_id", identity.user or ""),
        ("headwater.function_name", function),
        ("headwater.trace_id", trace_id),
    ]


_MILLISECONDS_MAX = 2**31 - 1
"""The longest time that PostgreSQL takes; a function may be given longer, or no end at all."""


def statement_timeout(seconds: float) -> list[Setting]:
    return [("statement_timeout", f"{int(min(max(1, seconds * 1000), _MILLISECONDS_MAX))}ms")]


async def begin(
    connection: Connection,
    how: Begin,
    settings: Sequence[Setting],
    *,
    refuses_policies: bool = False,
) -> None:
    """Begin a transaction with these settings, in one round trip. Forbidden for a role that is not
    there or that Headwater may not act as. For `refuses_policies` see `act`."""
    async with begin_as(connection, settings):
        await connection.execute(how)
        await set_settings(connection, settings)
        if refuses_policies:
            await connection.execute(_REFUSE_POLICIES)


@asynccontextmanager
async def begin_as(connection: Connection, settings: Sequence[Setting]) -> AsyncIterator[None]:
    """One round trip for all statements inside, which begin a transaction and set these settings.
    Forbidden as for `begin`, and the transaction is rolled back."""
    try:
        with _role_errors(settings):
            async with connection.pipeline():
                yield
    except Forbidden:
        await connection.rollback()
        raise


async def act(
    connection: Connection, settings: Sequence[Setting], *, refuses_policies: bool = False
) -> None:
    """Go on with these settings, in a transaction that has begun, until `act_no_more`. Forbidden as
    for `begin`. With `refuses_policies`, a role that may read a table with policies of an owner who
    would gain by it reads no table with policies: they could leave the role and have the rights of
    who logged in."""
    with _role_errors(settings):
        async with connection.pipeline():
            await connection.execute("savepoint headwater_act")
            await set_settings(connection, settings)
            if refuses_policies:
                await connection.execute(_REFUSE_POLICIES)


_REFUSE_POLICIES = """
    select pg_catalog.set_config('row_security', 'off', true)
    where exists (
      select from pg_catalog.pg_class c
      join pg_catalog.pg_roles o on o.oid operator(pg_catalog.=) c.relowner
      join pg_catalog.pg_roles me on me.rolname operator(pg_catalog.=) session_user
      where c.relrowsecurity and pg_catalog.has_any_column_privilege(c.oid, 'select')
        and not (o.rolsuper
                 or (not me.rolsuper and pg_catalog.pg_has_role(me.oid, o.oid, 'usage'))))
"""


async def act_no_more(connection: Connection) -> bool:
    """Go on as before: whatever was set since, by whomever, is undone. False where code of others
    has prepared statements, which stay: one may have taken the name of ours."""
    async with connection.pipeline():
        await connection.execute("rollback to headwater_act")
        await connection.execute("release headwater_act")
        cursor = await connection.execute(PREPARED_BY_OTHERS)
    return await cursor.fetchone() is None


# Ours are prepared by a message of the protocol.
PREPARED_BY_OTHERS = "select 1 from pg_catalog.pg_prepared_statements where from_sql limit 1"


async def set_settings(connection: Connection, settings: Sequence[Setting]) -> None:
    """Set them until the transaction ends, in one statement."""
    if settings:
        calls = ", ".join("pg_catalog.set_config(%s, %s, true)" for _ in settings)
        values = [text for setting in settings for text in setting]
        await connection.execute(f"select {calls}".encode(), values)


@contextmanager
def _role_errors(settings: Sequence[Setting]) -> Iterator[None]:
    try:
        yield
    except (errors.InvalidParameterValue, errors.InsufficientPrivilege) as error:
        raise _no_role(error, dict(settings).get("role")) from error


def _no_role(error: psycopg.Error, role: str | None) -> Exception:
    if role is None:
        return error
    if isinstance(error, errors.InsufficientPrivilege):
        return Forbidden(
            f"Headwater's own database role may not act as {role}",
            hint=f'grant "{role}" to the role that Headwater connects as',
        )
    return Forbidden(
        f"there is no database role {role}",
        hint="Create it, or correct the setting auth_role or the token's role claim.",
    )


def trace_id_of(given: str | None = None) -> str:
    """The one that was given, else the current OpenTelemetry span's, else a new one."""
    if given:
        return given
    span = trace.get_current_span().get_span_context()
    return f"{span.trace_id:032x}" if span.is_valid else secrets.token_hex(16)
