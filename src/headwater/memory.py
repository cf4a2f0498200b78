"""Counts the memory of subscriptions by owner, and enforces its bounds. Pure.

A *holding* is something that takes memory: the rows of a view, the history of a channel, frames
that wait for a client. It counts in full for each of its owners, so that the sum of an owner
depends only on its own subscriptions, and once in the total. A holding that is *idle* has no
subscription, and is ended first. Then an owner above its bound loses the holding that grew. When
the total is above its bound, the owner with the most bytes that no other owner shares loses the
largest of these: an owner below its share loses nothing to a larger one.

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
        """Of all holdings, each once, and of the frames that wait for clients, each once."""
        self.on_over: Callable[[], None] | None = None
        self.on_shed: Callable[[str], None] | None = None
        """Is given the code of each error that something ended with."""
        self._accounts: dict[Holder, _Account] = {}
        self._over: dict[Holder, Holding] = {}
        self._idle: dict[Holding, None] = {}
        self._noted = False

    def open(self, shed: Shed, *, in_total: bool = True) -> Holding:
        """A holding of no bytes, for no owner yet. Without `in_total` it counts for its owners
        only: what it consists of is counted elsewhere."""
        return Holding(self, shed, in_total)

    def of(self, owner: Holder) -> int:
        """Bytes that count for an owner."""
        account = self._accounts.get(owner)
        return 0 if account is None else account.held

    @property
    def owners(self) -> Iterator[tuple[Holder, int]]:
        """Each with its bytes."""
        return ((owner, account.held) for owner, account in self._accounts.items())

    def add(self, bytes: int) -> None:
        """Add bytes to the total."""
        self.total += bytes
        if self.in_all and self.total > self.in_all:
            self._note()

    def enforce(self) -> None:
        """End what is above the bounds."""
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
        """The owner who holds most alone; where nothing is held alone, most of all."""
        found = [each for each in self._accounts.items() if each[0] is not None]
        return max(found, key=lambda each: (each[1].alone, each[1].held), default=None)

    def _shed(self, holding: Holding, owner: Holder, code: str, most: int) -> None:
        if self.on_shed is not None and holding not in self._idle:
            self.on_shed(code)
        holding.shed(owner, exceeded(code, most))
        holding.leave_all(owner)  # also where it was not ended as it should have been

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
        """Of holdings that are held for no other owner: what would be free without this one."""
        self.holdings: dict[Holding, int] = {}
        """With how often it has each."""

    def largest(self) -> Holding:
        """Of what it holds alone, if there is any."""
        return max(self.holdings, key=lambda each: (len(each.owners) == 1, each.bytes))


class Holding:
    """Something that takes memory, and whom it is held for."""

    __slots__ = ("_in_total", "_memory", "bytes", "owners", "shed")

    def __init__(self, memory: Memory, shed: Shed, in_total: bool) -> None:
        self._memory = memory
        self._in_total = in_total
        self.bytes = 0
        self.owners: dict[Holder, _Account] = {}
        self.shed = shed

    def resize(self, bytes: int) -> None:
        """It has another size. Called at every change: most leave the size as it is."""
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
        """It is held for this owner, too, or once more."""
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
        """Once less for this owner."""
        account = self.owners.get(owner)
        if account is None:
            return
        account.holdings[self] -= 1
        if account.holdings[self] == 0:
            self.leave_all(owner)

    def leave_all(self, owner: Holder) -> None:
        """Not for this owner any more, however often it had it."""
        account = self.owners.get(owner)
        if account is None:
            return
        self._own(-self.bytes)
        del self.owners[owner], account.holdings[self]
        self._own(self.bytes)
        account.held -= self.bytes
        self._memory.left(owner)

    def rest(self) -> None:
        """No subscription needs it; it stays for its owners, in case they come back."""
        self._memory.rests(self, True)

    def resume(self) -> None:
        """It is needed again, for owners that are still to join."""
        self._memory.rests(self, False)
        for owner in list(self.owners):
            self.leave_all(owner)

    def close(self) -> None:
        """It takes no memory any more."""
        self._memory.rests(self, False)
        self.resize(0)
        for owner in list(self.owners):
            self.leave_all(owner)

    def _own(self, bytes: int) -> None:
        """Count for its only owner, if it has just one."""
        if len(self.owners) == 1:
            (account,) = self.owners.values()
            account.alone += bytes


_WHOSE = {
    "bytes_per_user": "the subscriptions of this user, or what waits for its clients, take",
    "bytes_total": "all subscriptions of this gateway together take",
}
_WAY_OUT = {
    "bytes_per_user": "Ask for fewer rows or columns, unsubscribe from what is no longer shown, and"
    " read what is sent.",
    "bytes_total": "The user with the most bytes loses a subscription first: ask for fewer rows or"
    " columns.",
}


def exceeded(code: str, most: int) -> LimitExceeded:
    """The error that something ends with."""
    return LimitExceeded(
        f"{_WHOSE[code]} more than {most:,} bytes of memory, which is the limit",
        hint=f"{_WAY_OUT[code]} The setting is [limits] {code}.",
        code=code,
        retry_after=QUOTA_RETRY_SECONDS,
    )
