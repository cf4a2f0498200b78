"""The cost of a view: time and bytes. `headwater.gateway.activity` shows it."""

from __future__ import annotations

from datetime import UTC, datetime

from headwater.limits import APPLY_QUICK_SECONDS
from headwater.protocol import Deltas, Frame


class Cost:
    """The cost of one view since it was made. `seconds` is the time for updates: applying changes
    to a live query, or executing a reactive one."""

    __slots__ = ("bytes", "deltas", "runs", "seconds", "since")

    def __init__(self) -> None:
        self.since = datetime.now(UTC)
        self.runs = 0
        """How often it was updated."""
        self.seconds = 0.0
        self.deltas = 0
        """Deltas that its subscribers were sent, each counted once for all of them."""
        self.bytes = 0
        """Bytes sent to all subscribers together, before compression."""

    @property
    def weight(self) -> float:
        """One number to compare views: seconds, plus one second for each 50 MB sent."""
        return self.seconds + self.bytes / 50e6

    def is_slow(self, *, at_first: bool) -> bool:
        """Whether an update takes long; `at_first` if that is not known yet."""
        return self.seconds >= self.runs * APPLY_QUICK_SECONDS if self.runs else at_first

    def ran(self, seconds: float) -> None:
        self.runs += 1
        self.seconds += seconds

    def sent(self, frame: Frame, receivers: int) -> None:
        """The frame is encoded to be sent, so asking for its size costs nothing."""
        if receivers:
            message = frame.message
            self.deltas += len(message.deltas) if isinstance(message, Deltas) else 1
            self.bytes += frame.size * receivers
