"""Creates mirrors and gives them other columns. The table itself is never dropped or replaced while
its source exists, so policies, grants and indexes that people add stay.

All functions run inside a transaction of the caller.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from psycopg import errors

from headwater.capture.mirror.registry import TableStateName
from headwater.capture.mirror.statements import MirrorColumn, TableStatements, quoted
from headwater.capture.source import SourceColumn, SourceKey, SourceTable
from headwater.database import Connection
from headwater.errors import SourceRefused


class Mirror(msgspec.Struct):
    """A mirror as it is now: what `headwater.source_tables` stores, and its columns."""

    source: str
    schema: str
    relid: int
    state: TableStateName
    description: SourceTable
    cursor: SourceKey | None = None
    copied: int = 0
    estimate: int | None = None
    follows: bool = False
    columns: tuple[MirrorColumn, ...] = ()

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def table(self) -> str:
        """The name in SQL."""
        return f"{quoted(self.schema)}.{quoted(self.description.target)}"

    @property
    def staging(self) -> str:
        """The table that a new copy is written to while the mirror serves the old rows."""
        return f"headwater.{quoted(f'staging_{self.relid}')}"

    def statements(self, table: str | None = None) -> TableStatements:
        return TableStatements(table or self.table, self.relid, self.columns, self.description.key)


async def load(connection: Connection, source: str, schema: str) -> dict[str, Mirror]:
    """The mirrors of a source, by the names of their tables; those that are no longer written
    without their columns."""
    found = await load_all(connection, source, schema)
    for mirror in found.values():
        if mirror.state not in ("dropped", "removed"):
            await read_columns(connection, mirror)
    return found


async def load_all(connection: Connection, source: str, schema: str) -> dict[str, Mirror]:
    """The same without their columns, also of mirrors that somebody has dropped."""
    cursor = await connection.execute(
        "select relid, state, description, cursor, copied, estimate, follows"
        " from headwater.source_tables where source = %s order by name",
        (source,),
    )
    found = {}
    for relid, state, description, key, copied, estimate, follows in await cursor.fetchall():
        table = msgspec.convert(description, SourceTable)
        found[table.name] = Mirror(
            source, schema, relid, state, table, key and tuple(key), copied, estimate, follows
        )
    return found


async def read_columns(connection: Connection, mirror: Mirror) -> None:
    """Read the columns as PostgreSQL has them, in the order of the description."""
    cursor = await connection.execute(_COLUMNS, (mirror.relid,))
    found = {
        name: MirrorColumn(name, type_, direct) for name, type_, direct in await cursor.fetchall()
    }
    missing = [c.name for c in mirror.description.columns if c.name not in found]
    if missing:
        raise SourceRefused(
            f"the mirror {mirror.schema}.{mirror.description.target} has no column {missing[0]}",
            hint="Somebody has altered or dropped it. Remove the source with --drop-tables, and"
            " add it again.",
        )
    mirror.columns = tuple(found[column.name] for column in mirror.description.columns)


_COLUMNS = """
    select a.attname::text, format('%%I.%%I', n.nspname, t.typname),
           t.typarray <> 0 and t.typtype <> 'd' and t.typdelim = ',' and t.typcategory <> 'A'
    from pg_attribute a join pg_type t on t.oid = a.atttypid
    join pg_namespace n on n.oid = t.typnamespace
    where a.attrelid = %s and a.attnum > 0 and not a.attisdropped
"""


async def save(connection: Connection, mirror: Mirror) -> None:
    """Write the row in `headwater.source_tables`."""
    await connection.execute(
        _SAVE,
        (
            mirror.source, mirror.name, mirror.description.target, mirror.relid, mirror.state,
            None if mirror.cursor is None else msgspec.json.encode(mirror.cursor).decode(),
            mirror.copied, mirror.estimate, mirror.follows,
            msgspec.json.encode(mirror.description).decode(),
        ),
    )  # fmt: skip


_SAVE = """
    insert into headwater.source_tables
      (source, name, target, relid, state, cursor, copied, estimate, follows, description)
    values (%s, %s, %s, %s, %s, %s::json, %s, %s, %s, %s::jsonb)
    on conflict (source, name) do update
    set (target, relid, state, cursor, copied, estimate, follows, description)
      = (excluded.target, excluded.relid, excluded.state, excluded.cursor, excluded.copied,
         excluded.estimate, excluded.follows, excluded.description)
