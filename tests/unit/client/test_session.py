"""A session applies the messages of a gateway, and requests the rest after a lost connection."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from headwater import limits
from headwater.client.session import (
    Changed,
    ClientSession,
    Event,
    Ready,
    RowsDiverged,
    Send,
    State,
    SubscriptionFailed,
    TransactionsReceived,
)
from headwater.client.state.feed import FeedState
from headwater.client.state.replica import result_hash
from headwater.client.state.rows import LiveState, RowsBatch, RowsState
from headwater.errors import Diverged, Forbidden, ResyncRequired
from headwater.model import Enter, Leave, Match, Position, Reset, Unmatch, Update
from headwater.protocol import (
    Changes,
    ChangesQuery,
    Deltas,
    Error,
    Gap,
    Reanchor,
    ResetMessage,
    ServerMessage,
    Snapshot,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Unsubscribed,
    WireChange,
    WireTransaction,
    read_server,
)

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
ORDERS = {"table": "orders"}


def position(xmin: int) -> str:
    return f"ab-{xmin}:{xmin}:"


def enter(id: int, index: int) -> Enter:
    return Enter((id,), {"id": id}, index, (id,))


def snapshot(view: int, at: int, *ids: int, **fields: Any) -> Snapshot:
    rows = tuple(enter(id, i) for i, id in enumerate(ids))
    return Snapshot(view, position(at), rows, **fields)


def deltas(view: int, at: int, *steps: Any, hash: int | None = None) -> Deltas:
    return Deltas(view, position(at), AT, steps, hash)


def transaction(xid: int, *seqs: int, complete: bool = True) -> WireTransaction:
    changes = tuple({"seq": seq, "table": "orders", "op": "insert"} for seq in seqs)
    return WireTransaction(xid, AT, changes, complete)


def changes(view: int, at: int, *transactions: WireTransaction) -> Changes:
    return Changes(view, position(at), transactions)


class SessionDriver:
    """A client session that receives messages over the wire's own encoding."""

    def __init__(self, *states: State) -> None:
        self.session = ClientSession()
        for state in states:
            self.session.add(state)
        self.subscribes = self.connect()

    def connect(self) -> list[Subscribe]:
        events = self.session.connected()
        return [e.message for e in events if isinstance(e, Send)]  # type: ignore[misc]

    def receive(self, *messages: ServerMessage) -> list[Event]:
        decoded = [read_server(msgspec.json.encode(message)) for message in messages]
        return [event for message in decoded for event in self.session.receive(message)]


def ids(state: RowsState) -> list[int]:
    return [row["id"] for row in state.rows]


def test_a_snapshot_and_the_deltas_after_it() -> None:
    orders = LiveState(ORDERS, verify=True)
    driver = SessionDriver(orders)
    assert driver.subscribes == [Subscribe("1", live=ORDERS, verify=True)]
    assert driver.receive(Subscribed("1", 5, key=("id",))) == [Ready(orders)]
    assert driver.receive(snapshot(5, 10, 1, 2)) == [
        Changed(orders, RowsBatch((Reset((enter(1, 0), enter(2, 1))),), position(10)))
    ]
    step = Leave((1,), 0)
    assert driver.receive(deltas(5, 11, step)) == [
        Changed(orders, RowsBatch((step,), position(11), AT))
    ]
    assert (ids(orders), orders.keys, orders.key) == ([2], [(2,)], ("id",))
    assert orders.cursor((2,)) == (2,)


def test_frames_are_for_the_subscriptions_of_their_view_only() -> None:
    first, second, other = LiveState(ORDERS), LiveState(ORDERS), LiveState(ORDERS)
    driver = SessionDriver(first, second, other)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 1), Subscribed("2", 5))
    # The snapshot is for the one that waits for it.
    assert driver.receive(snapshot(5, 10, 1)) == [
        Changed(second, RowsBatch((Reset((enter(1, 0),)),), position(10)))
    ]
    driver.receive(Subscribed("3", 6), snapshot(6, 10))
    driver.receive(deltas(5, 11, enter(2, 1)), deltas(9, 11, enter(3, 0)))
    assert (ids(first), ids(second), ids(other)) == ([1, 2], [1, 2], [])


