"""PostgreSQL stops and starts again; the gateway stops and another takes its place."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headwater import connect
from headwater.capture.postgres import schema
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.embedded import EmbeddedPostgres
from headwater.testing.gateway_process import Served, serving
from tests.gateway.test_oracle import LENIENT, Followers, quick
from tests.support.applications.shop import Truth, open_shop, random_query, until, writing
from tests.support.databases import FAST, passable_folder


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL of its own, which the test restarts."""
    with passable_folder() as folder, EmbeddedPostgres(folder / "data", settings=FAST) as server:
        yield server


@pytest.fixture
async def setup(server: EmbeddedPostgres) -> AsyncIterator[Connection]:
    connection = await connect_database(server.url, purpose="test", application_path=True)
    await schema.install(connection)
    await open_shop(connection)
    yield connection
    await connection.close()


def is_ready(gateway: Served) -> bool:
    return gateway.get("/readyz").status_code == 200


@pytest.mark.parametrize("crash", [False, True], ids=["restarted", "crashed"])
async def test_a_restarted_database_under_load(
    server: EmbeddedPostgres, setup: Connection, tmp_path: Path, crash: bool
) -> None:
    chance = random.Random(8)
    with serving(server.url, tmp_path, **LENIENT) as gateway:
        async with AsyncExitStack() as stack:
            followers = Followers(stack, await Truth.of(setup, "orders"))
            await followers.join([gateway.url], 6)
            for number in range(30):
                await followers.follow(random_query(chance), number)
            assert is_ready(gateway)
            async with writing(server.url, writers=4, seed=8, pause=0.005):
                await asyncio.sleep(0.5)
                await asyncio.to_thread(server.stop_now, "immediate" if crash else "fast")
                await until(lambda: not is_ready(gateway))
                body = gateway.get("/readyz").json()
                assert body["status"] == "unavailable"
                assert "password" not in body["reason"]
                await asyncio.to_thread(server.start)
                await until(lambda: is_ready(gateway))
                await asyncio.sleep(0.5)
            again = await connect_database(server.url, purpose="test", application_path=True)
            followers._truth = await Truth.of(again, "orders")
            await followers.wait_until_right()
            assert followers.diverged == 0
            await again.close()


async def test_clients_of_a_stopped_gateway_reconnect_and_lose_nothing(
    url: str, connection: Connection, tmp_path: Path
) -> None:
    """A change feed counts every change; the gateway is stopped while changes are written."""
    await connection.execute(
        "create table counted (id int generated always as identity primary key)"
    )
    await connection.execute("select headwater.enable_reactivity('counted')")
    got, begun = list[int](), asyncio.Event()
    with serving(url, tmp_path) as first, serving(url, tmp_path) as second:

        async def consume() -> None:
            async with (
                connect([first.url, second.url], backoff=quick) as hw,
                hw.changes("counted") as feed,
            ):
                begun.set()
                async for transaction in feed:
                    got.extend(change.after["id"] for change in transaction.changes)

        consuming = asyncio.create_task(consume())
        await begun.wait()
        written = 0
        stopping: asyncio.Future[int] | None = None
        for number in range(300):
            await connection.execute("insert into counted default values")
            written += 1
            if number == 100:
                stopping = asyncio.ensure_future(asyncio.to_thread(first.stop))
        assert stopping is not None
        assert await stopping == 0
        await until(lambda: len(got) >= written)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
    assert got == list(range(1, written + 1))
