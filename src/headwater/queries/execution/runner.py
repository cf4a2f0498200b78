"""Runs a function within its timeout, and single queries that a program calls."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from psycopg.errors import QueryCanceled

from headwater.database import Connection
from headwater.errors import LimitExceeded
from headwater.identity import Identity
from headwater.queries.context import Context
from headwater.queries.events import Events
from headwater.queries.execution.error_mapping import timed_out, translated_errors
from headwater.queries.execution.impersonation import (
    begin,
    role_settings,
    statement_timeout,
    trace_id_of,
)
from headwater.queries.execution.pool import Pool, PoolBusy
from headwater.queries.functions import Arguments, Function, Query
from headwater.settings import Settings


async def run_with_timeout(
    function: Function, context: Context, arguments: Arguments, seconds: float
) -> Any:
    """The result of the function; TimedOut if it took too long. The context is closed
    afterwards."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(seconds) as timer:
            return await function.run(context, arguments)
    except TimeoutError as error:
        if timer.expired():
            raise timed_out(function, seconds) from error
        raise
    except QueryCanceled as error:
        # The timeout of the database may come first, or the function has set another one.
        if time.monotonic() - began > seconds * 0.9:
            raise timed_out(function, seconds) from error
        raise
    except BaseException as error:
        if _is_ours(error):
            raise
        # The calling task would take it for its own cancellation, and never answer.
        raise RuntimeError(f"{function.label} raised {type(error).__name__}") from error
    finally:
        context.close()


def _is_ours(error: BaseException) -> bool:
    """Whether it is an error, or meant for the task or program that runs the function."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    return isinstance(error, Exception | KeyboardInterrupt | GeneratorExit)


class QueryRunner:
    """Runs queries that a program calls: each in its own snapshot, and without a cache."""

    def __init__(self, url: str, settings: Settings, *, events: Events | None = None) -> None:
        self._timeout = settings.query.timeout_period.total_seconds()
        self._has_question_role = settings.question_url is not None
        self._pool = Pool(
            url,
            settings.query.concurrency,
            purpose="query",
            question_url=settings.question_url,
        )
        self._events = events

    async def run(self, query: Query, arguments: Arguments, identity: Identity) -> Any:
        """The result, as its declared type."""
        trace_id, identity = trace_id_of(), query.identity(identity)
        with translated_errors(query, identity, trace_id, self._events):
            return query.convert(await self._run(query, arguments, identity, trace_id))

    async def _run(
        self, query: Query, arguments: Arguments, identity: Identity, trace_id: str
    ) -> Any:
        seconds = query.timeout or self._timeout

        async def begun(connection: Connection) -> None:
            settings = [*statement_timeout(seconds), *role_settings(identity)]
            await begin(
                connection,
                "begin isolation level repeatable read read only",
                settings,
                refuses_policies=identity.role is not None and not self._has_question_role,
            )

        try:
            as_role = identity.role is not None
            async with self._pool.begun(begun, wait=seconds, as_role=as_role) as connection:
                context = Context(
                    connection,
                    identity,
                    function=query.name,
                    trace_id=trace_id,
                    events=self._events,
                )
                return await run_with_timeout(query, context, arguments, seconds)
        except PoolBusy:
            raise LimitExceeded(
                f"{query.label} waited {seconds:g} s for one of {self._pool.size} connections",
                code="queries_busy",
                hint="Raise the setting [query] concurrency, or make queries quicker.",
            ) from None

    async def close(self) -> None:
        await self._pool.close()
