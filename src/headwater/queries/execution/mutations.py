"""Runs mutations: one transaction each, with its actor, on a pooled connection.

The result of the function is checked before the commit, so an error means that nothing was written.
There is one exception, with its own code: the connection was lost during the commit
(`outcome_unknown`). With an idempotency key, that is known too: the key and the result are stored
in the transaction of the mutation, so the database knows whether it was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import msgspec
import psycopg
from psycopg.pq import TransactionStatus

from headwater.database import Connection
from headwater.errors import DatabaseError, HeadwaterError, LimitExceeded, Unavailable
from headwater.fair_queue import Owner
from headwater.idempotency import Request
from headwater.identity import ANONYMOUS, Identity
from headwater.limits import COMMIT_SECONDS, MUTATION_USER_SHARE, REQUEST_LOOKUP_SECONDS
from headwater.log.reconnect import is_lost, reconnect_pause
from headwater.model import Position
from headwater.queries.context import MutationContext, writing
from headwater.queries.events import Events
from headwater.queries.execution.error_mapping import translated_errors
from headwater.queries.execution.idempotent_requests import (
    StoredResult,
    UserBound,
    begin_request,
    check_privileges,
    result_of,
    store_request,
    trim_user,
)
from headwater.queries.execution.impersonation import (
    actor_settings,
    begin,
    role_settings,
    statement_timeout,
    trace_id_of,
)
from headwater.queries.execution.pool import Pool, PoolBusy
from headwater.queries.execution.runner import run_with_timeout
from headwater.queries.functions import Arguments, Mutation
from headwater.queries.signals import ids_of
from headwater.settings import Settings
from headwater.tasks import ended


class MutationRunner:
    """The connections that mutations run on."""

    def __init__(self, url: str, settings: Settings, *, events: Events | None = None) -> None:
        self._timeout = settings.mutation.timeout_period.total_seconds()
        self._pool = Pool(
            url,
            settings.mutation.connections,
            purpose="mutation",
            share=MUTATION_USER_SHARE,
            question_url=settings.question_url,
            check=check_privileges,
        )
        self._events = events
        self._keep = settings.mutation.retention_period
        self._bound = UserBound()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self,
        mutation: Mutation,
        arguments: Arguments,
        identity: Identity,
        *,
        trace_id: str | None = None,
    ) -> tuple[Any, Position]:
        """The result as its declared type, and a position that contains what it wrote."""
        return await self._run(mutation, arguments, identity, trace_id, mutation.convert)

    async def answer(
        self,
        mutation: Mutation,
        arguments: Arguments,
        identity: Identity,
        *,
        trace_id: str | None = None,
        request: Request | None = None,
        owner: Owner | None = None,
    ) -> tuple[msgspec.Raw, Position]:
        """The same as JSON. A result that is not possible in JSON is an error before the commit. A
        `request` runs only once: if it ran before, its stored result is returned. Only some
        mutations of one `owner` run at the same time."""

        def encoded(value: Any) -> msgspec.Raw:
            return msgspec.Raw(mutation.encode(value))

        return await self._run(mutation, arguments, identity, trace_id, encoded, request, owner)

    async def signal(self, topic: str, ids: Iterable[Any] = ()) -> None:
        """Signal a topic, in a transaction of its own."""
        arguments = Arguments({"topic": topic, "ids": ids_of(ids)}, ())
        await self._run(_SIGNAL, arguments, ANONYMOUS, None, lambda value: value)

    async def close(self) -> None:
        await asyncio.gather(*map(ended, self._tasks))
        await self._pool.close()

    async def _run(
        self,
        mutation: Mutation,
        arguments: Arguments,
        identity: Identity,
        trace_id: str | None,
        finish: Callable[[Any], Any],
        request: Request | None = None,
        owner: Owner | None = None,
    ) -> tuple[Any, Position]:
        trace_id = trace_id_of(trace_id)
        if mutation.trusted:
            identity = msgspec.structs.replace(identity, role=None)
        with translated_errors(mutation, identity, trace_id, self._events):
            try:
                return await self._transaction(
                    mutation, arguments, identity, trace_id, finish, request, owner
                )
            except _CommitLost as lost:
                return lost.value, await self._outcome(mutation, request, lost)

    async def _transaction(
        self,
        mutation: Mutation,
        arguments: Arguments,
        identity: Identity,
        trace_id: str,
        finish: Callable[[Any], Any],
        request: Request | None,
        owner: Owner | None,
    ) -> tuple[Any, Position]:
        seconds = mutation.timeout or self._timeout
        own = statement_timeout(seconds)
        settings = [*actor_settings(identity, mutation.name, trace_id), *role_settings(identity)]
        stored: StoredResult | None = None

        async def begun(connection: Connection) -> None:
            nonlocal stored
            if request is None:
                await begin(connection, "begin", [*own, *settings])
            else:
                stored = await begin_request(connection, mutation, request, own, settings)

        try:
            as_role = identity.role is not None
            async with self._pool.begun(
                begun, wait=seconds, owner=owner, as_role=as_role
            ) as connection:
                if stored is not None:
                    return result_of(stored, mutation), await _position_after_rollback(connection)
                context = MutationContext(
                    connection,
                    identity,
                    function=mutation.name,
                    trace_id=trace_id,
                    events=self._events,
                )
                token = writing.set(context)
                try:
                    value = finish(await run_with_timeout(mutation, context, arguments, seconds))
                finally:
                    writing.reset(token)
                commit = _commit(connection, mutation, value, request, self._keep)
                position = await _uninterrupted(commit)
        except PoolBusy as busy:
            raise self._busy(mutation, seconds, own=busy.own) from None
        if request is not None and self._bound.stored(request.scope):
            self._start(self._trim(request.scope))
        return value, position

    async def _outcome(
        self, mutation: Mutation, request: Request | None, lost: _CommitLost
    ) -> Position:
        """A position that contains a mutation whose commit was not answered, if it was committed.
        With a key the database knows that; without one it is unknown."""
        if request is None:
            raise _outcome_unknown(mutation, retryable=False) from lost.__cause__
        try:
            async with asyncio.timeout(REQUEST_LOOKUP_SECONDS):
                found = await self._look_up(mutation, request)
        except (TimeoutError, PoolBusy):
            raise _outcome_unknown(mutation, retryable=True) from lost.__cause__
        if found is None:
            raise Unavailable(
                f"{mutation.label}: the database was lost while committing",
                hint="Nothing was written. Repeat it with the same key.",
            ) from lost.__cause__
        return found

    async def _look_up(self, mutation: Mutation, request: Request) -> Position | None:
        """Waits until the transaction that may have stored the request has ended."""
        stored: StoredResult | None = None

        async def begun(connection: Connection) -> None:
            nonlocal stored
            own = statement_timeout(REQUEST_LOOKUP_SECONDS)
            stored = await begin_request(connection, mutation, request, own, [])

        for attempt in count():
            try:
                async with self._pool.begun(begun, wait=REQUEST_LOOKUP_SECONDS) as connection:
                    if stored is None:
                        return None
                    return await _position_after_rollback(connection)
            except (psycopg.Error, DatabaseError) as error:
                if not is_lost(error):
                    raise
            await asyncio.sleep(reconnect_pause(attempt))
        raise AssertionError("there is always another attempt")

    async def _trim(self, scope: bytes) -> None:
        async def begun(connection: Connection) -> None:
            pass

        with suppress(psycopg.Error, HeadwaterError, PoolBusy):
            async with self._pool.begun(begun, wait=self._timeout) as connection:
                await trim_user(connection, scope)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _busy(self, mutation: Mutation, seconds: float, *, own: bool) -> HeadwaterError:
        if own:
            return LimitExceeded(
                f"{mutation.label} waited {seconds:g} seconds: this user has"
                f" {self._pool.owner_size} running mutations, which is the limit of one user",
                code="user_mutations_busy",
                hint="Wait until one of them ends. One user gets a share of the setting"
                " [mutation] connections.",
            )
        return LimitExceeded(
            f"{mutation.label} waited {seconds:g} seconds for one of {self._pool.size} connections",
            code="mutations_busy",
            hint="Raise the setting [mutation] connections, or make mutations quicker.",
        )


async def _signal(ctx: MutationContext, topic: str, ids: list[str]) -> None:
    await ctx.signal(topic, ids)


_SIGNAL = Mutation("signal", _signal)


class _CommitLost(Exception):
    """The commit was not answered. `value` is the result of the mutation."""

    def __init__(self, value: Any) -> None:
        self.value = value


async def _commit(
    connection: Connection, mutation: Mutation, value: Any, request: Request | None, keep: timedelta
) -> Position:
    """Commit. Returns a position that contains the transaction. A request is stored with it."""
    status = connection.info.transaction_status
    if status != TransactionStatus.INTRANS:
        raise RuntimeError(_NOT_WHOLE.get(status, _ENDED))
    commit = connection.cursor()
    try:
        async with asyncio.timeout(COMMIT_SECONDS):
            async with connection.pipeline():
                if request is not None:
                    await store_request(connection, request, bytes(value), keep)
                await commit.execute("commit")
                # The role that the function has left may not be allowed to read the log.
                await connection.execute("set session authorization default")
                cursor = await connection.execute(_POSITION)
            return await _position(cursor)
    except (psycopg.Error, TimeoutError) as error:
        if isinstance(error, psycopg.Error) and _refused(error) and not commit.statusmessage:
            raise
        raise _CommitLost(value) from error


async def _position_after_rollback(connection: Connection) -> Position:
    """A position that contains all transactions committed so far, read with Headwater's rights."""
    async with connection.pipeline():
        await connection.execute("rollback")
        await connection.execute("set session authorization default")
        cursor = await connection.execute(_POSITION)
    return await _position(cursor)


