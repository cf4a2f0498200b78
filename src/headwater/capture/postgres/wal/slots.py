"""The replication slot: made, judged, and removed. It makes the server keep its log for us.

A slot is `ok`, `lagging` (it holds more log than a setting), `unreserved` (the server is about to
remove log that we need), `lost` (it has) or `missing`. The last two mean that changes are gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from typing import Any

import msgspec
import psycopg

from headwater.capture.postgres.wal.connecting import fetch, fetch_value, open_walsender
from headwater.capture.postgres.wal.pgoutput import parse_lsn, print_lsn
from headwater.capture.postgres.wal.positions import Position, switch_lsn
from headwater.capture.source import Health
from headwater.database import Connection
from headwater.errors import PositionLost, SourceRefused, SourceUnavailable

LAG_WARNING_BYTES = 1_000_000_000
"""The option `lag_warning_bytes`."""

RELEASE_SECONDS = 10.0
"""How long a connection that reads the slot may take to end."""


class Server(msgspec.Struct, frozen=True):
    """Which server this is, and where its log ends: inserted, and safely on disk."""

    version: int
    system: str
    timeline: int
    inserted: int
    flushed: int

    @property
    def position(self) -> Position:
        return Position(self.system, self.timeline, self.inserted)


async def read_server(connection: Connection) -> Server:
    """Fails on a standby, which `check` refuses."""
    (row,) = await fetch(connection, _SERVER)
    version, system, file, inserted, flushed, block = row
    return Server(
        version, system, int(file[:8], 16), end_of_record(parse_lsn(inserted), block),
        parse_lsn(flushed),
    )  # fmt: skip


_SERVER = """
    select current_setting('server_version_num')::int,
           (select system_identifier from pg_control_system())::text,
           pg_walfile_name(l.inserted), l.inserted::text, pg_current_wal_flush_lsn()::text,
           current_setting('wal_block_size')::int
    from (select pg_current_wal_insert_lsn() as inserted) l
"""


async def flush(connection: Connection) -> None:
    """Make the server flush its log. A commit that writes something does; a message is the least
    that can be written, and readers of the log skip it."""
    await connection.execute("set synchronous_commit = local")
    await connection.execute("select pg_logical_emit_message(true, 'headwater', '')")


def end_of_record(lsn: int, block: int) -> int:
    """Where the last record before an insert position ends. At the start of a page the position is
    behind the page's header, which no reader of the log ever reports.

    >>> [end_of_record(lsn, 8192) for lsn in (8192 + 24, 16384 + 40, 8192 + 48)]
    [8192, 16384, 8240]
    """
    return lsn - lsn % block if lsn % block in (24, 40) else lsn


class Slot(msgspec.Struct, frozen=True):
    """A row of `pg_replication_slots`; newer servers have the last fields."""

    plugin: str | None
    database: str | None
    active: bool
    active_pid: int | None
    restart_lsn: str | None
    confirmed_flush_lsn: str | None
    wal_status: str | None
    safe_wal_size: int | None = None
    conflicting: bool | None = None
    invalidation_reason: str | None = None

    @property
    def is_lost(self) -> bool:
        gone = self.wal_status == "lost" or self.restart_lsn is None
        return gone or bool(self.conflicting) or self.invalidation_reason is not None


async def read_slot(connection: Connection, name: str) -> Slot | None:
    found = await fetch_value(
        connection, "select to_jsonb(s) from pg_replication_slots s where slot_name = %s", name
    )
    return None if found is None else msgspec.convert(found, Slot)


def slot_name(source: str) -> str:
    """The slot of a source: lower-case letters, digits and underscores, at most 63.

    >>> slot_name("shop"), slot_name("Shop 2")
    ('headwater_shop', 'headwater_shop_2_f58cd829')
    """
    name = re.sub(r"[^a-z0-9_]", "_", source.lower())
    if name == source and len(name) <= 53:
        return f"headwater_{name}"
    return f"headwater_{name[:44]}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"


# ------------------------------------------------------------------------ making


async def create_slot(connection: Connection, name: str, version: int) -> int:
    """Make the slot; returns the LSN from which it can be read. Waits until transactions that run
    now have ended. A failover slot where the server has these."""
    failover = ", failover => true" if version >= 170000 else ""
    made = f"select lsn::text from pg_create_logical_replication_slot(%s, 'pgoutput'{failover})"
    return parse_lsn(await fetch_value(connection, made, name))


async def drop_slot(connection: Connection, name: str) -> None:
    """Drop it, if it exists. A connection that still reads it is ended first."""
    until = time.monotonic() + RELEASE_SECONDS
    while (slot := await read_slot(connection, name)) is not None:
        if slot.active_pid is not None:
            await connection.execute("select pg_terminate_backend(%s)", (slot.active_pid,))
        try:
            await connection.execute("select pg_drop_replication_slot(%s)", (name,))
        except psycopg.errors.UndefinedObject:
            return
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > until:
                raise SourceUnavailable(
                    f"the slot {name} is still read by process {slot.active_pid} of the source",
                    hint=f"End that process, then: select pg_drop_replication_slot('{name}').",
                ) from None
            await asyncio.sleep(0.05)


# ------------------------------------------------------------------------ judging


def judge(slot: Slot | None, server: Server, name: str, limit: int, keep_bytes: int) -> Health:
    """How the slot is. `keep_bytes` is the server's `max_slot_wal_keep_size`, -1 without."""
    if slot is None:
        return Health("missing", None, f"the slot {name} does not exist at the source. {_RECOVER}")
    if slot.is_lost:
        reason = f" ({slot.invalidation_reason})" if slot.invalidation_reason else ""
        return Health(
            "lost", None, f"the server has invalidated the slot {name}{reason}. {_RECOVER}"
        )
    assert slot.restart_lsn is not None
    lag = max(0, server.inserted - parse_lsn(slot.restart_lsn))
    if slot.wal_status == "unreserved":
        return Health(
            "unreserved", lag,
            f"the server will soon remove log that the slot {name} needs. Let the source catch up,"
            " or raise max_slot_wal_keep_size at once.",
        )  # fmt: skip
    if lag > limit:
        return Health("lagging", lag, _lag_warning(slot, name, lag, keep_bytes))
    return Health("ok", lag)


