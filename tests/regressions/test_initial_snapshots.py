"""Several first results of one view at a time: each has every change since its snapshot, and is
sent to the subscribers that waited when its snapshot was taken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater.database import Connection
from headwater.hub.hub import Hub
from headwater.hub.live_views.initial_snapshots import InitialSnapshots
from tests.support.log_probe import enable, run
from tests.support.subscribers import Historian, Recorder, answer, live


class Gate:
    """Holds back first results: their snapshots are taken, and they are not read yet."""

    def __init__(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        self._hub = hub
        self._opened = asyncio.Event()
        self._started: list[Any] = []
        read = InitialSnapshots._read

        async def late(openings: InitialSnapshots, connection: Connection, opening: Any) -> None:
            self._started.append(opening)
            await self._opened.wait()
            await read(openings, connection, opening)

        monkeypatch.setattr(InitialSnapshots, "_read", late)

    def open(self) -> None:
        self._opened.set()

    async def holds(self, count: int) -> None:
        """Until this many have been started."""
        async with asyncio.timeout(30):
            while len(self._started) < count:
                await self._hub.flushes.next_flush()

    async def subscribe(self, recorder: Recorder) -> asyncio.Task[Any]:
        """A new subscriber, whose result is held back."""
        count = len(self._started) + 1
        task = asyncio.create_task(self._hub.live(live("notes", mode="streamed"), recorder))
        await self.holds(count)
        return task


@pytest.fixture
async def notes(connection: Connection) -> Connection:
    await run(
        connection,
        "create table notes (id int primary key, n int)",
        "insert into notes values (1, 0)",
    )
    await enable(connection, "notes")
    return connection


async def test_a_result_that_is_read_again_costs_another_no_change(
    url: str, notes: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first result has more changes after it than the buffer holds, and is read again; the
    second result continues, with the change that was one too many for the first."""
    monkeypatch.setattr("headwater.hub.live_views.view._OPENING_CHANGES_MAX", 3)
    async with Hub(url) as hub:
        hub.reconciler.seconds = None
        before, first, second = Recorder(), Recorder(), Recorder()
        await hub.live(live("notes", mode="streamed"), before)
        gate = Gate(hub, monkeypatch)

        async def write(n: int) -> None:
            await run(notes, f"update notes set n = {n}")
            await before.until_rows([{"id": 1, "n": n}])

        one = await gate.subscribe(first)
        await write(1)
        await write(2)
        two = await gate.subscribe(second)
        await write(3)
        await write(4)  # one too many for the first
        gate.open()
        async with asyncio.timeout(30):
            await asyncio.gather(one, two)
        await run(notes, "insert into notes values (2, 0)")
        rows = await answer(notes, "select * from notes order by id")
        for each in (before, first, second):
            await each.until(lambda each=each: each.replica.row((2,)))  # type: ignore[misc]
            assert each.rows == rows


async def test_an_older_result_is_not_sent_to_a_subscriber_that_has_seen_more(
    url: str, notes: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscriber that falls behind between the snapshot of another's result and its reading gets
    a later result: it does not lose what it has seen."""
    async with Hub(url) as hub:
        hub.reconciler.seconds = None
        before, newcomer = Historian(), Historian()
        handle = await hub.live(live("notes", mode="streamed"), before)
        gate = Gate(hub, monkeypatch)
        joining = await gate.subscribe(newcomer)
        await run(notes, "update notes set n = 1")
        await before.until_rows([{"id": 1, "n": 1}])
        handle.resync("overflow")
        await gate.holds(2)
        gate.open()
        await before.until(lambda: before.kinds() == ["snapshot", "deltas", "reset"])
        assert [rows[0]["n"] for _, rows in before.history] == [0, 1, 1]
        await joining
        await newcomer.until_rows([{"id": 1, "n": 1}])
        assert newcomer.kinds() == ["snapshot", "deltas"]
