"""Rows of the log: as JSON in an answer, as `LogRow`, and as the `Change` that an application gets.

A row names its table by a *shape*: the table as it was when the row was written, with its columns
and key. `Shapes` reads each shape once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import msgspec

from headwater.database import Connection
from headwater.log.images import ImageDecoder
from headwater.model import NO_ACTOR, Actor, Change, Column, Op, Origin, Table


class LogRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row of `headwater.log`. Its images stay text until a reader wants their table: a value
    that cannot be decoded must not stop readers of other tables."""

    seq: int
    xid: int
    at: datetime
    shape: int
    op: str
    before: str | None
    after: str | None
    user_id: str | None
    function_name: str | None
    trace_id: str | None


ROWS_AS_JSON = (
    "coalesce(json_agg(json_build_array(seq, xid::text::bigint, at, shape, op::text,"
    " before::text, after::text, user_id, function_name, trace_id)), '[]')"
)
"""Selects rows in the form that `decode_rows` reads."""

decode_rows = msgspec.json.Decoder(list[LogRow]).decode

_OPS: dict[str, Op] = {
    "I": "insert",
    "U": "update",
    "D": "delete",
    "T": "truncate",
    "R": "reset",
}


class Shapes:
    """The shapes that a reader has met. `wants` says which tables it reads; without it, all but the
    tables of Headwater itself."""

    def __init__(self, wants: Callable[[Table], bool] | None = None) -> None:
        self._wants = wants
        self._known: dict[int, tuple[Table, ImageDecoder] | None] = {}
        self._mirrors: set[int] = set()

    async def learn(self, connection: Connection, shapes: set[int]) -> None:
        """Read those of the shapes that are not known yet."""
        unknown = shapes - self._known.keys()
        if not unknown:
            return
        cursor = await connection.execute(
            "select distinct on (id) id, relid, schema_name, table_name, columns, key,"
            " exists (select from headwater.source_tables t where t.relid = s.relid)"
            " from headwater.shapes s where id = any(%s)",
            (list(unknown),),
        )
        for id_, oid, schema, name, columns, key, is_mirror in await cursor.fetchall():
            typed = msgspec.convert(columns, tuple[Column, ...])
            table = Table(id_, schema, name, typed, tuple(key), oid)
            wanted = not table.is_system if self._wants is None else self._wants(table)
            self._known[id_] = (table, ImageDecoder(table)) if wanted else None
            if wanted and is_mirror:
                self._mirrors.add(id_)

    def tables(self, shapes: Iterable[int]) -> list[Table]:
        """The tables of known shapes, without those that the reader does not want."""
        return [known[0] for shape in shapes if (known := self._known[shape])]

    def wanted(self, rows: Iterable[LogRow]) -> Iterable[LogRow]:
        """The rows of tables that the reader wants; their shapes are known."""
        return (row for row in rows if self._known[row.shape] is not None)

    def mirrored(self, rows: Iterable[LogRow]) -> set[int]:
        """The transactions that changed mirrors of sources; the shapes of the rows are known."""
        mirrors = self._mirrors
        return {row.xid for row in rows if row.shape in mirrors} if mirrors else set()

    def changes(self, rows: Iterable[LogRow], origins: Mapping[int, Origin]) -> tuple[Change, ...]:
        """The rows decoded, without those of tables that the reader does not want. `origins` are
        those of the transactions in `mirrored`."""
        known = self._known
        if not origins:
            return tuple(_change(row, *shape) for row in rows if (shape := known[row.shape]))
        mirrors = self._mirrors
        return tuple(
            _change(row, *shape, origins.get(row.xid) if row.shape in mirrors else None)
            for row in rows
            if (shape := known[row.shape])
        )


def _change(
    row: LogRow, table: Table, decode: ImageDecoder, origin: Origin | None = None
) -> Change:
    before = None if row.before is None else decode(row.before)
    after = None if row.after is None else decode(row.after)
    image = after if after is not None else before
    anonymous = not (row.user_id or row.function_name or row.trace_id)
    return Change(
        row.seq,
        row.xid,
        row.at,
        table,
        _OPS[row.op],
        table.key_of(image) if image is not None else (),
        before,
        after,
        NO_ACTOR
        if anonymous
        else Actor(row.user_id or None, row.function_name or None, row.trace_id or None),
        origin,
    )
