"""The server is killed while a source follows it; nothing is lost and nothing comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from headwater.capture.mongodb.source import MongoSource
from headwater.errors import SourceUnavailable
from tests.support.mongodb.follower import Mirror, following
from tests.support.mongodb.process import REAL, StandIn, with_new_database

pytestmark = pytest.mark.skipif(REAL is not None, reason="kills the server")


async def test_a_killed_server_is_unavailable_and_then_continues(
    stand_in: Callable[..., StandIn], source_of: Callable[..., MongoSource]
) -> None:
    server = stand_in()
    url = with_new_database(server.url)
    source = source_of("orders", url=f"{url}&serverSelectionTimeoutMS=500")
    mirror = Mirror(await source.start())
    for number in range(3):
        await insert(url, number * 2)
        await read(source, mirror, rows=number * 2 + 1)
        async with following(source, mirror) as until:
            await insert(url, number * 2 + 1)
            server.kill()
            with pytest.raises(SourceUnavailable):
                await until(lambda: False)
        server.start()
    await read(source, mirror, rows=6)
    inserts = [each for each in mirror.transactions if each[0][1] == "insert"]
    assert len(inserts) == 6


async def test_a_short_break_is_not_noticed(
    stand_in: Callable[..., StandIn], source_of: Callable[..., MongoSource]
) -> None:
    server = stand_in()
    url = with_new_database(server.url)
    source = source_of("orders", url=url)
    mirror = Mirror(await source.start())
    async with following(source, mirror) as until:
        await insert(url, 1)
        await until(lambda: mirror.documents("orders"))
        server.kill()
        server.start()
        await insert(url, 2)
        await until(lambda: len(mirror.documents("orders")) == 2)
    assert [each for each in mirror.transactions if each[0][1] == "insert"] == [
        [("orders", "insert", 1)]
    ] * 2


async def read(source: MongoSource, mirror: Mirror, rows: int) -> None:
    """Until the mirror has this many rows, trying again as a runner does."""
    async with asyncio.timeout(30):
        while len(mirror.documents("orders")) < rows:
            with suppress(SourceUnavailable):
                async with following(source, mirror) as until:
                    await until(lambda: len(mirror.documents("orders")) >= rows)


async def insert(url: str, number: int) -> None:
    async with AsyncMongoClient[dict[str, Any]](url) as client:
        await client.get_default_database().orders.insert_one({"_id": number})
