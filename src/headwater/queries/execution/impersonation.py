"""Runs a transaction as a user: with the user's database role, claims and actor.

All of these are settings of the transaction and end with it. One statement sets them, in the same
round trip as the statement that begins the transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Literal, TypeAlias

import msgspec
import psycopg
from opentelemetry import trace
from psycopg import errors

from headwater.database import Connection
from headwater.errors import Forbidden
from headwater.identity import Identity

Setting: TypeAlias = tuple[str, str]

Begin: TypeAlias = Literal["begin", "begin isolation level repeatable read read only"]


def role_settings(identity: Identity) -> list[Setting]:
    """The settings that row-level security reads; none for a user without a database role."""
    if identity.role is None:
        return []
    return [("request.jwt.claims", identity.claims_json), ("role", identity.role)]


def actor_settings(identity: Identity, function: str, trace_id: str) -> list[Setting]:
    """The settings that capture writes into the log."""
    return [(_USER, identity.user or ""), (_FUNCTION, function), (_TRACE, trace_id)]


_USER, _FUNCTION, _TRACE = (
    f"headwater.{name}" for name in ("user_id", "function_name", "trace_id")
)


_MILLISECONDS_MAX = 2**31 - 1
"""The longest timeout that PostgreSQL accepts. That of a function may be longer or infinite."""


def statement_timeout(seconds: float) -> list[Setting]:
    return [("statement_timeout", f"{int(min(max(1, seconds * 1000), _MILLISECONDS_MAX))}ms")]


async def begin(
    connection: Connection,
    how: Begin,
    settings: Sequence[Setting],
    *,
    refuses_policies: bool = False,
) -> None:
    """Begin a transaction with these settings, in one round trip. Forbidden for a role that does
    not exist or that Headwater may not act as. For `refuses_policies` see `impersonate`."""
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


async def impersonate(
    connection: Connection, settings: Sequence[Setting], *, refuses_policies: bool = False
) -> None:
    """Apply these settings in a transaction that has begun, until `end_impersonation`. Forbidden as
    for `begin`.

    Policies are code of the table's owner. They could leave the role and use the privileges of the
    login role. With `refuses_policies`, a role that may read such a table of an owner with fewer
    privileges can read no table with policies.
    """
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


async def end_impersonation(connection: Connection) -> bool:
    """Undo all settings since `impersonate`, also those made by code of others. False if that code
    prepared statements: they stay, and one may have taken the name of one of ours."""
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
        if any(name == _FUNCTION for name, _ in settings):
            # For tables that are captured from the WAL, which has no settings.
            found = dict(settings)
            actor = [found.get(name) or None for name in (_USER, _FUNCTION, _TRACE)]
            calls = f"headwater.say_actor(%s), {calls}"
            values.insert(0, msgspec.json.encode(actor).decode())
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
        hint="Create it, or correct the setting [auth] role or the token's role claim.",
    )


def trace_id_of(given: str | None = None) -> str:
    """The given trace id, else that of the current OpenTelemetry span, else a new one."""
    if given:
        return given
    span = trace.get_current_span().get_span_context()
    return f"{span.trace_id:032x}" if span.is_valid else secrets.token_hex(16)
