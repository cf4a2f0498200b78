"""One execution of a query: in a transaction, as the caller, within its time limit; and what it
read.

An error of the function is the outcome, and does not affect other queries. A lost connection is not
an error of the query: it is raised, and the pool tries again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import psycopg
from psycopg.pq import TransactionStatus

from headwater.database import Connection, connect, translated
from headwater.errors import HeadwaterError, Unavailable
from headwater.hub.reactive.group import FlushMoment, QueryGroup, Reason, Seen
from headwater.hub.reading.snapshot_queries import lost
from headwater.hub.reading.tables import FORMATS
from headwater.metrics import Metrics
from headwater.queries.analysis.analyst import Analyst
from headwater.queries.analysis.search_path import NameLookup, session_of
from headwater.queries.analysis.statements import Executed, Read, Statement
from headwater.queries.context import Context
from headwater.queries.events import Events
from headwater.queries.execution.chunked_fetch import StalePlan
from headwater.queries.execution.error_mapping import caller_error
from headwater.queries.execution.impersonation import (
    end_impersonation,
    impersonate,
    role_settings,
    statement_timeout,
    trace_id_of,
)
from headwater.queries.execution.runner import run_with_timeout
from headwater.settings import Settings


class ExecutionOutcome(msgspec.Struct, frozen=True):
    """The result of an execution: a value as JSON or an error; and what it read."""

    moment: FlushMoment
    reason: Reason
    statements: frozenset[Statement] = frozenset()
    value: bytes | None = None
    error: HeadwaterError | None = None
    reads: tuple[Read, ...] = ()
    everything: bool = False
    uncaptured: tuple[str, ...] = ()
    analysed: bool = False
    """Whether a statement was analysed for the first time."""
    seen: Seen | None = None


Finished: TypeAlias = Callable[[QueryGroup, ExecutionOutcome], None]


class Execution:
    """Executes groups, and calls `finished` with the outcome."""

    def __init__(
        self,
        settings: Settings,
        analyst: Analyst,
        events: Events,
        finished: Finished,
        metrics: Metrics,
    ) -> None:
        self._seconds = settings.query.timeout_period.total_seconds()
        self._has_question_role = settings.question_url is not None
        self._analyst = analyst
        self._events = events
        self.finished = finished
        self.metrics = metrics
        self._options = f"{FORMATS} -c statement_timeout={int(self._seconds * 1000)}"
        self._sessions: WeakKeyDictionary[Connection, NameLookup] = WeakKeyDictionary()
        self._current: WeakSet[Connection] = WeakSet()

    async def open(self, url: str) -> Connection:
        """A connection for queries. Its search path and user are stored."""
        current = self._current
        await self._analyst.note_settings()
        connection = await connect(
            url,
            purpose="queries",
            options=self._options,
            prepares=False,
            application_path=True,
        )
        try:
            with translated(url):
                self._sessions[connection] = await session_of(connection)
        except BaseException:
            await connection.close()
            raise
        current.add(connection)
        return connection

    def is_current(self, connection: Connection) -> bool:
        """Whether its session has the settings that a new one would have."""
        return connection in self._current

    @property
    def users(self) -> set[str]:
        """The users that sessions were opened with."""
        return {session.user for session in self._sessions.values()}

    def outdate(self) -> None:
        """Replace all sessions: they have other settings than new ones, or plans that the server
        does not make again (for example, for a role that may now see more)."""
        self._current = WeakSet()

    async def run(
        self, connection: Connection, group: QueryGroup, moment: FlushMoment, seen: Seen | None
    ) -> bool:
        """Execute a group in the connection's transaction. Raises if the connection is lost.
        Returns whether the transaction is unchanged, so that another query can use it."""
        reason, executed = group.reason, list[Executed]()
        self.metrics.query_executions.labels(reason).inc()
        began = time.perf_counter()
        fenced = self._needs_fence(group)
        value, error = await self._call(connection, group, executed, fenced)
        took = time.perf_counter() - began
        self.metrics.query_seconds.observe(took)
        group.cost.ran(took)
        group.losses = 0
        outcome = ExecutionOutcome(moment, reason, value=value, error=error, seen=seen)
        outcome = await self._with_reads(outcome, group, executed, self._sessions[connection])
        self.finished(group, outcome)
        # A statement that may read anything may also change settings, as `set_config` does.
        is_known = len(outcome.statements) > 0 or not executed
        return fenced or (is_known and not outcome.everything)

    def _needs_fence(self, group: QueryGroup) -> bool:
        """Whether it needs settings of its own, or is likely to change some."""
        return bool(group.identity.role or group.query.timeout or group.everything)

    async def _call(
        self, connection: Connection, group: QueryGroup, executed: list[Executed], fenced: bool
    ) -> tuple[bytes | None, HeadwaterError | None]:
        query, identity = group.query, group.identity
        seconds = query.timeout or self._seconds
        settings = [
            *role_settings(identity),
            *(statement_timeout(seconds) if query.timeout else ()),
        ]
        trace_id = trace_id_of(group.trace_id)
        context = Context(
            connection,
            identity,
            function=query.name,
            trace_id=trace_id,
            events=self._events,
            observe=executed.append,
        )
        try:
            if fenced:
                refuses = identity.role is not None and not self._has_question_role
                await impersonate(connection, settings, refuses_policies=refuses)
            value = await run_with_timeout(query, context, group.arguments, seconds)
            if connection.closed:  # the function has ignored the error
                raise psycopg.OperationalError("the connection was lost while it ran")
            return query.encode(value), None
        except Exception as error:
            if isinstance(error, psycopg.Error) and (lost(error) or isinstance(error, StalePlan)):
                raise
            if isinstance(error.__cause__, TimeoutError):
                await connection.close()  # its statement may still be running
            events = self._events
            return None, caller_error(
                error, query, identity=identity, trace_id=trace_id, events=events
            )
        except asyncio.CancelledError:
            await connection.close()  # the server may not answer
            raise
        finally:
            await self._clean(connection, fenced)

    async def _clean(self, connection: Connection, fenced: bool) -> None:
        """Undo settings of this query. A failed transaction is rolled back anyway."""
        match connection.info.transaction_status:
            case TransactionStatus.INTRANS:
                if fenced and not await end_impersonation(connection):
                    await connection.close()
            case TransactionStatus.INERROR:
                pass
            case _:  # a statement is still running, or the transaction has ended
                await connection.close()

    async def _with_reads(
        self,
        outcome: ExecutionOutcome,
        group: QueryGroup,
        executed: list[Executed],
        session: NameLookup,
    ) -> ExecutionOutcome:
        reads, role = list[Read](), group.identity.role
        everything, uncaptured, analysed = False, dict[str, None](), False
        for each in executed:
            known = self._analyst.known(each.statement, role, session)
            if known is None:
                analysed = True
                try:
                    known = await self._analyst.analyse(each.statement, role, session)
                except HeadwaterError as error:
                    return msgspec.structs.replace(outcome, value=None, error=error)
            reads += known.reads(each)
            everything |= known.everything
            uncaptured.update(dict.fromkeys(known.uncaptured))
        return msgspec.structs.replace(
            outcome,
            statements=frozenset(each.statement for each in executed),
            reads=tuple(dict.fromkeys(reads)),
            everything=everything,
            uncaptured=tuple(uncaptured),
            analysed=analysed,
        )

    def give_up(self, group: QueryGroup, moment: FlushMoment) -> None:
        """Its connection was lost too often."""
        error = Unavailable(
            f"query {group.query.name}: the database ended the connection while it ran",
            hint="PostgreSQL's own log has the reason.",
        )
        self.finished(group, ExecutionOutcome(moment, group.reason, error=error))
