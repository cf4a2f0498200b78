"""Mirrors of a source without the source: tests write to them as a runner does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headwater.database import Connection

SOURCE = "shop"


async def declare_mirror(connection: Connection, table: str, source: str = SOURCE) -> None:
    """Make a table that exists the mirror of a table of the source, whose kind is `mysql`."""
    await connection.execute(
        "insert into headwater.sources (name, kind, into_schema) values (%s, 'mysql', 'public')"
        " on conflict do nothing",
        (source,),
    )
    await connection.execute(
        "insert into headwater.source_tables (source, name, target, relid, state, description)"
        " values (%s, %s, %s, %s::regclass, 'live', '{}')",
        (source, table, table, table),
    )


@asynccontextmanager
async def source_transaction(
    connection: Connection, position: str, committed_at: str | None = None, source: str = SOURCE
) -> AsyncIterator[Connection]:
    """A transaction in which changes of a source are applied."""
    async with connection.transaction():
        yield connection
        await connection.execute(
            "insert into headwater.source_transactions (xid, source, position, committed_at)"
            " values (pg_current_xact_id(), %s, %s, %s)",
            (source, position, committed_at),
        )
