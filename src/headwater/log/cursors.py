"""Named cursors: where a consumer has come to, saved only after its effect.

A consumer that crashes anywhere starts again at its saved position: changes may come twice, none is
skipped.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

import msgspec

from headwater.database import Connection
from headwater.errors import ConfigError, ResyncRequired
from headwater.log.read import check
from headwater.model import Position

logger = logging.getLogger(__name__)


class Cursor(msgspec.Struct, frozen=True):
    """A saved position and how it stands to the log.

    `lag` is the age of the first change it has not seen, and `left` what remains of the retention
    before that change may be trimmed; both are None when it has seen everything.
    """

    name: str
    position: Position
    saved_at: datetime
    lag: timedelta | None
    left: timedelta | None
    lost: bool


async def load(connection: Connection, name: str) -> Position | None:
    cursor = await connection.execute(
        "select position from headwater.cursors where name = %s", (name,)
    )
    row = await cursor.fetchone()
    if row is None:
        return None
    try:
        return Position.parse(row[0])
    except ValueError as error:
        raise ConfigError(
            f"cursor {name!r} is damaged: {error}",
            hint=f"Delete it and start anew: delete from headwater.cursors where name = '{name}'",
        ) from error


async def save(connection: Connection, name: str, position: Position) -> None:
    await connection.execute(
        "insert into headwater.cursors (name, position) values (%s, %s)"
        " on conflict (name) do update"
        " set position = excluded.position, saved_at = clock_timestamp()",
        (name, str(position)),
    )


async def delete(connection: Connection, name: str) -> bool:
    cursor = await connection.execute("delete from headwater.cursors where name = %s", (name,))
    return cursor.rowcount > 0


async def list_all(connection: Connection) -> list[Cursor]:
    cursor = await connection.execute(
        "select name, position, saved_at from headwater.cursors order by name"
    )
    found = []
    for name, text, saved_at in await cursor.fetchall():
        try:
            found.append(await _describe(connection, name, Position.parse(text), saved_at))
        except ValueError as error:
            logger.error("cursor %s is damaged: %s", name, error)
    return found


async def _describe(
    connection: Connection, name: str, position: Position, saved_at: datetime
) -> Cursor:
    cursor = await connection.execute(
        """
        select clock_timestamp() - first.at,
               retention - (clock_timestamp() - first.at),
               headwater.log_id()
        from headwater.installation
        left join lateral (
          select min(at) as at from (
            select at from headwater.log
            where xid >= %(xid)s::xid8
              and not pg_visible_in_snapshot(xid, %(snapshot)s::pg_snapshot)
            order by xid limit 1
          ) unseen
        ) first on true
        """,
        {
            "xid": str(position.xmin),
            "snapshot": position.snapshot,
        },
    )
    row = await cursor.fetchone()
    assert row is not None
    lag, left, log = row
    try:
        await check(connection, log, position)
    except ResyncRequired:
        return Cursor(name, position, saved_at, lag, left, lost=True)
    return Cursor(name, position, saved_at, lag, left, lost=False)