"""


# ------------------------------------------------------------------------ creation


async def create(
    connection: Connection, source: str, schema: str, table: SourceTable, *, feed_only: bool
) -> Mirror:
    """Create a mirror without rows. One that is feed only is live from the start."""
    await _create_schema(connection, schema)
    await check_types(connection, table)
    await _check_free(connection, schema, table)
    columns = [_column(column, column.name in table.key) for column in table.columns]
    key = ", ".join(quoted(name) for name in table.key)
    name = f"{quoted(schema)}.{quoted(table.target)}"
    await connection.execute(
        f"create table {name} ({', '.join(columns)}, primary key ({key}))".encode()
    )
    cursor = await connection.execute("select %s::regclass::oid::bigint", (name,))
    relid = _first(await cursor.fetchone())
    mirror = Mirror(source, schema, relid, "live" if feed_only else "copying", table)
    await _guard(connection, mirror)
    await read_columns(connection, mirror)
    if feed_only:
        await make_live(connection, mirror)
    await save(connection, mirror)
    return mirror


async def _create_schema(connection: Connection, schema: str) -> None:
    cursor = await connection.execute(
        "select pg_has_role(nspowner, 'usage') from pg_namespace where nspname = %s", (schema,)
    )
    row = await cursor.fetchone()
    if row is None:
        await connection.execute(f"create schema {quoted(schema)}".encode())
        await connection.execute(f"comment on schema {quoted(schema)} is '{_OWN_SCHEMA}'".encode())
    elif not row[0]:
        raise SourceRefused(
            f"the schema {schema} exists and belongs to another role",
            hint="Give the source another schema (into), or let Headwater's role own this one.",
        )


_OWN_SCHEMA = "made by Headwater for the mirrors of a source"
"""The comment on a schema that was created here, and may be dropped with the mirrors."""


async def drop_schema(connection: Connection, schema: str) -> None:
    """Drop the schema if it was created for mirrors and nothing is in it."""
    cursor = await connection.execute(
        "select from pg_namespace where nspname = %s and obj_description(oid, 'pg_namespace') = %s",
        (schema, _OWN_SCHEMA),
    )
    if await cursor.fetchone() is not None:
        with suppress(errors.DependentObjectsStillExist):
            async with connection.transaction():
                await connection.execute(f"drop schema {quoted(schema)}".encode())


async def check_types(connection: Connection, table: SourceTable) -> None:
    """Raises for a type that does not exist here; only names of types pass."""
    if not table.key:
        raise SourceRefused(
            f"table {table.name} has no primary key",
            hint="Rows are distinguished by their key: give it one, or list the other tables"
            " (tables = […], --table).",
        )
    for column in table.columns:
        try:
            async with connection.transaction():
                cursor = await connection.execute("select to_regtype(%s)", (column.type,))
                known = _first(await cursor.fetchone()) is not None
        except errors.Error as error:
            if not error.sqlstate:
                raise
            known = False
        if not known:
            raise SourceRefused(
                f"table {table.name}: there is no type {column.type} for the column {column.name}",
                hint="Leave the column out (exclude), or give another type (types).",
            )


async def _check_free(connection: Connection, schema: str, table: SourceTable) -> None:
    cursor = await connection.execute(
        "select from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = %s and c.relname = %s",
        (schema, table.target),
    )
    if await cursor.fetchone() is not None:
        raise SourceRefused(
            f"{schema}.{table.target} exists and is not the mirror of {table.name}",
            hint="If a source that was removed has left it, drop it (headwater source remove"
            " --drop-tables does that at once). Otherwise rename it, or give the table another"
            " target or the source another schema.",
        )


def _column(column: SourceColumn, in_key: bool) -> str:
    return f"{quoted(column.name)} {column.type}{' not null' if in_key else ''}"


async def _guard(connection: Connection, mirror: Mirror) -> None:
    name = mirror.source.replace("'", "''")
    await connection.execute(
        f"create trigger headwater_guard before insert or update or delete or truncate on"
        f" {mirror.table} execute function headwater.guard_mirror('{name}')".encode()
    )


async def make_live(connection: Connection, mirror: Mirror) -> None:
    """Capture the mirror's changes from now on."""
    await connection.execute("select headwater.enable_table(%s::bigint::oid)", (mirror.relid,))


# ------------------------------------------------------------------------ other columns


async def alter(connection: Connection, mirror: Mirror, table: SourceTable) -> bool:
    """Give the mirror the columns and the key of a new description. Returns whether its rows must
    be copied because values are missing. The caller saves it."""
    await check_types(connection, table)
    old = {column.name: column for column in mirror.description.columns}
    new = {column.name: column for column in table.columns}
    has_lost = False
    key_changed = table.key != mirror.description.key
    if key_changed:
        await _drop_key(connection, mirror)
    for name in old.keys() - new.keys():
        await connection.execute(f"alter table {mirror.table} drop column {quoted(name)}".encode())
    for name, column in new.items():
        if name not in old:
            await _add(connection, mirror, column)
            has_lost = True
        elif old[name].type != column.type:
            has_lost |= not await _retype(connection, mirror, column)
    if key_changed:
        has_lost |= await _add_key(connection, mirror, table)
    mirror.description = msgspec.structs.replace(table, target=mirror.description.target)
    await read_columns(connection, mirror)
    if mirror.state in ("live", "recopying"):
        await make_live(connection, mirror)
    return has_lost


async def _add(connection: Connection, mirror: Mirror, column: SourceColumn) -> None:
    await connection.execute(
        f"alter table {mirror.table} add column {quoted(column.name)} {column.type}".encode()
    )


