"""The context of a query or mutation function: `ctx.fetch`, and the caller.

A context is valid for one call. It uses a connection in a transaction, one statement at a time. It
is closed when the function has returned or took too long: code that uses it later gets an error,
and cannot use the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

import msgspec
import psycopg

from headwater import limits
from headwater.database import Connection
from headwater.errors import ConfigError, HeadwaterError, ResultError
from headwater.identity import Identity
from headwater.queries.analysis.placeholders import placed
from headwater.queries.analysis.statements import Executed
from headwater.queries.events import Events, QueryEvent
from headwater.queries.execution.chunked_fetch import ChunkedFetch, Fetched
from headwater.queries.signals import SIGNAL, ids_of

Kind = Literal["query", "mutation"]
Result = TypeVar("Result")


class Caller:
    """The caller of a function: the part that all contexts have."""

    def __init__(self, identity: Identity, function: str, kind: Kind, trace_id: str) -> None:
        self.identity = identity
        self.function = function
        self.kind = kind
        self.trace_id = trace_id

    @property
    def user(self) -> str | None:
        return self.identity.user

    @property
    def tenant(self) -> str | None:
        return self.identity.tenant

    @property
    def claims(self) -> dict[str, Any]:
        return self.identity.claims


class Context(Caller):
    """The database in one snapshot, and the caller. Every query gets it as its first argument."""

    def __init__(
        self,
        connection: Connection,
        identity: Identity,
        *,
        function: str,
        kind: Kind = "query",
        trace_id: str | None = None,
        events: Events | None = None,
        observe: Callable[[Executed], None] | None = None,
    ) -> None:
        """`observe` is called with every statement before it is sent. The transaction has begun,
        and the role and claims are set."""
        super().__init__(identity, function, kind, trace_id or "")
        self._connection = connection
        self._events = events
        self._observe = observe
        self._lock = asyncio.Lock()
        self._running: asyncio.Task[Any] | None = None
        self._closed = False

    async def fetch(self, sql: str, /, *args: Any, **named: Any) -> list[Any]:
        """All rows, as dictionaries."""
        return (await self._send(sql, args, named)).rows

    async def fetch_one(self, sql: str, /, *args: Any, **named: Any) -> Any:
        """The row, as a dictionary; None if there is none. An error if there are several."""
        fetched = await self._send(sql, args, named)
        return _only(fetched)

    async def fetch_value(self, sql: str, /, *args: Any, **named: Any) -> Any:
        """The first column of the row; None if there is none. An error if there are several."""
        row = _only(await self._send(sql, args, named))
        return None if row is None else next(iter(row.values()), None)

    @property
    def is_over(self) -> bool:
        """Whether the function has returned: nothing can be sent after that."""
        return self._closed

    def close(self) -> None:
        """The function has returned, or took too long: every later use raises. A running statement
        is abandoned, and the connection stays locked until it ends."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(
                f"{self.kind} {self.function} used its context after it had ended",
                hint="A context is valid for one call: await everything before returning.",
            )

    async def _send(self, sql: str, args: tuple[Any, ...], named: dict[str, Any]) -> Fetched:
        text, values = placed(sql, args, named)
        async with self._lock:
            self._check_open()
            statement = ChunkedFetch(self._connection, text, values)
            if self._observe is not None:
                self._observe(Executed(statement.statement, values))
            self._running = asyncio.current_task()
            try:
                return await self._fetch_and_emit(statement, values)
            finally:
                self._running = None

    async def _fetch_and_emit(self, statement: ChunkedFetch, values: tuple[Any, ...]) -> Fetched:
        """Send it, and emit its event to the handlers."""
        if self._events is None or not self._events.wanted("query"):
            return await statement.fetch(limits.QUERY_ROWS_MAX)
        event = QueryEvent(
            function=self.function,
            kind=self.kind,
            sql=statement.statement.sql,
            parameters=values,
            operation=_first_word(statement.statement.sql),
            rows=0,
            seconds=0.0,
            trace_id=self.trace_id,
            user_id=self.user,
        )
        began = time.perf_counter()
        outcome: dict[str, Any] = {}
        try:
            fetched = await statement.fetch(limits.QUERY_ROWS_MAX)
            outcome = {"operation": fetched.command, "rows": fetched.count}
            return fetched
        except BaseException as error:
            outcome = {"error": _code(error)}
            raise
        finally:
            outcome["seconds"] = time.perf_counter() - began
            self._events.emit(msgspec.structs.replace(event, **outcome))


