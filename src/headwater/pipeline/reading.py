"""What a worker does: a part of the log as Arrow, straight from the server.

Imported on every worker, so that its connection outlives a task: to connect takes longer than to
read a small part. Rows leave as they arrive; that the log was not trimmed beneath them is looked at
when the last has come, and a task that fails then has given nothing to anybody.

A transaction has one time for all its changes, wherever they are cut: that of its commit where the
server keeps it, else that of its change with the highest `seq`, of whatever table that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import adbc_driver_postgresql.dbapi as adbc
import msgspec
import pyarrow as pa

from headwater.database import without_password
from headwater.errors import DatabaseError, ResyncRequired
from headwater.pipeline.offsets import Range

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Connection, Cursor

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

RESNAPSHOT = "Begin anew with another checkpoint, from since=now or since=beginning."
"""The way out where the log no longer reaches back to a position."""


class Part(msgspec.Struct, frozen=True):
    """Rows of the log that one task reads.

    `slots` are the partitions of the log that hold them (none for all of them). `whole` says that
    no transaction in it goes on behind it. `not_before` and `before` are times of transactions.
    """

    url: str
    range: Range
    relations: tuple[int, ...] = ()
    commit_times: bool = False
    slots: tuple[int, ...] = ()
    whole: bool = False
    not_before: str | None = None
    before: str | None = None


def read(part: Part) -> Iterator[pa.RecordBatch]:
    """The rows of a part in the order of `seq`. ResyncRequired if the log was trimmed meanwhile."""
    try:
        with _executed(part) as cursor:
            for batch in cursor.fetch_record_batch():
                yield _as_events(batch, str(part.range.until))
            cursor.execute("select last_value from headwater.log_floor")
            ((floor,),) = cursor.fetchall()
    except adbc.Error as error:
        _forget(part.url)
        raise _translated(error, part.url) from error
    if part.range.since.xmin < floor:
        raise ResyncRequired(
            f"the log was trimmed past position {part.range.since} while it was read",
            hint=f"Its retention is over. {RESNAPSHOT}",
        )


def _executed(part: Part) -> Cursor:
    """A connection that was lost since the last task is made anew, once."""
    was_open = part.url in _connections
    try:
        cursor = _connection(part.url).cursor()
        cursor.execute(statement(part))
    except adbc.Error:
        _forget(part.url)
        if not was_open:
            raise
        cursor = _connection(part.url).cursor()
        cursor.execute(statement(part))
    return cursor


def _as_events(batch: pa.RecordBatch, position: str) -> pa.RecordBatch:
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns["position"] = pa.repeat(pa.scalar(position, pa.string()), batch.num_rows)
    arrays = [columns[field.name].cast(field.type) for field in EVENTS]
    return pa.RecordBatch.from_arrays(arrays, schema=EVENTS)


def _translated(error: Any, url: str) -> DatabaseError:
    return DatabaseError(
        f"reading the log of {without_password(url)} failed: {error}",
        hint="Check that the server runs and that this machine reaches it.",
    )


# ---------------------------------------------------------------------------- connections

_connections: dict[str, Connection] = {}


def _connection(url: str) -> Connection:
    if url not in _connections:
        connection = adbc.connect(url, autocommit=True)
        with connection.cursor() as cursor:
            cursor.execute(_SESSION)
            cursor.fetchall()
        _connections[url] = connection
    return _connections[url]


# To compile a plan, or to sort on disk, would take longer than a part does.
_SESSION = """
    select set_config('application_name', 'headwater pipeline', false),
           set_config('client_encoding', 'UTF8', false),
           set_config('timezone', 'UTC', false),
           set_config('jit', 'off', false),
           set_config('work_mem', '64MB', false),
           set_config('max_parallel_workers_per_gather', '0', false)
