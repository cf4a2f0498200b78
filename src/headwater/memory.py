"""Counts the memory of subscriptions by owner, and enforces its bounds. Pure.

A *holding* is anything that takes memory: the rows of a view, the history of a channel, frames that
wait for a client. It counts in full for each of its owners, so that the sum of an owner depends
only on its own subscriptions, and once in the total. A holding that is *idle* has no subscription,
and is ended first. Then an owner above its bound loses the holding that grew. When the total is
above its bound, the owner with the most bytes that no other owner shares loses the largest of
these: an owner below its share loses nothing to a larger one.

A growing holding only records that a bound is exceeded, and calls `on_over` once. `enforce` acts,
at a moment when subscriptions may end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TypeAlias

from headwater.errors import LimitExceeded
from headwater.limits import QUOTA_RETRY_SECONDS

Holder: TypeAlias = Hashable
"""The owner that bytes count for. None is this process itself: it has no bound."""

Shed: TypeAlias = Callable[[Holder, LimitExceeded], None]
"""Ends what an owner has of a holding, for this reason."""


class Memory:
    """The sums of a process, and their bounds in bytes; 0 for none."""

    def __init__(self, per_owner: int = 0, in_all: int = 0) -> None:
        self.per_owner = per_owner
        self.in_all = in_all
        self.total = 0
        """The bytes of all holdings and of all frames that wait for clients, each counted once."""
        self.on_over: Callable[[], None] | None = None
        self.on_shed: Callable[[str], None] | None = None
        """Called with the code of each error that ended a subscription or connection."""
        self._accounts: dict[Holder, _Account] = {}
        self._over: dict[Holder, Holding] = {}
        self._idle: dict[Holding, None] = {}
        self._noted = False

    def open(self, shed: Shed, *, in_total: bool = True) -> Holding:
        """A new holding without bytes and owners. Without `in_total` it counts for its owners only,
        because its parts are counted elsewhere."""
        return Holding(self, shed, in_total)

    def of(self, owner: Holder) -> int:
        """The bytes of an owner."""
        account = self._accounts.get(owner)
        return 0 if account is None else account.held

    @property
    def owners(self) -> Iterator[tuple[Holder, int]]:
        """All owners, each with its bytes."""
        return ((owner, account.held) for owner, account in self._accounts.items())

    def add(self, bytes: int) -> None:
        """Add bytes to the total."""
        self.total += bytes
        if self.in_all and self.total > self.in_all:
            self._note()

    def enforce(self) -> None:
        """End holdings until no bound is exceeded."""
        self._noted = False
        while self._over:
            owner, grown = self._over.popitem()
            while (account := self._exceeded(owner)) is not None:
                idle = next((each for each in account.holdings if each in self._idle), None)
                if idle is None and grown not in account.holdings:
                    grown = account.largest()
                self._shed(idle or grown, owner, "bytes_per_user", self.per_owner)
        while self.in_all and self.total > self.in_all:
            idle = next(iter(self._idle), None)
            if idle is not None:
                self._end_idle(idle)
                continue
            victim = self._largest()
            if victim is None:
                return
            owner, account = victim
            self._shed(account.largest(), owner, "bytes_total", self.in_all)

    def _end_idle(self, holding: Holding) -> None:
        for owner in list(holding.owners):
            self._shed(holding, owner, "bytes_total", self.in_all)
        self._idle.pop(holding, None)

    def _exceeded(self, owner: Holder) -> _Account | None:
        account = self._accounts.get(owner)
        return account if account is not None and account.held > self.per_owner else None

    def _largest(self) -> tuple[Holder, _Account] | None:
        """The owner with the most bytes that it does not share; if there are none, with the most
        bytes."""
        found = [each for each in self._accounts.items() if each[0] is not None]
        return max(found, key=lambda each: (each[1].alone, each[1].held), default=None)

    def _shed(self, holding: Holding, owner: Holder, code: str, most: int) -> None:
        if self.on_shed is not None and holding not in self._idle:
            self.on_shed(code)
        holding.shed(owner, exceeded(code, most))
        holding.leave_all(owner)  # also if `shed` did not remove it

    # -------------------------------------------------------------------- for holdings

    def account(self, owner: Holder) -> _Account:
        account = self._accounts.get(owner)
        if account is None:
            account = self._accounts[owner] = _Account()
        return account

    def grew(self, owner: Holder, account: _Account, holding: Holding) -> None:
        if self.per_owner and account.held > self.per_owner and owner is not None:
            self._over[owner] = holding
            self._note()

    def rests(self, holding: Holding, idle: bool) -> None:
        self._idle.pop(holding, None)
        if idle:
            self._idle[holding] = None

    def left(self, owner: Holder) -> None:
        if not self._accounts[owner].holdings:
            del self._accounts[owner]
            self._over.pop(owner, None)

    def _note(self) -> None:
        if not self._noted:
            self._noted = True
            if self.on_over is not None:
                self.on_over()


class _Account:
    """The sums of one owner."""

    __slots__ = ("alone", "held", "holdings")

    def __init__(self) -> None:
        self.held = 0
        self.alone = 0
        """The bytes of holdings without another owner: they would be freed without this owner."""
        self.holdings: dict[Holding, int] = {}
        """Its holdings, each with how often it has it."""

    def largest(self) -> Holding:
        """The largest holding that it does not share, if there is one."""
        return max(self.holdings, key=lambda each: (len(each.owners) == 1, each.bytes))


class Holding:
    """Anything that takes memory, and its owners."""

    __slots__ = ("_in_total", "_memory", "bytes", "owners", "shed")

    def __init__(self, memory: Memory, shed: Shed, in_total: bool) -> None:
        self._memory = memory
        self._in_total = in_total
        self.bytes = 0
        self.owners: dict[Holder, _Account] = {}
        self.shed = shed

    def resize(self, bytes: int) -> None:
        """Set the size. Called at every change, most of which leave the size the same."""
        if bytes == self.bytes:
            return
        more, self.bytes = bytes - self.bytes, bytes
        if self._in_total:
            self._memory.add(more)
        alone = more if len(self.owners) == 1 else 0
        for owner, account in self.owners.items():
            account.held += more
            account.alone += alone
            if more > 0:
                self._memory.grew(owner, account, self)

    def join(self, owner: Holder) -> None:
        """Add an owner, or count it once more."""
        account = self._memory.account(owner)
        count = account.holdings.get(self, 0)
        account.holdings[self] = count + 1
        if count == 0:
            self._own(-self.bytes)
            self.owners[owner] = account
            self._own(self.bytes)
            account.held += self.bytes
            self._memory.grew(owner, account, self)

    def leave(self, owner: Holder) -> None:
        """Count this owner once less."""
        account = self.owners.get(owner)
        if account is None:
            return
        account.holdings[self] -= 1
        if account.holdings[self] == 0:
            self.leave_all(owner)

    def leave_all(self, owner: Holder) -> None:
        """Remove this owner, however often it is counted."""
        account = self.owners.get(owner)
        if account is None:
            return
        self._own(-self.bytes)
        del self.owners[owner], account.holdings[self]
        self._own(self.bytes)
        account.held -= self.bytes
        self._memory.left(owner)

    def rest(self) -> None:
        """No subscription needs it; it stays for its owners, in case they subscribe again."""
        self._memory.rests(self, True)

    def resume(self) -> None:
        """It is needed again, by owners that join after this."""
        self._memory.rests(self, False)
        for owner in list(self.owners):
            self.leave_all(owner)

    def close(self) -> None:
        """The holding is removed."""
        self._memory.rests(self, False)
        self.resize(0)
        for owner in list(self.owners):
            self.leave_all(owner)

    def _own(self, bytes: int) -> None:
        """Count bytes as unshared, if there is exactly one owner."""
        if len(self.owners) == 1:
            (account,) = self.owners.values()
            account.alone += bytes


_WHOSE = {
    "bytes_per_user": "the subscriptions of this user, or messages that wait for its clients, take",
    "bytes_total": "all subscriptions of this gateway together take",
}
_WAY_OUT = {
    "bytes_per_user": "Ask for fewer rows or columns, unsubscribe from what is no longer shown, and"
    " read messages as they arrive.",
    "bytes_total": "The user with the most bytes loses a subscription first: ask for fewer rows or"
    " columns.",
}


def exceeded(code: str, most: int) -> LimitExceeded:
    """The error with which a subscription or connection ends."""
    return LimitExceeded(
        f"{_WHOSE[code]} more than {most:,} bytes of memory, which is the limit",
        hint=f"{_WAY_OUT[code]} The setting is [limits] {code}.",
        code=code,
        retry_after=QUOTA_RETRY_SECONDS,
    )
