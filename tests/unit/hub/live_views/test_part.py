"""Live views, driven by a flush without a database: each client has the rows of its query."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest

from headwater.errors import Unavailable
from headwater.hub.live_views.part import LivePart
from headwater.hub.live_views.view import LiveSubscription
from headwater.hub.subscriptions.subscriber import Access
from tests.support.fake_flush import THINGS, VALUES, FakeHistory, FakeHub
from tests.support.fake_readers import FakeBackground, FakeSnapshots, LateAnswers
from tests.support.generators.sizes import first_seed, size
from tests.support.subscribers import Recorder, live

HISTORIES = size("live part histories", 40, large=10_000)


class World:
    """A hub with live views, clients of them, and what they should have."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.hub = FakeHub()
        self.history = FakeHistory(self.chance, self.hub)
        self.late = LateAnswers(self.chance)
        self.hub.busy = lambda: bool(self.late)
        self.part = LivePart(
            self.hub.resources,
            self.hub.flushes,
            {},
            snapshots=partial(FakeSnapshots, self.hub.database, self.late),
            background=partial(FakeBackground, self.hub.database),
        )
        self.hub.parts.append(self.part)
        self.clients: list[tuple[Recorder, LiveSubscription, dict[str, Any]]] = []
        self.joining: list[tuple[Recorder, asyncio.Task[LiveSubscription], dict[str, Any]]] = []

    # ---------------------------------------------------------------- clients

    def query(self) -> dict[str, Any]:
        chance = self.chance
        least = chance.randrange(VALUES)
        query: dict[str, Any] = {"where": [["n", ">=", least]] if chance.random() < 0.7 else []}
        if chance.random() < 0.3:
            return {**query, "mode": "streamed"}
        order = chance.choice([["n desc", "id"], ["n", "id desc"], ["id"]])
        return {**query, "order": order, "limit": chance.randint(1, 4)}

    def join(self, query: dict[str, Any] | None = None) -> None:
        query, client = query or self.query(), Recorder()
        verify = self.chance.random() < 0.5 and query.get("mode") != "streamed"
        join = self.part.views.join(live("things", **query), client, None, Access(), None, verify)
        self.joining.append((client, asyncio.create_task(join), query))

    def leave(self) -> None:
        if self.clients:
            self.clients.pop(self.chance.randrange(len(self.clients)))[1].close()

    def truth(self, query: dict[str, Any]) -> list[dict[str, int]]:
        least = query["where"][0][2] if query["where"] else 0
        rows = [row for row in self.hub.database.rows["things"].values() if row["n"] >= least]
        by: dict[str, Any] = {
            "n desc": lambda row: (-row["n"], row["id"]),
            "n": lambda row: (row["n"], -row["id"]),
            "id": lambda row: row["id"],
        }
        rows.sort(key=by[query.get("order", ["id"])[0]])
        return rows[: query.get("limit")]

    # ---------------------------------------------------------------- what happens

    async def act(self) -> None:
        match self.chance.choices(["join", "leave", "step"], [3, 1, 15]):
            case ["join"]:
                self.join()
            case ["leave"]:
                self.leave()
            case ["step"]:
                await self.history.step()

    async def compare(self) -> None:
        await self.hub.settle()
        for client, joining, query in self.joining:
            with suppress(Unavailable):  # the database was lost meanwhile
                self.clients.append((client, await joining, query))
        self.joining.clear()
        for client, _, query in self.clients:
            assert client.error is None
            assert client.fault is None
            assert client.rows == self.truth(query), query


@pytest.mark.parametrize("seed", range(first_seed(0), first_seed(0) + HISTORIES))
async def test_each_client_has_the_rows_of_its_query(seed: int) -> None:
    world = World(seed)
    await world.hub.commit(*world.history.changes())
    for _ in range(25):
        await world.act()
        if world.chance.random() < 0.5:
            await world.compare()
    await world.compare()
    await world.hub.close()


async def test_identical_queries_share_one_frame() -> None:
    world = World(0)
    await world.hub.commit()
    for _ in range(2):
        world.join({"where": [], "order": ["id"], "limit": 3})
    await world.compare()
    await world.hub.commit(world.hub.database.write(world.hub.next_seq(), THINGS, 1, 1))
    one, two = (client for client, *_ in world.clients)
    assert one.frames[-1] is two.frames[-1]


async def test_a_step_that_fails_is_read_again() -> None:
    world = World(0)
    await world.hub.commit()
    world.join({"where": [], "order": ["id"], "limit": 3})
    await world.compare()
    row = world.hub.database.write(world.hub.next_seq(), THINGS, 1, 1)
    await world.hub.commit(row, fails=True)
    await world.compare()
    ((client, *_),) = world.clients
    assert client.messages[-1].reason == "resync"


async def test_waiting_clients_are_refused_when_the_hub_ends() -> None:
    world = World(0)
    await world.hub.commit()
    world.join()
    ((_, joining, _),) = world.joining
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await world.hub.close()
    with pytest.raises(Unavailable):
        await joining
    assert not list(world.part.views)
