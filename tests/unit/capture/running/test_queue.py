"""Items that are read ahead: in order, bounded, and with the error at their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headwater.capture.running import queue
from headwater.capture.running.queue import ItemQueue
from headwater.capture.source import Item, Progress, RowChanges, TransactionPart
from headwater.errors import SourceUnavailable


async def test_items_come_in_order_and_the_error_last() -> None:
    async def items() -> AsyncIterator[Item]:
        yield Progress("1")
        yield Progress("2")
        raise SourceUnavailable("gone")

    filled = ItemQueue()
    await filled.fill(items())
    assert [filled.get_nowait(), filled.get_nowait()] == [Progress("1"), Progress("2")]
    with pytest.raises(SourceUnavailable):
        filled.get_nowait()


async def test_a_source_that_ends_is_an_error() -> None:
    async def items() -> AsyncIterator[Item]:
        return
        yield

    filled = ItemQueue()
    await filled.fill(items())
    with pytest.raises(EOFError):
        filled.get_nowait()


@pytest.mark.parametrize("rows", [[("1", "x" * 100)] * 10, [("1", "x" * 1000)]])
async def test_reading_ahead_is_bounded(
    monkeypatch: pytest.MonkeyPatch, rows: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(queue, "SOURCE_QUEUE_CHANGES", 50)
    monkeypatch.setattr(queue, "SOURCE_QUEUE_BYTES", 10_000)
    read, closed = 0, False

    async def items() -> AsyncIterator[Item]:
        nonlocal read, closed
        try:
            while True:
                read += 1
                yield TransactionPart([RowChanges("t", "insert", rows)], str(read))
        finally:
            closed = True

    filled = ItemQueue()
    task = asyncio.create_task(filled.fill(items()))
    await filled.wait(10)
    for _ in range(100):
        await asyncio.sleep(0)
    assert 4 <= read <= 13
    before = read
    assert filled.get_nowait() is not None
    for _ in range(100):
        await asyncio.sleep(0)
    assert read > before
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert closed
