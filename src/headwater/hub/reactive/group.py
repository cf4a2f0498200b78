"""A group: equal calls of one query for the same users, and their subscriptions.

It has the result, the flush that the result is as of, and the last flush with a change that may
affect it. Nothing here waits: `registry` and the executions call it. All subscribers get the same
frame; subscribers with row deltas share another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Literal, Protocol, TypeAlias

import msgspec

from headwater import limits
from headwater.errors import HeadwaterError
from headwater.fair_queue import Owner
from headwater.hub.subscriptions.costs import Cost
from headwater.hub.subscriptions.subscriber import Subscriber
from headwater.hub.subscriptions.subscription import HubSubscription, not_taken
from headwater.identity import Identity
from headwater.live.state.sizes import size_of
from headwater.memory import Holding
from headwater.model import Position
from headwater.protocol import Deltas, Failed, Frame, ResetMessage, ResetReason, Result, Snapshot
from headwater.queries.analysis.statements import Read, Statement
from headwater.queries.functions import Arguments, Query
from headwater.queries.row_deltas import Rows, entering, rows_of, steps

_QUERY_ROWS_FACTOR = 8
"""The rows of a result that is sent as row deltas count as this many times its text, in `[limits]
bytes_per_user`."""


logger = logging.getLogger(__name__)

Reason: TypeAlias = Literal["first", "call", "change", "retry", "sweep", "catalog", "identity"]
"""Why a query is executed."""


class FlushMoment(msgspec.Struct, frozen=True):
    """The flush in whose snapshot queries are executed. `written` is the end of its WAL."""

    flush: int
    position: Position
    written: int


class Seen(msgspec.Struct, frozen=True):
    """What an execution on a replica may have seen. Later executions must not be older."""

    position: Position
    replayed: int


class Answered(msgspec.Struct, frozen=True):
    """A query's result, as JSON, complete up to a position."""

    value: msgspec.Raw
    position: str


