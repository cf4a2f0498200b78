"""How long to wait after a failure: 1 s, 2 s, 4 s … 30 s, and when to give up.

Pure: the caller passes the random number. Every pause is shortened by up to half at random, so that
the clients of a restarted gateway do not reconnect all at once.
"""

from __future__ import annotations

from headwater.limits import CLIENT_BACKOFF_SECONDS, CLIENT_FAILURES_MAX


class Backoff:
    """Counts failures in a row.

    >>> backoff = Backoff(failures_max=3)
    >>> backoff.failed(chance=1.0), backoff.failed(chance=0.0), backoff.failed(chance=1.0)
    (1.0, 1.0, None)
    """

    def __init__(
        self,
        seconds: tuple[float, float] = CLIENT_BACKOFF_SECONDS,
        failures_max: int = CLIENT_FAILURES_MAX,
    ) -> None:
        self._first, self._longest = seconds
        self._failures_max = failures_max
        self.failures = 0

    def failed(self, chance: float, at_least: float = 0.0) -> float | None:
        """The pause in seconds before the next attempt, not less than the server asked for; None
        when it is time to give up. `chance` is between 0 and 1."""
        self.failures += 1
        if self.failures >= self._failures_max:
            return None
        whole = min(self._first * 2.0 ** (self.failures - 1), self._longest)
        return max(whole * (0.5 + chance / 2), at_least)

    def succeeded(self) -> None:
        """Something was received: the next failure counts as the first."""
        self.failures = 0