def test_a_reconnect_looks_at_every_position_once(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [LiveState(ORDERS) for _ in range(20)]
    driver = SessionDriver(*states)
    for number in range(1, 21):
        driver.receive(Subscribed(str(number), number), snapshot(number, 100 + number, 1))
    parsed, parse = list[str](), Position.parse

    def counting(text: str) -> Position:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(Position, "parse", counting)
    subscribes = driver.connect()
    assert [each.after for each in subscribes] == [*[position(120)] * 19, None]
    assert len(parsed) == 20


def test_a_result_in_parts() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5))
    assert driver.receive(Snapshot(5, position(10), (enter(1, 0),), more=True)) == []
    assert (ids(orders), orders.position) == ([], None)
    # A change between the parts is later than the result, or already in it.
    assert driver.receive(deltas(5, 9, enter(8, 0)), deltas(5, 12, enter(3, 2))) == []
    whole = result_hash([((1,), {"id": 1}), ((2,), {"id": 2})])
    events = driver.receive(Snapshot(5, position(10), (enter(2, 1),), hash=whole))
    assert [type(event) for event in events] == [Changed, Changed]
    assert (ids(orders), orders.position) == ([1, 2, 3], position(12))


def test_a_reset_in_parts_is_not_seen_until_it_is_whole() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 1))
    assert (
        driver.receive(ResetMessage(5, position(11), "overflow", (enter(7, 0),), more=True)) == []
    )
    assert (ids(orders), orders.position) == ([1], position(10))
    driver.receive(Snapshot(5, position(11), (enter(8, 1),)))
    assert ids(orders) == [7, 8]


def test_a_streamed_query() -> None:
    orders = LiveState({**ORDERS, "mode": "streamed"})
    driver = SessionDriver(orders)
    rows = (Match((2,), {"id": 2}), Match((1,), {"id": 1}))
    driver.receive(Subscribed("1", 5), Snapshot(5, position(10), rows))
    driver.receive(deltas(5, 11, Match((3,), {"id": 3}), Unmatch((1,)), Update((2,), {"id": 2})))
    assert ids(orders) == [2, 3]
    reset, *matches = orders.present()
    assert (reset, matches) == (Reset(), [Match((2,), {"id": 2}), Match((3,), {"id": 3})])


def test_the_present_rows_as_deltas() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 4, 2))
    assert orders.present() == (Reset((enter(4, 0), enter(2, 1))),)


# ------------------------------------------------------------------------ a lost connection


def test_a_live_query_resumes() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 1), deltas(5, 11, enter(2, 1)))
    assert driver.connect() == [Subscribe("2", live=ORDERS, since=position(11))]
    # The number of the old view may belong to another view now.
    assert driver.receive(deltas(5, 12, enter(9, 0))) == []
    assert driver.receive(Subscribed("2", 77, resumed=True), deltas(77, 12, enter(3, 2)))
    assert ids(orders) == [1, 2, 3]


def test_a_live_query_that_cannot_resume_is_replaced() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 1))
    driver.connect()
    assert driver.receive(Subscribed("2", 5), snapshot(5, 12, 1)) == [Ready(orders)]
    assert orders.position == position(12)
    driver.connect()
    assert driver.receive(Subscribed("3", 5), snapshot(5, 14, 7))[1:] == [
        Changed(orders, RowsBatch((Reset((enter(7, 0),)),), position(14)))
    ]


def test_an_unfinished_result_is_not_resumed_from() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), Snapshot(5, position(10), (enter(1, 0),), more=True))
    assert driver.connect() == [Subscribe("2", live=ORDERS)]
    driver.receive(Subscribed("2", 5), snapshot(5, 12, 3))
    assert ids(orders) == [3]


def test_of_those_on_one_view_only_the_first_resumes() -> None:
    first, second = LiveState(ORDERS), LiveState(ORDERS)
    driver = SessionDriver(first, second)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 1), Subscribed("2", 5), snapshot(5, 10, 1))
    assert [subscribe.since for subscribe in driver.connect()] == [position(10), None]
    driver.receive(Subscribed("3", 5, resumed=True), deltas(5, 11, enter(2, 1)))
    driver.receive(Subscribed("4", 5), snapshot(5, 11, 1, 2))
    assert (ids(first), ids(second)) == ([1, 2], [1, 2])


# ------------------------------------------------------------------------ divergence


