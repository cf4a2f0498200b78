"""Subscriptions of a program: `Live` for a live query, `Feed` for a change feed, and the base of
both and of `results.Results`.

The memory for a slow reader is bounded. A reader of rows gets the latest ones only. A reader of
deltas that falls behind gets one reset with the current rows. A reader of a feed that falls behind
blocks the connection, and so slows down the gateway, unless the program waits for something else:
then the feed is paused, and resumed later from its position. A subscription begins when it is first
entered or iterated, and ends with its last reader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from headwater import limits
from headwater.client.backoff import Backoff
from headwater.client.requests import Attempts
from headwater.client.session import State
from headwater.client.state.feed import FeedState, FeedTransaction
from headwater.client.state.rows import LiveState, RowsBatch
from headwater.errors import ConfigError
from headwater.model import Cursor, Key, Row
from headwater.protocol import ChangesQuery, Publish, SetState

_Self = TypeVar("_Self", bound="Subscription")
_Value = TypeVar("_Value")


class SubscriptionOwner(Protocol):
    """The connection, as its subscriptions see it."""

    def begin(self, subscription: Subscription) -> None:
        """Request a subscription, now and after every reconnect. Raises if the connection has
        ended."""

    def end(self, subscription: Subscription) -> None:
        """The subscription has no readers any more."""

    async def reanchor(self, live: Live, after: list[Any] | None) -> None:
        """Move its window, and wait for the answer. One window is moved at a time."""

    def resume(self, feed: Feed) -> None:
        """A paused feed has room again."""

    async def send_to_channel(
        self, message: Publish | SetState, attempts: Attempts | None = None
    ) -> None:
        """Send a message to a channel, and wait for the answer. `attempts` are the earlier ones
        with the same key."""


class Subscription:
    """The base of all subscriptions: begin, wait, fail, end."""

    state: State

    def __init__(self, owner: SubscriptionOwner) -> None:
        self._owner = owner
        self._holders = 0
        self._error: Exception | None = None
        self._over = True
        self._is_ready = False
        self._pulse = asyncio.Event()
        self.backoff = Backoff()

    async def __aenter__(self: _Self) -> _Self:
        self._holders += 1
        try:
            if self._holders == 1:
                self._begin()
            while not self._is_ready and await self.waiting():
                pass
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._owner.end(self)
            self.finish()

    def _begin(self) -> None:
        self._error, self._over, self._is_ready = None, False, False
        # A new subscription that is refused fails soon; one that had begun is retried for longer.
        self.backoff = Backoff(failures_max=limits.CLIENT_SUBSCRIBE_ATTEMPTS_MAX)
        self._owner.begin(self)

    async def waiting(self) -> bool:
        """Wait for the next event. False if there will be none; raises the error of a failed
        subscription."""
        if self._error is not None:
            raise self._error
        if self._over:
            return False
        await self._pulse.wait()
        return True

    def wake(self) -> None:
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()

    def ready(self, backoff: Backoff) -> None:
        """It has begun, or was resumed. From now on `backoff` counts its failures."""
        self.backoff, self._is_ready = backoff, True
        self.wake()

    def fail(self, error: Exception) -> None:
        """It has failed; its readers get the error."""
        self._error = error
        self.finish()

    def finish(self) -> None:
        """It has ended, as requested."""
        self._over = True
        self.wake()


class Latest(Subscription, Generic[_Value]):
    """A subscription with a current value. A slow reader gets the latest one only."""

    def __init__(self, owner: SubscriptionOwner) -> None:
        super().__init__(owner)
        self._version = 0

    def _begin(self) -> None:
        self.state, self._version = self._new_state(), 0
        super()._begin()

    def _new_state(self) -> State:
        raise NotImplementedError

    def _present(self) -> _Value:
        raise NotImplementedError

    async def __aiter__(self) -> AsyncGenerator[_Value, None]:
        """The current value, and the value after every change. A slow reader gets the latest one
        only."""
        async with self:
            seen = 0
            while True:
                while self._version == seen:
                    if not await self.waiting():
                        return
                seen = self._version
                yield self._present()

    def changed(self) -> None:
        self._version += 1
        self.wake()


class Live(Latest[list[Row]]):
    """A live query that is followed.

    ```python
    async for rows in hw.live("orders", limit=20): ...

    async with hw.live("orders", limit=20) as orders:
        orders.rows
        async for batch in orders.deltas(): ...
    ```
    """

    state: LiveState

    def __init__(self, owner: SubscriptionOwner, query: dict[str, Any], verify: bool) -> None:
        super().__init__(owner)
        self._query, self._verify = query, verify
        self._rows: list[Row] = []
        self._rows_version = 0
        self._readers: set[_Batches] = set()
        self.state = self._new_state()

    def _new_state(self) -> LiveState:
        return LiveState(self._query, self._verify)

    def _begin(self) -> None:
        self._rows_version = 0
        super()._begin()

    @property
    def rows(self) -> list[Row]:
        """A copy of the current rows, in the order of the query."""
        if self._rows_version != self._version:
            self._rows, self._rows_version = self.state.rows, self._version
        return list(self._rows)

    @property
    def keys(self) -> list[Key]:
        """Their primary keys, in the same order."""
        return self.state.keys

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The names of the primary key's columns."""
        return self.state.key

    @property
    def position(self) -> str | None:
        """The position that the rows contain; None while they are unknown."""
        return self.state.position

    def cursor(self, key: Key) -> Cursor:
        """The place of a row in the order, for `reanchor` or for another query's `after`."""
        return self.state.cursor(key)

    def _present(self) -> list[Row]:
        return self.rows

    async def deltas(self) -> AsyncGenerator[RowsBatch, None]:
        """First a reset with the current rows, then every batch. A reader that falls behind by more
        than `limits.CLIENT_BATCHES_MAX` gets a reset with the rows at that time."""
        async with self:
            batches = _Batches()
            self._readers.add(batches)
            try:
                while True:
                    while not batches:
                        if not await self.waiting():
                            return
                    yield batches.take(self.state)
            finally:
                self._readers.discard(batches)

    async def reanchor(self, after: Sequence[Any] | None) -> None:
        """Move the window: it begins after this cursor. Returns when the rows are received."""
        if self._over:
            raise ConfigError(
                "the live query is not open",
                hint="Use `async with hw.live(…) as rows: await rows.reanchor(cursor)`.",
            )
        await self._owner.reanchor(self, None if after is None else list(after))

    def received(self, batch: RowsBatch) -> None:
        for reader in self._readers:
            reader.add(batch)
        self.changed()


