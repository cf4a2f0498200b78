"""How a source judges what is left of the server's log."""

from __future__ import annotations

import pytest

from headwater.capture.mongodb.positions import Position
from headwater.capture.mongodb.source import window_health


@pytest.mark.parametrize(
    ("window", "seconds", "state"),
    [
        ((0, 100), 90, "ok"),
        ((0, 100), 25, "ok"),
        ((0, 100), 24, "lagging"),
        ((50, 100), 40, "lagging"),
        ((100, 100), 100, "ok"),
    ],
)
def test_the_window_of_the_oplog(window: tuple[int, int], seconds: int, state: str) -> None:
    health = window_health(window, Position((seconds, 1)))
    assert health.state == state
    assert ("oplog" in (health.warning or "")) is (state == "lagging")
