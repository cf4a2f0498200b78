"""A connection to a SQLite file in a thread of its own, so that the event loop never waits for a
disk or a lock. Errors of the driver are translated here.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

from headwater.capture.sqlite.values import decode_text
from headwater.errors import SourceError, SourceRefused, SourceUnavailable

T = TypeVar("T")

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_BROKEN = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_READ_ONLY = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)


class Busy(SourceUnavailable):
    """Another program holds a lock for longer than the busy timeout."""


class FileReplaced(SourceUnavailable):
    """The path leads to another file than the one that is open."""


def path_of(url: str) -> Path:
    """The file of `sqlite:///relative.db` or `sqlite:////absolute.db`, as an absolute path.

    >>> path_of("sqlite:////var/lib/a%20shop.db")
    PosixPath('/var/lib/a shop.db')
    """
    scheme, _, rest = url.partition("://")
    name = unquote(rest[1:]) if rest.startswith("/") else ""
    if scheme != "sqlite" or not name or ":memory:" in name or "?" in name or "\x00" in name:
        raise SourceRefused(
            "the URL of a SQLite source names no file"
            + (": a database in memory belongs to one process" if ":memory:" in name else ""),
            hint="Use sqlite:///relative.db or sqlite:////absolute/path.db.",
        )
    return Path(name).absolute()


class FileConnection:
    """Opens the file when it is first used."""

    def __init__(self, path: Path, busy_seconds: float) -> None:
        self.path = path
        self._busy_seconds = busy_seconds
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="headwater-sqlite")
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._is_closed = False

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call a function with the connection, in its thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._call, function
        )

    def _call(self, function: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._db is None:
                self._db = self._open()
            self._check_identity()
            return function(self._db)
        except SourceError:
            raise
        except (sqlite3.Error, OSError) as error:
            raise translated(self.path, error) from error

    def _open(self) -> sqlite3.Connection:
        # Any program may have created the file; we never do.
        db = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode=rw",
            uri=True,
            timeout=self._busy_seconds,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=32,
        )
        self._identity = _identity(self.path)
        db.text_factory = decode_text
        return db

    def _check_identity(self) -> None:
        if _identity(self.path) == self._identity:
            return
        assert self._db is not None
        self._db.close()
        self._db = None
        raise FileReplaced(
            f"the SQLite file {str(self.path)!r} was replaced by another file",
            hint="Headwater opens the new file.",
        )

    async def close(self) -> None:
        """End the thread, after what it does now."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.interrupt()
        closing = asyncio.get_running_loop().run_in_executor(self._executor, self._close)
        await asyncio.shield(closing)
        self._executor.shutdown(wait=True)

    def _close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def translated(path: Path, error: Exception) -> SourceError:
    """The error of the driver as one that says what to do."""
    name = f"the SQLite file {str(path)!r}"
    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    if isinstance(error, OSError) or primary == sqlite3.SQLITE_CANTOPEN:
        missing = isinstance(error, FileNotFoundError) or not path.exists()
        reason = "does not exist" if missing else f"cannot be opened ({error})"
        return SourceUnavailable(f"{name} {reason}", hint="Check the path and its rights.")
    if primary in _BUSY:
        return Busy(f"{name} is locked by another program", hint="Its transactions are long.")
    if primary in _BROKEN:
        return SourceRefused(f"{name} cannot be read: {error}", hint="Is it a SQLite database?")
    if primary in _READ_ONLY:
        return SourceRefused(
            f"{name} cannot be written: {error}",
            hint="Capture writes triggers and a queue into the file; grant the right to write to"
            " it and to its folder.",
        )
    return SourceUnavailable(f"{name}: {error}")
