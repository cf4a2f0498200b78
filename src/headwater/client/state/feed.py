"""The state of a change feed in a client: its position, and the changes delivered after it.

Pure. The feed resumes from its position after a lost connection. Changes that were delivered after
it are remembered by their number in the log, so that none is delivered twice.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from headwater.errors import ResyncRequired
from headwater.model import Position
from headwater.protocol import (
    Changes,
    ChangesQuery,
    Gap,
    Subscribe,
    Subscribed,
    WireChange,
    WireTransaction,
)  # fmt: skip

_CLIENT_DELIVERED_MAX = 100_000
"""Transactions after its position that a feed remembers. Older ones are forgotten, and may be
delivered twice after a lost connection."""


class FeedTransaction(msgspec.Struct, frozen=True):
    """Changes that became visible together, as a feed delivers them."""

    xid: int
    at: datetime
    changes: tuple[Any, ...]
    """`headwater.protocol.WireChange`, or Debezium envelopes if these were requested."""
    position: str | None
    """The position to resume from after processing: skips no change, may repeat some. None before
    the first position is known."""
    complete: bool = True
    """False for a part of a very large transaction, which continues in the next."""


class FeedState:
    """A change feed as the client knows it."""

    def __init__(self, query: ChangesQuery) -> None:
        self.wire_id = ""
        self.view: int | None = None
        self.position = query.since
        self._query = query
        self._delivered: dict[int, int] = {}

    @property
    def is_due(self) -> bool:
        """It was requested and has not begun, or has no position yet: if the connection is lost
        before that, it cannot resume."""
        return self.view is None or self.position is None

    def subscribe(self, wire_id: str) -> Subscribe:
        self.wire_id, self.view = wire_id, None
        query = msgspec.structs.replace(self._query, since=self.position)
        return Subscribe(wire_id, changes=query)

    def subscribed(self, message: Subscribed) -> None:
        self.view = message.view

    def receive(self, message: Changes) -> list[FeedTransaction]:
        """The transactions that were not delivered before."""
        known = None if self.position is None else Position.parse(self.position)
        missing = [t for t in message.transactions if known is None or not known.contains(t.xid)]
        fresh = [new for each in missing if (new := self._fresh(each))]
        before, later = self.position, Position.parse(message.position)
        # Another feed on the same view may be getting changes that this one already has.
        if known is None or not known.covers(later):
            self.position = message.position
            self._forget(later)
        last = len(fresh) - 1
        return [
            FeedTransaction(
                each.xid,
                each.at,
                each.changes,
                self.position if i == last else before,
                each.complete,
            )
            for i, each in enumerate(fresh)
        ]

    def gap(self, message: Gap) -> None:
        """Go back to where the gap begins. Raises ResyncRequired if the log no longer has the
        changes."""
        if message.reason == "resync" or message.since is None:
            raise ResyncRequired(
                "the log no longer has the changes after the position of this feed", hint=READ_AGAIN
            )
        self.position = message.since

    def _fresh(self, transaction: WireTransaction) -> WireTransaction | None:
        changes = transaction.changes
        if (last := self._delivered.get(transaction.xid)) is not None:
            changes = tuple(change for change in changes if (_seq(change) or 0) > last)
        if not changes and transaction.changes:
            return None
        seqs = [seq for change in changes if (seq := _seq(change)) is not None]
        if seqs or transaction.complete:
            self._delivered[transaction.xid] = max(seqs, default=0)
        if self._query.format == "headwater":
            changes = tuple(msgspec.convert(change, WireChange) for change in changes)
        return msgspec.structs.replace(transaction, changes=changes)

    def _forget(self, position: Position) -> None:
        """Forget transactions that the position contains: the gateway does not send them again."""
        delivered = self._delivered
        for xid in [xid for xid in delivered if position.contains(xid)]:
            del delivered[xid]
        while len(delivered) > _CLIENT_DELIVERED_MAX:
            del delivered[next(iter(delivered))]


def _seq(change: Any) -> int | None:
    """The number of a change in the log, also from a Debezium envelope."""
    match change:
        case {"seq": int(seq)} | {"source": {"seq": int(seq)}}:
            return seq
    return None


READ_AGAIN = "Read the tables again, then follow from a position taken before."