class _Batches:
    """The batches that wait for one reader of deltas: first, and whenever there are too many, one
    reset."""

    def __init__(self) -> None:
        self._waiting: deque[RowsBatch] = deque()
        self._behind = True

    def __bool__(self) -> bool:
        return self._behind or bool(self._waiting)

    def add(self, batch: RowsBatch) -> None:
        if self._behind:
            return
        self._waiting.append(batch)
        if len(self._waiting) > limits.CLIENT_BATCHES_MAX:
            self._waiting.clear()
            self._behind = True

    def take(self, state: LiveState) -> RowsBatch:
        if not self._behind:
            return self._waiting.popleft()
        self._behind = False
        return RowsBatch(state.present(), state.position or "")


class Feed(Subscription):
    """A change feed that is followed: `async for transaction in hw.changes("orders"): ...`"""

    state: FeedState

    def __init__(self, owner: SubscriptionOwner, query: ChangesQuery) -> None:
        super().__init__(owner)
        self._query = query
        self._waiting: deque[FeedTransaction] = deque()
        self.left = False
        """Whether the feed is paused until the waiting transactions are read."""
        self.state = FeedState(query)

    def _begin(self) -> None:
        self.state, self.left = FeedState(self._query), False
        self._waiting.clear()
        super()._begin()

    @property
    def position(self) -> str | None:
        """The position that the received transactions reach."""
        return self.state.position

    async def __aiter__(self) -> AsyncGenerator[FeedTransaction, None]:
        """Every transaction once, in order."""
        async with self:
            while True:
                while not self._waiting:
                    if not await self.waiting():
                        return
                transaction = self._waiting.popleft()
                self.wake()
                if self.left and not self._waiting:
                    self.left = False
                    self._owner.resume(self)
                yield transaction

    @property
    def is_full(self) -> bool:
        """Whether as many transactions wait as are allowed."""
        return len(self._waiting) >= limits.CLIENT_TRANSACTIONS_MAX and not self._over

    def received(self, transactions: list[FeedTransaction]) -> None:
        self._waiting.extend(transactions)
        self.wake()