@pytest.mark.parametrize("wrong", [deltas(5, 11, Leave((9,), 0)), deltas(5, 11, hash=1)])
def test_rows_that_diverge_are_read_again(wrong: Deltas) -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 1))
    doubted, *sent = driver.receive(wrong)
    assert isinstance(doubted, RowsDiverged)
    again = Subscribe("2", live=ORDERS, after=position(10))
    assert sent == [Send(Unsubscribe("1")), Send(again)]
    assert driver.session.diverged == 1
    assert driver.receive(deltas(5, 12, enter(2, 1)), Unsubscribed("1")) == []
    driver.receive(Subscribed("2", 5), snapshot(5, 12, 1, 2))
    assert ids(orders) == [1, 2]


def test_rows_that_diverge_repeatedly_fail_the_subscription() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    for attempt in range(1, limits.CLIENT_DIVERGED_MAX + 1):
        driver.receive(Subscribed(str(attempt), 5), snapshot(5, 10, 1))
        events = driver.receive(deltas(5, 11, hash=1))
    (failed,) = events
    assert isinstance(failed, SubscriptionFailed)
    assert isinstance(failed.error, Diverged)
    assert not failed.error.retryable
    assert driver.session.diverged == limits.CLIENT_DIVERGED_MAX


# ------------------------------------------------------------------------ sliding a window


def test_a_window_slides() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 1))
    assert orders.move([1]) == Reanchor("1", [1])
    driver.receive(deltas(5, 11, enter(0, 0)))
    assert (ids(orders), orders.is_moving) == ([0, 1], True)
    driver.receive(Subscribed("1", 6), ResetMessage(6, position(12), "window", (enter(2, 0),)))
    assert (ids(orders), orders.is_moving) == ([2], False)
    assert driver.connect() == [
        Subscribe("2", live={**ORDERS, "after": [1]}, since=position(12)),
    ]


def test_a_slide_that_the_connection_did_not_survive() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 1))
    orders.move([1])
    # The rows are still those of the old window: there is nothing to resume.
    moved = {**ORDERS, "after": [1]}
    assert driver.connect() == [Subscribe("2", live=moved, after=position(10))]
    driver.receive(Subscribed("2", 6), snapshot(6, 12, 2))
    assert (ids(orders), orders.is_moving) == ([2], False)


def test_a_slide_that_was_refused() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 1))
    orders.move(["x"])
    orders.stay()
    driver.receive(deltas(5, 11, enter(0, 0)))
    assert driver.connect() == [Subscribe("2", live=ORDERS, since=position(11))]


# ------------------------------------------------------------------------ the end of one


def test_an_error_ends_a_subscription() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    (failed,) = driver.receive(Error("forbidden", "no", id="1"))
    assert isinstance(failed, SubscriptionFailed)
    assert isinstance(failed.error, Forbidden)
    assert driver.receive(Error("forbidden", "no", id="1")) == []
    assert driver.session.subscribe(orders) == Subscribe("2", live=ORDERS)


def test_a_removed_subscription_gets_no_events() -> None:
    orders = LiveState(ORDERS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5))
    assert driver.session.remove(orders) == Unsubscribe("1")
    assert driver.session.remove(orders) is None
    assert driver.receive(snapshot(5, 10, 1), Unsubscribed("1"), Error("x", "y", id="1")) == []
    assert driver.connect() == []


# ------------------------------------------------------------------------ feeds


def xids(events: list[Event]) -> list[tuple[int, list[int]]]:
    return [
        (each.xid, [change.seq for change in each.changes])
        for event in events
        if isinstance(event, TransactionsReceived)
        for each in event.transactions
    ]


def test_a_feed() -> None:
    feed = FeedState(ChangesQuery(("orders",)))
    driver = SessionDriver(feed)
    assert driver.subscribes == [Subscribe("1", changes=ChangesQuery(("orders",)))]
    assert driver.receive(Subscribed("1", 5), changes(5, 10)) == [Ready(feed)]
    (received,) = driver.receive(changes(5, 12, transaction(10, 1, 2), transaction(11, 3)))
    assert isinstance(received, TransactionsReceived)
    first, second = received.transactions
    assert (first.position, second.position) == (position(10), position(12))
    assert first.changes == tuple(WireChange(seq, "orders", "insert") for seq in (1, 2))


