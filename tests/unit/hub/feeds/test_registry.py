"""Change feeds, driven by a flush without a database."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from headwater.hub.feeds.registry import FeedRegistry
from headwater.hub.feeds.view import FeedQuery
from headwater.hub.subscriptions.subscriber import Access
from headwater.live.filters.filter import Compare, Filter
from headwater.model import Op, Position, Table
from headwater.protocol import Changes, Gap
from tests.support.fake_flush import OTHERS, THINGS, FakeHistory, FakeHub, Listener, at
from tests.support.generators.sizes import first_seed, size

HISTORIES = size("feed histories", 60, large=5_000)


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub()


@pytest.fixture
async def feeds(hub: FakeHub) -> FeedRegistry:
    feeds = FeedRegistry(hub.resources, hub.flushes)
    hub.parts.append(feeds)
    await hub.flush()
    return feeds


def seen(listener: Listener) -> list[tuple[str, str, int]]:
    return [
        (change.table, change.op, dict(change.key)["id"])
        for message in listener.messages
        if isinstance(message, Changes)
        for transaction in message.transactions
        for change in transaction.changes
    ]


@pytest.mark.parametrize("seed", range(first_seed(0), first_seed(0) + HISTORIES))
async def test_each_feed_carries_exactly_its_changes(seed: int) -> None:
    chance, hub = Random(seed), FakeHub()
    feeds = FeedRegistry(hub.resources, hub.flushes)
    hub.parts.append(feeds)
    await hub.flush()
    followed = list[tuple[Listener, Any, list[tuple[str, str, int]]]]()
    for _ in range(30):
        if chance.random() < 0.3:
            tables = chance.choice([("things",), ("others",), ("things", "others")])
            least = chance.randrange(5) if len(tables) == 1 and chance.random() < 0.5 else 0
            where: Filter | None = Compare("n", ">=", least) if least else None
            listener = Listener()
            await feeds.follow(FeedQuery(tables, where), listener, Access())
            followed.append((listener, (tables, least), []))
        changes = list[tuple[Table, Op, int, int]]()
        for _ in range(chance.randrange(4)):
            op: Op = chance.choice(["insert", "update", "delete"])
            changes.append((chance.choice([THINGS, OTHERS]), op, chance.randrange(9),
                            chance.randrange(6)))  # fmt: skip
        await hub.flush(*changes)
        for _, (tables, least), expected in followed:
            expected += [
                (table.name, op, id) for table, op, id, n in changes
                if table.name in tables and n >= least
            ]  # fmt: skip
    for listener, what, expected in followed:
        assert seen(listener) == expected, what
        assert listener.error is None


async def test_identical_feeds_share_one_frame(hub: FakeHub, feeds: FeedRegistry) -> None:
    one, two = Listener(), Listener()
    for listener in (one, two):
        await feeds.follow(FeedQuery(("things",)), listener, Access())
    await hub.flush((THINGS, "insert", 1, 1))
    assert one.messages[-1] is two.messages[-1]
    assert one.messages[-1].position == str(hub.flushes.durable)


async def test_a_position_that_is_not_of_the_log_any_more_is_a_gap(
    hub: FakeHub, feeds: FeedRegistry
) -> None:
    listener = Listener()
    await feeds.follow(FeedQuery(("things",)), listener, Access())
    feeds.resync()
    await hub.flush((THINGS, "insert", 1, 1))
    gap = next(each for each in listener.messages if isinstance(each, Gap))
    assert gap.since == str(at(2))
    assert seen(listener) == [("things", "insert", 1)]


async def test_the_last_to_leave_is_forgotten(hub: FakeHub, feeds: FeedRegistry) -> None:
    listener = Listener()
    subscription = await feeds.follow(FeedQuery(("things",)), listener, Access())
    assert len(list(feeds)) == 1
    subscription.close()
    assert not feeds
    await hub.flush((THINGS, "insert", 1, 1))
    assert seen(listener) == []


@pytest.mark.parametrize("seed", range(first_seed(0), first_seed(0) + HISTORIES))
async def test_no_change_is_missing_since_the_last_gap(seed: int) -> None:
    chance, hub = Random(seed), FakeHub()
    history, feeds = FakeHistory(chance, hub), FeedRegistry(hub.resources, hub.flushes)
    hub.parts.append(feeds)
    await hub.flush()
    listener = Listener()
    subscription = await feeds.follow(FeedQuery(("things",)), listener, Access())
    for _ in range(25):
        if chance.random() < 0.1:
            subscription.pause()
        await history.step()
        if chance.random() < 0.3:
            subscription.resume()
    subscription.resume()
    await hub.settle()
    assert subscription.live
    assert listener.error is None
    continued = at(1)
    numbers = dict[int, None]()
    for message in listener.messages:
        match message:
            case Gap(position=position):
                continued = Position.parse(position)
                numbers.clear()
            case Changes(transactions=transactions):
                # What comes twice after a restart of the server, a client knows by its number.
                numbers |= {each.seq: None for one in transactions for each in one.changes}
    assert list(numbers) == [
        each.seq
        for one in hub.database.log
        if not continued.contains(one.xid)
        for each in one.changes
        if each.table is THINGS
    ]
    await hub.close()


async def test_a_gap_waits_while_a_feed_is_paused(hub: FakeHub, feeds: FeedRegistry) -> None:
    """It was sent to a feed that was paused again; what lay before the gap came after it."""
    listener = Listener()
    subscription = await feeds.follow(FeedQuery(("things",)), listener, Access())
    subscription.pause()
    hub.resync()
    await hub.flush()
    await hub.flush((THINGS, "insert", 1, 1))
    subscription.resume()
    subscription.pause()
    await hub.settle()
    assert not any(isinstance(each, Gap) for each in listener.messages)
    await hub.flush((THINGS, "insert", 2, 2))
    subscription.resume()
    await hub.settle()
    assert isinstance(listener.messages[-1], Gap)
    await hub.flush((THINGS, "insert", 3, 3))
    assert seen(listener) == [("things", "insert", 3)]
