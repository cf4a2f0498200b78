"""Topics, driven by a flush without a database: each viewer has the rows of its topic."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from headwater.errors import HeadwaterError
from headwater.hub.subscriptions.subscriber import Access
from headwater.hub.topics.registry import TopicRegistry
from headwater.hub.topics.subscription import TopicSubscription
from headwater.model import Change
from headwater.protocol import Frame, Gap, Poke, Remove, TopicMessage, Upsert
from headwater.topics.definitions import TopicDefinition
from tests.support.fake_flush import AT, SIGNALS, THINGS, VALUES, FakeHistory, FakeHub
from tests.support.fake_readers import FakeListener, FakeRows
from tests.support.generators.sizes import first_seed, size

HISTORIES = size("topic part histories", 40, large=10_000)

DERIVED = TopicDefinition("of:{n}", table="things")
"""Each change of a row goes to the topic that its column n names."""
SIGNALLED = TopicDefinition("all", entity="things")
"""The application signals each row that it writes."""


class Viewer:
    """Has the rows of a topic, as a client does: it reads them, and again after each gap."""

    def __init__(self, hub: FakeHub, n: int | None) -> None:
        self._hub = hub
        self.n = n
        self.rows = self.truth()
        self.error: HeadwaterError | None = None
        self.pokes = self.gaps = 0

    def truth(self) -> dict[int, dict[str, int]]:
        rows = self._hub.database.rows["things"]
        return {id: row for id, row in rows.items() if self.n is None or row["n"] == self.n}

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None:
        self.rows = self.truth()

    def deliver(self, frame: Frame) -> None:
        match frame.message:
            case TopicMessage(ops=ops):
                for op in ops:
                    match op:
                        case Upsert(_, (id,), row):
                            self.rows[id] = dict(row)
                        case Remove(_, (id,)):
                            self.rows.pop(id, None)
            case Gap():
                self.rows, self.gaps = self.truth(), self.gaps + 1
            case Poke():
                self.pokes += 1

    def failed(self, error: HeadwaterError) -> None:
        self.error = error

    async def room(self) -> None: ...


class SignalledHistory(FakeHistory):
    """Every transaction that writes things signals them."""

    def changes(self) -> list[Change | None]:
        made = super().changes()
        rows = [each for each in made if each is not None and each.table is THINGS]
        if any(each.op == "truncate" for each in rows):
            made += [self._signal(list(range(12)))]
        elif rows:
            made += [self._signal([each.key[0] for each in rows])]
        return made

    def _signal(self, ids: list[Any]) -> Change:
        seq = self.hub.next_seq()
        signal = {"topic": "all", "ids": list(map(str, ids))}
        return Change(seq, seq, AT, SIGNALS, "insert", (), after=signal)


class World:
    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.hub = FakeHub()
        self.hub.connection = object()
        self.history = SignalledHistory(self.chance, self.hub)
        self.part = TopicRegistry(
            self.hub.resources,
            self.hub.flushes,
            listener=FakeListener(),
            fetch=FakeRows(self.hub.database).fetch,
        )
        self.hub.parts.append(self.part)
        self.viewers: list[tuple[Viewer, TopicSubscription]] = []

    async def join(self, n: int | None) -> Viewer:
        viewer = Viewer(self.hub, n)
        name, definition = ("all", SIGNALLED) if n is None else (f"of:{n}", DERIVED)
        joining = asyncio.create_task(
            self.part.subscribe(name, definition, viewer, access=Access())
        )
        await self.hub.settle()
        self.viewers.append((viewer, await joining))
        return viewer

    def leave(self) -> None:
        if self.viewers:
            self.viewers.pop(self.chance.randrange(len(self.viewers)))[1].close()

    def pause(self) -> None:
        """Pause a viewer, or let a paused one continue."""
        if self.viewers:
            _, subscription = self.chance.choice(self.viewers)
            if subscription.state == "paused":
                subscription.resume()
            else:
                subscription.pause()

    async def act(self) -> None:
        match self.chance.choices(["join", "leave", "pause", "step"], [3, 1, 2, 15]):
            case ["join"]:
                await self.join(self.chance.choice([None, *range(VALUES)]))
            case ["leave"]:
                self.leave()
            case ["pause"]:
                self.pause()
            case ["step"]:
                await self.history.step()

    async def compare(self) -> None:
        await self.hub.settle()
        for viewer, subscription in self.viewers:
            assert viewer.error is None
            if subscription.state != "paused":
                assert subscription.is_live
                assert viewer.rows == viewer.truth(), subscription.topic.name


@pytest.mark.parametrize("seed", range(first_seed(0), first_seed(0) + HISTORIES))
async def test_each_viewer_has_the_rows_of_its_topic(seed: int) -> None:
    world = World(seed)
    await world.hub.commit(*world.history.changes())
    await world.join(None)
    for _ in range(25):
        await world.act()
        if world.chance.random() < 0.5:
            await world.compare()
    await world.compare()
    await world.hub.close()
    assert not world.part, "every subscription has ended"


async def test_a_poke_reads_nothing() -> None:
    world = World(0)
    world.hub.connection = None  # a flush that is asked fails
    await world.hub.commit()
    viewer = Viewer(world.hub, None)
    await world.part.subscribe("all", TopicDefinition("all", poke=True), viewer)
    await world.hub.commit(world.history._signal([1]))
    assert viewer.pokes == 1


@pytest.mark.parametrize("ticks", range(12))
async def test_a_gap_is_sent_although_the_viewer_pauses_again(ticks: int) -> None:
    """At each step of the event loop on the way to the gap, which waits for the end of a flush."""
    world = World(0)
    await world.hub.commit()
    viewer = await world.join(2)
    subscription = world.viewers[0][1]
    subscription.pause()
    flushes = world.hub.flushes
    assert flushes.position is not None
    subscription.lose(flushes.position)
    flushes.begin_step(flushes.position)
    subscription.resume()
    for _ in range(ticks):
        await asyncio.sleep(0)
    subscription.pause()
    flushes.end_step()
    subscription.resume()
    await world.compare()
    assert viewer.gaps == 1


async def test_a_step_that_fails_is_read_from_the_log() -> None:
    world = World(0)
    await world.hub.commit()
    viewer = await world.join(2)
    written = world.hub.database.write(world.hub.next_seq(), THINGS, 1, 2)
    await world.hub.commit(written, fails=True)
    assert viewer.rows == {}
    await world.compare()
    assert viewer.rows == {1: {"id": 1, "n": 2}}
