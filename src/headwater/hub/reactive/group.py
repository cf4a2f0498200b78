"""A group: calls of one query with the same arguments for the same users, and who follows it.

It knows its result, since which flush that holds, and which flush last brought a change that may
concern it. Nothing here waits: `groups` and the executions drive it. Every subscriber gets the same
frame; those who asked for row deltas share another.
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
from headwater.hub.costs import Cost
from headwater.hub.subscriber import Subscriber
from headwater.hub.subscription import Subscription, not_taken
from headwater.identity import Identity
from headwater.live.sizes import size_of
from headwater.memory import Holding
from headwater.model import Position
from headwater.protocol import Deltas, Failed, Frame, Reset, ResetReason, Result, Snapshot
from headwater.queries.analysis.statements import Read, Statement
from headwater.queries.functions import Arguments, Query
from headwater.queries.row_deltas import Rows, entering, rows_of, steps

_QUERY_ROWS_FACTOR = 8
"""How many times its text the rows of a result take that is sent row by row, as `bytes_per_user`
counts it."""


logger = logging.getLogger(__name__)

Reason: TypeAlias = Literal["first", "call", "change", "retry", "sweep", "catalog", "identity"]
"""Why a query is executed."""


class Moment(msgspec.Struct, frozen=True):
    """The flush in whose snapshot queries are executed. `written` is the end of the WAL then."""

    flush: int
    position: Position
    written: int


class Seen(msgspec.Struct, frozen=True):
    """How much an execution on a replica may have seen: nothing older may follow it."""

    position: Position
    replayed: int


class Answered(msgspec.Struct, frozen=True):
    """A query's result, as JSON, complete up to a position."""

    value: msgspec.Raw
    position: str


class QueryGroup:
    """The shared state behind the same calls."""

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
        """Calls, each with the first flush whose snapshot is late enough for it."""
        self.owner: Owner | None = None
        """Whom executing it counts for: who asked first of those that need it."""
        self.state: Literal["idle", "wanted", "running"] = "idle"
        self.wanted_in = 0
        """What its pool had shared out last when it was wanted."""
        self.reason: Reason = "first"
        self.trace_id: str | None = None
        self.result: bytes | None = None
        """As JSON; None if there is none, or if it is not cached."""
        self.error: HeadwaterError | None = None
        """Why the last execution failed."""
        self.reported_error: tuple[str, str] | None = None
        self.answered_at = 0
        """The flush that its last execution was as of."""
        self.touched_at = 0
        """The last flush that brought a change which may concern it."""
        self.since: Position | None = None
        """Since when the result is what it is."""
        self.executed: Position | None = None
        """What the last execution that succeeded was as of."""
        self.reads: tuple[Read, ...] = ()
        self.everything = False
        self.statements: frozenset[Statement] = frozenset()
        self.uncaptured: tuple[str, ...] = ()
        self.seen: Seen | None = None
        self.analyses = 0
        """How often in a row it met statements for the first time."""
        self.retries = 0
        self.losses = 0
        """How often its connection was lost while it was executed, one after the other."""
        self.delayed: asyncio.TimerHandle | None = None
        self.cost = Cost()
        self._digest = b""
        self._rows: Rows | None = None
        self._rows_bytes = 0
        self.holding: Holding | None = None
        """Its memory, and the users who follow it."""
        self._base_bytes = limits.VIEW_BYTES + size_of(dict(arguments.values))

    def weigh(self, *, by_row: bool = False) -> None:
        """Count the memory that it takes now for those who follow it, or with `by_row`, that it
        takes once its rows are sent one by one. A result that is only cached is bounded by
        `query_cache_bytes` instead."""
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
        """Whether an execution now would bring what is known."""
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

    def take(self, result: bytes, moment: Moment) -> bool:
        """A new result; whether it differs from the one before."""
        digest = blake2b(result, digest_size=16).digest()
        differs = digest != self._digest
        self.executed = moment.position
        if differs or self.since is None:
            self.since = moment.position
        self._digest, self.result, self.error = digest, result, None
        self.retries = 0
        return differs

    def forget_result(self) -> None:
        """Keep no more of it than it takes to tell another from it."""
        self.result = None

    def unchanged_since(self, position: str) -> bool:
        """Whether one who has the result of that position has this one."""
        try:
            return self.since is not None and Position.parse(position).covers(self.since)
        except ValueError:
            return False

    # -------------------------------------------------------------------- what is sent

    def position(self, reached: Position | None) -> str:
        """What the result is complete up to, at a hub that has reached a position. It holds there
        if no change since has touched it: one who has seen more elsewhere must not take it for an
        older one."""
        executed = self.executed
        assert executed is not None
        if self.is_fresh and reached is not None and reached.covers(executed):
            return str(reached)
        return str(executed)

    def present(self, delta: bool, reason: ResetReason | None, position: str) -> Frame:
        """The result as it is, for one who has none, or has another. ResultError where it cannot
        be sent row by row."""
        assert self.result is not None
        if not delta:
            return Frame(Result(self.id, position, msgspec.Raw(self.result)))
        rows = entering(self.rows())
        return Frame(
            Snapshot(self.id, position, rows)
            if reason is None
            else Reset(self.id, position, reason, rows)
        )

    def rows(self) -> Rows:
        """The rows of the result, stored while subscribers are sent what becomes of them."""
        if self._rows is None:
            assert self.result is not None
            self._rows_bytes = len(self.result)
            self._rows = rows_of(self.result, self.query.key, self.query.name)
        return self._rows

    def row_deltas(self, position: str) -> Frame | None:
        """What became of the rows that subscribers have; None for nothing."""
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
    """What a subscription asks of the registry that it belongs to."""

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


class QuerySubscription(Subscription):
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
        """The user whose memory it takes."""
        self.holding: Holding | None = None
        """That of its group, while it counts there."""
        self.group = group
        self.delta = delta
        self.since = since
        self.flush = flush
        """How far the hub was when it was asked for: it begins with no older result."""
        self.doubted = False
        """Whether what it reads was looked at again before it was refused."""
        self.reason: ResetReason | None = None
        self._introduced_as = 0

    def _leave(self) -> None:
        self._home.leave(self)

    def resync(self, reason: ResetReason) -> None:
        """The client fell behind: tell it the present result."""
        if not self.closed:
            self._home.resend(self, reason)

    async def change_identity(self, identity: Identity) -> None:
        """Continue for a caller whose identity changed."""
        await self._home.change_identity(self, identity)

    # -------------------------------------------------------------------- for the hub

    def begin(self) -> None:
        """Hand over the result, or say that it is the one that the client has."""
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
        # Row deltas start from what subscribers have; one that was away has other rows.
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
        """There is no result now. Before it has begun that ends it; later it continues."""
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
        """Wait until it was sent what the flushes so far made of its result, or an error."""
        touched_at = self.group.touched_at
        # Calls that wait are refused when the database is lost; this waits until it is back.
        while not self.closed and self.group.answered_at < touched_at:
            with suppress(HeadwaterError):
                await self._home.answered(self.group, touched_at)
        await self._arrived.wait()  # it may have moved to another group, or be sent whole

    def expect(self, reason: ResetReason) -> None:
        """Another whole result is to come."""
        self.reason = reason
        self._arrived.renew()


_RETRY_FIRST, _RETRY_LONGEST = limits.QUERY_RETRY_SECONDS


def retry_pause(retries: int) -> float:
    """Seconds before a query that failed so often in a row is tried again."""
    return min(_RETRY_FIRST * 2.0 ** min(retries, 16), _RETRY_LONGEST)
