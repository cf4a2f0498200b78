"""Enables and disables capture for a table, by triggers or from the write-ahead log, and lists the
captured tables."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from datetime import datetime
from typing import Literal, LiteralString, TypeAlias, get_args

import msgspec
import psycopg
from psycopg import errors
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus

from headwater.capture.postgres.wal.append import WalCapture
from headwater.database import Connection, translated
from headwater.errors import CaptureError, ConfigError
from headwater.limits import ENABLE_ATTEMPTS_MAX, ENABLE_LOCK_TIMEOUT, WAL_DRAIN_SECONDS
from headwater.model import Column, Table

logger = logging.getLogger(__name__)

Capture: TypeAlias = Literal["trigger", "wal"]
"""How the changes of a table reach the log."""


class CapturedTable(msgspec.Struct, frozen=True):
    """A table that was enabled. `members` counts the relations with triggers: itself, partitions,
    inheritance children. `altered` means that its writes are captured more slowly since a schema
    change (and as exactly), until the next maintenance or until it is enabled again. `left_out` are
    its virtual columns, which are not captured. `capture` says how its changes reach the log."""

    name: str
    enabled: bool
    exists: bool
    changed_at: datetime
    members: int
    altered: bool
    changes: int
    left_out: list[str] = []
    capture: Capture = "trigger"


async def enable(connection: Connection, name: str, capture: Capture | None = None) -> str:
    """Capture a table's changes from now on; returns its name as Headwater prints it. Enabling a
    table twice changes nothing. Without `capture`, a table that is captured stays as it is, and
    another one is captured by triggers."""
    if capture is None:
        return await _call(connection, "select headwater.enable_reactivity(%s)", name)
    if capture not in get_args(Capture):
        raise ConfigError(
            f"capture={capture!r} of table {name} is not known", hint="It is 'trigger' or 'wal'."
        )
    if capture == "wal":
        return await _enable_wal(connection, name)
    label = await _call(connection, "select headwater.enable_reactivity(%s, 'trigger')", name)
    await end_wal_capture(connection)
    return label


async def _enable_wal(connection: Connection, name: str) -> str:
    slot = await _make_slot(connection, name)
    try:
        return await _call(
            connection, "select headwater.enable_reactivity(%s, 'wal', %s)", name, slot
        )
    except BaseException:
        with suppress(psycopg.Error):  # a slot that was made for nothing
            await connection.execute("select headwater.drop_wal_slot(%s)", (slot,))
        raise


async def _make_slot(connection: Connection, name: str) -> str:
    """Before the table is locked: making a slot waits for all transactions that are running."""
    with translated():
        await connection.execute(
            "select headwater.check_wal("
            "headwater.check_capturable(headwater.find_table(%(name)s), %(name)s))",
            {"name": name},
        )
        await connection.execute("select headwater.make_wal_publication()")
        cursor = await connection.execute("select headwater.make_wal_slot()")
        row = await cursor.fetchone()
    assert row is not None
    return str(row[0])


async def disable(connection: Connection, name: str) -> str:
    """Stop capturing. Subscriptions stay; they get no changes until it is enabled again."""
    label = await _call(connection, "select headwater.disable_reactivity(%s)", name)
    await end_wal_capture(connection)
    return label


async def end_wal_capture(connection: Connection) -> None:
    """If no table is captured from the WAL and no process reads the slot, append what is unread,
    and drop the slot and the publication. A process that reads the slot does this itself."""
    if connection.info.transaction_status != TransactionStatus.IDLE:
        return
    with translated():
        cursor = await connection.execute(_UNUSED_SLOT)
        if await cursor.fetchone() is None:
            return
    url = make_conninfo(connection.info.dsn, password=connection.info.password or None)
    try:
        async with asyncio.timeout(WAL_DRAIN_SECONDS):
            await WalCapture(url, leaves_when_idle=True).run()
    except TimeoutError:
        logger.warning(
            "WAL capture: changes from before the last table was disabled are not in the log yet;"
            " a gateway (headwater serve) appends them and drops the slot"
        )


_UNUSED_SLOT = """
    select from headwater.installation i
    left join pg_replication_slots s on s.slot_name = i.wal_slot
    where i.wal_slot is not null and s.active is not true
      and not exists (select from headwater.tables where enabled and capture = 'wal')
      and (select pg_has_role(nspowner, 'MEMBER') from pg_namespace where nspname = 'headwater')
"""


async def _call(connection: Connection, statement: LiteralString, *values: str) -> str:
    """To create triggers needs a lock on the table, and writers queue behind that request: so it is
    made several times with a short timeout."""
    with translated():
        for attempt in range(1, ENABLE_ATTEMPTS_MAX + 1):
            try:
                async with connection.transaction():
                    await connection.execute(f"set local lock_timeout = '{ENABLE_LOCK_TIMEOUT}'")
                    cursor = await connection.execute(statement, values)
                    row = await cursor.fetchone()
                    assert row is not None
                    return str(row[0])
            except errors.LockNotAvailable as error:
                if attempt == ENABLE_ATTEMPTS_MAX:
                    raise CaptureError(
                        f"table {values[0]} is in use: a transaction holds a lock on it",
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
                   where k.root = t.relid and t.capture = 'trigger'
                     and k.fingerprint is distinct from headwater.fingerprint(k.member, k.root))
             or (t.enabled and c.oid is not null and exists (
                   select from headwater.members_of(t.relid) m
                   where m not in (select member from headwater.captures))),
           (select count(*) from headwater.log l
            where l.at > now() - interval '1 hour'
              and l.shape in (select id from headwater.shapes s where s.relid = t.relid)),
           array(select a.attname::text from pg_attribute a
                 where a.attrelid = t.relid and a.attnum > 0 and not a.attisdropped
                   and a.attgenerated = 'v' order by a.attnum),
           t.capture
    from headwater.tables t
    left join pg_class c on c.oid = t.relid
    order by 1
"""
