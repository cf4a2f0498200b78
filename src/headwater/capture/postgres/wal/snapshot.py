"""Reads chunks of a table in the order of its key, with the two positions of each.

A transaction writes its commit into the log a moment before other sessions see it; with synchronous
replication, long before. So a position that is merely the end of the log would claim too much: the
rows could lack a transaction before it. Here `low` is the position up to which the tail has been
read, and a chunk is read only in a snapshot that sees everything the tail has read. `high` is the
end of the log after the snapshot was taken, flushed before the chunk is returned, so the tail will
reach it, and a crash of the server cannot take back what the chunk has.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Sequence

import psycopg
from psycopg import sql

from headwater.capture.postgres.wal.connecting import fetch
from headwater.capture.postgres.wal.positions import Position
from headwater.capture.postgres.wal.slots import flush, read_server
from headwater.capture.source import Chunk, SourceKey, SourceRow, SourceTable
from headwater.database import Connection
from headwater.errors import SourceUnavailable
from headwater.limits import SOURCE_CHUNK_BYTES
from headwater.live.filters.sql import Sql, identifier

VISIBLE_SECONDS = 60.0
"""How long a transaction that has committed may stay invisible."""

DOUBT_SECONDS = 1.0
"""How long transactions that ran when reading began may delay the first chunk. Those that have
committed become visible in that time; the others are still running."""

RECENT_TRANSACTIONS = 10_000


class Visibility:
    """Which transactions a snapshot must see: those that the tail has returned."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=RECENT_TRANSACTIONS)
        self._doubtful: frozenset[int] = frozenset()
        self._doubt_until = 0.0

    def returned(self, xid: int) -> None:
        self._recent.append(xid)

    def doubt(self, snapshot: str) -> None:
        """Reading begins; these transactions may have committed before."""
        self._doubtful = _Snapshot(snapshot).running
        self._doubt_until = time.monotonic() + DOUBT_SECONDS

    def missing(self, snapshot: str) -> bool:
        """Whether the snapshot lacks one of them. Those that it sees are forgotten."""
        seen = _Snapshot(snapshot)
        doubtful = self._doubtful & seen.running
        if doubtful and time.monotonic() < self._doubt_until:
            return True
        self._doubtful = frozenset()
        hidden = [xid for xid in self._recent if not seen.sees(xid)]
        self._recent.clear()
        self._recent.extend(hidden)
        return bool(hidden)


class _Snapshot:
    """PostgreSQL's text form of a snapshot, with transaction ids as the log has them: 32 bits.

    >>> snapshot = _Snapshot("100:105:101,103")
    >>> [snapshot.sees(xid) for xid in (99, 100, 101, 104, 105)]
    [True, True, False, True, False]
    """

    def __init__(self, text: str) -> None:
        _, upper, running = text.split(":")
        self._next = int(upper) & 0xFFFFFFFF
        self.running = frozenset(int(xid) & 0xFFFFFFFF for xid in running.split(",") if xid)

    def sees(self, xid: int) -> bool:
        follows = (xid - self._next) & 0xFFFFFFFF < 0x80000000
        return xid not in self.running and not follows


# ------------------------------------------------------------------------ chunks


async def read_chunk(
    connection: Connection,
    statement: Sql,
    table: SourceTable,
    rows: int,
    low: Position,
    visibility: Visibility,
) -> Chunk:
    """One chunk, of the statement that `chunk_statement` made. After an error the connection is
    not usable."""
    await _begin(connection, visibility)
    server = await read_server(connection)
    found, full = await _copy(connection, statement, rows)
    await connection.rollback()
    await connection.set_autocommit(True)
    if server.flushed < server.inserted:
        await flush(connection)
    places = table.key_places()
    last: SourceKey | None = tuple(str(found[-1][at]) for at in places) if full else None
    return Chunk(found, last, str(low), str(server.position))


async def _begin(connection: Connection, visibility: Visibility) -> None:
    """Begin a transaction whose snapshot sees what it must."""
    until = time.monotonic() + VISIBLE_SECONDS
    await connection.set_autocommit(False)
    while True:
        await connection.execute("set transaction isolation level repeatable read, read only")
        ((snapshot,),) = await fetch(connection, "select pg_current_snapshot()::text")
        if not visibility.missing(snapshot):
            return
        await connection.rollback()
        if time.monotonic() > until:
            raise SourceUnavailable(
                "a transaction of the source has committed but stays invisible",
                hint="Usually a synchronous standby does not confirm: see pg_stat_replication at"
                " the source.",
            )
        await asyncio.sleep(0.01)


class _Full(Exception):
    """A chunk has enough bytes. Raised inside the COPY, so that the driver cancels the rest."""


async def _copy(connection: Connection, statement: Sql, rows: int) -> tuple[list[SourceRow], bool]:
    """The rows, and whether there may be more."""
    found: list[SourceRow] = []
    size = 0
    try:
        async with connection.cursor() as cursor:
            # With a value in any case: without one, the driver would not read "%%" as "%".
            text = f"copy ({statement.text} limit %s) to stdout".encode()
            async with cursor.copy(text, (*statement.values, rows)) as copy:
                async for data in copy:
                    size += len(data)
                    if found and size > SOURCE_CHUNK_BYTES:
                        raise _Full
                    found.append(parse_line(bytes(data)))
    except _Full:
        return found, True
    except (psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedTable) as error:
        raise SourceUnavailable(
            f"a table of the source was altered while it was copied: {error.diag.message_primary}",
            hint="The copy continues when the change has been read from the log.",
        ) from error
    return found, len(found) >= rows


def chunk_statement(
    from_: str,
    table: SourceTable,
    after: SourceKey | None,
    where: Sql | None,
    by_text: Sequence[str],
) -> Sql:
    """The rows whose keys follow. Columns in `by_text` have no order that we can name, and are
    ordered as texts.

    >>> from headwater.capture.source import SourceColumn
    >>> t = SourceTable("t", "t", (SourceColumn("id", "bigint"), SourceColumn("x", "text")), ("id",))
    >>> chunk_statement("only public.t", t, ("7",), None, ())
    Sql(text='select "id", "x" from only public.t where ("id") > (%s) order by "id"', values=('7',))
    """  # noqa: E501
    columns = ", ".join(identifier(column.name) for column in table.columns)
    keys = [_key(name, name in by_text) for name in table.key]
    conditions = [where] if where is not None else []
    if after is not None:
        bound = ", ".join(["%s"] * len(keys))
        conditions.append(Sql(f"({', '.join(keys)}) > ({bound})", tuple(after)))
    text = f"select {columns} from {from_.replace('%', '%%')}"
    if conditions:
        text += " where " + " and ".join(each.text for each in conditions)
    text += f" order by {', '.join(keys)}"
    return Sql(text, tuple(value for each in conditions for value in each.values))


def _key(name: str, by_text: bool) -> str:
    return f'({identifier(name)}::text collate "C")' if by_text else identifier(name)


def quoted_table(schema: str, name: str) -> str:
    return sql.Identifier(schema, name).as_string()


# ------------------------------------------------------------------------ COPY's text format


def parse_line(line: bytes) -> SourceRow:
    r"""The values of a row in COPY's text format.

    >>> parse_line(b"7\t\\N\ta\\tb\\\\\n")
    ('7', None, 'a\tb\\')
    """
    text = line.decode().removesuffix("\n")
    fields = text.split("\t")
    if "\\" not in text:
        return tuple(fields)
    return tuple([None if f == "\\N" else _unescaped(f) if "\\" in f else f for f in fields])


def _unescaped(field: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), field)


_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
