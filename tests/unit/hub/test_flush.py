"""A flush over parts that fail anywhere: each part gets every change, and positions are right."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from headwater.hub.flush import Flusher
from headwater.hub.flush_state import FlushState
from headwater.hub.part import Flush, Part
from headwater.log.reading.reader import LogBatch
from headwater.metrics import Metrics
from headwater.model import Position, Transaction
from tests.support.fake_flush import THINGS, at, change
from tests.support.generators.sizes import first_seed, size

HISTORIES = size("flush histories", 300, large=20_000)


class Counted(Part):
    """Counts what it was sent. What it was not sent, it reads again, as parts do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.total = 0
        self.calls: list[str] = []

    async def _may_fail(self, where: str) -> None:
        self.calls.append(where)
        await asyncio.sleep(0)
        self.world.may_fail(where)

    async def prepare(self, flush: Flush) -> None:
        await self._may_fail("prepare")

    async def send(self, flush: Flush) -> None:
        await self._may_fail("send")
        self.total += sum(len(each.changes) for each in flush.changes)
        self.calls.append("sent")

    def unsent(self, flush: Flush) -> None:
        if "sent" not in self.calls:
            self._read_again()
        self.world.may_fail("unsent")

    def ended(self, flush: Flush) -> None:
        self.calls.clear()
        self.world.may_fail("ended")

    def skipped(self, since: Position, until: Position, tables: Any) -> None:
        self.world.may_fail("skipped")
        self._read_again()

    def skip_failed(self) -> None:
        self._read_again()

    async def check(self, flush: Flush) -> None:
        self.world.may_fail("check")

    def _read_again(self) -> None:
        self.total = self.world.written


class Unforeseen(Exception):
    pass


class World:
    """A log of numbered transactions, a reader of it, and faults at generated places."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.state = FlushState()
        self.state.progress.skip_to(at(1))
        self.written = 0
        self.log: list[Transaction] = []
        self.parts = [Counted(self) for _ in range(self.chance.randint(1, 4))]
        self.rate = self.chance.choice([0.0, 0.02, 0.2])

    def may_fail(self, where: str) -> None:
        if self.chance.random() < self.rate:
            raise Unforeseen(where)

    def write(self) -> None:
        for _ in range(self.chance.randrange(3)):
            xid = 1 + len(self.log)
            count = self.chance.randint(1, 3)
            changes = tuple(change(xid, THINGS, "insert", n, n) for n in range(count))
            self.log.append(Transaction(xid, changes, at(xid + 1)))
            self.written += count

    # ---------------------------------------------------------------- as a LogReader

    async def read(self, connection: Any, since: Position) -> LogBatch:
        new = tuple(each for each in self.log if not since.contains(each.xid))
        now = await self.now(connection)
        backlog = len(new) > 3
        return LogBatch(() if backlog else new, now, 0, 0, has_changes=True, backlog=backlog)

    async def now(self, connection: Any) -> Position:
        return at(1 + len(self.log))

    async def tables_since(self, connection: Any, since: Position) -> Any:
        return self.chance.choice([None, {THINGS}])

    # ---------------------------------------------------------------- as a connection

    async def execute(self, statement: Any) -> None:
        pass

    def transaction(self) -> World:
        return self

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *exc_info: object) -> None:
        pass


@pytest.mark.parametrize("seed", range(first_seed(0), first_seed(0) + HISTORIES, HISTORIES // 3))
async def test_every_part_has_everything_up_to_the_position(seed: int) -> None:
    for each in range(seed, seed + HISTORIES // 3):
        world = World(each)
        reader: Any = world
        flusher = Flusher(world.parts, world.state, Metrics(), reader, reader, lambda: None)
        for _ in range(20):
            world.write()
            before = world.state.progress.position
            try:
                await flusher.flush()
            except Unforeseen:
                assert not world.state.stepping, "a step that failed has ended"
            if world.state.progress.position != before:
                assert world.state.position == world.state.progress.position
                totals = [part.total for part in world.parts]
                assert totals == [world.written] * len(totals), f"seed {each}"
            assert world.state.completed <= world.state.begun


async def test_parts_are_driven_in_order() -> None:
    world = World(0)
    world.rate, calls = 0.0, list[str]()

    class Named(Part):
        def __init__(self, name: str) -> None:
            self.name = name

        async def prepare(self, flush: Flush) -> None:
            calls.append(f"{self.name} prepares")

        async def send(self, flush: Flush) -> None:
            assert flush.number == world.state.number
            calls.append(f"{self.name} sends")

        def ended(self, flush: Flush) -> None:
            calls.append(f"{self.name} ends")

        async def check(self, flush: Flush) -> None:
            calls.append(f"{self.name} checks")

    reader: Any = world
    parts = [Named("a"), Named("b")]
    assert await Flusher(parts, world.state, Metrics(), reader, reader, lambda: None).flush()
    verbs = ("prepares", "sends", "ends", "checks")
    assert calls == [f"{name} {verb}" for verb in verbs for name in "ab"]
