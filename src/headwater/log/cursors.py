"""Named cursors: how far a consumer has processed the log, saved only after it did so.

A consumer that crashes continues from its saved position: it may receive changes a second time, and
misses none.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

import msgspec

from headwater.database import Connection
from headwater.errors import ConfigError, ResyncRequired
from headwater.log import reach
from headwater.log.between import SINCE_RANGES, parameters
from headwater.model import Position

logger = logging.getLogger(__name__)


class SavedCursor(msgspec.Struct, frozen=True):
    """A saved position, and how far it is behind the log.

    `lag` is the age of the first change since the position, and `left` the time until that change
    may be trimmed; both are None where there is none. `lost` says that the log no longer reaches
    back to the position.
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
            hint=f"Delete it and start again: delete from headwater.cursors where name = '{name}'",
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


async def list_all(connection: Connection) -> list[SavedCursor]:
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
) -> SavedCursor:
    cursor = await connection.execute(_LAG, parameters(position))
    row = await cursor.fetchone()
    assert row is not None
    lag, left = row
    try:
        await reach.check(connection, position)
        lost = False
    except ResyncRequired:
        lost = True
    return SavedCursor(name, position, saved_at, lag, left, lost)


_FIRST_SINCE = " union all ".join(
    f"(select xid, at from headwater.log where {range_} order by xid, seq limit 1)"
    for range_ in SINCE_RANGES
)

_LAG = f"""
    select clock_timestamp() - first.at, retention - (clock_timestamp() - first.at)
    from headwater.installation
    left join (select at from ({_FIRST_SINCE}) firsts order by xid limit 1) first on true
""".encode()