async def _position(cursor: psycopg.AsyncCursor[tuple[Any, ...]]) -> Position:
    row = await cursor.fetchone()
    assert row is not None
    return Position.of_snapshot(*row)


_POSITION = "select headwater.log_id(), pg_catalog.pg_current_snapshot()::pg_catalog.text"
_ENDED = (
    "the function ended its transaction itself: what it wrote until then may be committed."
    " Leave commit and rollback to Headwater; use `async with ctx.connection.transaction()` for"
    " parts that may fail."
)
_NOT_WHOLE = {
    TransactionStatus.INERROR: "a statement failed and the function continued: nothing is"
    " committed. Put what may fail inside `async with ctx.connection.transaction()`."
}


def _refused(error: psycopg.Error) -> bool:
    """Whether the server refused to commit, rather than ended the connection."""
    state = error.sqlstate
    return state is not None and not state.startswith(("08", "57P"))


def _outcome_unknown(mutation: Mutation, *, retryable: bool) -> HeadwaterError:
    error = Unavailable(
        f"{mutation.label}: the database was lost while committing",
        code="outcome_unknown",
        hint="Repeat it with the same key: it runs only if it has not happened."
        if retryable
        else "Look whether it happened before you try again.",
    )
    error.retryable = retryable
    return error


async def _uninterrupted(work: Coroutine[Any, Any, Position]) -> Position:
    """Finish a commit, even if its caller is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
