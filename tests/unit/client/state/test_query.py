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
from tests.unit.client.test_session import AT, SessionDriver, deltas, enter, ids, position, snapshot

CALL = QueryCall("open_orders", {"region": 7})
ROWS = QueryCall("open_orders", {"region": 7}, delta=True)


def failed(view: int, code: str = "timed_out", retryable: bool = True) -> FailedMessage:
    return FailedMessage(view, position(11), code, "no", "Wait.", retryable)


def test_a_result_replaces_the_one_before() -> None:
    orders = QueryState(CALL)
    driver = SessionDriver(orders)
    assert driver.subscribes == [Subscribe("1", query=CALL)]
    assert driver.receive(Subscribed("1", 5)) == [Ready(orders)]
    assert driver.session.is_due(orders)
    assert driver.receive(Result(5, position(10), [1])) == [Replaced(orders)]
    assert not driver.session.is_due(orders)
    assert driver.receive(Result(5, position(11), [1, 2]), Result(6, position(12), [3])) == [
        Replaced(orders)
    ]
    assert (orders.value, orders.position, orders.error) == ([1, 2], position(11), None)


def test_a_first_result_of_null_is_a_result() -> None:
    orders = QueryState(CALL)
    driver = SessionDriver(orders)
    assert driver.receive(Subscribed("1", 5), Result(5, position(10), None))[1:] == [
        Replaced(orders)
    ]


def test_a_query_resumes_from_its_position() -> None:
    orders = QueryState(CALL)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), Result(5, position(10), [1]))
    assert driver.connect() == [Subscribe("2", query=CALL, since=position(10))]
    assert driver.session.is_due(orders)
    assert driver.receive(Subscribed("2", 3, resumed=True)) == [Ready(orders)]
    assert not driver.session.is_due(orders)
    assert (orders.value, orders.position) == ([1], position(10))
    assert driver.receive(Result(5, position(11), [2])) == []
    assert driver.receive(Result(3, position(11), [2])) == [Replaced(orders)]


def test_after_a_reconnect_an_equal_result_is_no_event() -> None:
    orders = QueryState(CALL)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), Result(5, position(10), [{"a": 1, "b": True}]))
    driver.connect()
    driver.receive(Subscribed("2", 5))
    assert driver.receive(Result(5, position(12), [{"b": True, "a": 1}])) == []
    assert orders.position == position(12)
    assert driver.receive(Result(5, position(13), [{"a": True, "b": True}])) == [Replaced(orders)]


@pytest.mark.parametrize("state", [QueryState(CALL), QueryRowsState(ROWS)], ids=["whole", "rows"])
def test_a_failure_leaves_the_value_until_the_next_result(
    state: QueryState | QueryRowsState,
) -> None:
    driver = SessionDriver(state)
    driver.receive(Subscribed("1", 5), Result(5, position(10), [{"id": 1}]), snapshot(5, 10, 1))
    (event,) = driver.receive(failed(5))
    assert isinstance(event, Stale)
    assert isinstance(event.error, TimedOut)
    assert (event.error.hint, event.error.retryable) == ("Wait.", True)
    assert (state.value, state.position) == ([{"id": 1}], position(10))
    assert driver.receive(Result(5, position(12), [{"id": 1}]), deltas(5, 12)) == []
    assert (state.error, state.position) == (None, position(12))


@pytest.mark.parametrize(
    ("code", "kind"), [("function_failed", FunctionFailed), ("closed_on_sundays", Refused)]
)
def test_a_failure_has_the_class_of_its_code(code: str, kind: type[Exception]) -> None:
    orders = QueryState(CALL)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), failed(5, code, retryable=False))
    assert type(orders.error) is kind
    assert orders.error.code == code


@pytest.mark.parametrize("state", [QueryState(CALL), QueryRowsState(ROWS)], ids=["whole", "rows"])
def test_resuming_ends_a_failure(state: QueryState | QueryRowsState) -> None:
    driver = SessionDriver(state)
    driver.receive(Subscribed("1", 5), Result(5, position(10), []), snapshot(5, 10), failed(5))
    driver.connect()
    driver.receive(Subscribed("2", 5, resumed=True))
    assert state.error is None


def test_a_refusal_ends_it() -> None:
    orders = QueryState(CALL)
    driver = SessionDriver(orders)
    (event,) = driver.receive(Error("not_yours", "no", id="1"))
    assert isinstance(event, SubscriptionFailed)
    assert isinstance(event.error, Refused)
    assert not driver.session.is_due(orders)


def test_rows_by_their_deltas() -> None:
    orders = QueryRowsState(ROWS)
    driver = SessionDriver(orders)
    assert driver.subscribes == [Subscribe("1", query=ROWS)]
    driver.receive(Subscribed("1", 5, key=("id",)))
    first = Enter((1,), {"id": 1}, 0, ())
    assert driver.receive(ResetMessage(5, position(10), "resync", (first,))) == [
        Changed(orders, RowsBatch((Reset((first,)),), position(10)))
    ]
    second = Enter((2,), {"id": 2}, 1, ())
    step = (second, Leave((1,), 0))
    assert driver.receive(deltas(5, 11, *step)) == [
        Changed(orders, RowsBatch(step, position(11), AT))
    ]
    assert (orders.value, orders.key) == ([{"id": 2}], ("id",))
    assert driver.connect() == [Subscribe("2", query=ROWS, since=position(11))]


def test_rows_that_diverge_are_read_again() -> None:
    orders = QueryRowsState(ROWS)
    driver = SessionDriver(orders)
    driver.receive(Subscribed("1", 5), snapshot(5, 10, 1))
    doubted, *sent = driver.receive(deltas(5, 11, enter(7, 9)))
    assert isinstance(doubted, RowsDiverged)
    assert doubted.state.name == "open_orders"
    assert sent == [
        Send(Unsubscribe("1")),
        Send(Subscribe("2", query=ROWS, after=position(10))),
    ]
    driver.receive(Subscribed("2", 5), snapshot(5, 12, 1, 2))
    assert (ids(orders), driver.session.diverged) == ([1, 2], 1)
