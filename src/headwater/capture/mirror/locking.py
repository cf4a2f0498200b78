"""Locks that conflict with readers of a mirror: those of ALTER, TRUNCATE and CREATE TRIGGER.

While one is waited for, other readers queue behind it. So it is waited for briefly. What blocks it
is found out afterwards, over another connection: the transaction has failed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import errors

from headwater.database import Connection
from headwater.errors import CaptureError
from headwater.limits import SOURCE_LOCK_SECONDS


class MirrorLocked(CaptureError):
    """A lock was not granted. `relid` is the mirror, `table` its name."""

    def __init__(self, relid: int, table: str) -> None:
        super().__init__(f"the mirror {table} is locked by another session")
        self.relid = relid
        self.table = table


@asynccontextmanager
async def brief_locks(connection: Connection, relid: int, table: str) -> AsyncIterator[None]:
    """Inside of a transaction: locks are waited for briefly. Raises MirrorLocked."""
    await connection.execute(
        f"set local lock_timeout = '{SOURCE_LOCK_SECONDS * 1000:.0f}ms'".encode()
    )
    try:
        yield
    except errors.LockNotAvailable:
        raise MirrorLocked(relid, table) from None
    await connection.execute("set local lock_timeout = 0")


async def explained(connection: Connection, locked: MirrorLocked) -> CaptureError:
    """The error with the sessions that have the table, and the way out."""
    cursor = await connection.execute(_HOLDERS, (locked.relid,))
    holders = await cursor.fetchall()
    if not holders:
        return CaptureError(str(locked), hint="It is tried again.")
    table = holders[0][3]
    names = ", ".join(f"process {pid} of role {role} ({state})" for pid, role, state, _ in holders)
    ends = "; ".join(f"select pg_terminate_backend({pid})" for pid, *_ in holders)
    return CaptureError(
        f"the mirror {table} must be altered, and is in use by {names}",
        hint=f"Changes of the source wait until that transaction ends. To end it: {ends}",
    )


_HOLDERS = """
    select distinct a.pid, a.usename::text, coalesce(a.state, 'unknown'), l.relation::regclass::text
    from pg_locks l join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'relation' and l.granted and l.relation = %s::bigint::oid
      and l.database = (select oid from pg_database where datname = current_database())
      and l.pid <> pg_backend_pid() and a.query not like 'autovacuum:%%'
    order by 1
"""
