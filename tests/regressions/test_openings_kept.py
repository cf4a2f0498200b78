"""Several first results of one view at a time: each has every change since its snapshot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater import limits
from headwater.database import Connection
from headwater.hub.hub import Hub
from headwater.hub.openings import Openings
from tests.hub import Recorder, answer, live
from tests.support import enable, run


async def test_one_result_that_begins_again_costs_another_no_change(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first newcomer's result has more changes behind it than are kept, and is read again; the
    second newcomer's goes on, with the change that was one too many for the first."""
    monkeypatch.setattr(limits, "OPENING_CHANGES_MAX", 3)
    gate, read, started = asyncio.Event(), Openings._read, list[Any]()

    async def late(self: Openings, link: Connection, opening: Any) -> None:
        started.append(opening)
        await gate.wait()
        await read(self, link, opening)

    await run(
        connection,
        "create table notes (id int primary key, n int)",
        "insert into notes values (1, 0)",
    )
    await enable(connection, "notes")
    async with Hub(url) as hub:
        hub.reconciler.seconds = None
        before = Recorder()
        await hub.live(live("notes", mode="streamed"), before)
        monkeypatch.setattr(Openings, "_read", late)

        async def come(count: int) -> tuple[Recorder, asyncio.Task[Any]]:
            recorder = Recorder()
            task = asyncio.create_task(hub.live(live("notes", mode="streamed"), recorder))
            async with asyncio.timeout(30):
                while len(started) < count:
                    await hub.next_flush()
            return recorder, task

        async def write(n: int) -> None:
            await run(connection, f"update notes set n = {n}")
            await before.until_rows([{"id": 1, "n": n}])

        first, one = await come(1)
        await write(1)
        await write(2)
        second, two = await come(2)
        await write(3)
        await write(4)  # one too many for the first
        gate.set()
        async with asyncio.timeout(30):
            await asyncio.gather(one, two)
        await run(connection, "insert into notes values (2, 0)")
        rows = await answer(connection, "select * from notes order by id")
        for each in (before, first, second):
            await each.until(lambda each=each: each.replica.row((2,)))  # type: ignore[misc]
            assert each.rows == rows
