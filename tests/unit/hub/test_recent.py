"""Which frames one who comes back has missed."""

from __future__ import annotations

import pytest

from headwater import limits
from headwater.hub.recent import Recent, Recents
from headwater.protocol import Frame, Keepalive


def frames(count: int) -> list[Frame]:
    return [Frame(Keepalive()) for _ in range(count)]


def test_exactly_what_came_after() -> None:
    recent = Recent()
    recent.mark("0")
    one, two, three = frames(3)
    recent.add(one, "1")
    recent.add(two, "2")
    recent.mark("2b")
    recent.add(three, "3")
    assert recent.after("0") == [one, two, three]
    assert recent.after("1") == [two, three]
    assert recent.after("2") == recent.after("2b") == [three]
    assert recent.after("3") == []
    assert recent.after("somewhere") is None


def test_behind_a_dropped_frame_nothing_is_known() -> None:
    recent = Recent()
    recent.mark("0")
    for number, frame in enumerate(frames(3), 1):
        recent.add(frame, str(number))
    recent.drop_oldest()
    assert recent.after("0") is None
    assert len(recent.after("1") or ()) == 2
    recent.clear()
    assert recent.after("3") is None


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECENT_FRAMES_MAX", 5)
    monkeypatch.setattr(limits, "RECENT_BYTES_MAX", 8 * Frame(Keepalive()).size)
    recents, idle, busy = Recents(), Recent(), Recent()
    for number, frame in enumerate(frames(4)):
        recents.add(idle, frame, str(number))
    for number, frame in enumerate(frames(20)):
        recents.add(busy, frame, str(number))
    assert (len(idle), len(busy)) == (3, 5)
    assert idle.after("3") == []
    assert idle.after("0") is not None
    recents.clear(busy)
    for number, frame in enumerate(frames(4)):
        recents.add(busy, frame, str(number))
    assert (len(idle), len(busy)) == (3, 4)
