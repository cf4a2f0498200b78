"""A mirror in memory that follows a SQLite source and accepts only changes that fit.

An insert of a row that is there, an update or a delete of one that is not, and a row before a
change that is not the mirror's are errors: the source must say exactly what happened. Only of a
table that was copied again, changes up to the moment of the copy are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

from headwater.capture.source import (
    UNCHANGED,
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
from headwater.capture.sqlite.position import QueuePosition
from headwater.capture.sqlite.source import SqliteSource

SECONDS = 30.0

Rows = dict[SourceKey, SourceRow]


async def copy(source: SqliteSource, table: SourceTable, rows: int = 7) -> Rows:
    """The table as it is now, read in chunks. Meanwhile there are no writers."""
    found: Rows = {}
    last: SourceKey | None = None
    while True:
        chunk = await source.snapshot(table, last, rows)
        for row in chunk.rows:
            found[tuple(cast("str", row[i]) for i in table.key_places())] = row
        last = chunk.last
        if last is None:
            return found


class ExactMirror:
    """The tables of one source. `catch_up` reads until the end of the queue."""

    def __init__(self, source: SqliteSource) -> None:
        self.source = source
        self.tables: dict[str, SourceTable] = {}
        self.rows: dict[str, Rows] = {}
        self.position = ""
        self.items: list[Item] = []
        self.changes = 0
        self.compares_before = True
        self._copied: dict[str, str] = {}
        self._iterator: AsyncIterator[Item] | None = None

    async def start(self) -> None:
        await self.restart()
        self.position = await self.source.start()
        for table in await self.source.tables():
            self.tables[table.name] = table
            self.rows[table.name] = await copy(self.source, table)

    async def catch_up(self) -> None:
        """Read until everything that is committed now was received, and between transactions."""
        end = await self.source.start()
        if self._iterator is None:
            self._iterator = self.source.changes(self.position)
        async with asyncio.timeout(SECONDS):
            while not self._has_reached(end) or not self.items:
                await self._take(await anext(self._iterator))

    def _has_reached(self, end: str) -> bool:
        """Also the epoch: a change of columns may be all that happened."""
        here, there = QueuePosition.parse(self.position), QueuePosition.parse(end)
        return here.contains(there) and here.epoch >= there.epoch

    async def catch_up_without_start(self, condition: Callable[[], bool] | None = None) -> None:
        """Read until the condition, or until an item that ends a poll; `start` is not called."""
        if self._iterator is None:
            self._iterator = self.source.changes(self.position)
        async with asyncio.timeout(SECONDS):
            while True:
                item = await anext(self._iterator)
                await self._take(item)
                if condition is None and getattr(item, "position", None) is not None:
                    return
                if condition is not None and condition():
                    return

    async def restart(self) -> None:
        """Close the iterator; the next one begins at the position."""
        if self._iterator is not None:
            await self._iterator.aclose()  # type: ignore[attr-defined]
            self._iterator = None

    async def _take(self, item: Item) -> None:
        self.items.append(item)
        match item:
            case TransactionPart(changes, position):
                for change in changes:
                    if not self._is_copied(change.table):
                        self._apply(change)
                self.position = position or self.position
            case Progress(position):
                self.position = position
            case SchemaChange(table):
                self.tables[table.name] = table
                self.rows[table.name] = await copy(self.source, table)
                self._copied[table.name] = (await self.source.snapshot(table, None, 1)).high
            case TableDropped(name):
                self.rows.pop(name, None)

    def _is_copied(self, table: str) -> bool:
        """Whether the table was copied after all changes that are received now."""
        if table in self._copied and self.source.contains(self.position, self._copied[table]):
            del self._copied[table]
        return table in self._copied

    def _apply(self, change: RowChanges) -> None:
        table, rows = self.tables[change.table], self.rows[change.table]
        places = table.key_places()

        def key(row: SourceRow) -> SourceKey:
            return tuple(cast("str", row[i]) for i in places)

        after = list(change.after)
        before = list(change.before) or [None] * len(after)
        if change.op == "delete":
            assert not after
            for row in before:
                assert row is not None
                self._expect(rows.pop(key(row)), row)
        for old, new in zip(before, after, strict=False):
            self.changes += 1
            if change.op == "insert":
                assert old is None
            else:
                self._expect(rows.pop(key(new) if old is None else key(old)), old)
            assert key(new) not in rows, f"{change.op} of {new}: the key is there"
            rows[key(new)] = new

    def _expect(self, has: SourceRow, before: SourceRow | None) -> None:
        if before is not None and self.compares_before:
            pairs = zip(has, before, strict=True)
            assert all(old is UNCHANGED or old == cell for cell, old in pairs), (has, before)

    async def compare(self) -> None:
        """The mirror equals the tables."""
        for name, table in self.tables.items():
            if name in self.rows:
                assert self.rows[name] == await copy(self.source, table), name
