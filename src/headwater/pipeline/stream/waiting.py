"""Decides how long a stream without changes waits before it looks for some. Pure.

Writers send NOTIFY, or the gateway that polls does it for them (`log.waking`). So a stream sleeps,
and looks once a second only in case a NOTIFY was lost. Where a change came without one, it looks
more often for a while. On a server with prepared transactions no writer sends NOTIFY.
"""

from __future__ import annotations

_SPARK_SAFETY_LOOK_SECONDS = 1.0
"""A stream that waits for NOTIFY looks for changes this often."""

_SPARK_LOOK_SECONDS = 0.05
"""A stream that cannot rely on NOTIFY looks for changes this often."""

_SPARK_LOOKING_SECONDS = 10.0
"""After a change without NOTIFY, a stream relies on looking for this long."""


class WaitPace:
    """The pace of one stream."""

    def __init__(self) -> None:
        self._looks_until = 0.0
        self._sleeps = True

    def never_sleep(self) -> None:
        """No writer sends NOTIFY."""
        self._sleeps = False

    def pause(self, now: float) -> float:
        """The longest time to wait for a NOTIFY."""
        sleeps = self._sleeps and now >= self._looks_until
        return _SPARK_SAFETY_LOOK_SECONDS if sleeps else _SPARK_LOOK_SECONDS

    def have_looked(self, now: float, *, was_notified: bool, has_changes: bool) -> None:
        """The stream has looked after a pause."""
        if has_changes and not was_notified:
            self._looks_until = now + _SPARK_LOOKING_SECONDS
