"""The state of an installation: the log, the captured tables, the sources, the cursors, the readers
and the pipeline. `headwater status` prints it; the console shows a part of it."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from headwater.admin.sources import SourceReport, reports
from headwater.capture.postgres import triggers
from headwater.capture.postgres.triggers import CapturedTable
from headwater.database import Connection, translated
from headwater.log import cursors
from headwater.log.cursors import SavedCursor
from headwater.pipeline.spark import log_file
from headwater.pipeline.spark.session import spark_folder
from headwater.pipeline.stream import progress
from headwater.pipeline.stream.progress import PipelineStream


class WalCaptureStatus(msgspec.Struct, frozen=True):
    """The slot that feeds the log, where tables are captured from the write-ahead log. While no
    process reads it (`running`), readers of the log wait. `state` is PostgreSQL's: `reserved`,
    `extended`, `unreserved`, `lost`, or `missing`."""

    slot: str
    running: bool
    state: str
    behind_bytes: int


class LogStatus(msgspec.Struct, frozen=True):
    """`polling` means that a reader polls and writers send no NOTIFY."""

    id: str
    position: str
    bytes: int
    oldest: datetime | None
    retention: timedelta
    readers: int
    polling: bool


class LaggingView(msgspec.Struct, frozen=True):
    """A live query that is behind because its SQL takes long. `role` is the database role that the
    SQL runs as, None for Headwater's own."""

    gateway: str
    view: str
    table: str
    role: str | None
    since: datetime


class Status(msgspec.Struct, frozen=True):
    log: LogStatus
    tables: list[CapturedTable]
    cursors: list[SavedCursor]
    pipeline: list[PipelineStream]
    spark_log: str | None = None
    """The file with the output of the pipeline's Spark, if it is on this machine."""
    lagging: list[LaggingView] = []
    """As the gateways reported in the last seconds."""
    sources: list[SourceReport] = []
    wal_capture: WalCaptureStatus | None = None


async def log_status(connection: Connection) -> LogStatus:
    cursor = await connection.execute(_LOG)
    row = await cursor.fetchone()
    assert row is not None
    return LogStatus(*row)


async def read_status(connection: Connection, lake: str) -> Status:
    """The state now; `lake` is the lake of the pipeline."""
    with translated():
        return Status(
            await log_status(connection),
            await triggers.list_tables(connection),
            await cursors.list_all(connection),
            await progress.list_all(connection),
            log_file.found(lake, spark_folder()),
            await _lagging(connection),
            await reports(connection),
            await wal_capture_status(connection),
        )


async def wal_capture_status(connection: Connection) -> WalCaptureStatus | None:
    """None where no table is captured from the write-ahead log."""
    cursor = await connection.execute(_WAL_CAPTURE)
    row = await cursor.fetchone()
    return None if row is None else WalCaptureStatus(*row)


async def _lagging(connection: Connection) -> list[LaggingView]:
    cursor = await connection.execute(_LAGGING)
    return [LaggingView(*row) for row in await cursor.fetchall()]


_LAGGING = """
    select a.gateway, a.id, a.name, a.detail ->> 'role', (a.detail ->> 'lagging_since')::timestamptz
    from headwater.activity a
    join headwater.activity g on g.gateway = a.gateway and g.kind = 'gateway'
    where a.kind = 'view' and a.detail ->> 'lagging_since' is not null
      and g.alive_until > clock_timestamp()
    order by 5, 1, 2
"""


_WAL_CAPTURE = """
    select i.wal_slot, coalesce(s.active, false),
           case when s.slot_name is null then 'missing' else coalesce(s.wal_status, 'lost') end,
           greatest(coalesce(pg_current_wal_lsn() - s.confirmed_flush_lsn, 0), 0)::bigint
    from headwater.installation i left join pg_replication_slots s on s.slot_name = i.wal_slot
    where i.wal_slot is not null
"""

_LOG = """
    select headwater.log_id(),
           headwater.log_id() || '-' || pg_current_snapshot(),
           (select sum(pg_total_relation_size(inhrelid))::bigint
            from pg_inherits where inhparent = 'headwater.log'::regclass),
           (select at from headwater.log order by xid limit 1),
           retention,
           (select count(*) from pg_stat_activity
            where datname = current_database() and application_name = 'headwater listener')::int,
           exists (select from pg_locks
                   where locktype = 'advisory' and classid = headwater.lock_class()
                     and objid = 1 and mode = 'ExclusiveLock' and granted
                     and database = (select oid from pg_database
                                     where datname = current_database()))
    from headwater.installation
"""
