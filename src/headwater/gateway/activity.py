"""Writes down what a gateway is busy with, in the table `headwater.activity`, while an admin looks.

Every period: a row for the gateway, which is also the sign that it is alive, and a row for each of
its costliest sessions and views, if it differs from what was written last. Who looks is known to
the gateway that an admin follows the table at; a lock in the database tells the others. While
nobody looks nothing is written, and the question whether anybody does is all that it costs; but
while live queries lag it is written too, for `headwater status`. What goes wrong here is no trouble
of anybody's: it is logged, and tried again.
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
from headwater.gateway.census import Census, Entry
from headwater.gateway.connection import Connection
from headwater.hub.hub import Hub
from headwater.limits import ACTIVITY_SECONDS_MAX, ACTIVITY_SILENT_PERIODS
from headwater.metrics import Metrics

logger = logging.getLogger(__name__)

TABLE = ("headwater", "activity")

_DELETE = "delete from headwater.activity where gateway = %s"
_KNOWN = "select from headwater.activity where gateway = %s and kind = 'gateway'"


class Activity:
    """That of one gateway. `connections` are its sessions at the moment."""

    def __init__(
        self,
        hub: Hub,
        metrics: Metrics,
        connections: Callable[[], Iterable[Connection]],
        period: timedelta,
    ) -> None:
        self.gateway = secrets.token_hex(4)
        """What this gateway is called in the table."""
        self.census = Census(self.gateway, hub, metrics, connections)
        self._hub = hub
        self._period = period
        self._database: Database | None = None
        self._written: dict[tuple[str, str], Entry] = {}
        self._has_rows = False
        """Whether there may be rows of ours."""
        self._holds = False
        self._wake = asyncio.Event()
        self._trouble = ""

    def look(self) -> None:
        """Somebody has begun to follow the table: have it filled at once."""
        self._wake.set()

    async def run(self) -> None:
        """For ever. Ended, it takes its rows away."""
        if not self._period:
            return
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._period.total_seconds()):
                        await self._wake.wait()
                self._wake.clear()
                await self._try_round()
        finally:
            with suppress(psycopg.Error, HeadwaterError, TimeoutError):
                async with asyncio.timeout(ACTIVITY_SECONDS_MAX):
                    await self._leave()

    async def _try_round(self) -> None:
        try:
            async with asyncio.timeout(ACTIVITY_SECONDS_MAX):
                await self.round()
        except asyncio.CancelledError:
            await self._drop()  # In which state it is now nobody knows.
            raise
        except (psycopg.Error, HeadwaterError, TimeoutError) as error:
            await self._drop()
            found = translate(error) if isinstance(error, psycopg.Error) else error
            trouble = str(found) or "it takes too long"
            if self._trouble != trouble:  # told once
                self._trouble = trouble
                logger.warning("activity cannot be written down: %s", trouble)
        except Exception:
            await self._drop()
            logger.exception("activity cannot be written down")
        else:
            self._trouble = ""

    async def round(self) -> None:
        """Write down what has changed, if an admin looks or live queries lag; otherwise take away
        what is there."""
        ours = self._hub.lives.is_followed(*TABLE)
        if self._holds and not ours:
            await (await self._connected()).execute("select pg_advisory_unlock_all()")
            self._holds = False
        if ours or self._hub.lives.lagged() or await self._others_look():
            database = await self._connected()
            if ours and not self._holds:
                await database.execute("select headwater.looks_at_activity()")
                self._holds = True
            await self._write(database)
        else:
            await self._leave()

    async def _others_look(self) -> bool:
        if not self._hub.ready:
            return False
        rows = await self._hub.tables.ask("select headwater.is_activity_looked_at()", None)
        return bool(rows[0][0])

    # -------------------------------------------------------------------- writing

    async def _write(self, database: Database) -> None:
        entries = {entry.mark: entry for entry in await self.census.entries()}
        if not await self._is_known(database):
            # Rows of ours that may be there are of before something went wrong.
            self._written = {}
            await database.execute(_DELETE, (self.gateway,))
        news = [entry for mark, entry in entries.items() if self._written.get(mark) != entry]
        gone = [{"kind": kind, "id": id} for kind, id in self._written.keys() - entries.keys()]
        silence = self._period * ACTIVITY_SILENT_PERIODS
        values = (self.gateway, _text(news), _text(gone), silence)
        self._has_rows = True
        await database.execute("select headwater.write_activity(%s, %s, %s, %s)", values)
        self._written = entries

    async def _is_known(self, database: Database) -> bool:
        """Whether what we remember to have written is there. Another gateway may have taken us for
        dead, and taken our rows away."""
        if not self._written:
            return False
        return await (await database.execute(_KNOWN, (self.gateway,))).fetchone() is not None

    async def _leave(self) -> None:
        """Take the rows away, and with the connection the lock."""
        if self._has_rows:
            await (await self._connected()).execute(_DELETE, (self.gateway,))
            self._has_rows = False
        await self._drop()

    async def _connected(self) -> Database:
        if self._database is None:
            # What is lost in a crash of the server is written again.
            options = "-c synchronous_commit=off"
            self._database = await connect(self._hub.url, purpose="activity", options=options)
        return self._database

    async def _drop(self) -> None:
        database, self._database = self._database, None
        self._written, self._holds = {}, False
        if database is not None:
            await database.close()


_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def _text(value: Any) -> str:
    """As JSON that PostgreSQL takes: a NUL, which no text there can have, is told as unknown."""
    return _NUL.sub(r"\1\\ufffd", msgspec.json.encode(value).decode())
