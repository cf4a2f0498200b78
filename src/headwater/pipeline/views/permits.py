"""How many views work at the same time: those that the stream waits for, and the others, which are
built or catch up.

Permits are given in the order in which they were requested. A view under steady writes returns its
permit and requests it again at once; with Python's semaphores it would get it before a view that
has waited for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol

from headwater import limits


class Permits:
    """A number of permits."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = Lock()
        self._waiting = deque[Lock]()

    @property
    def waiting(self) -> int:
        """How many threads wait for a permit."""
        return len(self._waiting)

    def acquire(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def release(self) -> None:
        """Return a permit: the thread that has waited longest has it now."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1


class PermitHolder(Protocol):
    """Who works with a permit. It may be taken away before the work is done."""

    def hold(self, permit: Permits) -> None: ...

    def release(self) -> Permits | None:
        """The permit that it has, which it no longer has after that."""


class ViewPermits:
    """The permits of all views of a pipeline."""

    def __init__(self) -> None:
        self._together = Permits(limits.VIEWS_AT_ONCE)
        self._behind = Permits(limits.VIEWS_BEHIND_AT_ONCE)

    @contextmanager
    def held(self, worker: PermitHolder, *, is_behind: bool) -> Iterator[None]:
        permit = self._behind if is_behind else self._together
        permit.acquire()
        worker.hold(permit)
        try:
            yield
        finally:
            if (still := worker.release()) is not None:
                still.release()