def _lag_warning(slot: Slot, name: str, lag: int, keep_bytes: int) -> str:
    size = f"the slot {name} holds {lag / 1e9:.1f} GB of the source's log"
    if keep_bytes < 0:
        return (
            f"{size}, without a bound: it will fill the disk of the server. Let the source catch up"
            " or remove it, and set max_slot_wal_keep_size."
        )
    left = "" if slot.safe_wal_size is None else f" {slot.safe_wal_size / 1e9:.1f} GB are left."
    return f"{size}, and is lost when it reaches max_slot_wal_keep_size.{left}"


_RECOVER = "Copy the tables again: headwater source resnapshot NAME"


def check_usable(slot: Slot, name: str, database: str) -> None:
    """SourceRefused if the slot belongs to something else."""
    if slot.plugin != "pgoutput" or slot.database != database:
        raise SourceRefused(
            f"the slot {name} exists and belongs to {slot.plugin} in the database {slot.database}",
            hint="Give the source the option slot with another name.",
        )


async def check_position(
    connection: Connection, url: str, name: str, position: Position, server: Server
) -> None:
    """PositionLost unless the slot has everything after the position."""
    if position.system != server.system:
        raise _lost("the URL now leads to another server (its system identifier differs)")
    slot = await read_slot(connection, name)
    if slot is None:
        raise _lost(f"the slot {name} does not exist at the source")
    if slot.is_lost:
        reason = slot.invalidation_reason or slot.wal_status or "conflict"
        raise _lost(f"the server has invalidated the slot {name} ({reason})")
    if position.timeline != server.timeline:
        await _check_history(url, position, server)
    if slot.confirmed_flush_lsn and parse_lsn(slot.confirmed_flush_lsn) > position.lsn:
        raise _lost(
            f"the slot {name} is at {slot.confirmed_flush_lsn}, beyond our position"
            f" {print_lsn(position.lsn)}"
        )
    if position.lsn > server.inserted:
        raise _lost(
            f"the server's log ends at {print_lsn(server.inserted)}, before our position"
            f" {print_lsn(position.lsn)}: it was restored from a backup"
        )


async def _check_history(url: str, position: Position, server: Server) -> None:
    """After a failover or a restore, the server must have left our timeline behind our position;
    otherwise we have changes that it never had."""
    walsender = await open_walsender(url, purpose="timeline")
    try:
        rows = await fetch(walsender, f"TIMELINE_HISTORY {server.timeline}")
        switch = switch_lsn(_text(rows[0][1]), position.timeline)
    except psycopg.Error:
        switch = None
    finally:
        await walsender.close()
    if switch is None or switch < position.lsn:
        raise _lost(
            f"the server is on timeline {server.timeline} and does not have everything that we"
            f" have read on timeline {position.timeline}"
        )


def _text(content: Any) -> str:
    return bytes(content).decode() if isinstance(content, bytes | memoryview) else str(content)


def _lost(reason: str) -> PositionLost:
    return PositionLost(reason, hint=_RECOVER)
