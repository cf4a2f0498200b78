"""The fair queue against a model that looks at every item: which items may run, in which order."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from headwater.fair_queue import FairQueue, Owner
from tests.support.generators.sizes import first_seed, size

BOUNDS = {"user": 2, "table": 3}


class Model:
    """What the queue promises, by looking at everything."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[Owner, ...]] = {}
        self.running: dict[int, tuple[Owner, ...]] = {}

    def may_run(self, owners: tuple[Owner, ...]) -> bool:
        counts = Counter(owner for each in self.running.values() for owner in each)
        return all(counts[owner] < BOUNDS.get(owner[0], 10**9) for owner in owners)

    def runnable(self) -> set[int]:
        return {item for item, owners in self.waiting.items() if self.may_run(owners)}


def owners_of(random: Random, users: int, tables: int) -> tuple[Owner, ...]:
    user: tuple[Owner, ...] = (("user", random.randrange(users)),)
    table: tuple[Owner, ...] = (("table", random.randrange(tables)),)
    return random.choice((user + table, user + table, table, user, ()))


@pytest.mark.parametrize(
    "seed", range(first_seed(0), first_seed(0) + size("queues", 40, large=4_000))
)
def test_an_item_waits_only_for_its_own_owners(seed: int) -> None:
    """Work conserving: `next` finds nothing exactly where nothing may run. Bounds hold always."""
    random = Random(seed)
    users, tables = random.choice(((1, 1), (2, 3), (5, 2), (9, 9)))
    queue, model = FairQueue[int](BOUNDS), Model()
    for item in range(300):
        match random.choice(("add", "add", "next", "next", "done", "remove", "skip")):
            case "add":
                owners = owners_of(random, users, tables)
                queue.add(item, owners)
                model.waiting[item] = owners
            case "next" | "skip" as how:
                odd = how == "skip"
                found = queue.next((lambda item: item % 2 == 1) if odd else None)
                runnable = {each for each in model.runnable() if not odd or each % 2 == 1}
                assert (found in runnable) if runnable else found is None
                if found is not None:
                    model.running[found] = model.waiting.pop(found)
            case "done" if model.running:
                ended = random.choice(list(model.running))
                queue.done(ended)
                del model.running[ended]
            case "remove" if model.waiting:
                removed = random.choice(list(model.waiting))
                queue.remove(removed)
                del model.waiting[removed]
        assert queue.is_ready == bool(model.runnable())
        assert (len(queue), queue.running) == (len(model.waiting), len(model.running))
        assert bool(set(queue.ready()) & model.runnable()) == queue.is_ready


@pytest.mark.parametrize(
    "seed", range(first_seed(0), first_seed(0) + size("pools", 20, large=2_000))
)
def test_in_a_pool_no_user_delays_another(seed: int) -> None:
    """A hostile user first fills the queue with slow items. Every other user is served as if it
    were not there, except for the places that its bound allows it."""
    random = Random(seed)
    slots, bounds = random.randrange(3, 9), {"user": 2}
    queue = FairQueue[tuple[str, int]](bounds)
    for number in range(500):
        queue.add(("hostile", number), [("user", "hostile")])
    others = [f"u{number}" for number in range(random.randrange(1, 6))]
    asked = [(random.choice(others), number) for number in range(60)]
    for item in asked:
        queue.add(item, [("user", item[0])])
    running: list[tuple[str, int]] = []
    served: list[tuple[str, int]] = []
    while len(served) < len(asked):
        while len(running) < slots and (found := queue.next()) is not None:
            running.append(found)
        counts = Counter(user for user, _ in running)
        assert max(counts.values()) <= 2
        quick = [item for item in running if item[0] != "hostile"]
        assert counts["hostile"] <= 2
        assert quick, "the others wait for the hostile user"
        ended = random.choice(quick)  # what the hostile user runs never ends
        running.remove(ended)
        served.append(ended)
        queue.done(ended)
    assert set(served) == set(asked)
    assert all(number < 2 for user, number in running if user == "hostile")


def test_users_take_turns() -> None:
    queue = FairQueue[tuple[str, int]]({})
    for number in range(1_000):
        queue.add(("many", number), [("user", "many")])
    assert queue.next() == ("many", 0)
    for user in ("ann", "bob"):
        queue.add((user, 0), [("user", user)])
        queue.add((user, 1), [("user", user)])
    order = [queue.next() for _ in range(6)]
    assert [item[0] for item in order if item] == ["many", "ann", "bob", "many", "ann", "bob"]
    assert queue.next() == ("many", 3)


def test_no_user_starves_while_others_keep_coming() -> None:
    queue = FairQueue[tuple[str, int]]({})
    for number in range(10):
        queue.add(("many", number), [("user", "many")])
    served = []
    for number in range(100):
        queue.add((f"new{number}", 0), [("user", f"new{number}")])
        served.append(queue.next())
    assert [item for item in served if item and item[0] == "many"][-1][1] >= 9


def test_items_that_wait_for_one_owner_are_visited_once() -> None:
    """10,000 items of a locked table are parked once, not at every look."""
    queue = FairQueue[int]({"table": 1})
    looks = 0

    def at_bound(owner: Owner) -> bool:
        nonlocal looks
        looks += 1
        return FairQueue.at_bound(queue, owner)

    queue.at_bound = at_bound  # type: ignore[method-assign]
    for item in range(10_000):
        queue.add(item, [("table", "locked")])
    assert queue.next() == 0
    assert queue.next() is None
    assert looks < 25_000
    looks = 0
    for item in range(10_000, 10_100):
        queue.add(item, [("table", "free")])
        assert queue.next() == item
        queue.done(item)
    assert looks < 1_000
