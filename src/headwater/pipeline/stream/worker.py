"""Reads a part of the log as Arrow, straight from the server. Runs on the workers of Spark.

A worker process keeps its connection for later tasks: connecting takes longer than reading a small
part. Rows are passed on as they arrive. The check that the log was not trimmed meanwhile comes
after the last row; a task that fails then has written nothing.

A transaction has one time for all its changes, also if they are in different batches: the time of
its commit if the server stores it, else the time of its change with the highest `seq`, of any
table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Not its `dbapi`: that imports pandas, which takes longer than reading most parts.
import adbc_driver_manager as adbc
import adbc_driver_postgresql
import msgspec
import pyarrow as pa

from headwater.database import pinned_url, without_password
from headwater.errors import DatabaseError
from headwater.log import between
from headwater.log.reach import FLOOR, check_floor
from headwater.pipeline.stream.offsets import Range

_SPARK_LOOKS_MAX = 1_000
"""Transactions of one part whose last change is looked up one by one. For more of them, one scan of
the index is used if their ids are close together."""

_SPARK_LOOKS_SPREAD = 10
"""Ids are close together with at most this many ids in the range for each transaction."""


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
        pa.field("source", pa.string()),
        pa.field("source_position", pa.string()),
        pa.field("source_committed_at", _UTC),
    ]
)
"""A change in the pipeline: one row of the log, with the time of its transaction. The last three
say where a mirrored change came from."""

RESNAPSHOT = "Begin again with another checkpoint, from since=now or since=beginning."
"""The hint for a position that the log no longer reaches back to."""


class LogSlice(msgspec.Struct, frozen=True):
    """Rows of the log that one task reads.

    `slots` are the partitions of the log that hold them (none for all). `whole` says that no
    transaction of the part has changes after it. `not_before` and `before` bound the times of
    transactions. `origins` says that a source has applied transactions here.
    """

    url: str
    range: Range
    relations: tuple[int, ...] = ()
    commit_times: bool = False
    slots: tuple[int, ...] = ()
    whole: bool = False
    not_before: str | None = None
    before: str | None = None
    origins: bool = False


def read(part: LogSlice, owner: str = "") -> Iterator[pa.RecordBatch]:
    """The rows of a part in the order of `seq`. ResyncRequired if the log was trimmed meanwhile.
    Threads of one process that read at the same time need different names of `owner`."""
    try:
        with _executed(part, owner) as answer:
            for batch in answer.rows:
                yield _as_events(batch, str(part.range.until))
        with _Answer(_connection(part.url, owner), FLOOR) as answer:
            floor = answer.rows.read_all().column(0)[0].as_py()
    # OSError is how Arrow reports an error of the server while rows arrive.
    except (adbc.Error, OSError) as error:
        forget(part.url, owner)
        raise _translated(error, part.url) from error
    check_floor(part.range.since, floor, RESNAPSHOT)


class _Answer:
    """The rows of a query, which is executed when this is made."""

    def __init__(self, connection: Any, query: str) -> None:
        self._statement = adbc.AdbcStatement(connection)
        try:
            self._statement.set_sql_query(query)
            handle, _ = self._statement.execute_query()
            self.rows = pa.RecordBatchReader.from_stream(handle)
        except BaseException:
            self._statement.close()
            raise

    def __enter__(self) -> _Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.rows.close()
        self._statement.close()


def _executed(part: LogSlice, owner: str) -> _Answer:
    """A connection that was lost since the last task is made again, once."""
    was_open = (part.url, owner) in _connections
    try:
        return _Answer(_connection(part.url, owner), statement(part))
    except (adbc.Error, OSError):
        forget(part.url, owner)
        if not was_open:
            raise
    return _Answer(_connection(part.url, owner), statement(part))


def _as_events(batch: pa.RecordBatch, position: str) -> pa.RecordBatch:
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns["position"] = pa.repeat(pa.scalar(position, pa.string()), batch.num_rows)
    if "source" not in columns:
        columns |= {name: pa.nulls(batch.num_rows) for name in _ORIGIN}
    arrays = [columns[field.name].cast(field.type) for field in EVENTS]
    return pa.RecordBatch.from_arrays(arrays, schema=EVENTS)


def _translated(error: Any, url: str) -> DatabaseError:
    return DatabaseError(
        f"reading the log of {without_password(url)} failed: {error}",
        hint="Check that the server runs and that this machine reaches it.",
    )


# ---------------------------------------------------------------------------- connections

_connections: dict[tuple[str, str], tuple[Any, Any]] = {}


def _connection(url: str, owner: str) -> Any:
    if (url, owner) not in _connections:
        database = adbc_driver_postgresql.connect(pinned_url(url))
        connection = adbc.AdbcConnection(database)
        _connections[url, owner] = database, connection
        with _Answer(connection, _SESSION) as answer:
            answer.rows.read_all()
    return _connections[url, owner][1]


# Compiling a plan or sorting on disk would take longer than reading a part.
_SESSION = """
    select set_config('application_name', 'headwater pipeline', false),
           set_config('client_encoding', 'UTF8', false),
           set_config('timezone', 'UTC', false),
           set_config('jit', 'off', false),
           set_config('work_mem', '64MB', false),
           set_config('max_parallel_workers_per_gather', '0', false)
