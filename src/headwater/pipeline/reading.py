"""What a worker does: a part of the log as Arrow, straight from the server.

Imported on every worker, so that its connection outlives a task: to connect takes longer than to
read a small part. Rows leave as they arrive; that the log was not trimmed beneath them is looked at
when the last has come, and a task that fails then has given nothing to anybody.

A transaction has one time for all its changes, wherever they are cut: that of its commit where the
server keeps it, else that of its change with the highest `seq`, of whatever table that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Not its `dbapi`: that brings pandas along, which takes longer to import than most parts to read.
import adbc_driver_manager as adbc
import adbc_driver_postgresql
import msgspec
import pyarrow as pa

from headwater import limits
from headwater.database import pinned_url, without_password
from headwater.errors import DatabaseError, ResyncRequired
from headwater.pipeline.offsets import Range

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


def read(part: Part, owner: str = "") -> Iterator[pa.RecordBatch]:
    """The rows of a part in the order of `seq`. ResyncRequired if the log was trimmed meanwhile.
    Where several threads read in one process, each needs an owner's name of its own."""
    try:
        with _executed(part, owner) as answer:
            for batch in answer.rows:
                yield _as_events(batch, str(part.range.until))
        with _Answer(_connection(part.url, owner), _FLOOR) as answer:
            floor = answer.rows.read_all().column(0)[0].as_py()
    # Arrow's own: an error of the server while rows arrive.
    except (adbc.Error, OSError) as error:
        forget(part.url, owner)
        raise _translated(error, part.url) from error
    if part.range.since.xmin < floor:
        raise ResyncRequired(
            f"the log was trimmed past position {part.range.since} while it was read",
            hint=f"Its retention is over. {RESNAPSHOT}",
        )


class _Answer:
    """The rows of a query, which is under way when this is made."""

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


def _executed(part: Part, owner: str) -> _Answer:
    """A connection that was lost since the last task is made anew, once."""
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


_FLOOR = "select last_value from headwater.log_floor"

# To compile a plan, or to sort on disk, would take longer than a part does.
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
    if not part.commit_times:
        return _last_changes(part, "rows")
    # Not kept for those before the setting was made, nor for ever.
    return f"""
        with told as materialized (
          select xid, pg_xact_commit_timestamp(xid::xid) as at
          from (select distinct xid from rows) x
        ), untold as materialized (
          select * from rows where xid in (select xid from told where at is null)
        )
        select xid, at from told where at is not null
        union all
        select xid, at from ({_last_changes(part, "untold")}) last"""


def _last_changes(part: Part, rows: str) -> str:
    """When the transactions of these rows made their last change, which may lie in another part, or
    be of a table that is not wanted.

    To look for it is quick for a few; for many transactions it takes longer than all the rest.
    Where they are many and close together, the index tells in one go which of them have changes
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
                     count(*) > {limits.SPARK_LOOKS_MAX} and max(xid)::text::bigint
                       - min(xid)::text::bigint < {limits.SPARK_LOOKS_SPREAD} * count(*) as is_dense
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
