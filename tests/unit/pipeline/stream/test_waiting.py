"""How long a stream waits for a NOTIFY."""

from __future__ import annotations

from headwater.pipeline.stream.waiting import (
    _SPARK_LOOK_SECONDS,
    _SPARK_LOOKING_SECONDS,
    _SPARK_SAFETY_LOOK_SECONDS,
    WaitPace,
)


def test_sleeps_while_changes_are_announced() -> None:
    pace = WaitPace()
    pace.have_looked(5.0, was_notified=True, has_changes=True)
    pace.have_looked(6.0, was_notified=False, has_changes=False)
    assert pace.pause(6.0) == _SPARK_SAFETY_LOOK_SECONDS


def test_looks_more_often_after_a_change_without_notify() -> None:
    pace = WaitPace()
    pace.have_looked(5.0, was_notified=False, has_changes=True)
    assert pace.pause(5.1) == _SPARK_LOOK_SECONDS
    assert pace.pause(5.0 + _SPARK_LOOKING_SECONDS) == _SPARK_SAFETY_LOOK_SECONDS


def test_never_sleeps_where_no_writer_notifies() -> None:
    pace = WaitPace()
    pace.never_sleep()
    assert pace.pause(100.0) == _SPARK_LOOK_SECONDS