"""


def forget(url: str, owner: str = "") -> None:
    """Close an owner's connection."""
    for each in reversed(_connections.pop((url, owner), ())):
        with suppress(adbc.Error):
            each.close()


# ---------------------------------------------------------------------------- the statement


def statement(part: LogSlice) -> str:
    """The query for a part. It has no text from outside: only numbers, times and positions."""
    absent = {"position"} if part.origins else {"position", *_ORIGIN}
    names = [name for name in EVENTS.names if name not in absent]
    fields = _FIELDS | _ORIGIN
    columns = ", ".join(f"{fields.get(name, f'r.{name}')} as {name}" for name in names)
    return f"""
        with shapes as materialized (
          select distinct on (id) *, to_json(key[1])::text as name
          from headwater.shapes {_of_relations("where relid", part)} order by id
        ), rows as materialized (
          select * from headwater.log where {" and ".join(_conditions(part))}
        ), times as materialized ({_times(part)}){_ORIGINS if part.origins else ""}
        select {columns}
        from rows r join shapes s on s.id = r.shape join times t on t.xid = r.xid
        {"left join origins o on o.xid = r.xid" if part.origins else ""}
        where {" and ".join(_in_time(part))}
        order by r.seq"""


def _conditions(part: LogSlice) -> list[str]:
    conditions = [
        f"seq > {part.range.after}",
        between.literal(part.range.since, part.range.until),
    ]
    if part.range.upto is not None:
        conditions.append(f"seq <= {part.range.upto}")
    if part.slots:
        conditions.append(_in_slots(part))
    if part.relations:
        conditions.append("shape in (select id from shapes)")
    return conditions


def _of_relations(column: str, part: LogSlice) -> str:
    return f"{column} in ({', '.join(map(str, part.relations))})" if part.relations else ""


def _in_slots(part: LogSlice) -> str:
    return f"slot in ({', '.join(map(str, part.slots))})" if part.slots else "true"


def _times(part: LogSlice) -> str:
    """The time of every transaction in the part."""
    if not part.commit_times:
        return _last_changes(part, "rows")
    # The server has no times for commits before the setting was made, nor for very old ones.
    return f"""
        with known as materialized (
          select xid, pg_xact_commit_timestamp(xid::xid) as at
          from (select distinct xid from rows) x
        ), without_time as materialized (
          select * from rows where xid in (select xid from known where at is null)
        )
        select xid, at from known where at is not null
        union all
        select xid, at from ({_last_changes(part, "without_time")}) last"""


def _last_changes(part: LogSlice, rows: str) -> str:
    """When the transactions of these rows made their last change, which may be in another part or
    of a table that is not read.

    A lookup for each transaction is fast for a few, and slower than everything else for many. Where
    there are many with ids close together, one scan of the index finds which of them have changes
    elsewhere at all.
    """
    own = f"select distinct on (xid) xid, at from {rows} order by xid, seq desc"
    if part.whole and not part.relations:
        return own
    look = f"""
            cross join lateral (
              select at from headwater.log where xid = x.xid and {_in_slots(part)}
              order by seq desc limit 1
            ) l"""
    if part.range.upto is None or part.relations:
        return f"select x.xid, l.at from (select distinct xid from {rows}) x {look}"
    return f"""
            with own as materialized ({own}), spread as materialized (
              select min(xid) as first, max(xid) as last,
                     count(*) > {_SPARK_LOOKS_MAX} and max(xid)::text::bigint
                       - min(xid)::text::bigint < {_SPARK_LOOKS_SPREAD} * count(*) as is_dense
              from own
            ), elsewhere as materialized (
              select distinct xid from headwater.log
              where (select is_dense from spread) and {_in_slots(part)}
                and xid >= (select first from spread) and xid <= (select last from spread)
                and seq > {part.range.upto}
              union all
              select xid from own where not (select is_dense from spread)
            )
            select xid, at from own where xid not in (select xid from elsewhere)
            union all
            select x.xid, l.at from elsewhere x {look} where x.xid in (select xid from own)"""


def _in_time(part: LogSlice) -> list[str]:
    bounds = [("t.at >=", part.not_before), ("t.at <", part.before)]
    return [f"{test} '{time}'::timestamptz" for test, time in bounds if time] or ["true"]


# The bounds are for the index, also where the planner expects to need most of the table.
_ORIGINS = """, origins as materialized (
          select o.* from headwater.source_transactions o
          where o.xid >= (select min(xid) from times) and o.xid <= (select max(xid) from times)
            and o.xid in (select xid from times)
        )"""

_ORIGIN = {
    "source": "o.source",
    "source_position": "o.position",
    "source_committed_at": "o.committed_at",
}

_IMAGE = "coalesce(r.after, r.before)"

_FIELDS = {
    "xid": "r.xid::text::bigint",
    "committed_at": "t.at",
    "schema_name": "s.schema_name",
    "table_name": "s.table_name",
    "relation": "s.relid::bigint",
    "op": "case r.op when 'I' then 'insert' when 'U' then 'update' when 'D' then 'delete'"
    " when 'T' then 'truncate' else 'reset' end",
    # JSON without blanks, the columns in the key's order. Nearly every key has one column; the
    # subquery for each row would cost more than everything else.
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
