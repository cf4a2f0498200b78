"""End to end: the rows of clients equal the answer of the database, after any history."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from headwater import Backoff, connect
from headwater.capture.postgres.triggers import Capture
from headwater.client.subscriptions.subscription import Live
from headwater.database import Connection
from headwater.testing.gateway_process import serving
from headwater.testing.proxies import cutting
from tests.support.applications.shop import Truth, open_shop, random_query, until, writing

QUERIES = 200
CLIENTS = 20
SEED = 4
LENIENT: dict[str, Any] = {"limits_sessions_per_ip": 1000, "limits_requests_per_second": 10_000}


pytestmark = pytest.mark.parametrize("capture", ["trigger", "wal"])


def quick() -> Backoff:
    return Backoff((0.02, 0.2), failures_max=200)


class Followers:
    """Many clients with live queries, half of them over SSE and half over WebSocket."""

    def __init__(self, stack: AsyncExitStack, truth: Truth) -> None:
        self._stack = stack
        self._truth = truth
        self.clients: list[Any] = []
        self.lives: list[tuple[dict[str, Any], Live]] = []

    async def join(self, urls: list[str], clients: int) -> None:
        for number in range(clients):
            transport = "ws" if number % 2 else "sse"
            client = connect(urls, transport=transport, backoff=quick)  # type: ignore[arg-type]
            self.clients.append(await self._stack.enter_async_context(client))

    async def follow_all(self, queries: list[dict[str, Any]]) -> None:
        """Distributed over the clients, which begin at the same time, each with one query at a
        time."""

        async def of_client(first: int) -> None:
            for number in range(first, len(queries), len(self.clients)):
                await self.follow(queries[number], number)

        async with asyncio.TaskGroup() as tasks:
            for first in range(len(self.clients)):
                tasks.create_task(of_client(first))

    async def follow(self, query: dict[str, Any], number: int) -> None:
        client = self.clients[number % len(self.clients)]
        live = await self._stack.enter_async_context(client.live(query, verify=True))
        self.lives.append((query, live))

    async def all_are_right(self) -> bool:
        for query, live in self.lives:
            if not await self.is_right(query, live):
                return False
        return True

    async def is_right(self, query: dict[str, Any], live: Live) -> bool:
        true, rows = await self._truth.rows(query), live.rows
        if query.get("mode") == "streamed":
            return sorted(map(repr, rows)) == sorted(map(repr, true))
        return rows == true

    async def wait_until_right(self) -> None:
        """Wait until every client has the answer of the database; else report the differences."""
        try:
            await until(self.all_are_right, seconds=40, every=0.2)
        except TimeoutError:
            for query, live in self.lives:
                if not await self.is_right(query, live):
                    true = await self._truth.rows(query)
                    pytest.fail(f"{query}\nclient   {live.rows}\ndatabase {true}")

    @property
    def diverged(self) -> int:
        return sum(client.diverged for client in self.clients)


async def test_live_queries_equal_the_database_when_it_is_quiet(
    url: str, connection: Connection, tmp_path: Path, capture: Capture
) -> None:
    await open_shop(connection, capture=capture)
    chance = random.Random(SEED)
    truth = await Truth.of(connection, "orders")
    with serving(url, tmp_path, **LENIENT) as gateway:
        async with AsyncExitStack() as stack:
            cutter = await stack.enter_async_context(cutting(gateway.url))
            followers = Followers(stack, truth)
            await followers.join([cutter.url], CLIENTS)
            async with writing(url, seed=SEED, pause=0.01) as writers:
                await followers.follow_all([random_query(chance) for _ in range(QUERIES)])
                for _ in range(40):
                    await asyncio.sleep(0.25)
                    cutter.cut_some(chance, 0.1)
            await followers.wait_until_right()
            assert followers.diverged == 0
            assert cutter.cuts > 10
            assert sum(client.reconnects for client in followers.clients) > 10
            assert sum(writer.committed for writer in writers) > 100


async def test_a_subscription_opened_in_a_write_storm_misses_and_doubles_nothing(
    url: str, connection: Connection, tmp_path: Path, capture: Capture
) -> None:
    """A replica refuses a delta that does not fit its snapshot. The hash of the first batch and the
    comparison at the end find a wrong snapshot."""
    await open_shop(connection, capture=capture)
    truth = await Truth.of(connection, "orders")
    with serving(url, tmp_path, **LENIENT) as gateway:
        async with AsyncExitStack() as stack:
            followers = Followers(stack, truth)
            await followers.join([gateway.url], 10)
            async with writing(url, seed=SEED + 1, pause=0.001):
                for number in range(60):
                    # Each has a view of its own, and so a snapshot of its own.
                    query = {"table": "orders", "order": [["amount", "desc"]], "limit": 20 + number}
                    await followers.follow(query, number)
            await followers.wait_until_right()
            assert followers.diverged == 0


async def test_clients_of_a_killed_gateway_continue_at_another(
    url: str, connection: Connection, tmp_path: Path, capture: Capture
) -> None:
    await open_shop(connection, capture=capture)
    chance = random.Random(SEED + 2)
    truth = await Truth.of(connection, "orders")
    with serving(url, tmp_path, **LENIENT) as one, serving(url, tmp_path, **LENIENT) as other:
        async with AsyncExitStack() as stack:
            followers = Followers(stack, truth)
            await followers.join([one.url, other.url], 10)
            async with writing(url, writers=4, seed=SEED + 2, pause=0.01):
                for number in range(50):
                    await followers.follow(random_query(chance), number)
                one.kill()
                await until(lambda: all(client.reconnects for client in followers.clients))
            await followers.wait_until_right()
            assert followers.diverged == 0