def test_a_feed_resumes_and_brings_nothing_twice() -> None:
    feed = FeedState(ChangesQuery(("orders",)))
    driver = SessionDriver(feed)
    # The position is behind what was delivered: that is not yet on disk.
    driver.receive(Subscribed("1", 5), changes(5, 10, transaction(10, 1), transaction(11, 2)))
    assert driver.connect() == [
        Subscribe("2", changes=ChangesQuery(("orders",), since=position(10))),
    ]
    events = driver.receive(
        Subscribed("2", 6),
        changes(6, 11, transaction(10, 1), transaction(11, 2), transaction(12, 3)),
        changes(6, 13, transaction(12, 3), transaction(13, 4)),
    )
    assert xids(events) == [(12, [3]), (13, [4])]


def test_a_feed_that_catches_up_does_not_turn_back_another() -> None:
    first, second = FeedState(ChangesQuery()), FeedState(ChangesQuery(since=position(10)))
    driver = SessionDriver(first, second)
    driver.receive(Subscribed("1", 5), changes(5, 13, transaction(12, 3)), Subscribed("2", 5))
    events = driver.receive(changes(5, 11, transaction(10, 1)), changes(5, 13, transaction(12, 3)))
    assert xids(events) == [(10, [1]), (12, [3])]
    assert all(
        isinstance(event, TransactionsReceived) and event.state is second for event in events
    )
    assert (first.position, second.position) == (position(13), position(13))


def test_a_transaction_in_parts_begins_again() -> None:
    feed = FeedState(ChangesQuery())
    driver = SessionDriver(feed)
    driver.receive(Subscribed("1", 5), changes(5, 10))
    part = transaction(10, 1, 2, complete=False)
    assert xids(driver.receive(changes(5, 10, part))) == [(10, [1, 2])]
    driver.connect()
    longer = transaction(10, 1, 2, 3, complete=False)
    events = driver.receive(Subscribed("2", 5), changes(5, 10, longer))
    events += driver.receive(changes(5, 11, transaction(10, 4)))
    assert xids(events) == [(10, [3]), (10, [4])]


def test_what_a_feed_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.client.state.feed._CLIENT_DELIVERED_MAX", 2)
    feed = FeedState(ChangesQuery())
    driver = SessionDriver(feed)
    three = (transaction(10, 1), transaction(11, 2), transaction(12, 3))
    driver.receive(Subscribed("1", 5), changes(5, 10, *three))
    driver.connect()
    assert xids(driver.receive(Subscribed("2", 5), changes(5, 10, *three))) == [(10, [1])]


def test_debezium_envelopes_stay_as_they_are() -> None:
    feed = FeedState(ChangesQuery(format="debezium"))
    driver = SessionDriver(feed)
    envelope = {"op": "c", "source": {"seq": 7}}
    message = Changes(5, position(10), (WireTransaction(10, AT, (envelope,)),))
    (received,) = driver.receive(Subscribed("1", 5), message)[1:]
    assert isinstance(received, TransactionsReceived)
    assert received.transactions[0].changes == (envelope,)
    driver.connect()
    assert driver.receive(Subscribed("2", 5), message)[1:] == []


def test_a_gap_is_filled() -> None:
    feed = FeedState(ChangesQuery())
    driver = SessionDriver(feed)
    driver.receive(Subscribed("1", 5), changes(5, 11, transaction(10, 1)))
    assert driver.receive(Gap(5, position(20), position(11), "overflow")) == [
        Send(Unsubscribe("1")),
        Send(Subscribe("2", changes=ChangesQuery(since=position(11)))),
    ]


def test_a_gap_that_cannot_be_filled_fails_the_feed() -> None:
    feed = FeedState(ChangesQuery())
    driver = SessionDriver(feed)
    driver.receive(Subscribed("1", 5))
    (failed,) = driver.receive(Gap(5, position(20), None, "resync"))
    assert isinstance(failed, SubscriptionFailed)
    assert isinstance(failed.error, ResyncRequired)


def test_a_feed_is_ready_when_it_has_a_position() -> None:
    """If the connection is lost before that, the feed begins at the next connection."""
    feed = FeedState(ChangesQuery())
    driver = SessionDriver(feed)
    assert driver.receive(Subscribed("1", 5)) == []
    assert driver.connect() == [Subscribe("2", changes=ChangesQuery())]
    assert driver.receive(Subscribed("2", 6)) == []
    assert driver.receive(changes(6, 10)) == [Ready(feed)]
