"""Lists, rebuilds and drops streaming views, for commands and for the console.

Needs only the database. A running pipeline sees within seconds that a rebuild was requested.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from psycopg import sql

from headwater.database import Connection, translated
from headwater.errors import ConfigError


class ViewStatus(msgspec.Struct, frozen=True):
    """A view as `headwater view list` shows it. `state` is `new` until it is built the first time,
    `live`, or `due` when a rebuild was requested; `rows` is None if its table was dropped. While a
    pipeline builds it, `built_percent` and `seconds_left` say how far that is."""

    name: str
    state: str
    rows: int | None
    position: str | None
    built_at: datetime | None
    changed_at: datetime
    error: str | None
    built_percent: int | None = None
    seconds_left: float | None = None


async def list_views(connection: Connection) -> list[ViewStatus]:
    """Every view, with its rows counted."""
    found = []
    with translated():
        cursor = await connection.execute(_LIST)
        for name, state, table, position, *rest in await cursor.fetchall():
            rows = None if table is None else await _count(connection, table)
            found.append(ViewStatus(name, state, rows, position, *rest))
    return found


async def tables_of_views(connection: Connection) -> list[str]:
    """The tables that views are written to, each with its schema. They belong to the user, and stay
    when Headwater is removed. Empty for a schema from before views."""
    with translated():
        cursor = await connection.execute("select to_regclass('headwater.views') is not null")
        if not _one(await cursor.fetchone()):
            return []
        return [name for (name,) in await (await connection.execute(_SHOWN)).fetchall()]


async def _count(connection: Connection, table: str) -> int:
    cursor = await connection.execute(sql.SQL("select count(*) from {}").format(sql.SQL(table)))
    return int(_one(await cursor.fetchone()))


async def rebuild(connection: Connection, name: str) -> None:
    """Request a rebuild of a view, by the running pipeline or the next one."""
    with translated():
        cursor = await connection.execute(
            "update headwater.views set state = 'due' where name = %s returning 1",
            (_plain(name),),
        )
        if await cursor.fetchone() is None:
            await _number(connection, name)


async def drop(connection: Connection, name: str) -> None:
    """Remove a view, its table, and its inner tables."""
    with translated():
        async with connection.transaction():
            number, table = await _number(connection, name)
            cursor = await connection.execute(_TABLES, {"number": number})
            inner = [each for (each,) in await cursor.fetchall()]
            for each in (*inner, *([] if table is None else [table])):
                await connection.execute(sql.SQL("drop table {}").format(sql.SQL(each)))
            await connection.execute("delete from headwater.views where number = %s", (number,))


async def _number(connection: Connection, name: str) -> tuple[int, str | None]:
    cursor = await connection.execute(_FIND, {"name": _plain(name)})
    row = await cursor.fetchone()
    if row is None:
        raise ConfigError(f"there is no view {name}", hint="headwater view list shows them.")
    return row[0], row[1]


def _plain(name: str) -> str:
    return name.removeprefix("public.")


def _one(row: tuple[Any, ...] | None) -> Any:
    assert row is not None
    return row[0]


_LIST = """
    select v.name, v.state, c.oid::regclass::text, v.reached::json ->> 'snap', v.built_at,
           v.changed_at, v.error, 100 * p.task_done / greatest(p.task_total, 1),
           p.task_seconds_left
    from headwater.views v left join pg_class c on c.oid = v.relation
    left join headwater.pipeline p on p.name = 'view.' || v.name and p.task = 'build'
    order by v.name
"""

_SHOWN = """
    select pg_catalog.format('%I.%I', n.nspname, c.relname)
    from headwater.views v join pg_catalog.pg_class c on c.oid operator(pg_catalog.=) v.relation
    join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) c.relnamespace order by 1
"""

_FIND = """
    select v.number, c.oid::regclass::text
    from headwater.views v left join pg_class c on c.oid = v.relation
    where v.name = %(name)s for update of v
"""

_TABLES = """
    select oid::regclass::text from pg_class
    where relnamespace = 'headwater'::regnamespace and relkind = 'r'
      and relname ~ ('^view_' || %(number)s || '_')
"""
