"""The position of a source: read from the newest row of `headwater.source_transactions`, and saved
there by the transaction that applies the changes up to it."""

from __future__ import annotations

from datetime import datetime

from headwater.database import Connection

SAVE = "select headwater.save_position($1, $2, $3, $4)"
"""With the source, the position that was saved before, the new one, and the commit time."""


async def saved(connection: Connection, source: str) -> str | None:
    """Where the source was left; None if it was never started, or was removed."""
    cursor = await connection.execute(
        "select position from headwater.source_transactions where source = %s"
        " order by xid desc limit 1",
        (source,),
    )
    row = await cursor.fetchone()
    return None if row is None else row[0]


async def save(
    connection: Connection,
    source: str,
    expected: str | None,
    position: str | None,
    committed_at: datetime | None = None,
) -> None:
    await connection.execute(
        "select headwater.save_position(%s, %s, %s, %s)",
        (source, expected, position, committed_at),
    )