async def _retype(connection: Connection, mirror: Mirror, column: SourceColumn) -> bool:
    """Whether the values could be converted."""
    name = quoted(column.name)
    try:
        async with connection.transaction():
            await connection.execute(
                f"alter table {mirror.table} alter column {name} type {column.type}"
                f" using {name}::text::{column.type}".encode()
            )
        return True
    except errors.DataError:
        await connection.execute(f"alter table {mirror.table} drop column {name}".encode())
        await _add(connection, mirror, column)
        return False


async def _drop_key(connection: Connection, mirror: Mirror) -> None:
    cursor = await connection.execute(
        "select conname::text from pg_constraint where conrelid = %s and contype = 'p'",
        (mirror.relid,),
    )
    for (name,) in await cursor.fetchall():
        await connection.execute(
            f"alter table {mirror.table} drop constraint {quoted(name)}".encode()
        )


async def _add_key(connection: Connection, mirror: Mirror, table: SourceTable) -> bool:
    """Whether the rows had to be removed, because they have no such key."""
    key = ", ".join(quoted(name) for name in table.key)
    statement = f"alter table {mirror.table} add primary key ({key})".encode()
    try:
        async with connection.transaction():
            await connection.execute(statement)
        return False
    except errors.IntegrityError:
        await connection.execute(f"truncate {mirror.table}".encode())
        await connection.execute(statement)
        return True


# ------------------------------------------------------------------------ copies of live tables


async def begin_copy(connection: Connection, mirror: Mirror, *, follows: bool = False) -> None:
    """Copy the table from its beginning: into the mirror if that was never complete, otherwise into
    a staging table. `follows` says that the mirror still has every row of its source, so that
    changes are also applied to it until the copy replaces it."""
    mirror.cursor, mirror.copied, mirror.follows = None, 0, follows
    if mirror.state == "copying":
        await connection.execute(f"truncate {mirror.table}".encode())
    else:
        mirror.state = "recopying"
        await drop_staging(connection, mirror)
        columns = ", ".join(f"t.{quoted(c.name)}" for c in mirror.columns)
        key = ", ".join(quoted(name) for name in mirror.description.key)
        await connection.execute(
            f"create table {mirror.staging} as"
            f" select {columns} from {mirror.table} t limit 0".encode()
        )
        await connection.execute(f"revoke all on {mirror.staging} from public".encode())
        await connection.execute(f"alter table {mirror.staging} add primary key ({key})".encode())
        cursor = await connection.execute(
            "select reltuples::bigint from pg_class where oid = %s and reltuples > 0",
            (mirror.relid,),
        )
        row = await cursor.fetchone()
        mirror.estimate = row[0] if row else mirror.estimate
    await save(connection, mirror)


async def drop_staging(connection: Connection, mirror: Mirror) -> None:
    await connection.execute(f"drop table if exists {mirror.staging}".encode())


async def replace_rows(connection: Connection, mirror: Mirror) -> None:
    """Make the mirror equal to its staging table. Only rows that differ are written, so watchers
    get exactly the difference."""
    await connection.execute("set local enable_seqscan = on")
    await connection.execute(f"analyze {mirror.staging}".encode())
    same_key = " and ".join(f"m.{quoted(n)} = s.{quoted(n)}" for n in mirror.description.key)
    key = set(mirror.description.key)
    others = [quoted(c.name) for c in mirror.columns if c.name not in key]
    names = ", ".join(quoted(c.name) for c in mirror.columns)
    values = ", ".join(f"s.{quoted(c.name)}" for c in mirror.columns)
    await connection.execute(
        f"delete from {mirror.table} m where not exists"
        f" (select from {mirror.staging} s where {same_key})".encode()
    )
    if others:
        sets = ", ".join(f"{name} = s.{name}" for name in others)
        left, right = (", ".join(f"{x}.{name}" for name in others) for x in "ms")
        await connection.execute(
            f"update {mirror.table} m set {sets} from {mirror.staging} s"
            f" where {same_key} and record_image_ne(row({left}), row({right}))".encode()
        )
    await connection.execute(
        f"insert into {mirror.table} ({names}) select {values} from {mirror.staging} s"
        f" where not exists (select from {mirror.table} m where {same_key})".encode()
    )
    await drop_staging(connection, mirror)


# ------------------------------------------------------------------------ removal


async def release(connection: Connection, mirror: Mirror, *, drop: bool) -> None:
    """The source is removed: the mirror is dropped, or becomes an ordinary table."""
    await drop_staging(connection, mirror)
    cursor = await connection.execute("select to_regclass(%s) is null", (mirror.table,))
    if _first(await cursor.fetchone()):
        return
    if drop:
        await connection.execute(f"drop table {mirror.table}".encode())
    else:
        await connection.execute(
            f"drop trigger if exists headwater_guard on {mirror.table}".encode()
        )


def _first(row: tuple[Any, ...] | None) -> Any:
    assert row is not None
    return row[0]
