"""When a reader sleeps and when it polls, with a clock that the test sets."""

from __future__ import annotations

import pytest

from headwater.log.waking.pace import _POLL_QUIET_SECONDS, _POLL_SECONDS, _SAFETY_POLL_SECONDS, Pace
from headwater.model import Position


def at(xmin: int, xmax: int) -> Position:
    return Position("a", xmin, xmax)


@pytest.fixture
def busy() -> Pace:
    pace = Pace()
    for i in range(200):
        pace.woken(i * 0.001)
    return pace


def test_sleeps_at_first() -> None:
    assert (Pace().mode, Pace().pause) == ("asleep", _SAFETY_POLL_SECONDS)


def test_polls_when_woken_too_often(busy: Pace) -> None:
    assert (busy.mode, busy.pause) == ("polling", _POLL_SECONDS)


def test_keeps_sleeping_when_woken_seldom() -> None:
    pace = Pace()
    for i in range(1000):
        pace.woken(i * 0.01)
        pace.have_read(i * 0.01, has_changes=True, position=at(i, i))
    assert pace.mode == "asleep"


def test_keeps_polling_while_there_are_changes(busy: Pace) -> None:
    for second in range(1, 10):
        busy.have_read(second * _POLL_QUIET_SECONDS * 0.9, has_changes=True, position=at(1, 1))
    assert busy.mode == "polling"


def test_drains_until_every_transaction_of_that_moment_has_ended(busy: Pace) -> None:
    busy.have_read(10.0, has_changes=False, position=at(100, 110))
    assert (busy.mode, busy.pause) == ("draining", _POLL_SECONDS)
    # The lock is released; the next read says which transactions could have skipped NOTIFY.
    busy.have_read(10.1, has_changes=False, position=at(100, 120))
    modes = []
    for position in (at(119, 130), at(120, 131)):
        busy.have_read(10.2, has_changes=True, position=position)
        modes.append(busy.mode)
    assert modes == ["draining", "asleep"]


def test_goes_back_to_polling_while_draining(busy: Pace) -> None:
    busy.have_read(10.0, has_changes=False, position=at(100, 110))
    for i in range(200):
        busy.woken(11 + i * 0.001)
    assert busy.mode == "polling"


def test_a_lost_lock_is_drained_too(busy: Pace) -> None:
    busy.lock_lost()
    assert busy.mode == "draining"
    busy.have_read(0.5, has_changes=True, position=at(100, 120))
    assert busy.mode == "draining"


def test_never_sleeps_without_a_waker() -> None:
    pace = Pace()
    pace.never_sleep()
    pace.have_read(100.0, has_changes=False, position=at(100, 110))
    pace.lock_lost()
    assert (pace.mode, pace.pause) == ("polling", _POLL_SECONDS)


def test_polls_when_a_safety_poll_found_changes() -> None:
    pace = Pace()
    pace.unannounced(5.0)
    pace.have_read(5.0, has_changes=True, position=at(1, 1))
    modes = [pace.mode]
    pace.have_read(5.0 + _POLL_QUIET_SECONDS, has_changes=False, position=at(1, 1))
    assert [*modes, pace.mode] == ["polling", "draining"]
