"""Every table of the database: whether it is captured, how many changes it has, and problems."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from headwater.capture.postgres.doctor import Finding, of_table
from headwater.capture.postgres.triggers import CapturedTable
from headwater.database import Connection
from headwater.limits import ADMIN_RATE_ROWS_MAX, ADMIN_TABLES_MAX


class TableInfo(msgspec.Struct, frozen=True):
    """A table. `rows` is PostgreSQL's estimate, None if there is none yet; `minute` is the number
    of changes in the last minute; `capture` is `trigger`, or None if the table is not captured."""

    name: str
    kind: str
    capture: str | None
    key: list[str]
    columns: list[str]
    rows: int | None
    bytes: int
    minute: int
    secured: bool
    members: int
    since: datetime | None
    problems: list[Finding]


class TableList(msgspec.Struct, frozen=True):
    """`busy` means that the last minute had more changes than were counted."""

    tables: list[TableInfo]
    busy: bool
    more: bool


async def list_tables(connection: Connection) -> TableList:
    cursor = await connection.execute(_RATES, {"most": ADMIN_RATE_ROWS_MAX})
    rates: dict[int, int] = dict(await cursor.fetchall())
    cursor = await connection.execute(_TABLES, {"most": ADMIN_TABLES_MAX + 1})
    found = [_info(row, rates) for row in await cursor.fetchall()]
    busy = sum(rates.values()) >= ADMIN_RATE_ROWS_MAX
    return TableList(found[:ADMIN_TABLES_MAX], busy, len(found) > ADMIN_TABLES_MAX)


def _info(row: tuple[Any, ...], rates: dict[int, int]) -> TableInfo:
    (oid, name, quoted, kind, enabled, altered, key, columns, *facts) = row
    (rows, size, secured, members, since) = facts
    return TableInfo(
        name,
        kind,
        "trigger" if enabled else None,
        key,
        columns,
        None if rows < 0 else int(rows),
        size,
        rates.get(oid, 0),
        secured,
        members,
        since,
        _problems(name, quoted, enabled, altered, key, members, since),
    )


def _problems(
    name: str,
    quoted: str,
    enabled: bool | None,
    altered: bool,
    key: list[str],
    members: int,
    since: datetime | None,
) -> list[Finding]:
    if enabled is not None and since is not None:
        captured = CapturedTable(name, enabled, True, since, members, altered, 0)
        finding = of_table(captured)
        return [] if finding.level == "ok" else [finding]
    if not key:
        topic, hint = f"table {name}", f"alter table {quoted} add primary key (…)"
        return [Finding(topic, "warn", "has no primary key, so it cannot be captured", hint)]
    return []


_RATES = """
    select s.relid::bigint, count(*)::integer
    from (select shape, at from headwater.log order by xid desc, seq desc limit %(most)s) l
    cross join lateral (select relid from headwater.shapes where id = l.shape limit 1) s
    where l.at > clock_timestamp() - interval '1 minute'
    group by 1
"""

_TABLES = """
    select c.oid::bigint, headwater.label(c.oid),
           case when n.nspname = 'public' then '' else quote_ident(n.nspname) || '.' end
           || quote_ident(c.relname),
           case when v.name is not null then 'view'
                when n.nspname = 'headwater' then 'system'
                when c.relkind = 'p' then 'partitioned' else 'table' end,
           t.enabled,
           coalesce(t.enabled, false) and exists (
             select from headwater.captures k
             where k.root = c.oid
               and k.fingerprint is distinct from headwater.fingerprint(k.member, k.root)),
           array(select a.attname::text from pg_index i
                 cross join unnest(i.indkey::int2[]) with ordinality k (number, place)
                 join pg_attribute a on a.attrelid = c.oid and a.attnum = k.number
                 where i.indrelid = c.oid and i.indisprimary order by k.place),
           array(select a.attname::text from pg_attribute a
                 where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                 order by a.attnum),
           c.reltuples, pg_total_relation_size(c.oid), c.relrowsecurity,
           (select count(*) from headwater.captures k where k.root = c.oid)::integer,
           t.changed_at
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    left join headwater.tables t on t.relid = c.oid
    left join headwater.views v on v.relation = c.oid
    where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence <> 't'
      and n.nspname not in ('pg_catalog', 'information_schema', 'pg_toast')
      and (n.nspname <> 'headwater' or t.enabled is not null)
    order by t.enabled desc nulls last, n.nspname = 'headwater', 2
    limit %(most)s
"""
