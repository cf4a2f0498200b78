"""The progress of the pipeline's streams: for `headwater status`, live queries and metrics.

A running pipeline writes it to the table `headwater.pipeline`, a row for each stream, and only rows
that differ: clients that follow the table get no empty updates. Nothing here needs Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec
import psycopg
from psycopg import errors

from headwater.database import Connection, connect_blocking, translate
from headwater.errors import DatabaseError
from headwater.log.between import IN_UNTIL, SINCE, parameters
from headwater.metrics import PipelineMetrics
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.owner import owner_name

_PIPELINE_BEHIND_SECONDS = 5.0
"""How long counting the changes that a stream has not read may take. Then they are not reported."""


log = logging.getLogger(__name__)

STATES = ("starting", "running", "waiting", "failed", "stopped")
"""A `waiting` stream will be started again; a `failed` one will not."""


class StreamProgress(msgspec.Struct, frozen=True):
    """One stream. Rates are changes a second; `behind_…` is None while it is not known. `task` is
    what it is busy with, where that takes long, and how much of it is done."""

    name: str
    state: str
    owner: str
    batch: int | None = None
    position: str | None = None
    changes: int = 0
    input_rate: float = 0.0
    processed_rate: float = 0.0
    behind_changes: int | None = None
    behind_seconds: float | None = None
    restarts: int = 0
    error: str | None = None
    error_at: datetime | None = None
    task: str | None = None
    task_done: int | None = None
    task_total: int | None = None
    task_seconds_left: float | None = None


class StreamLag(msgspec.Struct, frozen=True):
    """The changes between an offset and now: how many, and the age of the oldest."""

    changes: int
    seconds: float


class Reports:
    """Writes the progress of streams to the database."""

    def __init__(self, url: str, metrics: PipelineMetrics | None = None) -> None:
        self._url = url
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._written: dict[str, StreamProgress] = {}
        self._metrics = metrics

    def enable(self) -> None:
        """Capture the table of progress, so that clients can follow it. Done once: a table that a
        user disables stays disabled."""
        try:
            self._execute(_ENABLE, {})
        except DatabaseError as error:
            log.warning("The pipeline's progress cannot be followed: %s", error)

    def write(self, streams: Iterable[StreamProgress]) -> None:
        """Write the streams whose progress differs. DatabaseError where that fails; the metrics
        have all of them all the same."""
        streams = tuple(streams)
        if self._metrics is not None:
            for stream in streams:
                _measure(self._metrics, stream)
        for stream in streams:
            if self._written.get(stream.name) != stream:
                self._execute(_WRITE, msgspec.structs.asdict(stream))
                self._written[stream.name] = stream

    def behind(self, offset: Offset) -> StreamLag | None:
        """The changes that are left to read; None if counting them takes too long."""
        values = parameters(offset.position, offset.until or offset.position)
        values["seq"] = offset.seq if offset.until else 0
        try:
            row = self._execute(_BEHIND, values).fetchone()
        except DatabaseError as error:
            if isinstance(error.__cause__, errors.QueryCanceled):
                return None
            raise
        assert row is not None
        return StreamLag(row[0], float(row[1]))

    def _execute(self, statement: str, values: dict[str, Any]) -> psycopg.Cursor[tuple[Any, ...]]:
        try:
            return self._connected().execute(statement.encode(), values)
        except psycopg.Error as error:
            if not isinstance(error, errors.QueryCanceled):
                self.close()
            raise translate(error, self._url) from error

    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        if self._connection is None or self._connection.closed:
            self._connection = connect_blocking(
                self._url,
                purpose="pipeline",
                options=f"-c statement_timeout={_PIPELINE_BEHIND_SECONDS * 1000:.0f}",
            )
            # Ends with the connection: `list_all` then shows that the pipeline has ended.
            self._connection.execute(_HOLD_LEASE, {"owner": owner_name()})
        return self._connection

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _measure(metrics: PipelineMetrics, stream: StreamProgress) -> None:
    name = stream.name
    metrics.up.labels(name).set(stream.state == "running")
    metrics.input_rate.labels(name).set(stream.input_rate)
    metrics.processed_rate.labels(name).set(stream.processed_rate)
    metrics.changes.labels(name).set(stream.changes)
    metrics.restarts.labels(name).set(stream.restarts)
    metrics.error.labels(name).set(stream.error is not None)
    for state in STATES:
        metrics.state.labels(name, state).set(stream.state == state)
    if stream.behind_changes is not None:
        metrics.behind_changes.labels(name).set(stream.behind_changes)
    if stream.behind_seconds is not None:
        metrics.behind_seconds.labels(name).set(stream.behind_seconds)


async def list_all(connection: Connection) -> list[PipelineStream]:
    """The streams as they were last reported. Those of a pipeline that ended without a report, as
    when it was killed, are `not running`."""
    cursor = await connection.execute(_LIST)
    return [PipelineStream(*row) for row in await cursor.fetchall()]


class PipelineStream(msgspec.Struct, frozen=True):
    """A stream as `headwater status` shows it; `updated_at` is when its progress last differed."""

    name: str
    state: str
    owner: str
    batch: int | None
    position: str | None
    changes: int
    input_rate: float
    processed_rate: float
    behind_changes: int | None
    behind_seconds: float | None
    restarts: int
    error: str | None
    error_at: datetime | None
    updated_at: datetime
    task: str | None = None
    task_done: int | None = None
    task_total: int | None = None
    task_seconds_left: float | None = None


_ENABLE = """
    select headwater.enable_reactivity('headwater.pipeline')
    where not exists (select from headwater.tables where relid = 'headwater.pipeline'::regclass)
"""

_FIELDS = StreamProgress.__struct_fields__

_WRITE = f"""
    insert into headwater.pipeline ({", ".join(_FIELDS)})
    values ({", ".join(f"%({name})s" for name in _FIELDS)})
    on conflict (name) do update
    set ({", ".join(_FIELDS)}, updated_at)
      = ({", ".join(f"excluded.{name}" for name in _FIELDS)}, clock_timestamp())
"""

_BEHIND = f"""
    select count(*), coalesce(extract(epoch from clock_timestamp() - min(at)), 0)
    from headwater.log
    where {SINCE} and (seq > %(seq)s or not {IN_UNTIL})
      and shape not in (select id from headwater.shapes where schema_name = 'headwater')
"""

LEASE_CLASS = 1752654965
"""Of the advisory lock that a pipeline holds while it runs, see headwater.lock_class(). The second
number is a hash of its owner."""

_HOLD_LEASE = f"select pg_advisory_lock_shared({LEASE_CLASS}, hashtext(%(owner)s))"

_SHOWN = {
    "state": "case when ended then 'not running' else state end",
    "error": "case when ended then concat('its pipeline (', owner, ') ended without a last report',"
    " '; last error: ' || error) else error end",
    "task": "case when not ended then task end",
    "behind_changes": "case when not ended then behind_changes end",
    "behind_seconds": "case when not ended then behind_seconds end",
}

_LIST = f"""
    select {", ".join(_SHOWN.get(name, name) for name in PipelineStream.__struct_fields__)}
    from headwater.pipeline, lateral (
      select state in ('starting', 'running', 'waiting') and not exists (
        select from pg_locks
        where locktype = 'advisory' and classid = {LEASE_CLASS}::oid and objsubid = 2 and granted
          and objid = (hashtext(owner)::bigint & 4294967295)::oid
          and database = (select oid from pg_database where datname = current_database())
      ) as ended
    ) as lease
    order by name
"""
