"""Marks of captured tables: whether the catalog shows that rows may have changed without changes in
the log.

A mark differs after a table got other files (a rewrite by ALTER, TRUNCATE, VACUUM FULL, CLUSTER),
after a column was altered, after one of our triggers was made, dropped, disabled or enabled, and
after partitions came or went. With the same mark before and after, nothing of that happened in
between.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg

from headwater.database import connect_blocking, translated
from headwater.model import Position


class CatalogMark(msgspec.Struct, frozen=True):
    """The mark of a table, and the last transaction that altered it; None while one of our
    triggers is disabled. The mark says whether the table has our triggers."""

    mark: str
    """The files, columns and triggers; the last word of it says less: the columns and triggers."""
    altered_in: int | None


def present(url: str) -> tuple[Position, datetime, dict[int, CatalogMark]]:
    """The marks of all captured tables without our own, and the position at which they hold."""
    with (
        translated(url),
        connect_blocking(url, purpose="pipeline", autocommit=False) as database,
    ):
        database.execute("set transaction isolation level repeatable read, read only")
        row = database.execute(_NOW).fetchone()
        assert row is not None
        log, snapshot, at = row
        relations = [relation for (relation,) in database.execute(_CAPTURED)]
        found = read(database, relations)
    return Position.of_snapshot(log, snapshot), at.astimezone(UTC), found


_NOW = "select headwater.log_id(), pg_current_snapshot()::text, clock_timestamp()"

_CAPTURED = """
    select t.relid::bigint from headwater.tables t join pg_class c on c.oid = t.relid
    join pg_namespace n on n.oid = c.relnamespace where t.enabled and n.nspname <> 'headwater'
"""


def read(database: psycopg.Connection[Any], relations: Iterable[int]) -> dict[int, CatalogMark]:
    """The marks of tables, in the snapshot of the connection. One query for all: with thousands of
    tables it takes some tens of milliseconds."""
    rows = database.execute(_MARKS, {"relations": list(relations)}).fetchall()
    return {root: CatalogMark(mark, altered_in) for root, mark, altered_in in rows}


# A row of the catalog is known by the transaction that wrote it, of which it has the lowest 32
# bits. The files are those of the snapshot, which pg_relation_filenode would look past.
_MARKS = """
    with recursive members (root, oid) as (
      select r, r from unnest(%(relations)s::oid[]) r
      union
      select m.root, i.inhrelid from members m join pg_inherits i on i.inhparent = m.oid
    ),
    written (root, oid, what, xmin, is_off) as (
      select m.root, m.oid, 'files ' || c.relfilenode, c.xmin, false
      from members m join pg_class c on c.oid = m.oid
      union all
      select m.root, m.oid, 'column ' || a.attnum || ' ' || a.xmin, a.xmin, false
      from members m join pg_attribute a on a.attrelid = m.oid
      where a.attnum > 0
      union all
      select m.root, m.oid, concat_ws(' ', 'trigger', t.tgname, t.tgenabled, t.xmin), t.xmin,
             t.tgenabled = 'D'
      from members m join pg_trigger t on t.tgrelid = m.oid join pg_proc f on f.oid = t.tgfoid
      where f.pronamespace = 'headwater'::regnamespace and not t.tgisinternal
    ),
    newest (xid) as (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint)
    select w.root::bigint,
           case when bool_or(w.what like 'trigger %%') then 'triggers ' else '' end
           || md5(string_agg(w.oid || ' ' || w.what, ',' order by w.oid, w.what collate "C"))
           || ' ' || md5(string_agg(
                w.oid || case when w.what not like 'files %%' then w.what else '' end, ','
                order by w.oid, w.what collate "C")),
           case when not bool_or(w.is_off) then
             coalesce(max(n.xid - mod(n.xid - w.xmin::text::bigint + 4294967296, 4294967296))
                      filter (where w.xmin::text::bigint > 2), 0) end
    from written w cross join newest n
    group by w.root
"""
