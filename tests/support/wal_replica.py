"""A small runner for tests: it applies the items of a source to rows in memory, and fails when a
change is lost or comes twice. Its state can be put back to the last position that it saved."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from headwater.capture.postgres.wal.connecting import open_session
from headwater.capture.postgres.wal.positions import parse_position
from headwater.capture.postgres.wal.slots import flush, read_server
from headwater.capture.postgres.wal.snapshot import parse_line
from headwater.capture.postgres.wal.source import PostgresSource
from headwater.capture.source import (
    UNCHANGED,
    Chunk,
    Item,
    Progress,
    RowChanges,
    SchemaChange,
    SourceKey,
    SourceRow,
    SourceTable,
    TableDropped,
    TransactionPart,
)
from headwater.errors import SourceUnavailable

Rows = dict[SourceKey, SourceRow]


class Replica:
    """Tables by name. `copying` has the rows of a copy that has not ended."""

    def __init__(self, source: PostgresSource, chunk_rows: int = 7) -> None:
        self.source = source
        self.chunk_rows = chunk_rows
        self.tables: dict[str, SourceTable] = {}
        self.rows: dict[str, Rows] = {}
        self.copying: dict[str, Rows] = {}
        self.cursors: dict[str, SourceKey | None] = {}
        self.pending: tuple[str, Chunk, Rows] | None = None
        self.position = ""
        self.dropped: list[str] = []
        self.items: list[Item] = []
        self.part: list[RowChanges] = []
        self._saved: Any = None

    async def begin(self) -> None:
        """Describe and start; every table is to be copied."""
        for table in await self.source.tables():
            self.tables[table.name], self.rows[table.name] = table, {}
            self.copying[table.name], self.cursors[table.name] = {}, None
        self.position = await self.source.start()
        self.save()

    def save(self) -> None:
        """What would be durable."""
        self._saved = copy.deepcopy(
            (self.tables, self.rows, self.copying, self.cursors, self.position, self.dropped)
        )

    async def crash(self, source: PostgresSource) -> None:
        """Back to what was saved, with a new source."""
        state = copy.deepcopy(self._saved)
        self.tables, self.rows, self.copying, self.cursors, self.position, self.dropped = state
        self.pending, self.part, self.source = None, [], source
        for table in await source.tables():
            if table != self.tables[table.name]:
                self._schema(table, True)

    # -------------------------------------------------------------------- reading

    async def run(
        self, until: Callable[[], bool], *, seconds: float = 60, saves: bool = False
    ) -> None:
        """Apply items until the condition holds after one. With `saves`, every third position is
        saved and acknowledged."""
        items = self.source.changes(self.position)
        try:
            async with asyncio.timeout(seconds):
                while not until():
                    await self._read_chunk()
                    if until():
                        break
                    item = await anext(items)
                    before = self.position
                    self.apply(item)
                    if saves and self.position != before and len(self.items) % 3 == 0:
                        self.save()
                        await self.source.acknowledge(self.position)
        finally:
            await _closed(items)

    async def catch_up(self, url: str, *, seconds: float = 60) -> None:
        """Until everything that is committed now is here, and every copy has ended."""
        end = await log_end(url)
        await self.run(lambda: self._is_at(end) and not self.copying, seconds=seconds)

    def _is_at(self, lsn: int) -> bool:
        return not self.part and parse_position(self.position).lsn >= lsn

    async def _read_chunk(self) -> None:
        while self.pending is None and self.copying and not self.part:
            name = next(iter(self.copying))
            try:
                chunk = await self.source.snapshot(
                    self.tables[name], self.cursors[name], self.chunk_rows
                )
            except SourceUnavailable as error:
                if "was altered" not in str(error):
                    raise
                return  # first the change has to be read
            assert self.source.contains(chunk.low, self.position), "a chunk lacks what was applied"
            self.pending = (name, chunk, {self._key(name, row): row for row in chunk.rows})
            assert len(self.pending[2]) == len(chunk.rows)
            self._end_chunk()

    # -------------------------------------------------------------------- applying

    def apply(self, item: Item) -> None:
        self.items.append(item)
        match item:
            case TransactionPart(changes, position):
                for change in changes:
                    self._change(change)
                self.part = list(changes)
                if position is not None:
                    self._at(position)
            case Progress(position):
                assert not self.part
                self._at(position)
            case SchemaChange(table, again):
                self._schema(table, again)
            case TableDropped(table):
                self.dropped.append(table)

    def _at(self, position: str) -> None:
        assert self.source.contains(position, self.position)
        self.part, self.position = [], position
        self._end_chunk()

    def _end_chunk(self) -> None:
        """Merge the rows of a chunk, once everything up to its second position was applied."""
        if self.pending and self.source.contains(self.position, self.pending[1].high):
            name, chunk, rows = self.pending
            self.pending = None
            self.copying[name].update(rows)
            self.cursors[name] = chunk.last
            if chunk.last is None:
                self.rows[name] = self.copying.pop(name)

    def _schema(self, table: SourceTable, again: bool) -> None:
        name, before = table.name, self.tables[table.name]
        old = [column.name for column in before.columns]
        places = [old.index(c.name) if c.name in old else None for c in table.columns]

        def moved(rows: Rows) -> Rows:
            made = [tuple(None if p is None else row[p] for p in places) for row in rows.values()]
            self.tables[name] = table
            return {self._key(name, row): row for row in made}

        self.rows[name] = moved(self.rows[name])
        if again:
            self.copying[name], self.cursors[name] = {}, None
        elif name in self.copying:
            self.copying[name] = moved(self.copying[name])
        if self.pending and self.pending[0] == name:
            self.pending = None  # read again

    def _change(self, change: RowChanges) -> None:
        name = change.table
        strict = name not in self.copying
        places: list[Rows] = [self.rows[name]]
        if name in self.copying:
            places.append(self.copying[name])
            if self.pending and self.pending[0] == name:
                places.append(self.pending[2])
        for rows in places:
            self._fold(rows, change, strict)

    def _fold(self, rows: Rows, change: RowChanges, strict: bool) -> None:
        name = change.table
        match change.op:
            case "truncate":
                rows.clear()
            case "insert":
                for row in change.after:
                    assert UNCHANGED not in row
                    key = self._key(name, row)
                    assert not strict or key not in rows, f"{name} {key} came twice"
                    rows[key] = row
            case "delete":
                for before in change.before:
                    assert before is not None
                    found = rows.pop(self._key(name, before), None)
                    assert not strict or found is not None, f"{name}: a delete of nothing"
            case "update":
                befores = change.before or [None] * len(change.after)
                for before, row in zip(befores, change.after, strict=True):
                    old_key = self._key(name, before or row)
                    old = rows.pop(old_key, None)
                    assert not strict or old is not None, f"{name}: an update of nothing"
                    if old is None and UNCHANGED in row:
                        continue  # the copy has not come to it
                    merged = tuple(
                        o if n is UNCHANGED else n for o, n in zip(old or row, row, strict=True)
                    )
                    rows[self._key(name, merged)] = merged

    def _key(self, name: str, row: SourceRow) -> SourceKey:
        key = tuple(row[at] for at in self.tables[name].key_places())
        assert all(isinstance(value, str) for value in key)
        return key  # type: ignore[return-value]


async def judge(url: str, table: SourceTable, from_: str) -> list[SourceRow]:
    """The rows as the database prints them now, in the order of their texts."""
    connection = await open_session(url, purpose="judge")
    names = ", ".join('"' + column.name + '"' for column in table.columns)
    statement = f"copy (select {names} from {from_}) to stdout".encode()
    async with connection, connection.cursor() as cursor, cursor.copy(statement) as lines:
        found = [parse_line(bytes(line)) async for line in lines]
    return sorted(found, key=repr)


async def log_end(url: str) -> int:
    """Where the log ends, flushed."""
    async with await open_session(url, purpose="judge") as connection:
        server = await read_server(connection)
        await flush(connection)
        return server.inserted


async def eventually(condition: Callable[[], Any], seconds: float = 20) -> Any:
    """Poll an async condition until it is true."""
    until = time.monotonic() + seconds
    while not (found := await condition()):
        assert time.monotonic() < until, "it did not happen"
        await asyncio.sleep(0.02)
    return found


async def _closed(items: AsyncIterator[Item]) -> None:
    with suppress(RuntimeError):
        await items.aclose()  # type: ignore[attr-defined]
