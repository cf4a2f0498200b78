"""How many sessions, subscriptions and requests a user or an address may have. Pure: the caller
passes the time.

Sessions, subscriptions and requests count against the user and, where there is none, against the
address: many users may share one. A session or subscription holds a lease: closing it once or
several times returns it once. Owners without a lease are not stored, so memory grows with what is
open and not with the number of past clients.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TypeAlias

from headwater.errors import LimitExceeded
from headwater.gateway.http.addresses import counted
from headwater.limits import QUOTA_RETRY_SECONDS, RATE_BURST_SECONDS
from headwater.settings.groups import LimitSettings

_RATE_OWNERS_MAX = 100_000
"""Users and addresses whose requests are counted. Beyond it the least recently seen one is
forgotten early, and may exceed the rate a little."""


QuotaOwner: TypeAlias = tuple[str, str]
"""The owner in a quota: ("user", account), ("address", network) or ("session", id)."""


class Quotas:
    """The quotas of one gateway. `user` is an `Identity.account`, None for an anonymous one."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self._sessions: Counter[QuotaOwner] = Counter()
        self._subscriptions: Counter[QuotaOwner] = Counter()
        self._rate = Rate(settings.requests_per_second)
        self._publish_rate = Rate(settings.publishes_per_second)

    def session(self, user: str | None, address: str) -> Lease:
        """One more connection; LimitExceeded `sessions_per_user` or `sessions_per_ip`."""
        owner = owner_of(user, address)
        setting = "sessions_per_ip" if user is None else "sessions_per_user"
        most = int(getattr(self._settings, setting))
        if self._sessions[owner] >= most:
            raise _exceeded(setting, most, f"this {owner[0]}")
        return Lease(self._sessions, [owner])

    def subscription(self, user: str | None, address: str) -> Lease:
        """One more subscription; LimitExceeded `subscriptions_per_user`."""
        owner, most = owner_of(user, address), self._settings.subscriptions_per_user
        if self._subscriptions[owner] >= most:
            raise _exceeded("subscriptions_per_user", most, f"this {owner[0]}")
        return Lease(self._subscriptions, [owner])

    def request(self, user: str | None, address: str, now: float, *, weight: int = 1) -> None:
        """Count a request by its weight; LimitExceeded `rate` if there are too many."""
        if wait := self._rate.take(owner_of(user, address), now, weight):
            raise self._too_fast(wait)

    def check_address(self, address: str, now: float) -> None:
        """LimitExceeded `rate` if the address may make no more requests without a user now. Counts
        nothing."""
        if wait := self._rate.wait(owner_of(None, address), now):
            raise self._too_fast(wait)

    def _too_fast(self, wait: float) -> LimitExceeded:
        return LimitExceeded(
            f"more than {self._settings.requests_per_second} requests a second",
            hint=f"Try again in {wait:.3g} s. The setting is [limits] requests_per_second.",
            code="rate",
            retry_after=wait,
        )

    def publish(self, session: str, now: float) -> None:
        """Count a message or state for a channel; LimitExceeded `publish_rate` if there are too
        many."""
        if wait := self._publish_rate.take(("session", session), now):
            raise LimitExceeded(
                f"more than {self._settings.publishes_per_second} messages and states a second",
                hint=f"Try again in {wait:.3g} s. The setting is [limits] publishes_per_second.",
                code="publish_rate",
                retry_after=wait,
            )

    @property
    def entries(self) -> int:
        """How many owners are stored, for memory checks."""
        rates = len(self._rate) + len(self._publish_rate)
        return len(self._sessions) + len(self._subscriptions) + rates


class Lease:
    """Something counted for its owners until it is closed."""

    def __init__(self, held: Counter[QuotaOwner], owners: list[QuotaOwner]) -> None:
        self._held = held
        self._owners = owners
        held.update(owners)

    def close(self) -> None:
        owners, self._owners = self._owners, []
        for owner in owners:
            self._held[owner] -= 1
            if self._held[owner] == 0:
                del self._held[owner]

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Rate:
    """A token bucket for each owner, stored as one number: the time when it will be full again.

    A full bucket holds the requests of RATE_BURST_SECONDS. Buckets are in the order of their last
    use, and each is full again after at most that time, so the full ones are first.
    """

    def __init__(self, per_second: float) -> None:
        self._each = 1 / per_second
        # One request may always be taken from a full bucket, however low the rate.
        self._most = max(RATE_BURST_SECONDS, self._each)
        self._full_at: dict[QuotaOwner, float] = {}

    def take(self, owner: QuotaOwner, now: float, weight: int = 1) -> float:
        """Take from the bucket: 0 if there was enough, else the seconds until there is."""
        if wait := self.wait(owner, now, weight):
            return wait
        full_at = max(self._full_at.pop(owner, -math.inf), now)
        self._full_at[owner] = full_at + self._seconds(weight)
        return 0.0

    def wait(self, owner: QuotaOwner, now: float, weight: int = 1) -> float:
        """The same without taking anything."""
        self._forget(now)
        full_at = max(self._full_at.get(owner, -math.inf), now) + self._seconds(weight)
        wait = full_at - now - self._most
        return wait if wait > 1e-9 else 0.0

    def _seconds(self, weight: int) -> float:
        """How long the bucket takes to refill by this weight. A full bucket is always enough."""
        return min(weight * self._each, self._most)

    def _forget(self, now: float) -> None:
        while self._full_at:
            owner = next(iter(self._full_at))
            if self._full_at[owner] > now and len(self._full_at) < _RATE_OWNERS_MAX:
                return
            del self._full_at[owner]

    def __len__(self) -> int:
        return len(self._full_at)


def owner_of(user: str | None, address: str) -> QuotaOwner:
    """The owner in quotas: the user, or the address without one."""
    return ("address", counted(address)) if user is None else ("user", user)


_HINTS = {
    "sessions_per_user": "Close one, or carry many subscriptions over one connection.",
    "sessions_per_ip": "Sessions with a user are not counted by address: send a token. Behind a"
    " proxy, name it in [gateway] trusted_proxies, or all its clients are one.",
    "subscriptions_per_user": "Unsubscribe from what is no longer shown.",
}


def _exceeded(setting: str, most: int, owner: str) -> LimitExceeded:
    return LimitExceeded(
        f"{owner} has {most} {setting.partition('_')[0]} open, which is the limit",
        hint=f"{_HINTS[setting]} The setting is [limits] {setting}.",
        code=setting,
        retry_after=QUOTA_RETRY_SECONDS,
    )
