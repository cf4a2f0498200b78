"""Items of a source that wait to be applied, so that the source is read while PostgreSQL works.
They are bounded by their size, as far as that is known without reading every value."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from headwater.capture.source import Item, RowChanges, SourceRow, TransactionPart
from headwater.limits import SOURCE_PART_BYTES, SOURCE_QUEUE_BYTES, SOURCE_QUEUE_CHANGES


class ItemQueue:
    """Filled by `fill`, which runs as a task; emptied by `get`."""

    def __init__(self) -> None:
        self._items: deque[tuple[Item, int, int]] = deque()
        self._changes = self._bytes = 0
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._error: BaseException | None = None

    async def fill(self, items: AsyncIterator[Item]) -> None:
        """Read the items to their end. What they raise, `get_nowait` raises after the last one."""
        try:
            async for item in items:
                while self._changes > SOURCE_QUEUE_CHANGES or self._bytes > SOURCE_QUEUE_BYTES:
                    self._room.clear()
                    await self._room.wait()
                changes, size = _size(item)
                self._items.append((item, changes, size))
                self._changes += changes
                self._bytes += size
                self._ready.set()
            self._error = EOFError("the source ended its changes")
        except Exception as error:
            self._error = error
        finally:
            self._ready.set()
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    def get_nowait(self) -> Item | None:
        """The next item; None if there is none now. Raises what ended the source."""
        if not self._items:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            return None
        item, changes, size = self._items.popleft()
        self._changes -= changes
        self._bytes -= size
        self._room.set()
        return item

    async def wait(self, seconds: float) -> None:
        """Until there is an item or an error, at most this long."""
        try:
            async with asyncio.timeout(seconds):
                await self._ready.wait()
        except TimeoutError:
            return


def _size(item: Item) -> tuple[int, int]:
    if not isinstance(item, TransactionPart):
        return 1, 0
    changes = sum(len(c.after) or len(c.before) for c in item.changes)
    return changes + 1, min(sum(_bytes(c) for c in item.changes), SOURCE_PART_BYTES)


def _bytes(changes: RowChanges) -> int:
    """As if all rows were like the larger of the first and the last."""
    rows = changes.after or changes.before
    if not rows:
        return 0
    return len(rows) * max(_row_bytes(rows[0]), _row_bytes(rows[-1]))


def _row_bytes(row: SourceRow | None) -> int:
    return sum(len(cell) for cell in row or () if isinstance(cell, str))
