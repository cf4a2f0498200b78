"""Positions of a SQLite queue."""

from __future__ import annotations

import pytest

from headwater.capture.sqlite.position import QueuePosition
from headwater.errors import PositionLost


def test_a_position_contains_earlier_ones_of_its_generation() -> None:
    one, two = QueuePosition("a", 1, "1.0", 1), QueuePosition("a", 2, "1.5", 1)
    assert two.contains(one)
    assert two.contains(two)
    assert not one.contains(two)
    assert not QueuePosition("b", 9, "1.0", 1).contains(one)


@pytest.mark.parametrize("text", ["", "0/16B3748", "a/b/c/d", "a/1/2/3/4"])
def test_positions_of_others(text: str) -> None:
    with pytest.raises(PositionLost, match="not a position of a SQLite queue"):
        QueuePosition.parse(text)