class QueryGroup:
    """The state that equal calls share."""

    __slots__ = (
        "_base_bytes",
        "_digest",
        "_rows",
        "_rows_bytes",
        "analyses",
        "answered_at",
        "arguments",
        "cost",
        "delayed",
        "error",
        "everything",
        "executed",
        "holding",
        "id",
        "identity",
        "joining",
        "key",
        "losses",
        "owner",
        "query",
        "reads",
        "reason",
        "reported_error",
        "result",
        "retries",
        "seen",
        "since",
        "state",
        "statements",
        "subscribers",
        "touched_at",
        "trace_id",
        "uncaptured",
        "waiters",
        "wanted_in",
    )  # fmt: skip

    def __init__(
        self, id: int, key: Hashable, query: Query, arguments: Arguments, identity: Identity
    ) -> None:
        self.id = id
        self.key = key
        self.query = query
        self.arguments = arguments
        self.identity = identity
        self.subscribers: dict[QuerySubscription, None] = {}
        self.joining: list[QuerySubscription] = []
        self.waiters: list[tuple[int, asyncio.Future[Answered]]] = []
        """Calls, each with the first flush whose snapshot is new enough for it."""
        self.owner: Owner | None = None
        """The user that executing it counts for: the first one of those that need it."""
        self.state: Literal["idle", "wanted", "running"] = "idle"
        self.wanted_in = 0
        """The last share of its pool when it was wanted."""
        self.reason: Reason = "first"
        self.trace_id: str | None = None
        self.result: bytes | None = None
        """The result as JSON; None if there is none, or if it is not cached."""
        self.error: HeadwaterError | None = None
        """Why the last execution failed."""
        self.reported_error: tuple[str, str] | None = None
        self.answered_at = 0
        """The flush of its last execution."""
        self.touched_at = 0
        """The last flush with a change that may affect it."""
        self.since: Position | None = None
        """The position at which the result last changed."""
        self.executed: Position | None = None
        """The position of the last execution that succeeded."""
        self.reads: tuple[Read, ...] = ()
        self.everything = False
        self.statements: frozenset[Statement] = frozenset()
        self.uncaptured: tuple[str, ...] = ()
        self.seen: Seen | None = None
        self.analyses = 0
        """How many executions in a row had statements that were new."""
        self.retries = 0
        self.losses = 0
        """How often in a row its connection was lost while it was executed."""
        self.delayed: asyncio.TimerHandle | None = None
        self.cost = Cost()
        self._digest = b""
        self._rows: Rows | None = None
        self._rows_bytes = 0
        self.holding: Holding | None = None
        """Its memory, and the users who follow it."""
        self._base_bytes = limits.VIEW_BYTES + size_of(dict(arguments.values))

    def weigh(self, *, by_row: bool = False) -> None:
        """Count its memory for the users that follow it; with `by_row`, the memory that it takes
        with row deltas. Without subscribers, `[query] cache_bytes` bounds it instead."""
        if self.holding is None:
            return
        if not (self.subscribers or self.joining):
            self.holding.resize(0)
            return
        rows = self.size if by_row else 0
        if self._rows is not None:
            rows = self._rows_bytes
        self.holding.resize(self._base_bytes + self.size + _QUERY_ROWS_FACTOR * rows)

    @property
    def is_fresh(self) -> bool:
        """Whether an execution now would have the same result."""
        return self.error is None and 0 < self.answered_at >= self.touched_at

    @property
    def has_answer(self) -> bool:
        """Whether a new subscriber can be sent the result as it is."""
        return self.is_fresh and self.result is not None and not self.uncaptured

    @property
    def is_needed(self) -> bool:
        return bool(self.subscribers or self.joining or self.waiters)

    @property
    def size(self) -> int:
        return 0 if self.result is None else len(self.result)

    def take(self, result: bytes, moment: FlushMoment) -> bool:
        """Store a new result. Returns whether it differs from the last one."""
        digest = blake2b(result, digest_size=16).digest()
        differs = digest != self._digest
        self.executed = moment.position
        if differs or self.since is None:
            self.since = moment.position
        self._digest, self.result, self.error = digest, result, None
        self.retries = 0
        return differs

    def forget_result(self) -> None:
        """Drop the result. Its digest stays, to notice a different one."""
        self.result = None

    def unchanged_since(self, position: str) -> bool:
        """Whether the result has not changed since the position."""
        try:
            return self.since is not None and Position.parse(position).covers(self.since)
        except ValueError:
            return False

    # -------------------------------------------------------------------- what is sent

    def position(self, reached: Position | None) -> str:
        """The position up to which the result is complete, at a hub that has reached a position. If
        no change has affected it since, that is the hub's position: a client that has seen a newer
        position elsewhere must not reject it."""
        executed = self.executed
        assert executed is not None
        if self.is_fresh and reached is not None and reached.covers(executed):
            return str(reached)
        return str(executed)

    def present(self, delta: bool, reason: ResetReason | None, position: str) -> Frame:
        """The frame with the whole result. ResultError if it cannot be sent by rows."""
        assert self.result is not None
        if not delta:
            return Frame(Result(self.id, position, msgspec.Raw(self.result)))
        rows = entering(self.rows())
        return Frame(
            Snapshot(self.id, position, rows)
            if reason is None
            else ResetMessage(self.id, position, reason, rows)
        )

    def rows(self) -> Rows:
        """The rows of the result, stored while it has subscribers with row deltas."""
        if self._rows is None:
            assert self.result is not None
            self._rows_bytes = len(self.result)
            self._rows = rows_of(self.result, self.query.key, self.query.name)
        return self._rows

    def row_deltas(self, position: str) -> Frame | None:
        """The frame with the deltas since the last result; None if there are none."""
        before, self._rows = self._rows, None
        if before is None:
            return self.present(True, "result", position)
        found = steps(before, self.rows())
        if found is None:
            return self.present(True, "result", position)
        if not found:
            return None
        return Frame(Deltas(self.id, position, datetime.now(UTC), found))

    def forget_rows(self) -> None:
        self._rows = None

    def forget_sent(self) -> None:
        """What its subscribers have is not known: it is not fresh, and the next result is sent
        whatever it is."""
        self.answered_at, self._digest, self._rows = 0, b"", None

    def failure(self, error: HeadwaterError, position: str) -> Frame:
        said = (error.code, str(error), error.hint, error.retryable)
        return Frame(Failed(self.id, position, *said))


