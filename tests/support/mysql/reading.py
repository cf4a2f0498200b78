"""Reading a source in tests: all rows by snapshot, changes up to a position, and their fold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import zip_longest

from headwater.capture.mysql.source import MysqlSource
from headwater.capture.source import (
    Item,
    Progress,
    SchemaChange,
    SourceDefinition,
    SourceKey,
    SourceRow,
    SourceTable,
    TransactionPart,
)

Rows = dict[SourceKey, SourceRow]


@asynccontextmanager
async def opened(definition: SourceDefinition) -> AsyncIterator[MysqlSource]:
    source = MysqlSource(definition)
    try:
        yield source
    finally:
        await source.close()


async def copied(source: MysqlSource, table: SourceTable, rows: int = 1000) -> Rows:
    """The whole table, in chunks."""
    found, last = Rows(), None
    while True:
        chunk = await source.snapshot(table, last, rows)
        for row in chunk.rows:
            key = key_of(table, row)
            assert key not in found
            found[key] = row
        last = chunk.last
        if last is None:
            return found


async def changed(source: MysqlSource, after: str, upto: str) -> list[Item]:
    """The items from one position to another."""
    items = list[Item]()
    async with asyncio.timeout(60), aclosing(source.changes(after)) as changes:
        if after == upto:
            return items
        async for item in changes:
            items.append(item)
            position = getattr(item, "position", None)
            if position is not None and source.contains(position, upto):
                return items
    raise AssertionError("the changes ended")


def key_of(table: SourceTable, row: SourceRow) -> SourceKey:
    return tuple(str(row[place]) for place in table.key_places())


def fold(
    rows: Rows, items: list[Item], tables: dict[str, SourceTable], *, exact: bool = True
) -> None:
    """Apply the changes of one table to its rows, strictly: an insert must be new, what is updated
    or deleted must be there and, if `exact`, as the log says."""
    for item in items:
        if isinstance(item, SchemaChange):
            tables[item.table.name] = item.table
        if not isinstance(item, TransactionPart):
            continue
        for changes in item.changes:
            table = tables[changes.table]
            if changes.op == "truncate":
                rows.clear()
            for before, after in zip_longest(changes.before, changes.after):
                if before is not None:
                    gone = rows.pop(key_of(table, before), None)
                    assert gone is not None
                    assert not exact or gone == before, (gone, before)
                if after is not None:
                    key = key_of(table, after)
                    assert key not in rows, key
                    rows[key] = after


def transactions(items: list[Item]) -> list[TransactionPart]:
    return [item for item in items if isinstance(item, TransactionPart)]


def positions(items: list[Item]) -> list[str]:
    found = [item.position for item in items if isinstance(item, TransactionPart | Progress)]
    return [position for position in found if position is not None]
