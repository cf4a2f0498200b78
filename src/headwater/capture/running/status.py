"""What is known about a running source, and writing it to `headwater.sources`.

A runner changes its `Status` as often as it likes. One task writes what has changed, about once a
second, over a connection of its own: the table is reactive, and each write is a change in the log.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime

import msgspec
import psycopg

from headwater.capture.mirror.registry import State, TableState
from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.limits import SOURCE_STATUS_SECONDS


class Status(msgspec.Struct):
    """A row of `headwater.sources`, and the speed of the copy."""

    name: str
    kind: str
    into_schema: str
    feed_only: bool
    state: State = "waiting"
    tables: tuple[TableState, ...] = ()
    position: str | None = None
    committed_at: datetime | None = None
    lag: float | None = None
    error: str | None = None
    hint: str | None = None
    changes: int = 0
    transactions: int = 0
    lag_bytes: int | None = None
    warning: str | None = None
    runner: str | None = None

    def enter(self, state: State, error: BaseException | None = None) -> None:
        """Change the state; the error is the reason for it, or none."""
        self.state = state
        self.error = None if error is None else str(error) or type(error).__name__
        self.hint = getattr(error, "hint", None)


def runner_name() -> str:
    """How this process is shown: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


class StatusWriter:
    """Writes the rows of several sources."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Connection | None = None
        self._written: dict[str, bytes] = {}
        self._statuses: dict[str, Status] = {}
        self._lock = asyncio.Lock()

    def add(self, status: Status) -> None:
        self._statuses[status.name] = status

    def remove(self, name: str) -> None:
        self._statuses.pop(name, None)
        self.forget(name)

    def forget(self, name: str) -> None:
        """Its row was written by somebody else: write it again, even if nothing has changed."""
        self._written.pop(name, None)

    async def run(self) -> None:
        """For ever; a failure is repeated later with what is known then."""
        while True:
            await asyncio.sleep(SOURCE_STATUS_SECONDS)
            with suppress(psycopg.Error, HeadwaterError):
                await self.write()

    async def write(self) -> None:
        """Write what has changed, now."""
        async with self._lock:
            changed = list(self._changed_rows(self._statuses.values()))
            if not changed:
                return
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = await connect(self._url, purpose="sources")
                for status, row in changed:
                    await self._connection.execute(_WRITE, _values(status))
                    self._written[status.name] = row
            except psycopg.Error:
                await self._close()
                raise

    async def close(self) -> None:
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    def _changed_rows(self, statuses: Iterable[Status]) -> Iterable[tuple[Status, bytes]]:
        for status in list(statuses):
            row = msgspec.msgpack.encode(status)
            if row != self._written.get(status.name):
                yield status, row


def _values(status: Status) -> dict[str, object]:
    values = msgspec.structs.asdict(status)
    values["tables"] = msgspec.json.encode(status.tables).decode()
    return values


_NAMES = [name for name in Status.__struct_fields__ if name != "name"]

_WRITE = f"""
    insert into headwater.sources (name, {", ".join(_NAMES)})
    select %(name)s, {
    ", ".join(f"%({name})s" + ("::json" if name == "tables" else "") for name in _NAMES)
}
    where exists (select from headwater.source_definitions where name = %(name)s)
    on conflict (name) do update
    set ({", ".join(_NAMES)}, updated_at)
      = ({", ".join(f"excluded.{name}" for name in _NAMES)}, clock_timestamp())
"""
