"""When the next flush begins: at once, or after a quiet time and at most a maximum time.

*Adaptive* needs no times: the first change is flushed at once, and all changes that arrive during a
flush are the next flush. With fixed times, a flush begins when no change has arrived for the quiet
time, at the latest after the maximum time.
"""

from __future__ import annotations

import re

import msgspec

from headwater.errors import ConfigError
from headwater.log.waking.waker import Waker


class Coalescing(msgspec.Struct, frozen=True):
    """Times in seconds; both zero means adaptive.

    >>> Coalescing.parse("50ms/200ms")
    Coalescing(quiet=0.05, maximum=0.2)
    >>> Coalescing.parse("adaptive")
    Coalescing(quiet=0.0, maximum=0.0)
    """

    quiet: float = 0.0
    maximum: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Coalescing:
        if text == "adaptive":
            return cls()
        match = re.fullmatch(r"(\d{1,6})ms/(\d{1,6})ms", text)
        if match is None or not 0 < int(match[1]) <= int(match[2]):
            raise ConfigError(
                f"[live] coalesce: {text!r} is not known",
                hint="Write adaptive, or a quiet and a maximum time: 50ms/200ms.",
            )
        return cls(int(match[1]) / 1000, int(match[2]) / 1000)

    async def wait(self, waker: Waker) -> None:
        """Return when it is time to flush."""
        await waker.wait()
        if self.maximum:
            await waker.settle(self.quiet, self.maximum)
