"""The publication: which tables, columns and rows the source's log is read for.

It is altered, never dropped and made again, while a slot exists: the server reads old changes with
the publication of that time. A comment on it says what we made and since when, so an unchanged
definition alters nothing, and one that was dropped in between is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import psycopg
from psycopg import AsyncClientCursor, sql

from headwater.capture.postgres.wal.catalog.describe import CatalogTable, chosen
from headwater.capture.postgres.wal.connecting import fetch, fetch_value
from headwater.capture.postgres.wal.pgoutput import parse_lsn, print_lsn
from headwater.capture.source import TableSpec
from headwater.database import Connection
from headwater.errors import PositionLost
from headwater.live.filters.sql import Sql


class PublishedTable(msgspec.Struct, frozen=True):
    spec: TableSpec
    catalog: CatalogTable
    where: Sql | None


async def ensure_publication(
    connection: Connection, name: str, tables: Sequence[PublishedTable], version: int
) -> None:
    """Make it or alter it, so that it has exactly these tables."""
    oids = frozenset(table.catalog.oid for table in tables)
    for filtered in (True, False):
        listed = [await _entry(connection, table, version, filtered) for table in tables]
        try:
            async with connection.transaction():
                await _apply(connection, name, listed, oids, version)
            return
        except (psycopg.errors.FeatureNotSupported, psycopg.errors.InvalidParameterValue):
            # The server does not accept such a condition: the runner applies it alone.
            if not filtered or not any(table.where for table in tables):
                raise


class _Present(msgspec.Struct, frozen=True):
    """A publication as it is: our mark on it, since which LSN it exists, and its tables."""

    mark: str
    since: int
    oids: frozenset[int]

    @property
    def is_ours(self) -> bool:
        return self.mark.startswith("headwater ")


async def _read(connection: Connection, name: str) -> _Present | None:
    rows = await fetch(
        connection,
        "select coalesce(obj_description(p.oid, 'pg_publication'), ''),"
        " array(select prrelid::bigint from pg_publication_rel where prpubid = p.oid)"
        " from pg_publication p where p.pubname = %s",
        name,
    )
    if not rows:
        return None
    mark, _, since = rows[0][0].partition(" since ")
    return _Present(mark, parse_lsn(since) if since else 0, frozenset(rows[0][1]))


async def _apply(
    connection: Connection, name: str, listed: list[str], oids: frozenset[int], version: int
) -> None:
    options = _options(version)
    mark = _mark(listed, options)
    quoted = sql.Identifier(name).as_string()
    found = await _read(connection, name)
    if found is not None and found.mark == mark and found.oids == oids:
        return
    tables = f"table {', '.join(listed)}"
    if found is None:
        made = f"create publication {quoted} for {tables} with ({options})"
        await connection.execute(made.encode())
    else:
        await connection.execute(f"alter publication {quoted} set ({options})".encode())
        await connection.execute(f"alter publication {quoted} set {tables}".encode())
    since = await fetch_value(connection, "select pg_current_wal_insert_lsn()::text")
    if found is not None and found.is_ours:
        since = print_lsn(found.since)
    comment = f"comment on publication {quoted} is '{mark} since {since}'"
    await connection.execute(comment.encode())


async def check_publication(
    connection: Connection, name: str, tables: Sequence[PublishedTable], lsn: int, managed: bool
) -> None:
    """PositionLost if changes after the position were not published. Some releases of the server
    leave them out silently when the publication did not exist at their time."""
    found = await _read(connection, name)
    if found is None or (managed and (not found.is_ours or lsn < found.since)):
        raise _lost(f"the publication {name} was dropped at the source")
    missing = [table.spec.name for table in tables if table.catalog.oid not in found.oids]
    was_ours = managed and found.mark in {
        _mark([await _entry(connection, t, _version(connection), filtered) for t in tables],
              _options(_version(connection)))
        for filtered in (True, False)
    }  # fmt: skip
    if missing and was_ours:
        raise _lost(f"the table {missing[0]} was removed from the publication {name}")


def _version(connection: Connection) -> int:
    return connection.info.server_version


def _lost(reason: str) -> PositionLost:
    return PositionLost(
        f"{reason}; changes since then cannot be read",
        hint="Copy the tables again: headwater source resnapshot NAME",
    )


def _options(version: int) -> str:
    options = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"
    return f"{options}, publish_generated_columns = 'stored'" if version >= 180000 else options


def _mark(listed: list[str], options: str) -> str:
    text = "\n".join([options, *listed])
    return f"headwater {hashlib.sha256(text.encode()).hexdigest()[:32]}"


async def _entry(
    connection: Connection, table: PublishedTable, version: int, filtered: bool
) -> str:
    """The table as in `create publication … for table`."""
    catalog = table.catalog
    text = f"{'only ' if catalog.kind == 'r' else ''}{catalog.quoted}"
    if version < 150000:
        return text
    if uses_column_list(table.spec, catalog):
        names = chosen(table.spec, [c.name for c in catalog.published(version)])
        text += f" ({', '.join(sql.Identifier(name).as_string() for name in names)})"
    if table.where is not None and filtered:
        condition = table.where.text.encode()
        text += f" where ({AsyncClientCursor(connection).mogrify(condition, table.where.values)})"
    return text


def uses_column_list(spec: TableSpec, catalog: CatalogTable) -> bool:
    """Not under REPLICA IDENTITY FULL: PostgreSQL would refuse the updates of the application. Not
    for `exclude`: columns that are added later would stay hidden."""
    identities = {catalog.identity, *(leaf.identity for leaf in catalog.leaves)}
    return spec.columns is not None and "f" not in identities


async def publishes(connection: Connection, name: str) -> set[tuple[str, str]]:
    """The schemas and names of the tables of a publication that an administrator made."""
    rows = await fetch(
        connection,
        "select schemaname::text, tablename::text from pg_publication_tables where pubname = %s",
        name,
    )
    return {(schema, table) for schema, table in rows}


async def publication_exists(connection: Connection, name: str) -> bool:
    found = await fetch_value(
        connection, "select count(*) from pg_publication where pubname = %s", name
    )
    return bool(found)


async def drop_publication(connection: Connection, name: str) -> None:
    await connection.execute(
        f"drop publication if exists {sql.Identifier(name).as_string()}".encode()
    )
