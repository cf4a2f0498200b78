"""A chunk of a table's rows, and the positions between which they were read.

MariaDB says at which place of the binary log a consistent snapshot was taken. MySQL does not:
there, GTIDs are read before and after, since a GTID counts as executed only when its rows are
visible. Without GTIDs, a short read lock on the table waits for transactions that are in the log
already but not visible yet.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from headwater import limits
from headwater.capture.mysql.bindings import key_error
from headwater.capture.mysql.connection import literal, query, quoted
from headwater.capture.mysql.describe import Charsets, Table
from headwater.capture.mysql.positions import Position
from headwater.capture.mysql.server import Server, current_position, gtids_at
from headwater.capture.mysql.types import Shape
from headwater.capture.mysql.values import NUL_PICTURE, from_query, select_expression
from headwater.capture.source import Chunk, SourceColumn, SourceKey, SourceRow, SourceTable
from headwater.errors import SourceUnavailable

if TYPE_CHECKING:
    from pymysql.connections import Connection

LOCK_SECONDS = 5
_GAP = Shape("", "int")
_NUMBER = re.compile(r"-?[0-9.]+(e[+-]?[0-9]+)?\Z")


class Snapshots:
    """Reads chunks on one connection. `broken` says that it must not be used again."""

    def __init__(self, connection: Connection[Any], server: Server) -> None:
        self._connection = connection
        self._server = server
        self._place: tuple[str, int] = ("", 0)
        self._gtids = ""
        self.broken = False

    def chunk(
        self,
        table: Table,
        source: SourceTable,
        charsets: Charsets,
        after: SourceKey | None,
        rows: int,
    ) -> Chunk:
        low = self._begin(table)
        found, last = self._rows(table, source, charsets, after, rows)
        if self.broken:
            return Chunk(found, last, str(low), str(low))
        high = low
        if self._server.dialect == "mysql":
            high = current_position(self._connection, self._server)
        query(self._connection, "rollback")
        return Chunk(found, last, str(low), str(high))

    def _begin(self, table: Table) -> Position:
        connection, server = self._connection, self._server
        low: Position | None = None
        if server.dialect == "mysql" and not server.gtids:
            query(connection, f"set session lock_wait_timeout = {LOCK_SECONDS}")
            query(connection, f"lock tables {quoted(table.schema, table.name)} read")
        if server.dialect == "mysql":
            low = current_position(connection, server)
        query(connection, "set session transaction isolation level repeatable read")
        query(connection, "start transaction with consistent snapshot, read only")
        return low or self._mariadb_place()

    def _mariadb_place(self) -> Position:
        status = dict(query(self._connection, "show status like 'binlog_snapshot_%'"))
        found = {str(name).lower(): value for name, value in status.items()}
        file, offset = found["binlog_snapshot_file"], int(found["binlog_snapshot_position"])
        if (file, offset) != self._place:
            self._gtids = gtids_at(self._connection, file, offset) or ""
            self._place = file, offset
        return Position("mariadb", self._server.identity, file, offset, self._gtids)

    def _rows(
        self,
        table: Table,
        source: SourceTable,
        charsets: Charsets,
        after: SourceKey | None,
        limit: int,
    ) -> tuple[list[SourceRow], SourceKey | None]:
        from pymysql.cursors import SSCursor

        shapes = [shape_of(table, column) for column in source.columns]
        converters = [from_query(shape or _GAP, charsets.tables) for shape in shapes]
        statement = self._statement(table, source, after, limit)
        found, size, more = list[SourceRow](), 0, False
        cursor = self._connection.cursor(SSCursor)
        cursor.execute(statement)
        while (values := cursor.fetchone()) is not None:
            row = tuple([
                None if value is None else convert(value)
                for value, convert in zip(values, converters, strict=True)
            ])  # fmt: skip
            found.append(row)
            size += sum([len(value) for value in row if value is not None])
            if size >= limits.SOURCE_CHUNK_BYTES:
                more = True
                break
        if more:
            # The rest of the answer is not wanted: the connection is closed with it.
            self.broken = True
            _abandon(self._connection)
        else:
            cursor.close()
        last = self._last(source, found) if more or len(found) >= limit else None
        self._check_keys(source, found)
        return found, last

    def _statement(
        self, table: Table, source: SourceTable, after: SourceKey | None, limit: int
    ) -> str:
        columns = [
            select_expression(shape, quoted(column.name)) if shape else "null"
            for column in source.columns
            for shape in [shape_of(table, column)]
        ]
        keys = [quoted(name) for name in source.key]
        where = ""
        if after is not None:
            bounds = [
                bound(self._connection, key_shape(table, name), value)
                for name, value in zip(source.key, after, strict=True)
            ]
            where = f" where {following(keys, bounds)}"
        return (
            f"select {', '.join(columns)} from {quoted(table.schema, table.name)}"
            f" force index (primary){where} order by {', '.join(keys)} limit {int(limit)}"
        )

    def _last(self, source: SourceTable, rows: list[SourceRow]) -> SourceKey:
        return tuple(str(rows[-1][place]) for place in source.key_places())

    def _check_keys(self, source: SourceTable, rows: list[SourceRow]) -> None:
        for place in source.key_places():
            for row in rows:
                value = row[place]
                if value is None or (isinstance(value, str) and NUL_PICTURE in value):
                    raise key_error(source.name, source.columns[place].name, row)


def _abandon(connection: Any) -> None:
    """Close it in the middle of an answer, which the driver would otherwise read to its end."""
    connection._result.unbuffered_active = False
    connection._result = None
    connection._force_close()


def shape_of(table: Table, column: SourceColumn) -> Shape | None:
    """None for a column that the table no longer has, or has with another type."""
    if any(c.name == column.name and c.type == column.type for c in table.source.columns):
        return table.shape(column.name)
    return None


def key_shape(table: Table, name: str) -> Shape:
    shape = table.shape(name)
    if shape is None:
        raise SourceUnavailable(f"{table.source.name} changed: it no longer has {name}")
    return shape


def following(keys: list[str], bounds: list[str]) -> str:
    """Rows whose key follows the bound. Written out, because a comparison of rows uses no index.

    >>> following(["a", "b"], ["1", "2"])
    'a >= 1 and (a > 1 or (a = 1 and b > 2))'
    """
    if len(keys) == 1:
        return f"{keys[0]} > {bounds[0]}"
    parts = list[str]()
    for i, key in enumerate(keys):
        same = [f"{k} = {b}" for k, b in zip(keys[:i], bounds[:i], strict=True)]
        parts.append(" and ".join([*same, f"{key} > {bounds[i]}"]))
    alternatives = " or ".join(part if " and " not in part else f"({part})" for part in parts)
    return f"{keys[0]} >= {bounds[0]} and ({alternatives})"


def bound(connection: Any, shape: Shape, text: str) -> str:
    """A value of the key inside of a statement, such that it compares as the column orders."""
    match shape.kind:
        case "bit" | "boolean":
            return str(int(text in ("t", "true"))) if text in ("t", "f") else str(int(text, 2))
        case "enum":
            return str(shape.members.index(text) + 1 if text in shape.members else 0)
        case "set":
            chosen = set(filter(None, text.split(",")))
            return str(sum(1 << i for i, name in enumerate(shape.members) if name in chosen))
        case "binary" | "blob" | "geometry":
            return literal(connection, bytes.fromhex(text.removeprefix("\\x")))
        case "timestamp":
            return literal(connection, text.removesuffix("+00"))
        case "char" | "text" | "date" | "datetime" | "time" | "uuid" | "inet4" | "inet6" | "json":
            return literal(connection, text)
        case _:
            if not _NUMBER.match(text):
                raise ValueError(f"{text!r} is not a number")
            return text
