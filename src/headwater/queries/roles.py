"""Acting as another database role inside a transaction: row-level security then applies."""

from __future__ import annotations

from psycopg import sql

from headwater.database import Connection


async def become(connection: Connection, role: str, claims: str) -> None:
    """From here to the end of the transaction act as the role; policies find the claims in
    `request.jwt.claims`."""
    async with connection.pipeline():
        await connection.execute(sql.SQL("set local role {}").format(sql.Identifier(role)))
        await connection.execute("select set_config('request.jwt.claims', %s, true)", (claims,))


async def become_oneself(connection: Connection) -> None:
    """Act as Headwater's own role again."""
    async with connection.pipeline():
        await connection.execute("set local role none")
        await connection.execute("select set_config('request.jwt.claims', '', true)")
