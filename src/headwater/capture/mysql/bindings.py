"""How to read the rows of one table map, and what a row must be: with its key, and with all columns
where it was inserted.
"""

from __future__ import annotations

from typing import NamedTuple

from headwater.capture.mysql.describe import Charsets, Table, described_by
from headwater.capture.mysql.types import MAYBE_ZERO
from headwater.capture.mysql.values import NUL_PICTURE
from headwater.capture.mysql.wire import events
from headwater.capture.mysql.wire.columns import reader
from headwater.capture.mysql.wire.events import TableMap
from headwater.capture.mysql.wire.rows import RowReader
from headwater.capture.source import UNCHANGED, RowOp, SourceRow
from headwater.errors import SourceRefused

_RESNAPSHOT = "Copy the tables again: headwater source resnapshot NAME"


class Binding(NamedTuple):
    """A table map and its table. `checked` are the places of the key whose values PostgreSQL might
    not store; `weight` is how much longer a value's text may be than its bytes."""

    table: Table
    rows: RowReader
    key: tuple[int, ...]
    checked: tuple[int, ...]
    weight: int

    def read(
        self, type: int, op: RowOp, body: bytes, *, inflate: bool
    ) -> tuple[list[SourceRow], list[SourceRow], int]:
        """The rows after and before the changes of an event, and about their size."""
        if inflate:
            body = _inflated(type, body)
        images = self.rows.read(type, body, 8)
        after, before = images.after, images.before
        if op == "delete":
            after, before = [], after
        if not images.complete:
            after = _completed(self, op, after, before)
        if self.checked:
            for row in after or before:
                _check_key(self, row)
        return after, before, len(body) * self.weight


def bind(table_map: TableMap, table: Table, charsets: Charsets) -> Binding:
    shapes = described_by(table_map, table, charsets).shapes
    readers = [
        reader(column, shape, charsets.tables)
        for column, shape in zip(table_map.columns, shapes, strict=True)
    ]
    names = [shape.name for shape in shapes]
    places = [names.index(column.name) for column in table.source.columns]
    key = table.source.key_places()
    checked = tuple(
        place
        for place, name in zip(key, table.source.key, strict=True)
        if shapes[names.index(name)].kind in MAYBE_ZERO | {"char", "text", "enum", "set"}
    )
    bytea = any(column.type == "bytea" for column in table.source.columns)
    return Binding(table, RowReader(readers, places), key, checked, 2 if bytea else 1)


def _inflated(type: int, body: bytes) -> bytes:
    """A compressed event of MariaDB: its head is as usual, its rows are compressed."""
    place = 8
    if type in events.WITH_EXTRA_DATA:
        place += int.from_bytes(body[place : place + 2], "little")
    count, place = events.length(body, place)
    size = (count + 7) // 8
    place += size * (2 if type in (events.UPDATE_1, events.UPDATE_2) else 1)
    return body[:place] + events.uncompressed(body[place:])


def _completed(
    binding: Binding, op: RowOp, after: list[SourceRow], before: list[SourceRow]
) -> list[SourceRow]:
    """Rows of a session that does not log all columns: an update's key is in the row before."""
    if op == "insert" and any(UNCHANGED in row for row in after):
        raise SourceRefused(
            f"{binding.table.source.name} was written by a session with binlog_row_image=MINIMAL",
            hint=f"Set binlog_row_image=FULL in every session. {_RESNAPSHOT}",
        )
    if op != "update":
        return after
    completed = list[SourceRow]()
    for new, old in zip(after, before, strict=True):
        row = list(new)
        for place in binding.key:
            if row[place] is UNCHANGED:
                row[place] = old[place]
        completed.append(tuple(row))
    return completed


def _check_key(binding: Binding, row: SourceRow) -> None:
    for place in binding.checked:
        value = row[place]
        if value is None or (isinstance(value, str) and NUL_PICTURE in value):
            table = binding.table.source
            raise key_error(table.name, table.columns[place].name, row)


def key_error(table: str, column: str, row: SourceRow) -> SourceRefused:
    shown = ", ".join(repr(value)[:40] for value in row[:4])
    return SourceRefused(
        f"{table}: the key of the row ({shown}, …) has in {column} a value that PostgreSQL cannot"
        " store: a zero date, or a text with a NUL character",
        hint="Correct or delete the row at the source, and copy the table again.",
    )
