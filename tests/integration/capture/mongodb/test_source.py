"""A MongoDB source against a server: the copy, and the changes after it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from bson.objectid import ObjectId

from headwater import limits
from headwater.capture.mongodb.connection import Replies
from headwater.capture.mongodb.source import MongoSource
from headwater.capture.source import Progress, SchemaChange, TableSpec, TransactionPart
from tests.integration.capture.mongodb.conftest import Shop
from tests.support.mongodb.follower import Mirror, copied, following

Sources = Callable[..., MongoSource]
ORDERS = TableSpec("orders", types={"status": "text", "total.amount": "numeric"})


async def test_a_healthy_source_has_no_problems(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_one({"_id": 1})
    source = source_of(ORDERS)
    assert await source.check() == []
    assert (await source.health()).state == "ok"
    await source.acknowledge(await source.start())
    await source.remove()


async def test_estimate(shop: Shop, source_of: Sources) -> None:
    """For the bar of a copy; the stand-in does not count."""
    await shop.orders.insert_one({"_id": 1})
    source = source_of(ORDERS)
    (table,) = await source.tables()
    assert await source.estimate(table) in (1, None)


async def test_changes_of_every_kind(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_one({"_id": 1, "status": "open"})
    source = source_of(ORDERS)
    mirror = Mirror(await source.start())
    async with following(source, mirror) as until:
        await shop.orders.insert_one({"_id": 2, "total": {"amount": 2.5}})
        await shop.orders.update_one({"_id": 1}, {"$set": {"status": "paid"}})
        await shop.orders.replace_one({"_id": 2}, {"note": "Zoë"})
        await shop.orders.delete_one({"_id": 1})
        await shop.other.insert_one({"_id": 1})
        await until(lambda: len(mirror.transactions) == 4)
    assert [each[0][1] for each in mirror.transactions] == ["insert", "update", "update", "delete"]
    assert mirror.tables == {"orders": {"2": ("2", '{"_id":2,"note":"Zoë"}', None, None)}}
    parts = [item for item in mirror.items if isinstance(item, TransactionPart)]
    assert all(part.committed_at is not None for part in parts)
    positions = [part.position for part in parts if part.position]
    assert all(source.contains(b, a) for a, b in itertools.pairwise(positions))
    assert not source.contains(positions[0], positions[1])


async def test_a_transaction_is_one(shop: Shop, source_of: Sources) -> None:
    await shop.create_collection("orders")
    await shop.create_collection("lines")
    source = source_of("orders", "lines")
    mirror = Mirror(await source.start())
    async with following(source, mirror) as until:
        async with shop.client.start_session() as session, await session.start_transaction():
            await shop.orders.insert_one({"_id": 1}, session=session)
            await shop.lines.insert_many([{"_id": n} for n in range(3)], session=session)
            await shop.orders.insert_one({"_id": 2}, session=session)
        await until(lambda: mirror.transactions)
    assert mirror.transactions == [
        [("orders", "insert", 1), ("lines", "insert", 3), ("orders", "insert", 1)]
    ]


async def test_a_rollback_sends_nothing(shop: Shop, source_of: Sources) -> None:
    await shop.create_collection("orders")
    source = source_of("orders")
    mirror = Mirror(await source.start())
    async with following(source, mirror) as until:
        async with shop.client.start_session() as session:
            await session.start_transaction()
            await shop.orders.insert_one({"_id": 1}, session=session)
            await session.abort_transaction()
        await shop.orders.insert_one({"_id": 2})
        await until(lambda: mirror.transactions)
    assert mirror.documents("orders") == {"2": {"_id": 2}}


async def test_interleaved_transactions_come_in_the_order_of_their_commits(
    shop: Shop, source_of: Sources
) -> None:
    await shop.create_collection("orders")
    source = source_of("orders")
    mirror = Mirror(await source.start())
    async with (
        following(source, mirror) as until,
        shop.client.start_session() as one,
        shop.client.start_session() as two,
    ):
        await one.start_transaction()
        await two.start_transaction()
        for number in range(4):
            await shop.orders.insert_one({"_id": number}, session=(one, two)[number % 2])
        await two.commit_transaction()
        await one.commit_transaction()
        await until(lambda: len(mirror.transactions) == 2)
    first, second = (item for item in mirror.items if isinstance(item, TransactionPart))
    assert [[row[0] for row in part.changes[0].after] for part in (first, second)] == [
        ["1", "3"], ["0", "2"],
    ]  # fmt: skip


async def test_a_large_transaction_passes_in_parts_over_many_batches(
    shop: Shop, source_of: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SOURCE_PART_CHANGES", 500)
    await shop.create_collection("orders")
    source = source_of("orders")
    mirror = Mirror(await source.start())
    async with shop.client.start_session() as session, await session.start_transaction():
        await shop.orders.insert_many([{"_id": n} for n in range(3300)], session=session)
    await shop.orders.insert_one({"_id": 9999})
    async with following(source, mirror) as until:
        await until(lambda: len(mirror.transactions) == 2)
    parts = [item for item in mirror.items if isinstance(item, TransactionPart)]
    assert [len(part.changes[0].after) for part in parts] == [500] * 6 + [300, 1]
    assert [part.position is None for part in parts] == [True] * 6 + [False] * 2


async def test_a_document_that_vanished_before_the_lookup(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_one({"_id": 1})
    source = source_of("orders")
    mirror = Mirror(await source.start())
    await shop.orders.update_one({"_id": 1}, {"$set": {"status": "paid"}})
    await shop.orders.delete_one({"_id": 1})
    await shop.orders.insert_one({"_id": 2})
    async with following(source, mirror) as until:
        await until(lambda: len(mirror.transactions) == 2)
    assert mirror.transactions == [[("orders", "delete", 1)], [("orders", "insert", 1)]]
    assert isinstance(mirror.items[0], Progress)


async def test_the_position_advances_without_events(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_one({"_id": 1})
    source = source_of("orders")
    start = await source.start()
    mirror = Mirror(start)
    async with following(source, mirror) as until:
        await shop.other.insert_one({"_id": 1})
        chunk = await source.snapshot((await source.tables())[0], None, 10)
        await until(lambda: source.contains(mirror.position, chunk.high))
    assert not mirror.transactions
    assert source.contains(mirror.position, start)
    assert source.contains(mirror.position, chunk.low)


async def test_a_stream_can_begin_at_the_mark_of_a_chunk(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_one({"_id": 1})
    source = source_of("orders")
    chunk = await source.snapshot((await source.tables())[0], None, 10)
    await shop.orders.insert_one({"_id": 2})
    mirror = Mirror(chunk.high)
    async with following(source, mirror) as until:
        await until(lambda: mirror.transactions)
    assert mirror.documents("orders") == {"2": {"_id": 2}}
    assert source.contains(mirror.position, chunk.low)
    assert not source.contains(chunk.high, mirror.position)


# ------------------------------------------------------------------------ copies


KEYS: list[Any] = [
    -(2**40), 1, 1.5, 2, "", "1", "Zoë", {"a": 1}, {"a": 2}, b"\x01",
    ObjectId("507f1f77bcf86cd799439011"), "507f1f77bcf86cd799439011", False, True,
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3, 100])
async def test_a_copy_of_keys_of_many_types(shop: Shop, source_of: Sources, rows: int) -> None:
    await shop.orders.insert_many([{"_id": key, "n": n} for n, key in enumerate(KEYS)])
    source = source_of(TableSpec("orders", types={"n": "integer"}))
    found = await copied(source, (await source.tables())[0], rows)
    assert len({row[0] for row in found}) == len(KEYS)
    assert [row[2] for row in found] == [
        str(doc["n"]) async for doc in shop.orders.find(sort=["_id"])
    ]


async def test_a_chunk_is_bounded_in_bytes(
    shop: Shop, source_of: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SOURCE_CHUNK_BYTES", 3000)
    await shop.orders.insert_many([{"_id": n, "text": "x" * 1000} for n in range(5)])
    await shop.orders.insert_one({"_id": 5, "text": "x" * 9000})
    source = source_of("orders")
    (table,) = await source.tables()
    chunk = await source.snapshot(table, None, 100)
    assert [row[0] for row in chunk.rows] == ["0", "1"]
    assert len(await copied(source, table)) == 6


async def test_an_empty_or_missing_collection(shop: Shop, source_of: Sources) -> None:
    source = source_of("orders")
    (problem,) = await source.check()
    assert problem.warning
    assert await copied(source, (await source.tables())[0]) == []


# ------------------------------------------------------------------------ filters


async def test_a_field_left_out_never_travels(
    shop: Shop, source_of: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies, succeeded = list[str](), Replies.succeeded

    def record(self: Replies, event: Any) -> None:
        replies.append(str(event.reply))
        succeeded(self, event)

    monkeypatch.setattr(Replies, "succeeded", record)
    await shop.orders.insert_one({"_id": 1, "name": "a", "secret": "s3cret"})
    source = source_of(TableSpec("orders", exclude=("secret",)), "other")
    mirror = Mirror(await source.start())
    async with following(source, mirror) as until:
        await shop.orders.update_one({"_id": 1}, {"$set": {"secret": "s3cret2", "name": "b"}})
        await shop.other.insert_one({"_id": 1, "secret": "public"})
        await until(lambda: mirror.documents("other"))
        await copied(source, (await source.tables())[0])
    assert mirror.documents("orders") == {"1": {"_id": 1, "name": "b"}}
    assert mirror.documents("other") == {"1": {"_id": 1, "secret": "public"}}
    assert "s3cret" not in "".join(replies)
    assert any("'name': 'b'" in reply for reply in replies)


async def test_a_filter_lets_a_document_leave(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_one({"_id": 1, "status": "open"})
    source = source_of(TableSpec("orders", types={"status": "text"}, where=["status", "=", "open"]))
    mirror = Mirror(await source.start())
    async with following(source, mirror) as until:
        await shop.orders.insert_one({"_id": 2, "status": "closed"})
        await shop.orders.update_one({"_id": 1}, {"$set": {"status": "closed"}})
        await until(lambda: mirror.transactions)
    assert mirror.transactions == [[("orders", "update", 1)]]
    assert await copied(source, (await source.tables())[0]) == []


# ------------------------------------------------------------------------ collections


async def test_a_collection_that_is_dropped_and_made_again(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_many([{"_id": 1}, {"_id": 2}])
    source = source_of("orders")
    mirror = Mirror(await source.start())
    mirror.tables["orders"] = {r[0]: r for r in await copied(source, (await source.tables())[0])}  # type: ignore[misc]
    async with following(source, mirror) as until:
        await shop.orders.drop()
        await until(lambda: mirror.dropped == ["orders"])
        assert mirror.documents("orders").keys() == {"1", "2"}
        await shop.orders.insert_one({"_id": 3})
        await until(lambda: "3" in mirror.documents("orders"))
    assert mirror.documents("orders") == {"3": {"_id": 3}}


async def test_renames_to_and_from_a_captured_name(shop: Shop, source_of: Sources) -> None:
    await shop.staging.insert_one({"_id": 2})
    await shop.orders.insert_one({"_id": 1})
    source = source_of("orders")
    mirror = Mirror(await source.start())
    async with following(source, mirror) as until:
        await shop.staging.rename("orders", dropTarget=True)
        await until(lambda: any(isinstance(item, SchemaChange) for item in mirror.items))
        await until(lambda: mirror.transactions)
        await shop.orders.rename("archive")
        await until(lambda: mirror.dropped == ["orders"])
    (change,) = (item for item in mirror.items if isinstance(item, SchemaChange))
    assert change.copies
    assert mirror.transactions == [[("orders", "truncate", 0)]]


@pytest.mark.parametrize("scope", ["database", "collection"])
async def test_a_stream_continues_after_it_was_invalidated(
    shop: Shop, source_of: Sources, scope: str
) -> None:
    await shop.orders.insert_one({"_id": 1})
    source = source_of("orders", scope=scope)
    mirror = Mirror(await source.start())
    async with following(source, mirror) as until:
        await (shop.client.drop_database(shop.name) if scope == "database" else shop.orders.drop())
        await until(lambda: mirror.dropped == ["orders"])
        await shop.orders.insert_one({"_id": 2})
        await until(lambda: "2" in mirror.documents("orders"))
    # The token of an invalidation is a position, too.
    created = next(i for i, item in enumerate(mirror.items) if isinstance(item, SchemaChange))
    invalidated = mirror.items[created - 1]
    assert isinstance(invalidated, Progress)
    again = Mirror(invalidated.position)
    async with following(source, again) as until:
        await until(lambda: "2" in again.documents("orders"))


async def test_all_collections_also_those_that_appear_later(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_one({"_id": 1})
    source = source_of()
    assert [table.name for table in await source.tables()] == ["orders"]
    mirror = Mirror(await source.start())
    async with following(source, mirror) as until:
        await shop.lines.insert_one({"_id": 5})
        await until(lambda: mirror.documents("lines"))
    (change,) = (item for item in mirror.items if isinstance(item, SchemaChange))
    assert (change.table.name, change.copies) == ("lines", False)
    assert [table.name for table in await source.tables()] == ["lines", "orders"]


# ------------------------------------------------------------------------ images

IMAGES = {"enabled": True}


async def test_images_show_each_change_as_it_was(shop: Shop, source_of: Sources) -> None:
    await shop.create_collection("orders", changeStreamPreAndPostImages=IMAGES)
    await shop.orders.insert_one({"_id": 1, "n": 0})
    source = source_of(TableSpec("orders", types={"n": "integer"}))
    mirror = Mirror(await source.start())
    for number in range(1, 4):
        await shop.orders.update_one({"_id": 1}, {"$set": {"n": number}})
    await shop.orders.delete_one({"_id": 1})
    async with following(source, mirror) as until:
        await until(lambda: len(mirror.transactions) == 4)
    changes = [c for i in mirror.items if isinstance(i, TransactionPart) for c in i.changes]
    assert [c.after[0][2] for c in changes[:3]] == ["1", "2", "3"]
    assert [c.before[0][2] for c in changes if c.before[0]] == ["0", "1", "2", "3"]


async def test_a_missing_image_is_looked_up(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_many([{"_id": 1, "n": 0}, {"_id": 2, "n": 0}])
    source = source_of("orders")
    mirror = Mirror(await source.start())
    await shop.orders.update_many({}, {"$set": {"n": 1}})
    await shop.orders.delete_one({"_id": 2})
    await shop.command("collMod", "orders", changeStreamPreAndPostImages=IMAGES)
    async with following(source, mirror) as until:
        await until(lambda: len(mirror.transactions) == 2)
    assert mirror.documents("orders") == {"1": {"_id": 1, "n": 1}}


# ------------------------------------------------------------------------ ends


async def test_closing_leaves_no_task_behind(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_one({"_id": 1})
    before = asyncio.all_tasks()
    source = source_of("orders")
    changes: Any = source.changes(await source.start())
    await shop.orders.insert_one({"_id": 2})
    while not isinstance(await anext(changes), TransactionPart):
        pass
    await changes.aclose()
    await source.close()
    assert asyncio.all_tasks() == before
