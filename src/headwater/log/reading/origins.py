"""The origins of mirrored changes: which transaction of which source they came from.

The log does not have them in its rows. A runner writes one row into `headwater.source_transactions`
in each transaction in which it applies changes of its source. Only rows of mirrors are looked up,
so a database without sources pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.database import Connection
from headwater.model import Origin

_ORIGINS = """
    select t.xid::text::bigint, t.source, t.position, t.committed_at, s.kind
    from headwater.source_transactions t left join headwater.sources s on s.name = t.source
    where t.xid = any(%s::xid8[])
"""


async def find_origins(connection: Connection, xids: Iterable[int]) -> dict[int, Origin]:
    """The origins of these transactions, by transaction id. A mirror also has changes without an
    origin, such as those of DDL."""
    wanted = list(map(str, xids))
    if not wanted:
        return {}
    cursor = await connection.execute(_ORIGINS, (wanted,))
    return {xid: Origin(*origin) for xid, *origin in await cursor.fetchall()}
