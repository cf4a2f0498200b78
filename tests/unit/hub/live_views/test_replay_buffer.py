"""Which frames a client that reconnects has missed."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.hub.live_views.replay_buffer import ReplayBuffer, ReplayBuffers
from headwater.protocol import Frame, Unsubscribed


def frames(count: int) -> list[Frame]:
    return [Frame(Unsubscribed(f"{number:02}")) for number in range(count)]


def after(recent: ReplayBuffer, position: str) -> list[Any] | None:
    """The messages of the stored frames since then."""
    stored = recent.after(position)
    return None if stored is None else [frame.message for frame in stored]


def test_the_frames_after_a_position() -> None:
    recent = ReplayBuffer()
    recent.mark("0")
    sent = frames(3)
    recent.add(sent[0], "1")
    recent.add(sent[1], "2")
    recent.mark("2b")
    recent.add(sent[2], "3")
    one, two, three = (frame.message for frame in sent)
    assert after(recent, "0") == [one, two, three]
    assert after(recent, "1") == [two, three]
    assert after(recent, "2") == after(recent, "2b") == [three]
    assert after(recent, "3") == []
    assert after(recent, "somewhere") is None


def test_positions_before_a_dropped_frame_cannot_be_replayed() -> None:
    recent = ReplayBuffer()
    recent.mark("0")
    for number, frame in enumerate(frames(3), 1):
        recent.add(frame, str(number))
    recent.drop_oldest()
    assert recent.after("0") is None
    assert len(recent.after("1") or ()) == 2
    recent.clear()
    assert recent.after("3") is None


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.hub.live_views.replay_buffer._RECENT_FRAMES_MAX", 5)
    monkeypatch.setattr(
        "headwater.hub.live_views.replay_buffer._RECENT_BYTES_MAX", 8 * frames(1)[0].size
    )
    recents, idle, busy = ReplayBuffers(), ReplayBuffer(), ReplayBuffer()
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
