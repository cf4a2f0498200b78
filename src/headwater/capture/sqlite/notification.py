"""Waking when a file changes: inotify on Linux, through ctypes; elsewhere nothing wakes.

A notification may come before the change can be read, because SQLite writes the file first and
makes the commit visible afterwards, so a reader that was woken tries again at short intervals.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, 0o2000000
_MODIFY, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x80, 0x100, 0x200
_EVENT = struct.Struct("iIII")

POLL_SECONDS_MIN, POLL_SECONDS_MAX = 0.001, 0.5


class FileWatch:
    """Waits for a change of a database file, its WAL or its journal."""

    def __init__(self, path: Path) -> None:
        self._names = {os.fsencode(path.name + end) for end in ("", "-wal", "-journal")}
        self._changed = asyncio.Event()
        self._fd = _open_watch(path.absolute().parent)
        if self._fd is not None:
            try:
                asyncio.get_running_loop().add_reader(self._fd, self._read)
            except NotImplementedError:  # a loop that cannot wait for files
                os.close(self._fd)
                self._fd = None

    @property
    def notifies(self) -> bool:
        return self._fd is not None

    async def wait(self, seconds: float) -> bool:
        """Until a change or for this long. Returns whether there was a notification."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def _read(self) -> None:
        assert self._fd is not None
        with suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                if self._is_about_us(data):
                    self._changed.set()

    def _is_about_us(self, data: bytes) -> bool:
        at = 0
        while at < len(data):
            _, _, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            if data[at : at + length].rstrip(b"\0") in self._names:
                return True
            at += length
        return False

    def close(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


def _open_watch(folder: Path) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd: int = libc.inotify_init1(_NONBLOCK | _CLOEXEC)
    except (OSError, AttributeError):
        return None
    if fd < 0:
        return None
    mask = _MODIFY | _MOVED_TO | _CREATE | _DELETE
    if libc.inotify_add_watch(fd, os.fsencode(folder), mask) < 0:
        os.close(fd)
        return None
    return fd
