"""Reactive queries as a client follows them: whole results, or rows by their deltas."""

from __future__ import annotations

import pytest

from headwater.client.session import (
    Changed,
    Ready,
    Replaced,
    RowsDiverged,
    Send,
    Stale,
    SubscriptionFailed,
)
from headwater.client.state.query import QueryState
from headwater.client.state.rows import QueryRowsState, RowsBatch
from headwater.errors import FunctionFailed, Refused, TimedOut
from headwater.model import Enter, Leave, Reset
from headwater.protocol import (
    Error,
    QueryCall,
    ResetMessage,
    Result,
    Subscribe,
    Subscribed,
    Unsubscribe,
)
from headwater.protocol import Failed as FailedMessage
from tests.unit.client.test_session import AT, TopicUpdated, deltas, enter, ids, position, snapshot

CALL = QueryCall("open_orders", {"region": 7})
ROWS = QueryCall("open_orders", {"region": 7}, delta=True)


def failed(view: int, code: str = "timed_out", retryable: bool = True) -> FailedMessage:
    return FailedMessage(view, position(11), code, "no", "Wait.", retryable)


def test_a_result_replaces_the_one_before() -> None:
    orders = QueryState(CALL)
    told = TopicUpdated(orders)
    assert told.subscribe_count == [Subscribe("1", query=CALL)]
    assert told.tell(Subscribed("1", 5)) == [Ready(orders)]
    assert told.session.is_due(orders)
    assert told.tell(Result(5, position(10), [1])) == [Replaced(orders)]
    assert not told.session.is_due(orders)
    assert told.tell(Result(5, position(11), [1, 2]), Result(6, position(12), [3])) == [
        Replaced(orders)
    ]
    assert (orders.value, orders.position, orders.error) == ([1, 2], position(11), None)


def test_a_first_result_of_nothing_is_one() -> None:
    orders = QueryState(CALL)
    told = TopicUpdated(orders)
    assert told.tell(Subscribed("1", 5), Result(5, position(10), None))[1:] == [Replaced(orders)]


def test_it_goes_on_where_it_was() -> None:
    orders = QueryState(CALL)
    told = TopicUpdated(orders)
    told.tell(Subscribed("1", 5), Result(5, position(10), [1]))
    assert told.connect() == [Subscribe("2", query=CALL, since=position(10))]
    assert told.session.is_due(orders)
    assert told.tell(Subscribed("2", 3, resumed=True)) == [Ready(orders)]
    assert not told.session.is_due(orders)
    assert (orders.value, orders.position) == ([1], position(10))
    assert told.tell(Result(5, position(11), [2])) == []
    assert told.tell(Result(3, position(11), [2])) == [Replaced(orders)]


def test_after_a_reconnect_the_same_result_is_no_news() -> None:
    orders = QueryState(CALL)
    told = TopicUpdated(orders)
    told.tell(Subscribed("1", 5), Result(5, position(10), [{"a": 1, "b": True}]))
    told.connect()
    told.tell(Subscribed("2", 5))
    assert told.tell(Result(5, position(12), [{"b": True, "a": 1}])) == []
    assert orders.position == position(12)
    assert told.tell(Result(5, position(13), [{"a": True, "b": True}])) == [Replaced(orders)]


@pytest.mark.parametrize("state", [QueryState(CALL), QueryRowsState(ROWS)], ids=["whole", "rows"])
def test_a_failure_leaves_the_value_and_ends_with_the_next(
    state: QueryState | QueryRowsState,
) -> None:
    told = TopicUpdated(state)
    told.tell(Subscribed("1", 5), Result(5, position(10), [{"id": 1}]), snapshot(5, 10, 1))
    (event,) = told.tell(failed(5))
    assert isinstance(event, Stale)
    assert isinstance(event.error, TimedOut)
    assert (event.error.hint, event.error.retryable) == ("Wait.", True)
    assert (state.value, state.position) == ([{"id": 1}], position(10))
    assert told.tell(Result(5, position(12), [{"id": 1}]), deltas(5, 12)) == []
    assert (state.error, state.position) == (None, position(12))


@pytest.mark.parametrize(
    ("code", "kind"), [("function_failed", FunctionFailed), ("closed_on_sundays", Refused)]
)
def test_what_kind_of_failure(code: str, kind: type[Exception]) -> None:
    orders = QueryState(CALL)
    told = TopicUpdated(orders)
    told.tell(Subscribed("1", 5), failed(5, code, retryable=False))
    assert type(orders.error) is kind
    assert orders.error.code == code


@pytest.mark.parametrize("state", [QueryState(CALL), QueryRowsState(ROWS)], ids=["whole", "rows"])
def test_a_failure_is_over_when_it_is_resumed(state: QueryState | QueryRowsState) -> None:
    told = TopicUpdated(state)
    told.tell(Subscribed("1", 5), Result(5, position(10), []), snapshot(5, 10), failed(5))
    told.connect()
    told.tell(Subscribed("2", 5, resumed=True))
    assert state.error is None


def test_a_refusal_ends_it() -> None:
    orders = QueryState(CALL)
    told = TopicUpdated(orders)
    (event,) = told.tell(Error("not_yours", "no", id="1"))
    assert isinstance(event, SubscriptionFailed)
    assert isinstance(event.error, Refused)
    assert not told.session.is_due(orders)


def test_rows_by_their_deltas() -> None:
    orders = QueryRowsState(ROWS)
    told = TopicUpdated(orders)
    assert told.subscribe_count == [Subscribe("1", query=ROWS)]
    told.tell(Subscribed("1", 5, key=("id",)))
    first = Enter((1,), {"id": 1}, 0, ())
    assert told.tell(ResetMessage(5, position(10), "resync", (first,))) == [
        Changed(orders, RowsBatch((Reset((first,)),), position(10)))
    ]
    second = Enter((2,), {"id": 2}, 1, ())
    step = (second, Leave((1,), 0))
    assert told.tell(deltas(5, 11, *step)) == [Changed(orders, RowsBatch(step, position(11), AT))]
    assert (orders.value, orders.key) == ([{"id": 2}], ("id",))
    assert told.connect() == [Subscribe("2", query=ROWS, since=position(11))]


def test_rows_that_diverge_are_read_anew() -> None:
    orders = QueryRowsState(ROWS)
    told = TopicUpdated(orders)
    told.tell(Subscribed("1", 5), snapshot(5, 10, 1))
    doubted, *sent = told.tell(deltas(5, 11, enter(7, 9)))
    assert isinstance(doubted, RowsDiverged)
    assert doubted.state.name == "open_orders"
    assert sent == [
        Send(Unsubscribe("1")),
        Send(Subscribe("2", query=ROWS, after=position(10))),
    ]
    told.tell(Subscribed("2", 5), snapshot(5, 12, 1, 2))
    assert (ids(orders), told.session.diverged) == ([1, 2], 1)