def _code(error: BaseException) -> str:
    match error:
        case psycopg.Error():
            return error.sqlstate or "connection"
        case HeadwaterError():
            return error.code
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"


writing: ContextVar[MutationContext | None] = ContextVar("headwater_writing", default=None)
"""The mutation that the current task runs in. A task that it started still has it after its end."""


def mutation_under_way() -> MutationContext | None:
    """The mutation that the current task runs in, unless it has ended."""
    context = writing.get()
    return None if context is None or context.is_over else context


class MutationContext(Context):
    """A context that can write."""

    def __init__(self, connection: Connection, identity: Identity, **options: Any) -> None:
        super().__init__(connection, identity, kind="mutation", **options)

    async def execute(self, sql: str, /, *args: Any, **named: Any) -> int:
        """Execute a statement. Returns the number of rows that it wrote or found."""
        return (await self._send(sql, args, named)).count

    async def signal(self, topic: str, ids: Iterable[Any] = ()) -> None:
        """Send the rows with these keys to the followers of the topic, if this commits."""
        await self._send(SIGNAL, (topic, ids_of(ids)), {})

    @property
    def connection(self) -> Connection:
        """The psycopg connection inside the transaction: for COPY, executemany, savepoints, …"""
        self._check_open()
        return self._connection


def _only(fetched: Fetched) -> dict[str, Any] | None:
    if len(fetched.rows) > 1:
        raise ResultError(
            f"a statement was to return one row, and returned {len(fetched.rows):,}",
            code="several_rows",
            hint="Use ctx.fetch, or give the statement a limit.",
        )
    return fetched.rows[0] if fetched.rows else None


def _first_word(sql: str) -> str:
    return (sql.split(None, 1) or [""])[0].lower()


# ------------------------------------------------------------------------ for threads


class BlockingContext(Caller):
    """A context for a function that is not async and runs in a thread: the same methods, which
    block."""

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(context.identity, context.function, context.kind, context.trace_id)
        self._context = context
        self._loop = loop
        self._under_way: Future[Any] | None = None
        self._closed = False

    def fetch(self, sql: str, /, *args: Any, **named: Any) -> list[Any]:
        """All rows, as dictionaries."""
        return self.wait(self._context.fetch(sql, *args, **named))

    def fetch_one(self, sql: str, /, *args: Any, **named: Any) -> Any:
        """The row, as a dictionary; None if there is none. An error if there are several."""
        return self.wait(self._context.fetch_one(sql, *args, **named))

    def fetch_value(self, sql: str, /, *args: Any, **named: Any) -> Any:
        """The first column of the row; None if there is none. An error if there are several."""
        return self.wait(self._context.fetch_value(sql, *args, **named))

    def execute(self, sql: str, /, *args: Any, **named: Any) -> int:
        """Execute a statement. Returns the number of rows that it wrote or found. In mutations
        only."""
        return self.wait(self.writing.execute(sql, *args, **named))

    def signal(self, topic: str, ids: Iterable[Any] = ()) -> None:
        """Send the rows with these keys to the followers of the topic, if this commits. In
        mutations only."""
        self.wait(self.writing.signal(topic, ids))

    @property
    def writing(self) -> MutationContext:
        if not isinstance(self._context, MutationContext):
            raise ConfigError(
                f"query {self.function} tries to write", hint="Make it a mutation: @hw.mutation."
            )
        return self._context

    @property
    def context(self) -> Context:
        """The context whose methods are awaited."""
        return self._context

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the event loop, and wait for it."""
        if self._closed:
            work.close()
            self._context._check_open()
            raise _over(self)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._under_way = future
        try:
            return future.result()
        except CancelledError:
            raise _over(self) from None
        finally:
            self._under_way = None

    def close(self) -> None:
        """Every later use raises, and a running statement is abandoned."""
        self._closed = True
        if self._under_way is not None:
            self._under_way.cancel()


def _over(caller: Caller) -> ConfigError:
    return ConfigError(
        f"{caller.kind} {caller.function} continued after it had ended",
        hint="It took too long, or its client has disconnected. What it does now is discarded.",
    )
