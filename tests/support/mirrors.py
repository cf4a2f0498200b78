"""Mirrors of a source without the source: tests write to them as a runner does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headwater.database import Connection

SOURCE = "shop"


def mirror_sql(table: str, source: str = SOURCE) -> str:
    """Makes a table that exists the mirror of a table of the source, whose kind is `mysql`."""
    return f"""
        insert into headwater.sources (name, kind, into_schema)
        values ('{source}', 'mysql', 'public') on conflict do nothing;
        insert into headwater.source_tables (source, name, target, relid, state, description)
        values ('{source}', '{table}', '{table}', '{table}'::regclass, 'live', '{{}}')"""


def applied_sql(position: str, committed_at: str | None = None, source: str = SOURCE) -> str:
    """Says that the present transaction applied one of the source."""
    time = "null" if committed_at is None else f"'{committed_at}'"
    return (
        "insert into headwater.source_transactions (xid, source, position, committed_at)"
        f" values (pg_current_xact_id(), '{source}', '{position}', {time})"
    )


async def declare_mirror(connection: Connection, table: str, source: str = SOURCE) -> None:
    await connection.execute(mirror_sql(table, source).encode())


@asynccontextmanager
async def source_transaction(
    connection: Connection, position: str, committed_at: str | None = None, source: str = SOURCE
) -> AsyncIterator[Connection]:
    """A transaction in which changes of a source are applied."""
    async with connection.transaction():
        yield connection
        await connection.execute(applied_sql(position, committed_at, source).encode())
