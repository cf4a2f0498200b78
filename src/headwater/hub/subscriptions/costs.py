"""What a view costs: counted where it happens, read when activity is written."""

from __future__ import annotations

from datetime import UTC, datetime

from headwater.limits import APPLY_QUICK_SECONDS
from headwater.protocol import Deltas, Frame


class Cost:
    """Of one view, since it was made. `seconds` is time spent on keeping it true: applying changes
    to a live query, executing a reactive one."""

    __slots__ = ("bytes", "deltas", "runs", "seconds", "since")

    def __init__(self) -> None:
        self.since = datetime.now(UTC)
        self.runs = 0
        """How often it was brought up to date."""
        self.seconds = 0.0
        self.deltas = 0
        """Steps that its subscribers were sent, each counted once for all of them."""
        self.bytes = 0
        """Sent to all of them together, before compression."""

    @property
    def weight(self) -> float:
        """By which views are compared: seconds, as if fifty megabytes took one to send."""
        return self.seconds + self.bytes / 50e6

    def is_slow(self, *, at_first: bool) -> bool:
        """Whether bringing it up to date takes more than a moment; `at_first` where that is not
        known yet."""
        return self.seconds >= self.runs * APPLY_QUICK_SECONDS if self.runs else at_first

    def ran(self, seconds: float) -> None:
        self.runs += 1
        self.seconds += seconds

    def sent(self, frame: Frame, receivers: int) -> None:
        """The frame is encoded for them anyway, so that its size costs nothing more."""
        if receivers:
            message = frame.message
            self.deltas += len(message.deltas) if isinstance(message, Deltas) else 1
            self.bytes += frame.size * receivers
