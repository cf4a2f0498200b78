"""The state of a client's subscriptions: messages of a gateway in, what they mean out.

Pure. Each subscription keeps what it takes to go on after a lost connection: a live query its rows
and their position, a feed its position and what it was given beyond it. The frames of a view are
for every subscription on that view. Nothing is guessed: a batch that does not fit, or does not lead
to the hash it carries, is answered by subscribing anew, and counted. Each time a subscription is
asked for it has another id on the wire, so that late messages about the old one fall on nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, TypeAlias

import msgspec

from headwater import limits
from headwater.client.refusals import error_of
from headwater.client.replica import Replica
from headwater.errors import Diverged, HeadwaterError, ResyncRequired
from headwater.model import Cursor, Delta, Enter, Key, Match, Position, Row
from headwater.model import Reset as ResetDelta
from headwater.protocol import (
    Changes,
    ChangesQuery,
    ClientMessage,
    Deltas,
    Error,
    Gap,
    Reanchor,
    Reset,
    ServerMessage,
    Snapshot,
    Subscribe,
    Subscribed,
    Unsubscribe,
    WireChange,
    WireTransaction,
)


class Batch(msgspec.Struct, frozen=True):
    """What changed in a result at once. A snapshot is a batch that begins with a reset."""

    deltas: tuple[Delta, ...]
    position: str
    at: datetime | None = None
    """When the last of the changes was written; None for a snapshot."""


class FeedTransaction(msgspec.Struct, frozen=True):
    """Changes that became visible together, as a feed delivers them."""

    xid: int
    at: datetime
    changes: tuple[Any, ...]
    """`headwater.protocol.WireChange`, or Debezium envelopes where they were asked for."""
    position: str | None
    """Where to resume once it is dealt with: never skips, may repeat. None before the first is
    known."""
    complete: bool = True
    """False for a part of a very large transaction, which goes on in the next."""


# ------------------------------------------------------------------------ one live query


class LiveState:
    """A live query as the client knows it."""

    def __init__(self, query: dict[str, Any], verify: bool = False) -> None:
        self.wire_id = ""
        self.view: int | None = None
        self.position: str | None = None
        self.key: tuple[str, ...] = ()
        self._query = query
        self._moving: dict[str, Any] | None = None
        self._verify = verify
        self._replica = Replica()
        self._waiting = True
        self._whole = False
        self._parts: list[Enter | Match] | None = None
        self._meanwhile: list[Deltas] = []
        self._diverged = 0

    @property
    def streamed(self) -> bool:
        return self._query.get("mode") == "streamed"

    @property
    def table(self) -> str:
        return str(self._query.get("table"))

    @property
    def is_moving(self) -> bool:
        return self._moving is not None

    @property
    def keys(self) -> list[Key]:
        return self._replica.keys

    @property
    def rows(self) -> list[Row]:
        return self._replica.rows

    def cursor(self, key: Key) -> Cursor:
        return self._replica.cursor(key)

    def present(self) -> tuple[Delta, ...]:
        """Deltas that lead from anything to the present rows."""
        rows = zip(self.keys, self.rows, strict=True)
        if self.streamed:
            return _replacing([Match(key, row) for key, row in rows])
        return _replacing(
            [Enter(key, row, i, self.cursor(key)) for i, (key, row) in enumerate(rows)]
        )

    def subscribe(self, wire_id: str, *, resume: bool) -> Subscribe:
        """Ask for it, from where it is if that is to be resumed."""
        self.wire_id, self.view, self._waiting = wire_id, None, True
        self._parts, self._meanwhile = None, []
        query, since = self._query, self.position
        if self._moving is not None or not resume:
            query, since = self._moving or query, None
        return Subscribe(wire_id, live=query, since=since, verify=self._verify)

    def subscribed(self, message: Subscribed) -> None:
        self.view, self.key, self._waiting = message.view, message.key, not message.resumed

    def move(self, after: list[Any] | None) -> Reanchor:
        """Ask for the window behind another cursor. Until it comes, the old one is followed."""
        self._moving = {**self._query, "after": after}
        return Reanchor(self.wire_id, after)

    def stay(self) -> None:
        """The move was refused."""
        self._moving = None

    def receive(self, message: Snapshot | Reset | Deltas) -> Iterator[Batch]:
        """Fold a frame; the batch it completes, if any. Raises Diverged."""
        match message:
            case Deltas():
                yield from self._fold(message)
            case Reset():
                self._waiting, self._parts = True, []
                yield from self._collect(message, moved=message.reason == "window")
            case Snapshot() if self._waiting:
                yield from self._collect(message, moved=True)

    def _collect(self, message: Snapshot | Reset, *, moved: bool) -> Iterator[Batch]:
        self._parts = [*(self._parts or ()), *message.rows]
        moved = moved and self._moving is not None
        if moved:
            self._query, self._moving = self._moving or self._query, None
        if message.more:
            return
        deltas, self._parts = _replacing(self._parts), None
        before = (self.keys, self.rows) if self._whole and not moved else None
        self.position, self._waiting = None, False
        self._replica.apply(deltas, message.hash)
        self.position, self._whole = message.position, True
        # After a reconnect the result is often what it was; nobody needs to hear that.
        if before != (self.keys, self.rows):
            yield Batch(deltas, message.position)
        meanwhile, self._meanwhile = self._meanwhile, []
        for later in meanwhile:
            if not _covers(message.position, later.position):
                yield from self._fold(later)

    def _fold(self, message: Deltas) -> Iterator[Batch]:
        if self._waiting:
            # Between the parts of a result; before the first there is nothing to apply it to.
            if self._parts is not None:
                self._meanwhile.append(message)
                if len(self._meanwhile) > limits.CLIENT_BATCHES_MAX:
                    raise Diverged("too much changed while the result was being received")
            return
        self.position = None
        self._replica.apply(message.deltas, message.hash)
        self.position, self._diverged = message.position, 0
        yield Batch(message.deltas, message.position, message.at)

    def diverged(self) -> bool:
        """Forget the rows; whether it is worth another snapshot."""
        self._replica, self.position = Replica(), None
        self._whole, self._waiting = False, True
        self._diverged += 1
        return self._diverged < limits.CLIENT_DIVERGED_MAX


def _replacing(rows: list[Enter | Match] | list[Enter] | list[Match]) -> tuple[Delta, ...]:
    entering = tuple(row for row in rows if isinstance(row, Enter))
    matching = tuple(row for row in rows if isinstance(row, Match))
    return ResetDelta(entering), *matching


def _covers(later: str, earlier: str) -> bool:
    return Position.parse(later).covers(Position.parse(earlier))


# ------------------------------------------------------------------------ one change feed


class FeedState:
    """A change feed as the client knows it."""

    def __init__(self, query: ChangesQuery) -> None:
        self.wire_id = ""
        self.view: int | None = None
        self.position = query.since
        self._query = query
        self._begun = False
        self._delivered: dict[int, int] = {}

    @property
    def is_lost(self) -> bool:
        """It has begun at a place that it was never told: there is no way to go on from there."""
        return self._begun and self.position is None

    def subscribe(self, wire_id: str) -> Subscribe:
        self.wire_id, self.view = wire_id, None
        query = msgspec.structs.replace(self._query, since=self.position)
        return Subscribe(wire_id, changes=query)

    def subscribed(self, message: Subscribed) -> None:
        self.view, self._begun = message.view, True

    def receive(self, message: Changes) -> list[FeedTransaction]:
        """The transactions that were not delivered before."""
        known = None if self.position is None else Position.parse(self.position)
        missing = [t for t in message.transactions if known is None or not known.contains(t.xid)]
        fresh = [new for each in missing if (new := self._fresh(each))]
        before, later = self.position, Position.parse(message.position)
        # Another feed on the same view may be catching up with what this one has.
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
        """Go back to where the gap begins. Raises ResyncRequired if the log does not reach."""
        if message.reason == "resync" or message.since is None:
            raise ResyncRequired(
                "the log no longer reaches back to where this feed was", hint=_READ_AGAIN
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
        """Drop what the position contains: nobody will send that again."""
        delivered = self._delivered
        for xid in [xid for xid in delivered if position.contains(xid)]:
            del delivered[xid]
        while len(delivered) > limits.CLIENT_DELIVERED_MAX:
            del delivered[next(iter(delivered))]


def _seq(change: Any) -> int | None:
    """A change's number in the log, also out of a Debezium envelope."""
    match change:
        case {"seq": int(seq)} | {"source": {"seq": int(seq)}}:
            return seq
    return None


