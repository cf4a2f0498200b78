"""Calls of clients: reactive queries and mutations, by name, each with one answer.

Results are JSON already, and are sent unchanged. A mutation that has begun runs to its end, also if
its client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Literal

from opentelemetry.context import Context

from headwater.errors import HeadwaterError, InvalidQuery, NotFound, ResyncRequired, TimedOut
from headwater.gateway.connection import GatewayConnection, no_session
from headwater.gateway.http.tracing import traced
from headwater.gateway.internal_errors import internal_error
from headwater.gateway.quotas import QuotaOwner
from headwater.gateway.session import ChannelSubscription, error_message
from headwater.hub.hub import Hub
from headwater.hub.reactive.registry import Answered
from headwater.idempotency import Request, check_key
from headwater.identity import Identity
from headwater.limits import ARGUMENT_VALUES_MAX, WAIT_SECONDS_MAX
from headwater.model import Position
from headwater.protocol import Answer, Ask, Error, Mutate, Wait
from headwater.queries.execution.mutations import MutationRunner
from headwater.queries.functions import Arguments, Mutation, Query


class CallHandler:
    """The queries and mutations of an application."""

    def __init__(
        self,
        hub: Hub,
        queries: Mapping[str, Query],
        mutations: Mapping[str, Mutation],
        runner: MutationRunner | None,
    ) -> None:
        self.queries = queries
        self.mutations = mutations
        self._hub = hub
        self._runner = runner
        self._running: set[asyncio.Task[Answered]] = set()
        self._answering: dict[asyncio.Future[None], GatewayConnection] = {}

    async def close(self) -> None:
        """Cancel the mutations that still run; they are rolled back."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    @property
    def mutating(self) -> set[GatewayConnection]:
        """The connections with a mutation that is not answered yet."""
        return set(self._answering.values())

    async def answered(self, seconds: float) -> None:
        """Wait until the mutations that have begun are answered, for at most this many seconds."""
        if self._answering:
            await asyncio.wait(set(self._answering), timeout=seconds)

    # -------------------------------------------------------------------- by name

    def query(self, name: str) -> Query:
        """The query of that name; NotFound where there is none."""
        query = self.queries.get(name)
        if query is None:
            raise _unknown("query", name)
        return query

    def mutation(self, name: str) -> Mutation:
        """The mutation of that name; NotFound where there is none."""
        mutation = self.mutations.get(name)
        if mutation is None:
            raise _unknown("mutation", name)
        return mutation

    # -------------------------------------------------------------------- calling

    async def ask(
        self,
        name: str,
        args: dict[str, Any],
        identity: Identity,
        *,
        after: str | None = None,
        parent: Context | None = None,
        owner: QuotaOwner | None = None,
    ) -> Answered:
        """A query's result. With `after`, one that contains that position. Of one `owner`, only
        some are executed at a time."""
        query = self.query(name)
        arguments = query.bind(args, most=ARGUMENT_VALUES_MAX)
        position = None if after is None else self.position(after, path="after")
        with traced("headwater.query", {"headwater.function": name}, parent) as trace_id:
            return await self._hub.reactive.call(
                query, arguments, identity, after=position, trace_id=trace_id, owner=owner
            )

    async def mutate(
        self,
        name: str,
        args: dict[str, Any],
        identity: Identity,
        *,
        key: str | None = None,
        parent: Context | None = None,
        owner: QuotaOwner | None = None,
    ) -> Answered:
        """What a mutation returned, and a position that contains what it wrote. With an idempotency
        key, it runs once for this user. Of one `owner`, only some run at a time."""
        mutation = self.mutation(name)
        arguments = mutation.bind(args)
        request = None if key is None else Request.of(identity, check_key(key), name, args)
        work = self._mutate(mutation, arguments, identity, request, parent, owner)
        running = asyncio.create_task(work)
        self._running.add(running)
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    async def _mutate(
        self,
        mutation: Mutation,
        arguments: Arguments,
        identity: Identity,
        request: Request | None,
        parent: Context | None,
        owner: QuotaOwner | None,
    ) -> Answered:
        assert self._runner is not None, "mutations need a runner"
        attributes = {"headwater.function": mutation.name}
        with traced("headwater.mutation", attributes, parent) as trace_id:
            value, position = await self._runner.answer(
                mutation, arguments, identity, trace_id=trace_id, request=request, owner=owner
            )
            return Answered(value, str(position))

    def _ended(self, running: asyncio.Task[Answered]) -> None:
        self._running.discard(running)
        if not running.cancelled():
            running.exception()  # The caller has received it, or has disconnected.

    # -------------------------------------------------------------------- through a session

    def begin(
        self, connection: GatewayConnection, request: Ask | Mutate | Wait
    ) -> Coroutine[Any, Any, None]:
        """Begin a request, or raise if it is invalid. Its answer or error is sent through the
        connection's session, after what was sent before."""
        if connection.closing is not None:
            raise no_session()
        match request:
            case Ask(name=name):
                self.query(name)
            case Mutate(name=name, idempotency_key=key):
                self.mutation(name)
                if key is not None:
                    check_key(key)
            case Wait(position=position):
                self.position(position)
        connection.begin_request(request.id)
        if isinstance(request, Mutate):
            return self._answer_mutation(connection, request)
        return self._answer(connection, request)

    async def _answer_mutation(self, connection: GatewayConnection, request: Mutate) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answering[over] = connection
        try:
            await self._answer(connection, request)
        finally:
            del self._answering[over]
            over.set_result(None)

    async def _answer(self, connection: GatewayConnection, request: Ask | Mutate | Wait) -> None:
        session = connection.session
        message: Answer | Error
        try:
            message = await self._answer_to(connection, request)
        except HeadwaterError as error:
            message = error_message(error, id=request.id)
        except Exception:
            message = error_message(internal_error(), id=request.id)
        if session.is_full:
            await connection.room()  # a result may be large
        session.send(message)
        connection.end_request(request.id)

    async def _answer_to(
        self, connection: GatewayConnection, request: Ask | Mutate | Wait
    ) -> Answer:
        identity, owner = connection.session.identity, connection.owner
        match request:
            case Ask(id, name, args, after):
                found = await self.ask(name, args, identity, after=after, owner=owner)
                return Answer(id, found.position, found.value)
            case Mutate(id, name, args, key):
                found = await self.mutate(name, args, identity, key=key, owner=owner)
                return Answer(id, found.position, found.value)
            case Wait(id, position):
                await self.wait(connection, self.position(position))
                return Answer(id, position)

    # -------------------------------------------------------------------- reading your own writes

    def position(self, text: str, *, path: str = "position") -> Position:
        """A position of this log. InvalidQuery for a text that is not a position, ResyncRequired
        for a position of another log."""
        try:
            position = Position.parse(text)
        except ValueError:
            raise InvalidQuery(
                f"{text!r:.100} is not a position",
                path=path,
                hint="Use the position of an answer without changing it.",
            ) from None
        if self._hub.position is not None and self._hub.position.log != position.log:
            raise ResyncRequired(
                f"{path}: position {position} belongs to another log",
                hint="Use a position of this database. The database may have been restored since.",
            )
        return position

    async def wait(self, connection: GatewayConnection, position: Position) -> None:
        """Return when everything up to the position has been sent to a client, for every
        subscription that it has now."""
        try:
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                await self._wait(connection, position)
        except TimeoutError:
            raise TimedOut(
                f"position {position} was not sent within {WAIT_SECONDS_MAX:.0f} seconds",
                hint="Wait again. The client may read slowly, or the gateway may be behind the"
                " database.",
            ) from None

    async def _wait(self, connection: GatewayConnection, position: Position) -> None:
        # Subscriptions that are being opened may still get an earlier result.
        if connection.openings:
            await asyncio.wait(set(connection.openings.values()))
        subscriptions = [
            each
            for each in connection.session.subscriptions.values()
            if not isinstance(each, ChannelSubscription)
        ]
        await self._hub.reached(position)
        while True:
            for each in subscriptions:
                if not each.over and each.handle is not None:
                    await each.handle.settled(position)
            if not any(each.has_unsent for each in subscriptions if not each.over):
                return
            # Subscriptions that fell behind get the rest when there is room: wait for them, and
            # then for those that catch up from the log.
            await connection.all_sent()


def _unknown(kind: Literal["query", "mutation"], name: str) -> NotFound:
    return NotFound(
        f"this gateway has no {kind} {name!r:.100}",
        code=f"{kind}_unknown",
        hint=f"The application registers it with @hw.{kind}.",
    )
