"""Periodic work: trims the log, tickets and finished requests, captures altered tables, and warns
of cursors that the log will soon be trimmed past.

Any number of processes may run this loop; a lock lets one of them work at a time.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import timedelta

import msgspec
import psycopg

from headwater.database import Connection, connect, translated
from headwater.errors import HeadwaterError
from headwater.limits import (
    CURSOR_WARNING_SHARE,
    MAINTENANCE_SECONDS,
    REQUESTS_TRIM_BATCH,
)
from headwater.log import cursors

_MAINTENANCE_LOCK_TIMEOUT = "1s"
"""How long maintenance may wait for a user's table; then it tries again next time."""

_REQUESTS_TRIM_BATCHES_MAX = 1_000
"""Transactions in which one round of maintenance removes expired idempotency keys. The next round
removes the rest."""


logger = logging.getLogger(__name__)

MAINTENANCE_LOCK = (1752654962, 3)  # see headwater.lock_class() in 002_waking.sql


class MaintenanceRound(msgspec.Struct, frozen=True):
    """What one round did."""

    slots_emptied: int = 0
    tables_synced: int = 0


async def run(url: str, *, every: float = MAINTENANCE_SECONDS) -> None:
    """Do a round every `every` seconds, for ever; a failed one is logged and tried again."""
    while True:
        try:
            connection = await connect(url, purpose="maintenance")
            try:
                await once(connection)
            finally:
                await connection.close()
        except (psycopg.Error, HeadwaterError, ValueError) as error:
            logger.warning("maintenance failed, trying again in %.0f s: %s", every, error)
        await asyncio.sleep(every)


async def set_retention(connection: Connection, keep: timedelta) -> None:
    """Set how long the log keeps a change."""
    with translated():
        await connection.execute(
            "select headwater.set_retention(%(keep)s) from headwater.installation"
            " where retention <> %(keep)s",
            {"keep": keep},
        )


async def once(connection: Connection) -> MaintenanceRound:
    """One round. Does nothing while another process does one, or for a role that only reads."""
    cursor = await connection.execute(
        "select pg_has_role(nspowner, 'MEMBER') from pg_namespace where nspname = 'headwater'"
    )
    if (await cursor.fetchone()) != (True,):
        return MaintenanceRound()
    cursor = await connection.execute("select pg_try_advisory_lock(%s, %s)", MAINTENANCE_LOCK)
    if (await cursor.fetchone()) != (True,) and not await _held_by_stranger(connection):
        return MaintenanceRound()
    try:
        emptied = await _call(connection, "trim_log")
        synced = await _call(connection, "sync_tables")
        await _call(connection, "trim_source_transactions")
        await _call(connection, "drop_wal_slots")
        await _call(connection, "trim_tickets")
        await _trim_requests(connection)
        await _warn_of_late_cursors(connection)
        return MaintenanceRound(emptied, synced)
    finally:
        # A lost connection releases the lock, and must not hide the error that ended the round.
        with suppress(psycopg.Error):
            await connection.execute("select pg_advisory_unlock(%s, %s)", MAINTENANCE_LOCK)


async def _held_by_stranger(connection: Connection) -> bool:
    """Every role can take an advisory lock. One that may not do maintenance does not block it: each
    step has locks of its own."""
    cursor = await connection.execute(
        "select pid, role from headwater.lock_holders() where number = %s and not is_ours",
        MAINTENANCE_LOCK[1:],
    )
    row = await cursor.fetchone()
    if row is None:
        return False
    logger.warning("process %s of role %s holds the maintenance lock; continuing without it", *row)
    return True


async def _call(connection: Connection, function: str) -> int:
    """A step in its own transaction. One that would wait for a user's table is skipped."""
    try:
        async with connection.transaction():
            await connection.execute(f"set local lock_timeout = '{_MAINTENANCE_LOCK_TIMEOUT}'")
            cursor = await connection.execute(f"select headwater.{function}()")
            row = await cursor.fetchone()
            return int(row[0]) if row else 0
    except psycopg.errors.LockNotAvailable:
        logger.info("maintenance step %s: a table is in use; the next round tries again", function)
        return 0
    except psycopg.errors.ObjectInUse as error:
        # Another role holds the lock of one step (`headwater.take_turn`): the others are done.
        logger.warning("maintenance step %s is skipped: %s", function, error.diag.message_primary)
        return 0


async def _trim_requests(connection: Connection) -> None:
    """In batches, each in its own transaction, until no expired request is left."""
    for _ in range(_REQUESTS_TRIM_BATCHES_MAX):
        if await _call(connection, "trim_requests") < REQUESTS_TRIM_BATCH:
            return


async def _warn_of_late_cursors(connection: Connection) -> None:
    cursor = await connection.execute("select retention from headwater.installation")
    row = await cursor.fetchone()
    retention: timedelta = row[0] if row else timedelta()
    for known in await cursors.list_all(connection):
        if known.lost:
            logger.error(
                "cursor %s is lost: the log was trimmed past it, its consumer must resync",
                known.name,
            )
        elif known.left is not None and known.left < retention * CURSOR_WARNING_SHARE:
            logger.warning(
                "cursor %s will be lost in %s: the log is trimmed past it then",
                known.name,
                known.left,
            )
