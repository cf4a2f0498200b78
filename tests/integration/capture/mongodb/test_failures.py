"""What can be wrong with a server, a URL or a definition: one clear error each, with the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from headwater.capture.mongodb.source import MongoSource
from headwater.capture.source import SourceDefinition, TableSpec
from headwater.errors import (
    ConfigError,
    HeadwaterError,
    PositionLost,
    SourceRefused,
    SourceUnavailable,
)
from tests.integration.capture.mongodb.conftest import Shop
from tests.support.mongodb.follower import Mirror, following
from tests.support.mongodb.process import REAL, StandIn, with_new_database

Sources = Callable[..., MongoSource]
Servers = Callable[..., StandIn]
only_stand_in = pytest.mark.skipif(REAL is not None, reason="breaks or configures the server")


async def first_item(source: MongoSource, position: str) -> Any:
    changes: Any = source.changes(position)
    try:
        return await anext(changes)
    finally:
        await changes.aclose()


async def fail(url: str, command: str, code: int, times: int = 1) -> None:
    async with AsyncMongoClient[dict[str, Any]](url) as client:
        data = {"failCommands": [command], "errorCode": code}
        await client.admin.command(
            "configureFailPoint", "failCommand", mode={"times": times}, data=data
        )


@only_stand_in
async def test_a_server_without_a_replica_set(stand_in: Servers, source_of: Sources) -> None:
    source = source_of("orders", url=with_new_database(stand_in("--standalone").url))
    (problem,) = await source.check()
    assert "replica set" in problem.what
    assert "rs.initiate()" in problem.fix
    with pytest.raises(SourceRefused, match="replica set") as caught:
        await source.start()
    assert "rs.initiate()" in (caught.value.hint or "")
    with pytest.raises(SourceRefused, match="replica set"):
        await first_item(source, "1.1")


@only_stand_in
async def test_a_server_that_is_too_old(stand_in: Servers, source_of: Sources) -> None:
    source = source_of("orders", url=with_new_database(stand_in("--version", "5.0.9").url))
    (problem,) = await source.check()
    assert "5.0.9" in problem.what
    with pytest.raises(SourceRefused, match="too old"):
        await source.start()


async def test_a_wrong_password(mongodb_url: str, source_of: Sources) -> None:
    url = mongodb_url.replace("mongodb://", "mongodb://me:hunter2@", 1)
    source = source_of("orders", url=url)
    (problem,) = await source.check()
    assert "password is wrong" in problem.what
    with pytest.raises(SourceRefused) as caught:
        await source.start()
    assert "hunter2" not in f"{caught.value} {caught.value.hint} {problem} {source!r}"


async def test_an_unknown_host(source_of: Sources) -> None:
    url = "mongodb://me:hunter2@no-such-host.invalid/shop?serverSelectionTimeoutMS=300"
    source = source_of("orders", url=url)
    with pytest.raises(SourceUnavailable, match=r"no-such-host\.invalid") as caught:
        await source.tables()
    assert caught.value.hint
    assert "hunter2" not in str(caught.value)


async def test_a_server_that_does_not_run(source_of: Sources) -> None:
    source = source_of("orders", url="mongodb://127.0.0.1:1/shop?serverSelectionTimeoutMS=300")
    for call in (source.check, source.start, source.health, source.tables):
        with pytest.raises(SourceUnavailable, match=r"127\.0\.0\.1:1"):
            await call()


@only_stand_in
async def test_a_missing_right(stand_in: Servers, source_of: Sources) -> None:
    url = with_new_database(stand_in().url)
    await fail(url, "aggregate", 13, times=2)
    source = source_of("orders", url=url)
    problem = (await source.check())[-1]
    assert "lacks a right" in problem.what
    assert "grantRolesToUser" in problem.fix
    with pytest.raises(SourceRefused, match="lacks a right"):
        await source.start()
    await fail(url, "find", 13)
    problem = (await source.check())[-1]
    assert "reading the collection orders" in problem.what


@only_stand_in
async def test_the_right_to_list_collections_is_not_needed(
    stand_in: Servers, source_of: Sources
) -> None:
    url = with_new_database(stand_in().url)
    await fail(url, "listCollections", 13, times=3)
    assert await source_of("orders", url=url, scope="collection").check() == []
    (problem,) = await source_of(url=url).check()
    assert "lacks a right" in problem.what


@only_stand_in
@pytest.mark.parametrize("code", [280, 286])
@pytest.mark.parametrize("command", ["aggregate", "getMore"])
async def test_a_lost_position(
    stand_in: Servers, source_of: Sources, code: int, command: str
) -> None:
    url = with_new_database(stand_in().url)
    source = source_of("orders", url=url)
    position = await source.start()
    await fail(url, command, code)
    with pytest.raises(PositionLost, match=str(code)) as caught:
        await first_item(source, position)
    assert "resnapshot" in (caught.value.hint or "")


@only_stand_in
async def test_a_position_that_the_oplog_no_longer_has(
    stand_in: Servers, source_of: Sources
) -> None:
    url = with_new_database(stand_in().url)
    source = source_of("orders", url=url)
    async with AsyncMongoClient[dict[str, Any]](url) as client:
        database = client.get_default_database()
        position = await source.start()
        await database.orders.insert_one({"_id": 1})
        (table,) = await source.tables()
        mark = (await source.snapshot(table, None, 10)).high
        mirror = Mirror(position)
        async with following(source, mirror) as until:
            await until(lambda: mirror.documents("orders"))
        await database.orders.insert_one({"_id": 2})
        await client.admin.command("standInTruncateOplog")
        for lost in (position, mark, mirror.position):
            with pytest.raises(PositionLost):
                await first_item(source, lost)
        again = Mirror(await source.start())
        async with following(source, again) as until:
            await database.orders.insert_one({"_id": 3})
            await until(lambda: "3" in again.documents("orders"))


async def test_a_position_of_another_source(source_of: Sources) -> None:
    with pytest.raises(PositionLost, match="not a position of a MongoDB source"):
        await first_item(source_of("orders"), "0/16B3748")


@only_stand_in
async def test_an_event_that_is_too_large(stand_in: Servers, source_of: Sources) -> None:
    """A server that can split an event does; an older one says that it cannot send it."""
    for version, splits in (("6.0.4", False), ("7.0.2", True)):
        server = stand_in("--version", version, "--split-bytes", "3000")
        source = source_of("orders", url=with_new_database(server.url))
        mirror = Mirror(await source.start())
        async with AsyncMongoClient[dict[str, Any]](source.definition.url) as client:
            database = client.get_default_database()
            images = {"enabled": True}
            await database.create_collection("orders", changeStreamPreAndPostImages=images)
            await database.orders.insert_one({"_id": 1, "text": "a" * 2000})
            await database.orders.update_one({"_id": 1}, {"$set": {"text": "b" * 2000}})
            async with following(source, mirror) as until:
                if splits:
                    await until(lambda m=mirror: "b" in str(m.documents("orders")))
                else:
                    with pytest.raises(SourceRefused, match="larger than 16 MB"):
                        await until(lambda m=mirror: "b" in str(m.documents("orders")))
        if splits:
            change = mirror.items[-1].changes[0]  # type: ignore[union-attr]
            assert "aaa" in str(change.before)


async def test_a_view_cannot_be_captured(shop: Shop, source_of: Sources) -> None:
    await shop.orders.insert_one({"_id": 1})
    if REAL is None:
        await shop.create_collection("paid", type="view")
    else:
        await shop.create_collection("paid", viewOn="orders")
    source = source_of("paid")
    with pytest.raises(SourceRefused, match="paid is a view"):
        await source.tables()
    (problem,) = await source.check()
    assert "paid is a view" in problem.what
    assert [table.name for table in await source_of().tables()] == ["orders"]


@pytest.mark.parametrize(
    ("url", "tables", "options"),
    [
        ("mongodb://db", ("orders",), {}),
        ("mongodb://db/shop", ("orders",), {"speed": 3}),
        ("mongodb://db/shop", ("orders",), {"scope": "cluster"}),
        ("mongodb://db/shop", ("orders", "lines"), {"scope": "collection"}),
    ],
)
def test_definitions_that_are_wrong(url: str, tables: Any, options: dict[str, Any]) -> None:
    specs = tuple(map(TableSpec, tables))
    with pytest.raises(ConfigError) as caught:
        MongoSource(SourceDefinition("shop", url, "shop", specs, options=options))
    assert caught.value.hint


async def test_a_url_that_is_not_valid(source_of: Sources) -> None:
    source = source_of("orders", url="mongodb://me:hun@ter2@host:x/shop")
    with pytest.raises(HeadwaterError) as caught:
        await source.tables()
    assert "ter2" not in f"{caught.value} {caught.value.hint}"
