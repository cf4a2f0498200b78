"""Enables and disables capture for a table, and lists the captured tables."""

from __future__ import annotations

import asyncio
import random
from datetime import datetime
from typing import LiteralString

import msgspec
from psycopg import errors

from headwater.database import Connection, translated
from headwater.errors import CaptureError
from headwater.limits import ENABLE_ATTEMPTS_MAX, ENABLE_LOCK_TIMEOUT
from headwater.model import Column, Table


class CapturedTable(msgspec.Struct, frozen=True):
    """A table that was enabled. `members` counts the relations with triggers: itself, partitions,
    inheritance children. `altered` means that its writes are captured more slowly since a schema
    change (and as exactly), until the next maintenance or until it is enabled again. `left_out` are
    its virtual columns, which are not captured."""

    name: str
    enabled: bool
    exists: bool
    changed_at: datetime
    members: int
    altered: bool
    changes: int
    left_out: list[str] = []


async def enable(connection: Connection, name: str) -> str:
    """Capture a table's changes from now on; returns its name as Headwater prints it. Enabling a
    table twice changes nothing."""
    return await _call(connection, "select headwater.enable_reactivity(%s)", name)


async def disable(connection: Connection, name: str) -> str:
    """Stop capturing. Subscriptions stay; they get no changes until it is enabled again."""
    return await _call(connection, "select headwater.disable_reactivity(%s)", name)


async def _call(connection: Connection, statement: LiteralString, name: str) -> str:
    """To create triggers needs a lock on the table, and writers queue behind that request: so it is
    made several times with a short timeout."""
    with translated():
        for attempt in range(1, ENABLE_ATTEMPTS_MAX + 1):
            try:
                async with connection.transaction():
                    await connection.execute(f"set local lock_timeout = '{ENABLE_LOCK_TIMEOUT}'")
                    cursor = await connection.execute(statement, (name,))
                    row = await cursor.fetchone()
                    assert row is not None
                    return str(row[0])
            except errors.LockNotAvailable as error:
                if attempt == ENABLE_ATTEMPTS_MAX:
                    raise CaptureError(
                        f"table {name} is in use: a transaction holds a lock on it",
                        hint="Find the open transaction in pg_stat_activity, and try again.",
                    ) from error
                await asyncio.sleep(random.uniform(0.05, 0.2))
    raise AssertionError


async def find_enabled(connection: Connection, name: str) -> Table:
    """A captured table as it is now."""
    with translated():
        cursor = await connection.execute(
            "select headwater.shape_id(relid), relid, headwater.describe(relid)"
            " from headwater.tables where relid = headwater.find_table(%s) and enabled",
            (name,),
        )
        row = await cursor.fetchone()
    if row is None:
        raise CaptureError(
            f"table {name} is not enabled", hint=f"Enable it first: headwater enable {name}"
        )
    id_, oid, found = row
    columns = msgspec.convert(found["columns"], tuple[Column, ...])
    key, virtual = tuple(found["key"]), tuple(found.get("virtual", ()))
    return Table(id_, found["schema"], found["name"], columns, key, oid, virtual)


async def list_tables(connection: Connection) -> list[CapturedTable]:
    with translated():
        cursor = await connection.execute(_LIST)
        rows = await cursor.fetchall()
    return [CapturedTable(*row) for row in rows]


_LIST = """
    select coalesce(headwater.label(t.relid),
                    case when t.schema_name = 'public' then t.table_name
                         else t.schema_name || '.' || t.table_name end),
           t.enabled,
           c.oid is not null,
           t.changed_at,
           (select count(*) from headwater.captures k where k.root = t.relid),
           exists (select from headwater.captures k
                   where k.root = t.relid
                     and k.fingerprint is distinct from headwater.fingerprint(k.member, k.root))
             or (t.enabled and c.oid is not null and exists (
                   select from headwater.members_of(t.relid) m
                   where m not in (select member from headwater.captures))),
           (select count(*) from headwater.log l
            where l.at > now() - interval '1 hour'
              and l.shape in (select id from headwater.shapes s where s.relid = t.relid)),
           array(select a.attname::text from pg_attribute a
                 where a.attrelid = t.relid and a.attnum > 0 and not a.attisdropped
                   and a.attgenerated = 'v' order by a.attnum)
    from headwater.tables t
    left join pg_class c on c.oid = t.relid
    order by 1
"""
