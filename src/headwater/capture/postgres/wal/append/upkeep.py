"""Looks whether all changes of tables that are captured from the write-ahead log still reach it.

The publication and the tables belong to the application's database, where anyone with the right may
alter them. Then the server sends nothing, and no error either. The runner looks once a second.
"""

from __future__ import annotations

import asyncio
import logging

from psycopg.errors import Diagnostic, LockNotAvailable

from headwater.database import Connection
from headwater.errors import DatabaseError
from headwater.limits import ENABLE_LOCK_TIMEOUT

logger = logging.getLogger(__name__)

_DROP_ATTEMPTS_MAX = 50
_DROP_PAUSE_SECONDS = 0.05


async def check_slot(connection: Connection, slot: str) -> None:
    """Raise DatabaseError if the slot no longer feeds the log, or its publication is gone. When the
    runner begins again, both are made, and the tables are read again."""
    cursor = await connection.execute(_IS_USED, (slot,))
    if await cursor.fetchone() is None:
        raise DatabaseError(
            f"the publication of slot {slot} was dropped, or the slot was replaced",
            hint="It is made again, and tables that are captured from the WAL are read again.",
        )


async def drop_slot(connection: Connection, slot: str) -> None:
    """Drop a slot that feeds nothing. The server may need a moment to see that its reader has left;
    where it needs longer, maintenance drops the slot."""
    for _ in range(_DROP_ATTEMPTS_MAX):
        cursor = await connection.execute(_DROP, {"slot": slot})
        if await cursor.fetchone() == (True,):
            return
        await asyncio.sleep(_DROP_PAUSE_SECONDS)


async def sync_tables(connection: Connection) -> None:
    """Where changes of a table are not sent (it was removed from the publication, or is unlogged),
    have them captured again, with a reset. A table that is in use is tried again at the next look;
    until then each look is a reset."""
    cursor = await connection.execute(_MISSING)
    tables = [str(label) for (label,) in await cursor.fetchall()]
    if not tables:
        return
    logger.warning("WAL capture: changes of %s were not captured: read again", ", ".join(tables))
    connection.add_notice_handler(_warn)
    try:
        async with connection.transaction():
            await connection.execute(f"set local lock_timeout = '{ENABLE_LOCK_TIMEOUT}'")
            await connection.execute("select headwater.sync_tables()")
    except LockNotAvailable:
        logger.info("WAL capture: tables are being enabled; the next look tries again")
    finally:
        connection.remove_notice_handler(_warn)


def _warn(notice: Diagnostic) -> None:
    message = (notice.message_primary or "").removeprefix("headwater: ")
    logger.warning("WAL capture: %s (%s)", message, notice.message_hint or "no hint")


_IS_USED = """
    select from headwater.installation
    where wal_slot = %s
      and exists (select from pg_publication where pubname = headwater.wal_publication())
"""

_DROP = """
    select headwater.drop_wal_slot(%(slot)s)
      or not exists (select from pg_replication_slots where slot_name = %(slot)s)
"""

_MISSING = """
    select headwater.label(relid) from headwater.tables
    where enabled and capture = 'wal' and headwater.misses_changes(relid)
"""
