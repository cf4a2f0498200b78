"""Groups: what calls of the same query with the same arguments for the same users share.

One execution, one result, one frame for all who subscribe.
"""

from __future__ import annotations

import msgspec

from headwater.hub.subscriber import Subscriber
from headwater.identity import Identity
from headwater.model import Position
from headwater.protocol import ResetReason
from headwater.queries.functions import Arguments, Query


class Answered(msgspec.Struct, frozen=True):
    """A query's result, as JSON, complete up to a position."""

    value: msgspec.Raw
    position: str


class QuerySubscription:
    """One subscriber's query. Made by `Groups.subscribe`."""

    def close(self) -> None:
        """End it; nothing is delivered any more."""
        raise NotImplementedError

    def resync(self, reason: ResetReason) -> None:
        """The client fell behind: tell it the present result."""
        raise NotImplementedError

    async def change_identity(self, identity: Identity) -> None:
        """Go on for a caller of whom something else is known now."""
        raise NotImplementedError


class Groups:
    """All queries of a hub (`hub.groups`)."""

    async def call(
        self,
        query: Query,
        arguments: Arguments,
        identity: Identity,
        *,
        after: Position | None = None,
        trace_id: str | None = None,
    ) -> Answered:
        """A result: a kept one while nothing it rests on has changed, else a new one. With `after`
        one that contains that position. Raises what the function raised, as our error."""
        raise NotImplementedError

    async def subscribe(
        self,
        query: Query,
        arguments: Arguments,
        identity: Identity,
        subscriber: Subscriber,
        *,
        since: str | None = None,
        delta: bool = False,
        trace_id: str | None = None,
    ) -> QuerySubscription:
        """Follow a query. Returns when its first result has been handed over; raises what made
        that impossible. Later failures are `failed` frames, and it goes on."""
        raise NotImplementedError