class QueryHome(Protocol):
    """The registry, as its subscriptions use it."""

    @property
    def reached(self) -> Position | None: ...

    @property
    def position_text(self) -> str: ...

    def leave(self, subscription: QuerySubscription) -> None: ...

    def resend(self, subscription: QuerySubscription, reason: ResetReason) -> None: ...

    async def change_identity(
        self, subscription: QuerySubscription, identity: Identity
    ) -> None: ...

    async def answered(self, group: QueryGroup, flush: int) -> None: ...


class QuerySubscription(HubSubscription):
    """One subscriber's query. Made by `ReactiveQueries.subscribe`."""

    __slots__ = (
        "_home", "_introduced_as", "delta", "doubted", "flush", "group", "holding", "owner",
        "reason", "since",
    )  # fmt: skip

    def __init__(
        self,
        home: QueryHome,
        group: QueryGroup,
        subscriber: Subscriber,
        *,
        delta: bool,
        since: str | None,
        flush: int,
        owner: Owner | None = None,
    ) -> None:
        super().__init__(subscriber)
        self._home = home
        self.owner = owner
        """The user that its memory counts for."""
        self.holding: Holding | None = None
        """The memory of its group, while it counts for the owner."""
        self.group = group
        self.delta = delta
        self.since = since
        self.flush = flush
        """The last flush before it was opened. It begins with no older result."""
        self.doubted = False
        """Whether its statements were analysed again before it is refused."""
        self.reason: ResetReason | None = None
        self._introduced_as = 0

    def _leave(self) -> None:
        self._home.leave(self)

    def resync(self, reason: ResetReason) -> None:
        """The client is behind: send the present result."""
        if not self.closed:
            self._home.resend(self, reason)

    async def change_identity(self, identity: Identity) -> None:
        """Continue for a caller whose identity changed."""
        await self._home.change_identity(self, identity)

    # -------------------------------------------------------------------- for the hub

    def begin(self) -> None:
        """Send the result, or that the client has it already."""
        group = self.group
        resumed = self._introduced_as != group.id and self._may_resume()
        try:
            position = group.position(self._home.reached)
            frame = None if resumed else group.present(self.delta, self.reason, position)
        except HeadwaterError as error:
            self.report(error)
            return
        self.reason = None
        group.subscribers[self] = None
        self._introduce(resumed=resumed)
        if frame is not None:
            self.deliver(frame)
        self._arrived.settle()

    def _may_resume(self) -> bool:
        # Row deltas apply to the last result. A returning subscriber may have another one.
        since, self.since = self.since, None
        return since is not None and not self.delta and self.group.unchanged_since(since)

    def _introduce(self, *, resumed: bool) -> None:
        group = self.group
        if self._introduced_as == group.id:
            return
        self.begun, self._introduced_as = True, group.id
        key = group.query.key if self.delta else ()
        try:
            self.subscriber.subscribed(group.id, key=key, resumed=resumed)
        except Exception:
            logger.exception("a subscriber of query %s failed to take it", group.query.name)

    def deliver(self, frame: Frame) -> None:
        if self.closed:
            return
        try:
            self.subscriber.deliver(frame)
        except Exception:
            logger.exception("a subscriber of query %s failed to take it", self.group.query.name)
            self.fail(not_taken())

    def report(self, error: HeadwaterError) -> None:
        """There is no result now. Before it has begun, this ends it; later it continues."""
        if self.closed:
            return
        if not self.begun:
            self.fail(error)
            return
        self.group.subscribers[self] = None
        self._introduce(resumed=False)
        self.deliver(self.group.failure(error, self._home.position_text))
        self._arrived.settle()

    async def settled(self, position: Position) -> None:
        """Wait until it was sent a result, or an error, that is as of all flushes so far."""
        touched_at = self.group.touched_at
        # Calls are refused when the database is lost; this waits until it is back.
        while not self.closed and self.group.answered_at < touched_at:
            with suppress(HeadwaterError):
                await self._home.answered(self.group, touched_at)
        await self._arrived.wait()  # it may wait for a whole result, or that of another group

    def expect(self, reason: ResetReason) -> None:
        """Wait for another whole result."""
        self.reason = reason
        self._arrived.renew()


_RETRY_FIRST, _RETRY_LONGEST = limits.QUERY_RETRY_SECONDS


def retry_pause(retries: int) -> float:
    """Seconds until a query is tried again that failed this many times in a row."""
    return min(_RETRY_FIRST * 2.0 ** min(retries, 16), _RETRY_LONGEST)
