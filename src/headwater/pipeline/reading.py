"""What a worker does: a part of the log as Arrow, straight from the server.

Imported on every worker, so that its connection outlives a task: to connect takes longer than to
read a small part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import adbc_driver_postgresql.dbapi as adbc
import msgspec
import pyarrow as pa

from headwater.errors import ResyncRequired
from headwater.pipeline.offsets import Range

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Connection

_UTC = pa.timestamp("us", tz="UTC")

EVENTS = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("at", _UTC, nullable=False),
        pa.field("committed_at", _UTC, nullable=False),
        pa.field("position", pa.string(), nullable=False),
        pa.field("schema_name", pa.string(), nullable=False),
        pa.field("table_name", pa.string(), nullable=False),
        pa.field("relation", pa.int64(), nullable=False),
        pa.field("shape", pa.int64(), nullable=False),
        pa.field("op", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("before", pa.string()),
        pa.field("after", pa.string()),
        pa.field("user_id", pa.string()),
        pa.field("function_name", pa.string()),
        pa.field("trace_id", pa.string()),
    ]
)
"""A change as the pipeline has it: one row of the log, with its transaction's time."""


class Part(msgspec.Struct, frozen=True):
    """Rows of the log that one task reads."""

    url: str
    range: Range
    relations: tuple[int, ...] = ()
    commit_times: bool = False


def read(part: Part) -> Iterator[pa.RecordBatch]:
    """The rows of a part in the order of `seq`. ResyncRequired if the log was trimmed meanwhile."""
    cursor = _connection(part.url).cursor()
    try:
        cursor.execute(statement(part))
        table = cursor.fetch_arrow_table()
        cursor.execute("select last_value from headwater.log_floor")
        ((floor,),) = cursor.fetchall()
    except Exception:
        _forget(part.url)
        raise
    finally:
        cursor.close()
    if part.range.since.xmin < floor:
        raise ResyncRequired(f"the log was trimmed past position {part.range.since}")
    yield from table.cast(EVENTS).to_batches()


_connections: dict[str, Connection] = {}


def _connection(url: str) -> Connection:
    if url not in _connections:
        _connections[url] = adbc.connect(url, autocommit=True)
    return _connections[url]


def _forget(url: str) -> None:
    connection = _connections.pop(url, None)
    if connection is not None:
        connection.close()


def statement(part: Part) -> str:
    """The query for a part. Everything in it is a number or a position of ours."""
    wanted = part.range
    conditions = [
        f"seq > {wanted.after}",
        f"not pg_visible_in_snapshot(xid, '{wanted.since.snapshot}')",
        f"pg_visible_in_snapshot(xid, '{wanted.until.snapshot}')",
    ]
    if wanted.upto is not None:
        conditions.append(f"seq <= {wanted.upto}")
    if part.relations:
        oids = ", ".join(map(str, part.relations))
        conditions.append(f"shape in (select id from headwater.shapes where relid in ({oids}))")
    time, join = ("pg_xact_commit_timestamp(r.xid::xid)", "") if part.commit_times else _LAST
    fields = _FIELDS | {"position": f"'{wanted.until}'::text", "committed_at": time}
    columns = ", ".join(f"{fields.get(name, f'r.{name}')} as {name}" for name in EVENTS.names)
    return f"""
        with rows as materialized (
          select * from headwater.log where {" and ".join(conditions)}
        )
        select {columns}
        from rows r {join}
        cross join lateral (select * from headwater.shapes where id = r.shape limit 1) s
        order by r.seq"""


_LAST = (
    "t.at",
    "join (select l.xid, max(l.at) as at from headwater.log l"
    " where l.xid in (select xid from rows) group by l.xid) t on t.xid = r.xid",
)
"""A transaction's time is that of its last change, also where that is in another part."""

_FIELDS = {
    "xid": "r.xid::text::bigint",
    "schema_name": "s.schema_name",
    "table_name": "s.table_name",
    "relation": "s.relid::bigint",
    "op": "case r.op when 'I' then 'insert' when 'U' then 'update' when 'D' then 'delete'"
    " when 'T' then 'truncate' else 'reset' end",
    "key": "case when r.op in ('I', 'U', 'D')"
    " then headwater.key_of(coalesce(r.after, r.before), s.key)::text end",
    "before": "r.before::text",
    "after": "r.after::text",
    "user_id": "nullif(r.user_id, '')",
    "function_name": "nullif(r.function_name, '')",
    "trace_id": "nullif(r.trace_id, '')",
}
