"""Inputs that would keep the event loop busy: refused at a bound, or done in few steps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headwater import limits
from headwater.errors import InvalidQuery, ResultError
from headwater.gateway.http.bodies import check_json_size
from headwater.hub.live_views.view import LiveView
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.state.window import Window
from headwater.model import Column, Position, Table
from headwater.protocol import Wire
from headwater.queries.arguments import Parameter, Signature
from headwater.queries.row_deltas import rows_of

ORDERS = Table(
    1, "s", "t", (Column("id", "integer", "integer"), Column("a", "text", "text")), ("id",)
)
TAKES = Signature("query", [Parameter("values", list[Any])])


class Counted(int):
    """A number that counts what it is compared with."""

    comparisons = 0

    def __lt__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) < other  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ({"columns": ["id"] * 3}, "columns"),
        ({"order": ["id"] * 100_000}, "order"),
        ({"after": [1] * 100_000}, "after"),
    ],
)
def test_long_lists_are_refused_by_their_length(query: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        BoundQuery(LiveQuery.from_json({"table": "t", **query}), ORDERS)
    assert caught.value.path == path


def test_a_position_is_compared_in_few_steps() -> None:
    xids = tuple(Counted(2 * i + 2) for i in range(10_000))
    position = Position("a", 2, 10**9, xids)
    Counted.comparisons = 0
    assert position.contains(5_001)
    assert not position.contains(5_000)
    assert Position("a", 20, 10**9, (20, 21)).covers(position) is False
    assert Counted.comparisons < 100


def test_a_position_has_a_longest_text() -> None:
    def text(count: int) -> str:
        return "abc-1:999999999:" + ",".join(str(100_000 + i) for i in range(count))

    assert len(Position.parse(text(14_000)).xip) == 14_000
    assert len(text(14_300)) > limits.POSITION_CHARS_MAX
    with pytest.raises(ValueError, match="is not a position") as caught:
        Position.parse(text(14_300))
    assert len(str(caught.value)) < 300


def test_values_in_arguments() -> None:
    most = limits.ARGUMENT_VALUES_MAX
    TAKES.bind({"values": [[1]] * (most // 2 - 1)}, most=most)
    with pytest.raises(InvalidQuery, match=r"args: more than 10,000 values"):
        TAKES.bind({"values": [[1]] * (most // 2)}, most=most)
    # A program may pass any value, and mutations are not compared with each other.
    assert TAKES.bind({"values": [1] * (most + 1)}).key is not None
    assert TAKES.bind({"values": [1] * (most + 1)}, keyed=False).key is None
    large = [2**64] * limits.ARGUMENT_LARGE_INTEGERS_MAX
    TAKES.bind({"values": large})
    with pytest.raises(InvalidQuery, match="integers of more than 64 bits"):
        TAKES.bind({"values": [*large, -(2**70)]}, keyed=False)
    deep: list[Any] = []
    for _ in range(limits.ARGUMENT_DEPTH_MAX + 2):
        deep = [deep]
    for keyed in (True, False):
        with pytest.raises(InvalidQuery, match="nested too deeply"):
            TAKES.bind({"values": deep}, keyed=keyed)


def test_lists_and_objects_in_a_message() -> None:
    most = limits.MESSAGE_CONTAINERS_MAX
    check_json_size("[" + ",".join(["[]"] * (most - 1)) + "]")
    for text in ("[" + ",".join(["[]"] * most) + "]", "[" + ",".join(["{}"] * most) + "]"):
        with pytest.raises(InvalidQuery, match="more than 50,000 lists and objects"):
            check_json_size(text)
        with pytest.raises(InvalidQuery, match="more than 50,000 lists and objects"):
            check_json_size(text.encode())
    # What stands in a text does not count.
    check_json_size('["' + "[{" * most + '\\"[' + '"]')
    check_json_size('"' + '\\"[{' * most)


def test_a_large_result_has_no_hash() -> None:
    view = LiveView(1, BoundQuery(LiveQuery("t", limit=1_000), ORDERS), None)
    view.verifiers = 1
    view.known = Known()  # type: ignore[assignment]
    assert isinstance(view.state, Window)
    (need,) = view.state.needs
    view.state.answer(need, [{"id": 1, "a": "x" * limits.VERIFY_CHARS_MAX}])
    assert view.hash() is not None
    frame = view.whole("p", None)
    assert frame.message.hash == view.hash()  # type: ignore[union-attr]
    view.state = Window(view.query)
    (need,) = view.state.needs
    view.state.answer(need, [{"id": 1, "a": "x" * (limits.VERIFY_CHARS_MAX + 1)}])
    assert view.hash() is None
    view.state = Window(view.query)
    (need,) = view.state.needs
    few = limits.VERIFY_VALUES_MAX // len(ORDERS.columns)
    view.state.answer(need, [{"id": i, "a": ""} for i in range(1_000)])
    assert view.hash() is not None
    assert few >= 1_000


class Known:
    wire = Wire(ORDERS)


def test_a_result_that_is_too_large_to_be_followed_row_by_row() -> None:
    most = limits.ROW_DELTA_ROWS_MAX
    rows = [{"id": i} for i in range(most + 1)]
    assert len(rows_of(msgspec.json.encode(rows[:most]), ["id"], "q")) == most
    with pytest.raises(ResultError, match="more than 10,000 rows") as caught:
        rows_of(msgspec.json.encode(rows), ["id"], "q")
    assert caught.value.code == "result_too_large"
    large = [{"id": 1, "text": "x" * limits.ROW_DELTA_BYTES_MAX}]
    with pytest.raises(ResultError, match="more than 4,194,304 bytes"):
        rows_of(msgspec.json.encode(large), ["id"], "q")
