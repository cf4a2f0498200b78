"""All subscriptions of a client: takes messages of a gateway, and returns events.

Pure. The state of each subscription is in `state.rows`, `state.query`, `state.feed` and so on; this
module finds the subscription of a message, and decides what to request after a lost connection. The
frames of a view are for every subscription on that view. After a wrong result the client counts it
and subscribes again. Each request for a subscription has a new id on the wire, so that late
messages with the old id are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from headwater.client.errors import error_of
from headwater.client.state.channel import ChannelMessage, ChannelState
from headwater.client.state.feed import FeedState, FeedTransaction
from headwater.client.state.positions import is_older, joined
from headwater.client.state.query import QueryState
from headwater.client.state.rows import LiveState, QueryRowsState, RowsBatch, RowsState
from headwater.client.state.topic import Ops, TopicState
from headwater.errors import Behind, Diverged, HeadwaterError, ResyncRequired
from headwater.protocol import (
    Changes,
    ClientMessage,
    Deltas,
    Error,
    Gap,
    Message,
    Poke,
    Presence,
    ResetMessage,
    Result,
    ServerMessage,
    Snapshot,
    Subscribe,
    Subscribed,
    TopicMessage,
    Unsubscribe,
)
from headwater.protocol import Failed as FailedMessage

State: TypeAlias = LiveState | QueryState | QueryRowsState | FeedState | TopicState | ChannelState


class Ready(msgspec.Struct, frozen=True):
    """The subscription has begun, or was resumed after a lost connection."""

    state: State


class Changed(msgspec.Struct, frozen=True):
    """The rows of a live query, or of a reactive one, have changed."""

    state: LiveState | QueryRowsState
    batch: RowsBatch


class Replaced(msgspec.Struct, frozen=True):
    """The result of a reactive query has changed."""

    state: QueryState


class Stale(msgspec.Struct, frozen=True):
    """The result of a reactive query may be out of date, until the next."""

    state: QueryState | QueryRowsState
    error: HeadwaterError


class TransactionsReceived(msgspec.Struct, frozen=True):
    """A feed brought transactions."""

    state: FeedState
    transactions: list[FeedTransaction]


class TopicUpdated(msgspec.Struct, frozen=True):
    """A topic sent something."""

    state: TopicState
    ops: Ops


class MessageReceived(msgspec.Struct, frozen=True):
    """Something was published on a channel."""

    state: ChannelState
    message: ChannelMessage


class PresenceChanged(msgspec.Struct, frozen=True):
    """The members of a channel have changed."""

    state: ChannelState


class SubscriptionFailed(msgspec.Struct, frozen=True):
    """The subscription has ended on the server. If the error is retryable, it can be requested
    again later."""

    state: State
    error: HeadwaterError


class RowsDiverged(msgspec.Struct, frozen=True):
    """The rows were wrong; they are requested again."""

    state: LiveState | QueryRowsState
    error: Diverged


class Send(msgspec.Struct, frozen=True):
    """Send this message to the gateway."""

    message: ClientMessage


Event: TypeAlias = (
    Ready
    | Changed
    | Replaced
    | Stale
    | TransactionsReceived
    | TopicUpdated
    | MessageReceived
    | PresenceChanged
    | RowsDiverged
    | SubscriptionFailed
    | Send
)


class ClientSession:
    """Every subscription of one client, over all its connections."""

    def __init__(self) -> None:
        self.diverged = 0
        """How often the rows of a replica were wrong. Expected: 0."""
        self._states: dict[State, None] = {}
        self._by_wire_id: dict[str, State] = {}
        self._number = 0
        self._saw: str | None = None

    def __iter__(self) -> Iterator[State]:
        return iter(list(self._states))

    @property
    def subscribe_count(self) -> int:
        """How many requests for subscriptions were made so far."""
        return self._number

    def saw(self, position: str) -> None:
        """The program has seen this position in the answer to a call."""
        self._saw = joined((self._saw, position))

    @property
    def seen(self) -> str | None:
        """The least position that covers everything that the program has seen."""
        return joined((self._saw, *map(_shown, self._states)))

    def _forget_positions(self) -> None:
        """Forget all positions: the database no longer has them."""
        self._saw = None
        for state in self._states:
            if isinstance(state, RowsState | QueryState):
                state.shown = None

    def add(self, state: State) -> None:
        """Add a subscription. It begins with the next connection, or with `subscribe` on this
        one."""
        self._states[state] = None

    def subscribe(self, state: State, *, resume: bool = True) -> Subscribe:
        """The message that begins or resumes it, with a new id."""
        return self._subscribe(state, self.seen, resume=resume)

    def _subscribe(self, state: State, seen: str | None, *, resume: bool) -> Subscribe:
        self._by_wire_id.pop(state.wire_id, None)
        self._number += 1
        wire_id = str(self._number)
        self._by_wire_id[wire_id] = state
        if isinstance(state, ChannelState):
            return state.subscribe(wire_id)
        if isinstance(state, FeedState | TopicState):
            message = state.subscribe(wire_id)
        else:
            message = state.subscribe(wire_id, resume=resume)
        since = message.since if message.changes is None else message.changes.since
        # The position that it resumes from is implied.
        return message if seen == since else msgspec.structs.replace(message, after=seen)

    def remove(self, state: State) -> Unsubscribe | None:
        """Remove a subscription. Returns the message to send, if the server may have it."""
        self._states.pop(state, None)
        if (shown := _shown(state)) is not None:
            self.saw(shown)
        return self.pause(state)

    def pause(self, state: State) -> Unsubscribe | None:
        """Pause a subscription until it is requested again. Returns the message to send, as
        `remove` does."""
        known = self._by_wire_id.pop(state.wire_id, None)
        return Unsubscribe(state.wire_id) if known is not None else None

    def is_requested(self, state: State) -> bool:
        """Whether it was requested on this connection."""
        return state.wire_id in self._by_wire_id

    def is_due(self, state: State) -> bool:
        """Whether it was requested and has not begun, or was not resumed yet."""
        return self.is_requested(state) and state.is_due

    def connected(self) -> list[Event]:
        """The requests on a new connection: every subscription from its position."""
        self._by_wire_id = {}
        resumed, events = set[int](), list[Event]()
        seen = self.seen  # computed once: it reads every subscription
        for state in self:
            # Frames of a view are for all its subscriptions: if two resumed, each of them would
            # also get what the other missed.
            first = state.view is None or state.view not in resumed
            resumed |= {state.view} if state.view is not None else set()
            events.append(Send(self._subscribe(state, seen, resume=first)))
        return events

    def receive(self, message: ServerMessage) -> list[Event]:
        """The events that follow from a message, in order."""
        match message:
            case Subscribed():
                return self._subscribed(message)
            case Snapshot() | ResetMessage() | Deltas():
                return [e for state in self._on(message.view) for e in self._fold(state, message)]
            case Result():
                return [
                    e for state in self._on(message.view) for e in self._replace(state, message)
                ]
            case FailedMessage():
                return [e for state in self._on(message.view) for e in _mark_stale(state, message)]
            case Changes():
                return [e for state in self._on(message.view) for e in _deliver(state, message)]
            case TopicMessage() | Poke():
                return [
                    e for state in self._on(message.view) for e in _update_topic(state, message)
                ]
            case Message():
                return [
                    e for state in self._on(message.view) for e in _receive_message(state, message)
                ]
            case Presence():
                return [
                    e for state in self._on(message.view) for e in _update_presence(state, message)
                ]
            case Gap():
                return [e for state in self._on(message.view) for e in self._gap(state, message)]
            case Error(id=str(wire_id)) if wire_id in self._by_wire_id:
                state = self._by_wire_id.pop(wire_id)
                state.view = None
                return [SubscriptionFailed(state, error_of(message))]
        return []

    def _on(self, view: int) -> list[State]:
        return [state for state in self._by_wire_id.values() if state.view == view]

    def _subscribed(self, message: Subscribed) -> list[Event]:
        state = self._by_wire_id.get(message.id)
        if state is None:
            return []
        if message.lost:
            self._forget_positions()
        if isinstance(state, TopicState):
            ops = state.subscribed(message)
            return [Ready(state)] if ops is None else [Ready(state), TopicUpdated(state, ops)]
        state.subscribed(message)
        if isinstance(state, FeedState) and state.is_due:
            return []
        return [Ready(state)]

    def _fold(self, state: State, message: Snapshot | ResetMessage | Deltas) -> Iterator[Event]:
        if not isinstance(state, RowsState):
            return
        if not isinstance(message, Deltas) and is_older(message.position, state.shown):
            yield from self._refuse(state)
            return
        try:
            for batch in state.receive(message):
                yield Changed(state, batch)
        except Diverged as error:
            self.diverged += 1
            if state.diverged():
                yield RowsDiverged(state, error)
                yield from self._again(state)
            else:
                error.retryable = False
                yield SubscriptionFailed(state, error)

    def _replace(self, state: State, message: Result) -> Iterator[Event]:
        if not isinstance(state, QueryState):
            return
        if is_older(message.position, state.shown):
            yield from self._refuse(state)
        elif state.receive(message):
            yield Replaced(state)

    def _refuse(self, state: RowsState | QueryState) -> Iterator[Event]:
        """The result is older than what the program has seen. A gateway should never send such a
        result, because the client sends what it has seen; if it does, request it again later."""
        assert isinstance(state, LiveState | QueryRowsState | QueryState)
        if message := self.pause(state):
            yield Send(message)
        state.view = None
        text = f"{state.name}: the gateway sent an older state than it had sent before"
        yield SubscriptionFailed(state, Behind(text, hint="It is requested again."))

    def _gap(self, state: State, message: Gap) -> Iterator[Event]:
        if isinstance(state, TopicState):
            yield from _update_topic(state, message)
        if not isinstance(state, FeedState):
            return
        try:
            state.gap(message)
        except ResyncRequired as error:
            yield SubscriptionFailed(state, error)
        else:
            yield from self._again(state)

    def _again(self, state: State) -> Iterator[Event]:
        yield Send(Unsubscribe(state.wire_id))
        yield Send(self.subscribe(state))


def _shown(state: State) -> str | None:
    """The position that the program has seen of a subscription."""
    match state:
        case RowsState() | QueryState():
            return state.shown
        case FeedState() | TopicState():
            return state.position
    return None


def _mark_stale(state: State, message: FailedMessage) -> Iterator[Event]:
    if isinstance(state, QueryState | QueryRowsState):
        error = Error(message.code, message.message, message.hint, message.retryable, state.wire_id)
        state.error = error_of(error)
        yield Stale(state, state.error)


def _deliver(state: State, message: Changes) -> Iterator[Event]:
    if not isinstance(state, FeedState):
        return
    was_due = state.is_due
    transactions = state.receive(message)
    if was_due:
        yield Ready(state)
    if transactions:
        yield TransactionsReceived(state, transactions)


def _update_topic(state: State, message: TopicMessage | Poke | Gap) -> Iterator[Event]:
    if isinstance(state, TopicState) and (ops := state.receive(message)) is not None:
        yield TopicUpdated(state, ops)


def _receive_message(state: State, message: Message) -> Iterator[Event]:
    if isinstance(state, ChannelState) and (received := state.receive(message)):
        yield MessageReceived(state, received)


def _update_presence(state: State, message: Presence) -> Iterator[Event]:
    if isinstance(state, ChannelState):
        state.gather(message)
        yield PresenceChanged(state)
