"""A replica folds what fits, and refuses what does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headwater.client.state.replica import Replica, result_hash
from headwater.errors import Diverged
from headwater.model import Delta, Enter, Leave, Match, Move, Reset, Row, Unmatch, Update


def row(id: int) -> Row:
    return {"id": id}


def enter(id: int, index: int) -> Enter:
    return Enter((id,), row(id), index, (id,))


def three() -> Replica:
    replica = Replica()
    replica.apply([Reset((enter(1, 0), enter(2, 1), enter(3, 2)))])
    return replica


FOLDS: list[tuple[Delta, list[int]]] = [
    (enter(9, 1), [1, 9, 2, 3]),
    (Leave((2,), 1), [1, 3]),
    (Move((1,), row(1), 0, 2, (1,)), [2, 3, 1]),
    (Move((3,), row(3), 2, 0, (3,)), [3, 1, 2]),
    (Update((2,), row(2), 1, (2,)), [1, 2, 3]),
    (Reset((enter(7, 0),)), [7]),
    (Reset(), []),
]


@pytest.mark.parametrize(("delta", "ids"), FOLDS)
def test_a_delta_folds(delta: Delta, ids: list[int]) -> None:
    replica = three()
    replica.apply([delta])
    assert [each["id"] for each in replica.rows] == ids


@pytest.mark.parametrize("delta", [delta for delta, _ in FOLDS])
def test_deltas_cross_the_wire(delta: Delta) -> None:
    decoder: Any = msgspec.json.Decoder(Enter | Leave | Move | Update | Reset | Match | Unmatch)
    assert decoder.decode(msgspec.json.encode(delta)) == delta


@pytest.mark.parametrize(
    "delta",
    [
        enter(1, 0),
        enter(9, 7),
        Leave((2,), 0),
        Leave((9,), 9),
        Move((1,), row(1), 1, 0, (1,)),
        Move((1,), row(1), 0, 3, (1,)),
        Update((1,), row(1), 2, (1,)),
        Update((9,), row(9)),
        Match((1,), row(1)),
        Unmatch((9,)),
    ],
)
def test_a_delta_that_does_not_fit_is_divergence(delta: Delta) -> None:
    with pytest.raises(Diverged, match="does not fit"):
        three().apply([delta])


def test_a_hash_proves_the_result() -> None:
    replica = three()
    expected = result_hash([((1,), row(1)), ((3,), row(3))])
    replica.apply([Leave((2,), 1)], expected)
    with pytest.raises(Diverged, match="hash differs"):
        replica.apply([Leave((3,), 1)], expected)


def test_the_hash_depends_on_the_order_of_rows_but_not_of_columns() -> None:
    one, other = ((1,), {"a": 1, "b": 2}), ((2,), {"a": 1, "b": 2})
    assert result_hash([one, other]) != result_hash([other, one])
    assert result_hash([((1,), {"b": 2, "a": 1})]) == result_hash([one])
