"""Follows a source in tests: folds what it sends into tables, as a mirror would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from bson import json_util

from headwater.capture.source import (
    Item,
    Progress,
    RowChanges,
    Source,
    SourceRow,
    SourceTable,
    TableDropped,
    TransactionPart,
)


class Mirror:
    """The rows of each table by their key. Changes count when their transaction is whole."""

    def __init__(self, position: str) -> None:
        self.position = position
        self.tables: dict[str, dict[str, SourceRow]] = {}
        self.items: list[Item] = []
        self.dropped: list[str] = []
        self._open: list[RowChanges] = []

    def apply(self, item: Item) -> None:
        self.items.append(item)
        match item:
            case TransactionPart(changes, position):
                self._open += changes
                if position is not None:
                    self._commit(position)
            case Progress(position):
                assert not self._open, "progress within a transaction"
                self.position = position
            case TableDropped(table):
                self.dropped.append(table)

    def _commit(self, position: str) -> None:
        for changes in self._open:
            self._change(self.tables.setdefault(changes.table, {}), changes)
        self._open, self.position = [], position

    def _change(self, rows: dict[str, SourceRow], changes: RowChanges) -> None:
        if changes.op == "truncate":
            rows.clear()
        if changes.op == "delete":
            for row in changes.before:
                assert row is not None
                rows.pop(_key(row), None)
        for row in changes.after:
            rows[_key(row)] = row

    def documents(self, table: str) -> dict[str, Any]:
        """The documents of a table, read from their JSON."""
        rows = self.tables.get(table, {})
        return {key: json_util.loads(str(row[1])) for key, row in rows.items()}

    @property
    def transactions(self) -> list[list[tuple[str, str, int]]]:
        """Of each whole transaction: tables, operations and numbers of rows."""
        found: list[list[tuple[str, str, int]]] = [[]]
        for item in self.items:
            if isinstance(item, TransactionPart):
                found[-1] += [(c.table, c.op, len(c.after) or len(c.before)) for c in item.changes]
                if item.position is not None:
                    found.append([])
        return found[:-1]


def _key(row: SourceRow) -> str:
    assert isinstance(row[0], str)
    return row[0]


@asynccontextmanager
async def following(source: Source, mirror: Mirror) -> AsyncIterator[Callable[..., Any]]:
    """Reads changes from the mirror's position in the background. What it yields waits for a
    condition on the mirror, and raises what the source raises."""
    changed = asyncio.Condition()
    changes: Any = source.changes(mirror.position)

    async def read() -> None:
        async for item in changes:
            async with changed:
                mirror.apply(item)
                changed.notify_all()

    task = asyncio.create_task(read())

    async def until(condition: Callable[[], Any], seconds: float = 15) -> None:
        async def wait() -> None:
            async with changed:
                await changed.wait_for(condition)

        waiting = asyncio.create_task(wait())
        await asyncio.wait({waiting, task}, timeout=seconds, return_when="FIRST_COMPLETED")
        if task.done() and not waiting.done():
            waiting.cancel()
            task.result()
        if not waiting.done():
            waiting.cancel()
            raise AssertionError(f"not within {seconds} s: {mirror.items[-5:]}")
        await waiting

    try:
        yield until
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
        await changes.aclose()


async def copied(source: Source, table: SourceTable, rows: int = 1000) -> list[SourceRow]:
    """All rows of a table, chunk by chunk."""
    found, after = list[SourceRow](), None
    while True:
        chunk = await source.snapshot(table, after, rows)
        assert len(chunk.rows) <= rows
        found += chunk.rows
        if chunk.last is None:
            return found
        assert chunk.last != after, "the copy makes no progress"
        after = chunk.last
