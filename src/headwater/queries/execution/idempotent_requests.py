"""Stores the results of mutations with an idempotency key, and looks them up.

All of it runs as the login role of the connection (Headwater's, or the question role, which may
execute `REQUIRED_FUNCTIONS`), in the mutation's transaction and without a round trip of its own.
The key is looked up before the user's role is set, and the result is stored by the last statement
before the commit. The commit itself has the user's role again, because a commit can run code of
others: deferred triggers, and the queries of cursors that outlive the transaction. Code that leaves
the user's role can call these functions as well: a stored result is protected by its key, which
cannot be guessed. `016_requests.sql` has the tables.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import msgspec
from psycopg import errors

from headwater.database import Connection
from headwater.errors import DatabaseError, HeadwaterError, PermissionMissing, ResultError
from headwater.idempotency import Request, reused
from headwater.limits import (
    REQUEST_BEGIN_ATTEMPTS_MAX,
    REQUEST_RESULT_BYTES_MAX,
    REQUEST_SECONDS_MIN,
    REQUESTS_PER_USER_MAX,
    REQUESTS_TRIM_BATCH,
)
from headwater.queries.execution.impersonation import Setting, begin_as, set_settings
from headwater.queries.functions import Mutation

_REQUESTS_TRIM_EVERY = 1_000
"""After this many stored keys of one user, a gateway checks whether there are too many. Until then,
each gateway may exceed the limit by this number."""

_REQUESTS_COUNTED_USERS_MAX = 10_000
"""Users whose stored keys a gateway counts. If there are more, all counts are reset."""


class StoredResult(msgspec.Struct, frozen=True):
    """The stored result of a mutation; None if it was too large."""

    result: bytes | None


async def begin_request(
    connection: Connection,
    mutation: Mutation,
    request: Request,
    own: Sequence[Setting],
    settings: Sequence[Setting],
) -> StoredResult | None:
    """Begin a transaction, in one round trip. Returns what is stored for the request, or None if it
    must run now. Waits while another transaction runs it, with the `own` settings."""
    for _ in range(REQUEST_BEGIN_ATTEMPTS_MAX):
        try:
            async with begin_as(connection, settings):
                await connection.execute("begin")
                await set_settings(connection, own)
                asked = (request.scope, request.key, request.digest)
                cursor = await connection.execute(_BEGIN, asked)
                await set_settings(connection, settings)
            row = await cursor.fetchone()
        except errors.SerializationFailure:
            await connection.rollback()
            continue
        except (errors.QueryCanceled, errors.LockNotAvailable) as error:
            await connection.rollback()
            raise _under_way(mutation) from error
        assert row is not None
        outcome, result = row
        if outcome in ("new", "repeated"):
            return StoredResult(result) if outcome == "repeated" else None
        await connection.rollback()
        if outcome == "reused":
            raise reused(mutation.label)
    raise _under_way(mutation)


_BEGIN = "select outcome, result from headwater.begin_request(%s, %s, %s)"


async def store_request(
    connection: Connection, request: Request, result: bytes, keep: timedelta
) -> None:
    """Store the result, as the last statement before the commit; inside a pipeline.

    This statement runs with the login role, not with the role that the mutation has left. The
    search path may contain any schema, so every name here has its schema.
    """
    stored = result if len(result) <= REQUEST_RESULT_BYTES_MAX else None
    # Deferred constraints fail here already. Also, the first statement of a pipeline must
    # return no rows: libpq would return them in chunks, as it did for the last `ctx.fetch`.
    await connection.execute("set local statement_timeout = 0")  # as for COMMIT itself
    await connection.execute("set constraints all immediate")
    await connection.execute(_PUT_ROLE_ASIDE)
    await connection.execute("set session authorization default")
    await connection.execute(_STORE, (request.scope, request.key, request.digest, stored, keep))
    await connection.execute(_TAKE_ROLE_AGAIN)


_PUT_ROLE_ASIDE = (
    "select pg_catalog.set_config('headwater.session_user',"
    " pg_catalog.current_setting('session_authorization'), true),"
    " pg_catalog.set_config('headwater.role', pg_catalog.current_setting('role'), true)"
)
_TAKE_ROLE_AGAIN = (
    "select pg_catalog.set_config('session_authorization',"
    " pg_catalog.current_setting('headwater.session_user'), true),"
    " pg_catalog.set_config('role', pg_catalog.current_setting('headwater.role'), true)"
)
_STORE = (
    "select headwater.store_request(%s::pg_catalog.bytea, %s::pg_catalog.text,"
    " %s::pg_catalog.bytea, %s::pg_catalog.bytea, %s::pg_catalog.interval)"
)


REQUIRED_FUNCTIONS = (
    "headwater.begin_request(bytea, text, bytea)",
    "headwater.store_request(bytea, text, bytea, bytea, interval)",
    "headwater.log_id()",
)
"""The functions that the question role must be allowed to execute for mutations."""


async def check_privileges(connection: Connection) -> None:
    """Raise PermissionMissing unless this role may execute the functions that mutations need."""
    cursor = await connection.execute(
        "select f, session_user from pg_catalog.unnest(%s::pg_catalog.text[]) f"
        " where not pg_catalog.has_function_privilege(f, 'execute')",
        (list(REQUIRED_FUNCTIONS),),
    )
    row = await cursor.fetchone()
    if row is not None:
        function, role = row
        raise PermissionMissing(
            f"mutations of sessions with a database role run as {role} (question_url), which may"
            f" not execute {function}",
            hint=f'grant execute on function {", ".join(REQUIRED_FUNCTIONS)} to "{role}"',
        )


def result_of(stored: StoredResult, mutation: Mutation) -> msgspec.Raw:
    """The stored result. ResultError if only the key is stored."""
    if stored.result is None:
        raise ResultError(
            f"{mutation.label} ran before under this idempotency key; its result was larger than"
            f" {REQUEST_RESULT_BYTES_MAX:,} bytes and is not stored",
            hint="What it wrote is there: read it with a query.",
            code="result_not_stored",
        )
    return msgspec.Raw(stored.result)


def _under_way(mutation: Mutation) -> HeadwaterError:
    return DatabaseError(
        f"{mutation.label} still runs under this idempotency key",
        code="still_running",
        hint="How it ends is not known yet. Repeat it with the same key.",
    )


class UserBound:
    """Counts stored keys by user, to know when there may be too many."""

    def __init__(self) -> None:
        self._stored: Counter[bytes] = Counter()

    def stored(self, scope: bytes) -> bool:
        """Count one more. Returns whether it is time to trim this user's requests."""
        self._stored[scope] += 1
        if self._stored[scope] >= _REQUESTS_TRIM_EVERY:
            del self._stored[scope]
            return True
        if len(self._stored) > _REQUESTS_COUNTED_USERS_MAX:
            self._stored.clear()
        return False


_AGE_MIN = timedelta(seconds=REQUEST_SECONDS_MIN)


async def trim_user(connection: Connection, scope: bytes) -> None:
    """Remove the oldest requests of a user beyond the bound, if no client repeats them any more."""
    removed = REQUESTS_TRIM_BATCH
    while removed >= REQUESTS_TRIM_BATCH:
        cursor = await connection.execute(
            "select headwater.trim_user_requests(%s, %s, %s, %s)",
            (scope, REQUESTS_PER_USER_MAX, _AGE_MIN, REQUESTS_TRIM_BATCH),
        )
        row = await cursor.fetchone()
        removed = row[0] if row else 0
        await asyncio.sleep(0)
