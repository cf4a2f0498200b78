"""The sums of memory: exact after every step, and which client is closed above the bound."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headwater.errors import LimitExceeded
from headwater.gateway.backlog import Backlog
from headwater.memory import Holder, Holding, Memory
from headwater.protocol import Shared
from tests.support.generators.sizes import first_seed, size


class World:
    """A memory, and what is in it as a test knows it."""

    def __init__(self, per_owner: int = 0, in_all: int = 0) -> None:
        self.memory = Memory(per_owner, in_all)
        self.holdings: dict[Holding, Counter[Holder]] = {}
        self.backlogs: list[tuple[Backlog, Holding]] = []
        self.ended: list[tuple[Holder, str]] = []
        self.idle: set[Holding] = set()

    def open(self, bytes: int, *owners: Holder) -> Holding:
        def shed(owner: Holder, error: LimitExceeded) -> None:
            if holding not in self.idle:
                self.ended.append((owner, error.code))
            del self.holdings[holding][owner]
            if not self.holdings[holding]:
                self.close(holding)

        holding = self.memory.open(shed)
        self.holdings[holding] = Counter()
        holding.resize(bytes)
        for owner in owners:
            self.join(holding, owner)
        return holding

    def queue(self, owner: Holder) -> None:
        """One more client."""

        def shed(owner: Holder, error: LimitExceeded) -> None:
            self.ended.append((owner, error.code))
            backlog.close()
            self.backlogs.remove((backlog, holding))

        holding = self.memory.open(shed, in_total=False)
        holding.join(owner)
        backlog = Backlog(self.memory, holding)
        self.backlogs.append((backlog, holding))

    def join(self, holding: Holding, owner: Holder) -> None:
        if holding in self.idle:
            self.idle.discard(holding)
            self.holdings[holding].clear()
            holding.resume()
        self.holdings[holding][owner] += 1
        holding.join(owner)

    def leave(self, holding: Holding, owner: Holder) -> None:
        self.holdings[holding] -= Counter([owner])
        holding.leave(owner)

    def rest(self, holding: Holding) -> None:
        self.idle.add(holding)
        holding.rest()

    def close(self, holding: Holding) -> None:
        del self.holdings[holding]
        self.idle.discard(holding)
        holding.close()

    def check(self) -> None:
        """What is counted equals what is there."""
        memory = self.memory
        held: Counter[Holder] = Counter()
        alone: Counter[Holder] = Counter()
        for holding, owners in self.holdings.items():
            for owner in owners:
                held[owner] += holding.bytes
                alone[owner] += holding.bytes if len(owners) == 1 else 0
            assert set(holding.owners) == set(owners)
        waiting: set[Shared] = set()
        for backlog, holding in self.backlogs:
            assert holding.bytes == sum(each.bytes for each in backlog._waiting)
            waiting.update(backlog._waiting)
            for owner in holding.owners:
                held[owner] += holding.bytes
                alone[owner] += holding.bytes
        assert dict(memory.owners) == {owner: held[owner] for owner in memory._accounts}
        assert {owner for owner, bytes in held.items() if bytes} <= set(memory._accounts)
        for owner, account in memory._accounts.items():
            assert (account.held, account.alone) == (held[owner], alone[owner])
        shared = sum(each.bytes for each in waiting)
        assert memory.total == sum(each.bytes for each in self.holdings) + shared


STEPS = size("memory", 3_000, large=300_000)


@pytest.mark.parametrize("bounds", [(0, 0), (3_000, 0), (0, 9_000), (3_000, 9_000)])
def test_the_sums_are_exact_after_every_step(bounds: tuple[int, int]) -> None:
    seed = first_seed(7)
    chance = random.Random(seed)
    world = World(*bounds)
    owners = ["ann", "bob", "cid", "dot", None]
    frames = [Shared(chance.randrange(1, 300)) for _ in range(20)]
    for step in range(STEPS // 4):
        holdings = list(world.holdings)
        match chance.randrange(9):
            case 0 | 1:
                world.open(chance.randrange(1_000), chance.choice(owners))
            case 2 | 3 if holdings:
                chance.choice(holdings).resize(chance.choice([0, chance.randrange(2_000)]))
            case 4 if holdings:
                world.join(chance.choice(holdings), chance.choice(owners))
            case 5 if holdings:
                holding = chance.choice(holdings)
                counted = world.holdings[holding]
                if holding in world.idle:
                    continue
                if counted.total() > 1:
                    world.leave(holding, chance.choice(list(counted)))
                elif counted:
                    world.rest(holding)
            case 6 if len(holdings) > 10:
                world.close(chance.choice(holdings))
            case 7:
                world.queue(("queue", chance.choice(owners)))
                if len(world.backlogs) > 6:
                    world.backlogs.pop(chance.randrange(6))[0].close()
            case 8 if world.backlogs:
                backlog, waiting = chance.choice(world.backlogs)
                if chance.random() < 0.7:
                    backlog.add(chance.choice(frames), waiting.bytes + 100)
                else:
                    backlog.settle(chance.choice([0, chance.randrange(1_000)]))
        world.check()
        if chance.random() < 0.3:
            world.memory.enforce()
            world.check()
            assert (
                not bounds[1]
                or world.memory.total <= bounds[1]
                or None in dict(world.memory.owners)
            ), f"seed {seed}, step {step}"
            for owner, bytes in world.memory.owners:
                assert owner is None or not bounds[0] or bytes <= bounds[0], f"seed {seed}"
    for backlog, _ in world.backlogs:
        backlog.close()
    for holding in list(world.holdings):
        world.close(holding)
    assert world.memory.total == 0
    assert dict(world.memory.owners) == {}
    assert all(frame.holders == 0 for frame in frames)


def test_the_holding_that_grew_is_closed() -> None:
    world = World(per_owner=100)
    large, small = world.open(60, "ann"), world.open(10, "ann")
    small.resize(50)
    world.memory.enforce()
    assert world.ended == [("ann", "bytes_per_user")]
    assert list(world.holdings) == [large]


def test_a_user_that_joins_above_its_limit_loses_what_it_joined() -> None:
    world = World(per_owner=100)
    shared = world.open(80, "ann")
    own = world.open(30, "bob")
    world.join(shared, "bob")
    world.memory.enforce()
    assert world.ended == [("bob", "bytes_per_user")]
    assert set(shared.owners) == {"ann"}
    assert list(own.owners) == ["bob"]


def test_the_largest_user_is_closed_and_smaller_ones_lose_nothing() -> None:
    world = World(in_all=1_000)
    hostile = [world.open(90, "eve") for _ in range(9)]
    shared = world.open(100)
    for number in range(50):
        world.join(shared, f"user {number}")
    late = world.open(200, "ann")
    world.memory.enforce()
    assert {owner for owner, _ in world.ended} == {"eve"}
    assert {code for _, code in world.ended} == {"bytes_total"}
    assert len(world.ended) == 2
    assert late in world.holdings
    assert shared in world.holdings
    assert sum(each in world.holdings for each in hostile) == 7


def test_idle_holdings_are_closed_first() -> None:
    world = World(per_owner=100, in_all=150)
    idle, other = world.open(60, "ann"), world.open(60, "bob")
    world.rest(idle)
    world.rest(other)
    used = world.open(60, "ann")
    world.memory.enforce()
    assert idle not in world.holdings
    assert other in world.holdings
    world.open(90, "cid")
    world.memory.enforce()
    assert other not in world.holdings
    assert used in world.holdings
    assert world.ended == []


def test_holdings_of_the_process_itself_are_not_closed() -> None:
    world = World(per_owner=10, in_all=10)
    world.open(50, None)
    world.memory.enforce()
    assert world.ended == []


def test_frames_for_many_clients_count_once_in_all() -> None:
    memory = Memory()
    frame = Shared(1_000)
    backlogs = []
    for user in ("ann", "ann", "bob"):
        holding = memory.open(lambda *_: None, in_total=False)
        holding.join(user)
        backlogs.append(Backlog(memory, holding))
        backlogs[-1].add(frame, 1_000)
    assert (memory.total, memory.of("ann"), memory.of("bob")) == (1_000, 2_000, 1_000)
    backlogs[0].settle(500)  # a part of it still waits
    assert memory.of("ann") == 2_000
    for backlog in backlogs:
        backlog.close()
    assert (memory.total, dict(memory.owners)) == (0, {})


def test_a_bound_is_logged_once_until_it_is_enforced() -> None:
    world, said = World(per_owner=10), []
    world.memory.on_over = lambda: said.append(1)
    holding = world.open(5, "ann")
    for bytes in (20, 30, 40):
        holding.resize(bytes)
    assert said == [1]
    world.memory.enforce()
    world.open(20, "ann")
    assert said == [1, 1]


def test_the_error_names_the_setting() -> None:
    caught: list[LimitExceeded] = []
    memory = Memory(per_owner=1_000)
    holding = memory.open(lambda _, error: caught.append(error))
    holding.join("ann")
    holding.resize(1_001)
    memory.enforce()
    (error,) = caught
    assert "more than 1,000 bytes" in str(error)
    assert error.hint is not None
    assert error.hint.endswith("The setting is [limits] bytes_per_user.")
    assert error.retryable
    assert memory.of("ann") == 0
