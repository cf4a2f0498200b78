"""The connections that all views of a pipeline write over: a few, shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock

import psycopg

from headwater import limits
from headwater.database import connect_blocking, translate
from headwater.pipeline.views.storage.shown import Database


class ViewConnections:
    """At most `limits.VIEW_CONNECTIONS_MAX` connections; a thread waits for a free one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._free: list[Database] = []
        self._lock = Lock()
        self._permits = BoundedSemaphore(limits.VIEW_CONNECTIONS_MAX)
        self._is_closed = False

    @contextmanager
    def transaction(self) -> Iterator[Database]:
        """A transaction. Raises the driver's errors."""
        with self._permits:
            database = self._taken()
            try:
                with database.transaction():
                    yield database
            finally:
                self._give_back(database)

    def _taken(self) -> Database:
        with self._lock:
            while self._free:
                database = self._free.pop()
                if not database.closed:
                    return database
        return connect_blocking(
            self.url,
            purpose="pipeline",
            prepare_threshold=2,
            # To replace all rows of a view may take long.
            has_timeouts=False,
            # A batch is on disk when the view says that it has it.
            options="-c jit=off -c synchronous_commit=on -c work_mem=32MB"
            f" -c lock_timeout={limits.VIEW_LOCK_SECONDS * 1000:.0f}",
        )

    def _give_back(self, database: Database) -> None:
        with self._lock:
            if not self._is_closed and not database.closed:
                self._free.append(database)
                return
        database.close()

    def close(self) -> None:
        """Close the free connections, and the others when they are given back."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for database in free:
            database.close()


def translated(error: psycopg.Error, url: str, view: str) -> Exception:
    """The error for the user, which names the view."""
    found = translate(error, url)
    return type(found)(f"view {view}: {found}", hint=found.hint)
