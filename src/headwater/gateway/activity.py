"""Writes the activity of a gateway to the table `headwater.activity`, while an admin follows it.

Every period it writes a row for the gateway, which also shows that it is alive, and a row for each
of its costliest sessions and views, if that row changed. The gateway at which an admin follows the
table holds a lock in the database, which the other gateways check. While no admin follows the
table, the only cost is that check. While live queries lag the table is written too, for `headwater
status`. Errors are logged and the write is tried again; clients do not notice them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import psycopg

from headwater.database import Connection as Database
from headwater.database import connect, translate
from headwater.errors import HeadwaterError
from headwater.gateway.connection import GatewayConnection
from headwater.gateway.usage import Entry, UsageReport
from headwater.hub.hub import Hub
from headwater.metrics import Metrics

ACTIVITY_PERIOD = timedelta(seconds=2)
"""How often a gateway writes its activity."""

_ACTIVITY_SILENT_PERIODS = 5
"""After this many periods in which a gateway wrote nothing, the others remove its rows."""

_ACTIVITY_SECONDS_MAX = 10.0
"""How long one write may take. Then it is cancelled, and tried again in the next period."""


logger = logging.getLogger(__name__)

TABLE = ("headwater", "activity")

_DELETE = "delete from headwater.activity where gateway = %s"
_EXISTS = "select from headwater.activity where gateway = %s and kind = 'gateway'"


class Activity:
    """The activity of one gateway. `connections` returns its current sessions."""

    def __init__(
        self,
        hub: Hub,
        metrics: Metrics,
        connections: Callable[[], Iterable[GatewayConnection]],
        period: timedelta,
    ) -> None:
        self.gateway = secrets.token_hex(4)
        """The id of this gateway in the table."""
        self.usage = UsageReport(self.gateway, hub, metrics, connections)
        self._hub = hub
        self.period = period
        self._database: Database | None = None
        self._written: dict[tuple[str, str], Entry] = {}
        self._has_rows = False
        """Whether the table may have rows of this gateway."""
        self._holds_lock = False
        self._wake = asyncio.Event()
        self._problem = ""

    def wake(self) -> None:
        """An admin has started to follow the table: write it now."""
        self._wake.set()

    async def run(self) -> None:
        """Runs for ever; deletes its rows when it is cancelled."""
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.period.total_seconds()):
                        await self._wake.wait()
                self._wake.clear()
                await self._try_round()
        finally:
            with suppress(psycopg.Error, HeadwaterError, TimeoutError):
                async with asyncio.timeout(_ACTIVITY_SECONDS_MAX):
                    await self._leave()

    async def _try_round(self) -> None:
        try:
            async with asyncio.timeout(_ACTIVITY_SECONDS_MAX):
                await self.round()
        except asyncio.CancelledError:
            await self._drop()  # The state of the connection is unknown.
            raise
        except (psycopg.Error, HeadwaterError, TimeoutError) as error:
            await self._drop()
            found = translate(error) if isinstance(error, psycopg.Error) else error
            problem = str(found) or "the database did not answer in time"
            if self._problem != problem:  # logged once
                self._problem = problem
                logger.warning("cannot write the table headwater.activity: %s", problem)
        except Exception:
            await self._drop()
            logger.exception("cannot write the table headwater.activity")
        else:
            self._problem = ""

    async def round(self) -> None:
        """Write what has changed, if an admin follows the table or live queries lag; otherwise
        delete the rows of this gateway."""
        ours = self._hub.live_views.is_followed(*TABLE)
        if self._holds_lock and not ours:
            await (await self._connected()).execute("select pg_advisory_unlock_all()")
            self._holds_lock = False
        if ours or self._hub.live_views.lagged() or await self._others_follow():
            database = await self._connected()
            if ours and not self._holds_lock:
                await database.execute("select headwater.looks_at_activity()")
                self._holds_lock = True
            await self._write(database)
        else:
            await self._leave()

    async def _others_follow(self) -> bool:
        if not self._hub.ready:
            return False
        rows = await self._hub.tables.ask("select headwater.is_activity_looked_at()", None)
        return bool(rows[0][0])

    # -------------------------------------------------------------------- writing

    async def _write(self, database: Database) -> None:
        entries = {entry.mark: entry for entry in await self.usage.entries()}
        if not await self._exists(database):
            # Rows of this gateway in the table are from before an error.
            self._written = {}
            await database.execute(_DELETE, (self.gateway,))
        changed = [entry for mark, entry in entries.items() if self._written.get(mark) != entry]
        removed = [{"kind": kind, "id": id} for kind, id in self._written.keys() - entries.keys()]
        silence = self.period * _ACTIVITY_SILENT_PERIODS
        values = (self.gateway, _text(changed), _text(removed), silence)
        self._has_rows = True
        await database.execute("select headwater.write_activity(%s, %s, %s, %s)", values)
        self._written = entries

    async def _exists(self, database: Database) -> bool:
        """Whether the rows that were written still exist. Another gateway may have deleted them
        because it took this one for dead."""
        if not self._written:
            return False
        return await (await database.execute(_EXISTS, (self.gateway,))).fetchone() is not None

    async def _leave(self) -> None:
        """Delete the rows, and release the lock by closing the connection."""
        if self._has_rows:
            await (await self._connected()).execute(_DELETE, (self.gateway,))
            self._has_rows = False
        await self._drop()

    async def _connected(self) -> Database:
        if self._database is None:
            # Rows that are lost in a crash of the server are written again.
            options = "-c synchronous_commit=off"
            self._database = await connect(self._hub.url, purpose="activity", options=options)
        return self._database

    async def _drop(self) -> None:
        database, self._database = self._database, None
        self._written, self._holds_lock = {}, False
        if database is not None:
            await database.close()


_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def _text(value: Any) -> str:
    """JSON for PostgreSQL, whose texts cannot have a NUL: it becomes U+FFFD."""
    return _NUL.sub(r"\1\\ufffd", msgspec.json.encode(value).decode())
