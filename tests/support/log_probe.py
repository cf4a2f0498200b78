"""Short functions for reading the log and running SQL, for many test files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headwater.database import Connection, connect
from headwater.log.reading.reader import LogReader
from headwater.model import Change, Position, Transaction


class LogProbe:
    """Remembers a position and reads the changes since the position."""

    def __init__(self, connection: Connection, reader: LogReader, position: Position) -> None:
        self.connection = connection
        self.reader = reader
        self.position = position

    async def transactions(self) -> list[Transaction]:
        batch = await self.reader.read(self.connection, self.position)
        assert not batch.backlog
        self.position = batch.position
        return list(batch.transactions)

    async def changes(self) -> list[Change]:
        return [change for t in await self.transactions() for change in t.changes]

    async def story(self) -> list[tuple[Any, ...]]:
        """Each change as (op, *key): enough for most tests."""
        return [(change.op, *change.key) for change in await self.changes()]


@asynccontextmanager
async def probing(url: str) -> AsyncIterator[LogProbe]:
    connection = await connect(url, purpose="probe", application_path=True)
    reader = await LogReader.open(connection)
    try:
        yield LogProbe(connection, reader, await reader.now(connection))
    finally:
        await connection.close()


async def enable(connection: Connection, *names: str) -> None:
    for name in names:
        await connection.execute("select headwater.enable_reactivity(%s)", (name,))


async def run(connection: Connection, *statements: str) -> None:
    for statement in statements:
        await connection.execute(statement.encode())


async def rows(connection: Connection, statement: str) -> list[tuple[Any, ...]]:
    cursor = await connection.execute(statement.encode())
    return await cursor.fetchall()


async def unseen(connection: Connection, statement: str) -> None:
    """Write without an entry in the log, and without a sign of it: triggers are off meanwhile, and
    capture is made to believe that they were never changed."""
    off, on = (
        "do $$ declare t text; begin for t in select relid::regclass from headwater.tables"
        f" where enabled loop execute format('alter table %s {verb} trigger user', t); end loop;"
        " end $$"
        for verb in ("disable", "enable")
    )
    async with connection.transaction():
        await run(connection, off, statement, on)
        await run(
            connection,
            "select headwater.remember(headwater.observe(member, root)) from headwater.captures",
        )
