"""Generated histories: what a source sends, folded, is what the database has.

Writers insert, update, replace and delete, alone and in transactions that commit or do not, while
the source reads, or before it reads, so that documents vanish before they are looked up. Batches
and parts are small, so that transactions are cut everywhere. At random moments the source stops
and continues from the position that it last sent.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from headwater import limits
from headwater.capture.mongodb import stream
from headwater.capture.mongodb.source import MongoSource
from headwater.capture.source import TableSpec
from tests.integration.capture.mongodb.conftest import Shop
from tests.support.mongodb.follower import Mirror, copied, following
from tests.support.mongodb.process import REAL, StandIn, with_new_database

COLLECTIONS = ("orders", "lines")
KEYS: list[Any] = [*range(8), "a", "1", 2.5]
TYPES = {"status": "text", "total.amount": "numeric"}


class History:
    """Random writes from a seed."""

    def __init__(self, shop: Shop, seed: int) -> None:
        self._shop, self._random = shop, random.Random(seed)

    async def step(self) -> None:
        if self._random.random() < 0.7:
            await self._write(None)
            return
        async with self._shop.client.start_session() as session:
            await session.start_transaction()
            for _ in range(self._random.randint(1, 6)):
                await self._write(session)
            if self._random.random() < 0.8:
                await session.commit_transaction()
            else:
                await session.abort_transaction()

    async def _write(self, session: Any) -> None:
        collection = self._shop[self._random.choice(COLLECTIONS)]
        match self._random.choice(["upsert", "upsert", "update", "update", "many", "delete"]):
            case "upsert":
                await collection.replace_one(self._one(), self._document(), True, session=session)
            case "update":
                changes = {"$set": {"status": self._word()}, "$inc": {"total.amount": 1}}
                await collection.update_one(self._one(), changes, session=session)
            case "many":
                changes = {"$set": {"note": self._word()}}
                await collection.update_many({"status": self._word()}, changes, session=session)
            case "delete":
                await collection.delete_one(self._one(), session=session)

    def _one(self) -> dict[str, Any]:
        return {"_id": self._random.choice(KEYS)}

    def _word(self) -> str:
        return self._random.choice(["open", "paid", "Zoë"])

    def _document(self) -> dict[str, Any]:
        return {"status": self._word(), "total": {"amount": self._random.randint(0, 9) / 2}}


async def of_database(shop: Shop, name: str) -> list[Any]:
    return sorted([doc async for doc in shop[name].find()], key=str)


async def in_step(shop: Shop, mirror: Mirror) -> bool:
    """Whether the mirror has what the database has."""
    found = {name: sorted(mirror.documents(name).values(), key=str) for name in COLLECTIONS}
    return found == {name: await of_database(shop, name) for name in COLLECTIONS}


@pytest.mark.parametrize("seed", range(12))
async def test_the_folded_changes_are_the_database(
    shop: Shop, source_of: Callable[..., MongoSource], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed * 31 + 1)
    monkeypatch.setattr(stream, "AWAIT_MS", 50)
    monkeypatch.setattr(stream, "BATCH_EVENTS", chance.choice([1, 2, 3, 7, 1000]))
    monkeypatch.setattr(limits, "SOURCE_PART_CHANGES", chance.choice([1, 2, 1000]))
    images: dict[str, Any] = (
        {"changeStreamPreAndPostImages": {"enabled": True}} if seed % 3 == 0 else {}
    )
    for name in COLLECTIONS:
        await shop.create_collection(name, **images)
    history = History(shop, seed)
    for _ in range(20):
        await history.step()
    source = source_of(*(TableSpec(name, types=TYPES) for name in COLLECTIONS))
    mirror = Mirror(await source.start())
    for table in await source.tables():
        mirror.tables[table.name] = {row[0]: row for row in await copied(source, table, 3)}  # type: ignore[misc]
    assert await in_step(shop, mirror)
    marks = [mirror.position]
    for round_ in range(6):
        behind = chance.random() < 0.5
        if behind:
            for _ in range(chance.randint(1, 25)):
                await history.step()
        async with following(source, mirror) as until:
            if not behind:
                for _ in range(chance.randint(1, 25)):
                    await history.step()
            await shop.marks.insert_one({"_id": round_})
            mark = await source.start()
            if chance.random() < 0.7:
                await until(lambda mark=mark: source.contains(mirror.position, mark))
                assert await in_step(shop, mirror)
        marks.append(mirror.position)
    async with following(source, mirror) as until:
        await shop.marks.insert_one({"_id": "end"})
        end = (await source.snapshot((await source.tables())[0], None, 1)).high
        await until(lambda: source.contains(mirror.position, end))
    assert await in_step(shop, mirror)
    assert all(source.contains(later, one) for one, later in itertools.pairwise(marks))
    await replayed(shop, source, mirror, chance)


@pytest.mark.skipif(REAL is not None, reason="needs a server of its own")
async def test_a_router_promises_less_than_a_replica_set(
    stand_in: Callable[..., StandIn],
    source_of: Callable[..., MongoSource],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events of the same time may follow, so a position only contains what lies before its time;
    transactions end where the next event or an empty batch comes."""
    monkeypatch.setattr(stream, "AWAIT_MS", 50)
    url = with_new_database(stand_in("--router").url)
    source = source_of(*COLLECTIONS, url=url)
    async with AsyncMongoClient[dict[str, Any]](url) as client:
        shop = client.get_default_database()
        history = History(shop, 99)
        mirror = Mirror(await source.start())
        async with following(source, mirror) as until:
            for _ in range(60):
                await history.step()
            (_, table) = await source.tables()
            chunk = await source.snapshot(table, None, 100)
            assert chunk.low != chunk.high
            await until(lambda: len(mirror.documents("orders")) == len(chunk.rows))
            assert not source.contains(mirror.position, chunk.high)
            for number in range(2):
                await shop.marks.insert_one({"_id": number})
            await until(lambda: source.contains(mirror.position, chunk.high))
            assert await in_step(shop, mirror)


async def replayed(shop: Shop, source: MongoSource, mirror: Mirror, chance: random.Random) -> None:
    """From any position that was sent, over the rows at the end, the result is the same."""
    positions = [p for item in mirror.items if (p := getattr(item, "position", None))]
    for position in chance.sample(positions, min(3, len(positions))):
        again = Mirror(position)
        again.tables = {name: dict(rows) for name, rows in mirror.tables.items()}
        async with following(source, again) as until:
            await until(lambda again=again: source.contains(again.position, mirror.position))
        assert await in_step(shop, again)