"""


def _forget(url: str) -> None:
    connection = _connections.pop(url, None)
    if connection is not None:
        connection.close()


# ---------------------------------------------------------------------------- the statement


def statement(part: Part) -> str:
    """The query for a part. Everything in it is a number, a time or a position of ours."""
    names = [name for name in EVENTS.names if name != "position"]
    columns = ", ".join(f"{_FIELDS.get(name, f'r.{name}')} as {name}" for name in names)
    return f"""
        with shapes as materialized (
          select distinct on (id) *, to_json(key[1])::text as name
          from headwater.shapes {_of_relations("where relid", part)} order by id
        ), rows as materialized (
          select * from headwater.log where {" and ".join(_conditions(part))}
        ), times as materialized ({_times(part)})
        select {columns}
        from rows r join shapes s on s.id = r.shape join times t on t.xid = r.xid
        where {" and ".join(_in_time(part))}
        order by r.seq"""


def _conditions(part: Part) -> list[str]:
    since, until = part.range.since, part.range.until
    running = "".join(f" or xid = '{xid}'" for xid in since.xip)
    conditions = [
        f"seq > {part.range.after}",
        f"(xid >= '{since.xmax}'{running}) and xid < '{until.xmax}'",
        f"pg_visible_in_snapshot(xid, '{until.snapshot}')",
    ]
    if part.range.upto is not None:
        conditions.append(f"seq <= {part.range.upto}")
    if part.slots:
        conditions.append(_in_slots(part))
    if part.relations:
        conditions.append("shape in (select id from shapes)")
    return conditions


def _of_relations(column: str, part: Part) -> str:
    return f"{column} in ({', '.join(map(str, part.relations))})" if part.relations else ""


def _in_slots(part: Part) -> str:
    return f"slot in ({', '.join(map(str, part.slots))})" if part.slots else "true"


def _times(part: Part) -> str:
    """The time of every transaction in the part."""
    if part.whole and not part.relations:
        last = "select distinct on (xid) xid, at from rows order by xid, seq desc"
    else:
        # Its last change may lie in another part, or be of a table that is not wanted.
        last = f"""
            select x.xid, l.at from (select distinct xid from rows) x
            cross join lateral (
              select at from headwater.log where xid = x.xid and {_in_slots(part)}
              order by seq desc limit 1
            ) l"""
    if not part.commit_times:
        return last
    # Not kept for those before the setting was made, nor for ever.
    return f"""
        select xid, coalesce(pg_xact_commit_timestamp(xid::xid), at) as at from ({last}) last"""


def _in_time(part: Part) -> list[str]:
    bounds = [("t.at >=", part.not_before), ("t.at <", part.before)]
    return [f"{test} '{time}'::timestamptz" for test, time in bounds if time] or ["true"]


_IMAGE = "coalesce(r.after, r.before)"

_FIELDS = {
    "xid": "r.xid::text::bigint",
    "committed_at": "t.at",
    "schema_name": "s.schema_name",
    "table_name": "s.table_name",
    "relation": "s.relid::bigint",
    "op": "case r.op when 'I' then 'insert' when 'U' then 'update' when 'D' then 'delete'"
    " when 'T' then 'truncate' else 'reset' end",
    # JSON without blanks, the columns in the key's order. Nearly every key is of one column, and
    # to take a set apart for each row would cost more than all the rest.
    "key": f"""
        case when r.op not in ('I', 'U', 'D') then null
        when cardinality(s.key) = 1
        then '{{' || s.name || ':' || coalesce(({_IMAGE} -> s.key[1])::text, 'null') || '}}'
        else (
          select '{{' || string_agg(
            to_json(k.name)::text || ':' || coalesce(({_IMAGE} -> k.name)::text, 'null'), ','
            order by k.n) || '}}'
          from unnest(s.key) with ordinality k (name, n)
        ) end""",
    "before": "r.before::text",
    "after": "r.after::text",
    "user_id": "nullif(r.user_id, '')",
    "function_name": "nullif(r.function_name, '')",
    "trace_id": "nullif(r.trace_id, '')",
}
