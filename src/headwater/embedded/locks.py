"""File locks that end with the process that holds them.

A `flock` belongs to an open file description: it ends when the last descriptor of it is closed,
also by SIGKILL, and two descriptions exclude each other even within one process. So every FileLock
opens its file for itself. A program started with the descriptor shares the lock, which is how the
server itself holds one (see `server`). A forked child gets copies of all descriptors; it closes
them at once, so it keeps no lock of its parent alive, and its copies of the objects are closed.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from headwater.embedded.folder import open_private

_EMBEDDED_POLL_SECONDS = (0.01, 0.1)
"""The first and the longest pause between two checks of a server that is starting or stopping."""


_open_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """One open description of a lock file, at first unlocked."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = open_private(path)
        _open_locks.add(self)

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def fileno(self) -> int:
        assert self._descriptor is not None, "the lock is closed"
        return self._descriptor

    def share(self) -> bool:
        """Take a shared lock. False if another holder has an exclusive lock."""
        return self._try(fcntl.LOCK_SH)

    def take(self) -> bool:
        """Take an exclusive lock. False if another holder has any lock."""
        return self._try(fcntl.LOCK_EX)

    def take_within(self, seconds: float) -> bool:
        return wait_until(self.take, seconds)

    def close(self) -> None:
        """Unlock, also for a forked child that has not closed its copy yet. Safe to call again."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.hand_over()

    def hand_over(self) -> None:
        """Close the file without unlocking: programs that were started with the descriptor keep the
        lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _try(self, operation: int) -> bool:
        try:
            fcntl.flock(self.fileno(), operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition became true in time. It is checked at least once."""
    return any(condition() for _ in polls(seconds))


def polls(seconds: float) -> Iterator[None]:
    """Yields until the time is over: often at first, then less often."""
    deadline = time.monotonic() + seconds
    pause, longest = _EMBEDDED_POLL_SECONDS
    yield
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(pause * 1.2, longest)
        yield


def _close_in_forked_child() -> None:
    for lock in list(_open_locks):
        lock.hand_over()


os.register_at_fork(after_in_child=_close_in_forked_child)