_READ_AGAIN = "Read the tables again, then follow from a position taken before."


# ------------------------------------------------------------------------ all of them

State: TypeAlias = LiveState | FeedState


class Ready(msgspec.Struct, frozen=True):
    """The subscription has begun, or goes on after a lost connection."""

    state: State


class Changed(msgspec.Struct, frozen=True):
    """The rows of a live query are others now."""

    state: LiveState
    batch: Batch


class Received(msgspec.Struct, frozen=True):
    """A feed brought transactions."""

    state: FeedState
    transactions: list[FeedTransaction]


class Failed(msgspec.Struct, frozen=True):
    """The subscription is over on the server. If the error is retryable, ask again later."""

    state: State
    error: HeadwaterError


class Doubted(msgspec.Struct, frozen=True):
    """The rows turned out not to be what they should be; they are being read anew."""

    state: LiveState
    error: Diverged


class Send(msgspec.Struct, frozen=True):
    """Tell the gateway this."""

    message: ClientMessage


Event: TypeAlias = Ready | Changed | Received | Doubted | Failed | Send


class Session:
    """Every subscription of one client, over all its connections."""

    def __init__(self) -> None:
        self.diverged = 0
        """How often a replica turned out not to be what it should be. Expected: never."""
        self._states: dict[State, None] = {}
        self._by_wire_id: dict[str, State] = {}
        self._number = 0

    def __iter__(self) -> Iterator[State]:
        return iter(list(self._states))

    def add(self, state: State) -> None:
        """Follow it from the next connection on; `subscribe` has it begin on this one."""
        self._states[state] = None

    def subscribe(self, state: State, *, resume: bool = True) -> Subscribe:
        """What to send to have it begin, or go on, under a new id."""
        self._by_wire_id.pop(state.wire_id, None)
        self._number += 1
        wire_id = str(self._number)
        self._by_wire_id[wire_id] = state
        if isinstance(state, LiveState):
            return state.subscribe(wire_id, resume=resume)
        return state.subscribe(wire_id)

    def remove(self, state: State) -> Unsubscribe | None:
        """Forget it; what to send, if the server may know of it."""
        self._states.pop(state, None)
        known = self._by_wire_id.pop(state.wire_id, None)
        return Unsubscribe(state.wire_id) if known is not None else None

    def connected(self) -> list[Event]:
        """What follows from a new connection: everything is asked for from where it is."""
        self._by_wire_id = {}
        resumed, events = set[int](), list[Event]()
        for state in self:
            if isinstance(state, FeedState) and state.is_lost:
                events.append(Failed(state, _lost_feed()))
                continue
            # Frames of a view are for all who are on it: were two to resume, each of them would
            # get what the other missed a second time.
            first = state.view is None or state.view not in resumed
            resumed |= {state.view} if state.view is not None else set()
            events.append(Send(self.subscribe(state, resume=first)))
        return events

    def receive(self, message: ServerMessage) -> list[Event]:
        """What a message means to the subscriptions, in order."""
        match message:
            case Subscribed():
                return self._subscribed(message)
            case Snapshot() | Reset() | Deltas():
                return [e for state in self._on(message.view) for e in self._fold(state, message)]
            case Changes():
                return [e for state in self._on(message.view) for e in _deliver(state, message)]
            case Gap():
                return [e for state in self._on(message.view) for e in self._gap(state, message)]
            case Error(id=str(wire_id)) if wire_id in self._by_wire_id:
                state = self._by_wire_id.pop(wire_id)
                state.view = None
                return [Failed(state, error_of(message))]
        return []

    def _on(self, view: int) -> list[State]:
        return [state for state in self._by_wire_id.values() if state.view == view]

    def _subscribed(self, message: Subscribed) -> list[Event]:
        state = self._by_wire_id.get(message.id)
        if state is None:
            return []
        state.subscribed(message)
        return [Ready(state)]

    def _fold(self, state: State, message: Snapshot | Reset | Deltas) -> Iterator[Event]:
        if not isinstance(state, LiveState):
            return
        try:
            for batch in state.receive(message):
                yield Changed(state, batch)
        except Diverged as error:
            self.diverged += 1
            if state.diverged():
                yield Doubted(state, error)
                yield from self._again(state)
            else:
                error.retryable = False
                yield Failed(state, error)

    def _gap(self, state: State, message: Gap) -> Iterator[Event]:
        if not isinstance(state, FeedState):
            return
        try:
            state.gap(message)
        except ResyncRequired as error:
            yield Failed(state, error)
        else:
            yield from self._again(state)

    def _again(self, state: State) -> Iterator[Event]:
        yield Send(Unsubscribe(state.wire_id))
        yield Send(self.subscribe(state))


def _deliver(state: State, message: Changes) -> Iterator[Event]:
    if isinstance(state, FeedState) and (transactions := state.receive(message)):
        yield Received(state, transactions)


def _lost_feed() -> ResyncRequired:
    return ResyncRequired(
        "the connection was lost before the feed knew its first position", hint=_READ_AGAIN
    )
