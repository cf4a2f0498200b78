"""Runs mutations: one transaction each, with its actor, on a pooled connection.

What the function returned is checked before the commit, so that whoever gets an error knows that
nothing was written. The one exception says so: the connection was lost while committing, and nobody
knows (`outcome_unknown`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec
import psycopg
from psycopg.pq import TransactionStatus

from headwater.database import Connection
from headwater.errors import HeadwaterError, LimitExceeded, Unavailable
from headwater.identity import ANONYMOUS, Identity
from headwater.limits import COMMIT_SECONDS
from headwater.model import Position
from headwater.queries.acting import actor, as_whom, begin, statement_timeout, trace_id_of
from headwater.queries.context import MutationContext, writing
from headwater.queries.events import Events
from headwater.queries.failures import as_callers_see
from headwater.queries.functions import Arguments, Mutation
from headwater.queries.pool import Pool, PoolBusy
from headwater.queries.running import bounded
from headwater.queries.signals import ids_of
from headwater.settings import Settings


class Mutations:
    """The connections that mutations run on."""

    def __init__(self, url: str, settings: Settings, *, events: Events | None = None) -> None:
        self._timeout = settings.mutation_timeout_period.total_seconds()
        self._pool = Pool(url, settings.mutation_connections, purpose="mutation")
        self._events = events

    async def run(
        self,
        mutation: Mutation,
        arguments: Arguments,
        identity: Identity,
        *,
        trace_id: str | None = None,
    ) -> tuple[Any, Position]:
        """What it returned, as its declared type, and a position that contains what it wrote."""
        return await self._run(mutation, arguments, identity, trace_id, mutation.convert)

    async def answer(
        self,
        mutation: Mutation,
        arguments: Arguments,
        identity: Identity,
        *,
        trace_id: str | None = None,
    ) -> tuple[msgspec.Raw, Position]:
        """The same as JSON. What JSON cannot hold is an error before the commit."""

        def encoded(value: Any) -> msgspec.Raw:
            return msgspec.Raw(mutation.encode(value))

        return await self._run(mutation, arguments, identity, trace_id, encoded)

    async def signal(self, topic: str, ids: Iterable[Any] = ()) -> None:
        """Signal a topic, in a transaction of its own."""
        arguments = Arguments({"topic": topic, "ids": ids_of(ids)}, ())
        await self._run(_SIGNAL, arguments, ANONYMOUS, None, lambda value: value)

    async def close(self) -> None:
        await self._pool.close()

    async def _run(
        self,
        mutation: Mutation,
        arguments: Arguments,
        identity: Identity,
        trace_id: str | None,
        finish: Callable[[Any], Any],
    ) -> tuple[Any, Position]:
        trace_id = trace_id_of(trace_id)
        if mutation.trusted:
            identity = msgspec.structs.replace(identity, role=None)
        with as_callers_see(mutation, identity, trace_id, self._events):
            return await self._transaction(mutation, arguments, identity, trace_id, finish)

    async def _transaction(
        self,
        mutation: Mutation,
        arguments: Arguments,
        identity: Identity,
        trace_id: str,
        finish: Callable[[Any], Any],
    ) -> tuple[Any, Position]:
        seconds = mutation.timeout or self._timeout
        settings = [
            *statement_timeout(seconds),
            *actor(identity, mutation.name, trace_id),
            *as_whom(identity),
        ]

        async def begun(connection: Connection) -> None:
            await begin(connection, "begin", settings)

        try:
            async with self._pool.begun(begun, wait=seconds) as connection:
                context = MutationContext(
                    connection,
                    identity,
                    function=mutation.name,
                    trace_id=trace_id,
                    events=self._events,
                )
                token = writing.set(context)
                try:
                    value = finish(await bounded(mutation, context, arguments, seconds))
                finally:
                    writing.reset(token)
                return value, await _uninterrupted(_commit(connection, mutation))
        except PoolBusy:
            raise self._busy(mutation, seconds) from None

    def _busy(self, mutation: Mutation, seconds: float) -> HeadwaterError:
        return LimitExceeded(
            f"{mutation.label} waited {seconds:g} seconds for one of {self._pool.size} connections",
            code="mutations_busy",
            hint="Raise the setting mutation_connections, or make mutations quicker.",
        )


async def _signal(ctx: MutationContext, topic: str, ids: list[str]) -> None:
    await ctx.signal(topic, ids)


_SIGNAL = Mutation("signal", _signal)


async def _commit(connection: Connection, mutation: Mutation) -> Position:
    """Commit, and a position that contains what was committed."""
    status = connection.info.transaction_status
    if status != TransactionStatus.INTRANS:
        raise RuntimeError(_NOT_WHOLE.get(status, _ENDED))
    commit = connection.cursor()
    try:
        async with asyncio.timeout(COMMIT_SECONDS):
            async with connection.pipeline():
                await commit.execute("commit")
                # Whatever role the function may have left behind, it need not know the log.
                await connection.execute("set session authorization default")
                cursor = await connection.execute(_POSITION)
            return await _position(cursor)
    except (psycopg.Error, TimeoutError) as error:
        if isinstance(error, psycopg.Error) and _refused(error) and not commit.statusmessage:
            raise
        raise _outcome_unknown(mutation) from error


async def _position(cursor: psycopg.AsyncCursor[tuple[Any, ...]]) -> Position:
    row = await cursor.fetchone()
    assert row is not None
    return Position.of_snapshot(*row)


_POSITION = "select headwater.log_id(), pg_current_snapshot()::text"
_ENDED = (
    "the function ended its transaction itself: what it wrote until then may be committed."
    " Leave commit and rollback to Headwater; use `async with ctx.connection.transaction()` for"
    " parts that may fail."
)
_NOT_WHOLE = {
    TransactionStatus.INERROR: "a statement failed and the function went on: nothing is committed."
    " Put what may fail inside `async with ctx.connection.transaction()`."
}


def _refused(error: psycopg.Error) -> bool:
    """Whether the server refused to commit, rather than ended the connection."""
    return error.sqlstate is not None and error.sqlstate[:2] not in ("08", "57")


def _outcome_unknown(mutation: Mutation) -> HeadwaterError:
    error = Unavailable(
        f"{mutation.label}: the database was lost while committing",
        code="outcome_unknown",
        hint="Look whether it happened before you try again.",
    )
    error.retryable = False
    return error


async def _uninterrupted(work: Coroutine[Any, Any, Position]) -> Position:
    """A commit is seen to its end, even if whoever waits for it has gone."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
