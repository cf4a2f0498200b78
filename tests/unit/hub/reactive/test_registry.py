"""Reactive queries, driven by a flush without a database: each client has the present result."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from headwater.errors import Unavailable
from headwater.hub.positions import Positions
from headwater.hub.reactive.group import QuerySubscription
from headwater.hub.reactive.placement import Placement
from headwater.hub.reactive.registry import ReactiveQueries
from headwater.identity import ANONYMOUS
from headwater.queries.events import Events
from headwater.queries.functions import Query
from headwater.settings import Settings
from tests.support.fake_flush import THINGS, VALUES, FakeHistory, FakeHub
from tests.support.fake_readers import FakePlacement, LateAnswers
from tests.support.generators.sizes import first_seed, size
from tests.support.subscribers import Recorder

HISTORIES = size("reactive part histories", 40, large=10_000)


async def things(context: Any, least: int) -> list[Any]:
    raise AssertionError("`FakePlacement` answers")


QUERY = Query("things", things, key="id", share="everyone")


class World:
    """A hub with reactive queries, clients of them, and what they should have."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.hub = FakeHub()
        self.history = FakeHistory(self.chance, self.hub)
        self.late = LateAnswers(self.chance)
        self.hub.busy = lambda: bool(self.late)
        self.executions: FakePlacement
        self.part = ReactiveQueries(
            self.hub.resources,
            self.hub.flushes,
            Positions("postgresql://nowhere", self.hub.flushes),
            Settings(),
            Events(),
            placement=self._placement,
        )
        self.hub.parts.append(self.part)
        self.clients: list[tuple[Recorder, QuerySubscription, int]] = []
        self.joining: list[tuple[Recorder, asyncio.Task[QuerySubscription], int]] = []

    def _placement(self, *args: Any) -> Placement:
        self.executions = FakePlacement(self.hub.database, self.late, *args)
        return self.executions

    def join(self, least: int, *, delta: bool = False) -> None:
        client, arguments = Recorder(), QUERY.bind({"least": least})
        join = self.part.subscribe(QUERY, arguments, ANONYMOUS, client, delta=delta)
        self.joining.append((client, asyncio.create_task(join), least))

    def leave(self) -> None:
        if self.clients:
            self.clients.pop(self.chance.randrange(len(self.clients)))[1].close()

    async def call(self, least: int) -> None:
        call = self.part.call(QUERY, QUERY.bind({"least": least}), ANONYMOUS)
        calling = asyncio.create_task(call)
        await self.hub.settle()
        assert QUERY.encode(self.truth(least)) == bytes((await calling).value)

    def truth(self, least: int) -> list[dict[str, int]]:
        rows = [row for row in self.hub.database.rows["things"].values() if row["n"] >= least]
        return sorted(rows, key=lambda row: row["id"])

    async def act(self) -> None:
        least = self.chance.randrange(VALUES)
        match self.chance.choices(["join", "leave", "call", "step"], [3, 1, 1, 15]):
            case ["join"]:
                self.join(least, delta=self.chance.random() < 0.5)
            case ["leave"]:
                self.leave()
            case ["call"]:
                await self.call(least)
            case ["step"]:
                await self.history.step()

    async def compare(self) -> None:
        await self.hub.settle()
        for client, joining, least in self.joining:
            with suppress(Unavailable):  # the database was lost meanwhile
                self.clients.append((client, await joining, least))
        self.joining.clear()
        for client, subscription, least in self.clients:
            assert client.error is None
            assert client.fault is None
            found = client.rows if subscription.delta else client.value
            assert found == self.truth(least), least


@pytest.mark.parametrize("seed", range(first_seed(0), first_seed(0) + HISTORIES))
async def test_each_client_has_the_present_result(seed: int) -> None:
    world = World(seed)
    await world.hub.commit(*world.history.changes())
    for _ in range(25):
        await world.act()
        if world.chance.random() < 0.5:
            await world.compare()
    await world.compare()
    await world.hub.close()


async def test_a_change_that_does_not_concern_a_query_does_not_execute_it() -> None:
    world, database = World(0), FakeHub().database
    await world.hub.commit()
    world.join(3)
    await world.compare()
    executed = world.executions.executed
    await world.hub.commit(database.write(world.hub.next_seq(), THINGS, 1, 2))
    await world.hub.settle()
    assert world.executions.executed == executed


async def test_waiting_clients_are_refused_when_the_database_is_lost() -> None:
    world = World(0)
    await world.hub.commit()
    call = world.part.call(QUERY, QUERY.bind({"least": 1}), ANONYMOUS)
    calling = asyncio.create_task(call)
    await asyncio.sleep(0)
    world.hub.lose()
    with pytest.raises(Unavailable):
        await calling
