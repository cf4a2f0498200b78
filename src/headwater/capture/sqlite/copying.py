"""Copying a table: a chunk of rows in the order of the key, from one read transaction."""

from __future__ import annotations

import sqlite3

from headwater.capture.source import Cell, Chunk, SourceKey, SourceRow, SourceTable
from headwater.capture.sqlite.changes import Misfits
from headwater.capture.sqlite.queue import Queue
from headwater.capture.sqlite.shapes import find_table
from headwater.capture.sqlite.statements import quoted
from headwater.capture.sqlite.values import Misfit, converter, key_value
from headwater.errors import SourceUnavailable
from headwater.limits import SOURCE_CHUNK_BYTES


def read_chunk(
    db: sqlite3.Connection,
    queue: Queue,
    table: SourceTable,
    after: SourceKey | None,
    rows: int,
    misfits: Misfits,
) -> Chunk:
    """The rows and the end of the queue are seen at the same moment: both positions are one."""
    db.execute("begin")
    try:
        position = str(queue.last(db))
        found, last = _read_rows(db, table, after, rows, misfits)
        return Chunk(found, last, position, position)
    finally:
        db.execute("rollback")


def _read_rows(
    db: sqlite3.Connection,
    table: SourceTable,
    after: SourceKey | None,
    most: int,
    misfits: Misfits,
) -> tuple[list[SourceRow], SourceKey | None]:
    statement, parameters = _statement(db, table, after)
    places = table.key_places()
    read = _row_converter(table, misfits)
    found: list[SourceRow] = []
    size = 0
    cursor = db.execute(statement, parameters)
    try:
        for values in cursor:
            row = read(values)
            if row is None:
                continue
            found.append(row)
            size += sum(len(cell) for cell in row if isinstance(cell, str))
            if len(found) >= most or size >= SOURCE_CHUNK_BYTES:
                return found, tuple([str(row[i]) for i in places])
    finally:
        cursor.close()
    return found, None


def _statement(
    db: sqlite3.Connection, table: SourceTable, after: SourceKey | None
) -> tuple[str, list[object]]:
    stored = find_table(db, table.name)
    if stored is None:
        raise SourceUnavailable(f"the SQLite table {table.name!r} no longer exists")
    columns = ", ".join(f"t.{quoted(column.name)}" for column in table.columns)
    key = ", ".join(f"t.{quoted(name)}" for name in table.key)
    statement, parameters = f"select {columns} from {quoted(stored[0])} t", list[object]()
    if after is not None:
        types = {column.name: column.type for column in table.columns}
        parameters = [
            key_value(types[name], text) for name, text in zip(table.key, after, strict=True)
        ]
        places = ", ".join("?" * len(parameters))
        statement += f" where {f'({key}) > ({places})' if len(parameters) > 1 else f'{key} > ?'}"
    return f"{statement} order by {key}", parameters


class _RowConverter:
    """Rows of the table as rows of the mirror; None for one whose key the mirror cannot have."""

    def __init__(self, table: SourceTable, misfits: Misfits) -> None:
        self._name = table.name
        self._misfits = misfits
        self._columns = [
            (converter(column.type), column.name, column.type, column.name in table.key)
            for column in table.columns
        ]

    def __call__(self, values: tuple[object, ...]) -> SourceRow | None:
        cells: list[Cell] = []
        for value, (convert, name, type, is_key) in zip(values, self._columns, strict=True):
            cell: Cell = None
            if value is not None:
                try:
                    cell = convert(value)
                except Misfit:
                    self._misfits.count_value(self._name, name, type)
            if is_key and cell is None:
                self._misfits.count_row(self._name)
                return None
            cells.append(cell)
        return tuple(cells)


def _row_converter(table: SourceTable, misfits: Misfits) -> _RowConverter:
    return _RowConverter(table, misfits)
