"""The newest position that a client has seen, over all its subscriptions: it requests and accepts
nothing older."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest

from headwater.client.session import (
    Changed,
    ClientSession,
    Ready,
    Replaced,
    Send,
    SubscriptionFailed,
)
from headwater.client.state.feed import FeedState
from headwater.client.state.query import QueryState
from headwater.client.state.rows import LiveState
from headwater.client.state.topic import TopicState
from headwater.errors import Behind
from headwater.model import Enter, Position
from headwater.protocol import (
    Changes,
    ChangesQuery,
    QueryCall,
    ResetMessage,
    Result,
    Snapshot,
    Subscribe,
    Subscribed,
    TopicMessage,
    Unsubscribe,
)

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
ORDERS = {"table": "orders"}
CALL = QueryCall("count")


def position(xmax: int, *running: int, log: str = "ab") -> str:
    return str(Position(log, min(running, default=xmax), xmax, running))


def snapshot(view: int, at: str, *ids: int) -> Snapshot:
    return Snapshot(view, at, tuple(Enter((id,), {"id": id}, i, (id,)) for i, id in enumerate(ids)))


def begun(session: ClientSession, state: Any, view: int, first: Any) -> Any:
    session.add(state)
    wire_id = session.subscribe(state).id
    session.receive(Subscribed(wire_id, view))
    session.receive(first)
    return state


@pytest.fixture
def session() -> ClientSession:
    return ClientSession()


def test_every_subscription_names_the_newest_position_of_the_client(session: ClientSession) -> None:
    begun(session, LiveState(ORDERS), 5, snapshot(5, position(10), 1))
    count = begun(session, QueryState(CALL), 6, Result(6, position(12), 3))
    begun(session, TopicState("chat"), 7, TopicMessage(7, position(9), AT, ()))
    begun(session, FeedState(ChangesQuery()), 8, Changes(8, position(11), ()))
    session.saw(position(14, 13))
    session.remove(count)
    sent = [event.message for event in session.connected() if isinstance(event, Send)]
    after = position(14, 13)
    assert sent == [
        Subscribe("5", live=ORDERS, since=position(10), after=after),
        Subscribe("6", topic="chat", since=position(9), after=after),
        Subscribe("7", changes=ChangesQuery(since=position(11)), after=after),
    ]
    assert session.subscribe(QueryState(CALL)).after == after


@pytest.mark.parametrize("older", [position(9), position(12, 9)])
def test_an_older_snapshot_is_not_taken(session: ClientSession, older: str) -> None:
    state = begun(session, LiveState(ORDERS), 5, snapshot(5, position(10), 1))
    session.connected()
    assert session.receive(Subscribed("2", 6)) == [Ready(state)]
    unsubscribe, failed = session.receive(snapshot(6, older, 1, 2))
    assert unsubscribe == Send(Unsubscribe("2"))
    assert isinstance(failed, SubscriptionFailed)
    assert isinstance(failed.error, Behind)
    assert failed.error.retryable
    assert (state.keys, session.is_requested(state)) == ([(1,)], False)
    again = session.subscribe(state)
    assert again.since == position(10)
    session.receive(Subscribed(again.id, 6))
    (changed,) = session.receive(snapshot(6, position(10), 1, 2))
    assert isinstance(changed, Changed)


def test_an_older_reset_or_result_is_not_taken(session: ClientSession) -> None:
    live = begun(session, LiveState(ORDERS), 5, snapshot(5, position(10), 1))
    query = begun(session, QueryState(CALL), 6, Result(6, position(12), 3))
    assert len(session.receive(ResetMessage(5, position(9), "resync"))) == 2
    assert len(session.receive(Result(6, position(11), 2))) == 2
    assert (live.keys, query.value) == ([(1,)], 3)


def test_positions_that_the_database_has_lost_are_forgotten(session: ClientSession) -> None:
    """Its positions count for nothing any more, those of other subscriptions included."""
    live = begun(session, LiveState(ORDERS), 5, snapshot(5, position(10), 1))
    query = begun(session, QueryState(CALL), 6, Result(6, position(12), 3))
    session.saw(position(20))
    session.connected()
    session.receive(Subscribed("3", 5, lost=True))
    session.receive(Subscribed("4", 6))
    assert session.receive(snapshot(5, position(7), 4))
    assert session.receive(Result(6, position(7), 1)) == [Replaced(query)]
    assert (live.keys, query.value, session.seen) == ([(4,)], 1, position(7))


def test_a_restored_database_is_accepted(session: ClientSession) -> None:
    state = begun(session, LiveState(ORDERS), 5, snapshot(5, position(10), 1))
    session.connected()
    session.receive(Subscribed("2", 6))
    session.receive(snapshot(6, position(3, log="cd"), 2))
    assert state.keys == [(2,)]


def test_joined_positions_cover_exactly_what_either_contains() -> None:
    chance = random.Random(5)
    for _ in range(2_000):
        one, other = (_random_position(chance) for _ in range(2))
        both = one.joined(other)
        assert both == Position.parse(str(both))
        assert both.covers(one)
        assert both.covers(other)
        for xid in range(30):
            assert both.contains(xid) == (one.contains(xid) or other.contains(xid)), (one, other)


def _random_position(chance: random.Random) -> Position:
    xmax = chance.randint(5, 25)
    xip = tuple(sorted(chance.sample(range(2, xmax), chance.randint(0, 3))))
    return Position("ab", min(xip, default=xmax), xmax, xip)
