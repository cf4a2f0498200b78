"""Clients that are switched between two gateways, of which one or the other is behind.

Counters only grow, so the value that a client shows of one must never fall: not at another gateway,
not after a cut, in no kind of subscription. What a mutation wrote is in every subscription after
`wait_for`, and in the end all of them are what the database has.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headwater import Backoff, connect
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.errors import ConnectionFailed, DatabaseError, TimedOut, Unavailable
from headwater.protocol import Upsert
from headwater.testing.gateway_process import serving
from headwater.testing.proxies import Cutter, Holder, cutting, holding
from tests.support.applications.shop import until
from tests.support.databases import fresh_database
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import run

SEED = first_seed(15)
SWITCHES = size("switches", 3, large=100)
COUNTERS = 6
CLIENTS = 4
SETTINGS: dict[str, Any] = {
    "limits_sessions_per_ip": 1000,
    "limits_sessions_per_user": 1000,
    "limits_requests_per_second": 10_000,
}
PROGRAM = """
from headwater import Headwater

hw = Headwater()
hw.table("counters")
hw.topic("all:{kind}", table="counters")

@hw.query(key="id")
async def counters(ctx) -> list:
    return await ctx.fetch("select id, n from counters order by id")

@hw.mutation
async def bump(ctx, id: int) -> int:
    return await ctx.fetch_value("update counters set n = n + 1 where id = %s returning n", id)
"""


async def open_counters(connection: Connection, folder: Path) -> None:
    await run(
        connection,
        "create table counters (id int primary key, n int not null, kind int not null default 1)",
        f"insert into counters select i, 0 from generate_series(1, {COUNTERS}) i",
        "select headwater.enable_reactivity('counters')",
    )
    (folder / "counting.py").write_text(PROGRAM)


class Shown:
    """What one subscription has shown of each counter, which only grows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counters: dict[int, int] = {}
        self.fell: list[tuple[int, int, int]] = []
        self.updates = 0

    def show(self, rows: Iterable[Any]) -> None:
        self.updates += 1
        for row in rows:
            before = self.counters.get(row["id"], 0)
            if row["n"] < before:
                self.fell.append((row["id"], before, row["n"]))
            self.counters[row["id"]] = row["n"]


class Client:
    """One client with a subscription of each kind."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.shown = {
            kind: Shown(f"{kind} of client {number}")
            for kind in ("live", "streamed", "query", "deltas", "topic")
        }
        self.waited = 0

    async def follow(self, stack: AsyncExitStack, hw: Any) -> None:
        self.hw = hw
        follow = stack.enter_async_context
        self.subscriptions: dict[str, Any] = {
            "live": await follow(hw.live("counters", order="id")),
            "streamed": await follow(hw.live("counters", mode="streamed")),
            "query": await follow(hw.subscribe("counters")),
            "deltas": await follow(hw.subscribe("counters", delta=True)),
            "topic": await follow(hw.topic("all:1")),
        }

    async def watch(self, kind: str) -> None:
        """Record every state that the subscription shows."""
        async for state in self.subscriptions[kind]:
            if kind == "topic":
                rows = [op.row for op in state if isinstance(op, Upsert)]
                self.shown[kind].show(rows)
            else:
                self.shown[kind].show(state)

    def present(self, kind: str) -> dict[int, int]:
        """The present state of the subscription, also if the client has not read it yet."""
        held = self.subscriptions[kind]
        match kind:
            case "live" | "streamed":
                rows = held.rows
            case "topic":
                rows = held.rows("counters")
            case _:
                rows = held.value
        return {row["id"]: row["n"] for row in rows}

    async def write_and_wait(self, chance: random.Random) -> None:
        """Write, and read the write in every subscription."""
        while True:
            id = chance.randint(1, COUNTERS)
            try:
                bumped = await self.hw.mutate("bump", id=id)
                await self.hw.wait_for(bumped.position)
            except (ConnectionFailed, TimedOut, Unavailable, DatabaseError):
                await asyncio.sleep(0.05)  # it was cut, or its gateway is held up
                continue
            for kind in self.shown:
                held = self.present(kind).get(id, 0)
                assert held >= bumped.value, (kind, self.number, id, held, bumped.value)
            self.waited += 1
            await asyncio.sleep(0.02)


class Writer:
    """Counts up, beside the gateways."""

    def __init__(self) -> None:
        self.written = 0

    async def count_up(self, url: str, chance: random.Random) -> None:
        connection = await connect_database(url, purpose="writer", application_path=True)
        try:
            while True:
                id = chance.randint(1, COUNTERS)
                await run(connection, f"update counters set n = n + 1 where id = {id}")
                self.written += 1
                await asyncio.sleep(0.01)
        finally:
            await connection.close()


class Two:
    """Two gateways over one database, each behind links that can be held and cut."""

    def __init__(self, urls: list[str], cutters: list[Cutter], holders: list[Holder]) -> None:
        self.urls = urls
        """Of the gateways themselves."""
        self.cutters = cutters
        self.holders = holders

    async def disturb(self, chance: random.Random, writer: Writer, clients: list[Client]) -> None:
        """Hold up one gateway, and move clients to it from the other, and maybe back."""
        slow = chance.randrange(2)
        self.holders[slow].hold()
        written = writer.written + chance.randint(5, 40)
        with suppress(TimeoutError):  # a mutation that is held up may hold the row
            await until(lambda: writer.written >= written, seconds=2)
        moved = _reconnects(clients)
        self.cutters[1 - slow].cut_some(chance, 0.8)
        # They move to the gateway that is held up, or away from it.
        with suppress(TimeoutError):
            await until(lambda: _reconnects(clients) > moved, seconds=1)
        await asyncio.sleep(chance.uniform(0.1, 1.0))
        if chance.random() < 0.3:
            self.cutters[slow].cut_some(chance, 0.8)
        self.holders[slow].release()
        await asyncio.sleep(chance.uniform(0.0, 0.5))


def _reconnects(clients: list[Client]) -> int:
    return sum(client.hw.reconnects for client in clients)


@asynccontextmanager
async def two_gateways(url: str, folder: Path, program: str = "counting:hw") -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        holders = [await stack.enter_async_context(holding(url)) for _ in range(2)]

        async def serve(holder: Holder) -> str:
            # Started and stopped in a thread: a gateway reaches its database through this event
            # loop.
            running = ExitStack()
            stack.push_async_callback(asyncio.to_thread, running.close)
            gateway = serving(holder.url, folder, program=program, **SETTINGS)
            return (await asyncio.to_thread(running.enter_context, gateway)).url

        urls = await asyncio.gather(*map(serve, holders))
        cutters = [await stack.enter_async_context(cutting(each)) for each in urls]
        try:
            yield Two(urls, cutters, holders)
        finally:
            for holder in holders:
                holder.release()


def patient() -> Backoff:
    return Backoff((0.02, 0.2), failures_max=1000)


@pytest.mark.timeout(60 + 10 * SWITCHES)
@pytest.mark.parametrize("server", ["embedded", "system"])
async def test_no_counter_ever_falls(
    request: pytest.FixtureRequest, tmp_path: Path, server: str
) -> None:
    fixture = "server_url" if server == "embedded" else "system_postgres"
    chance = random.Random(SEED)
    with fresh_database(request.getfixturevalue(fixture), installed=True) as url:
        connection = await connect_database(url, purpose="test", application_path=True)
        await open_counters(connection, tmp_path)
        async with two_gateways(url, tmp_path) as two, AsyncExitStack() as stack:
            clients = [Client(number) for number in range(CLIENTS)]
            urls = [cutter.url for cutter in two.cutters]
            for client in clients:
                transport: Any = "ws" if client.number % 2 else "sse"
                order = urls if client.number < CLIENTS // 2 else urls[::-1]
                hw = connect(order, transport=transport, backoff=patient)
                await client.follow(stack, await stack.enter_async_context(hw))
            await _disturbed(url, two, clients, chance)
            for holder in two.holders:
                holder.release()
            await _all_equal(connection, clients)
            assert sum(client.hw.reconnects for client in clients) > 0
            assert all(client.hw.diverged == 0 for client in clients)
        await connection.close()


async def _disturbed(url: str, two: Two, clients: list[Client], chance: random.Random) -> None:
    writer = Writer()
    works = [
        asyncio.create_task(writer.count_up(url, random.Random(SEED + 1))),
        *(asyncio.create_task(each.watch(kind)) for each in clients for kind in each.shown),
        *(
            asyncio.create_task(each.write_and_wait(random.Random(SEED + each.number)))
            for each in clients
        ),
    ]
    try:
        for switch in range(SWITCHES):
            await two.disturb(chance, writer, clients)
            for work in works:
                assert not work.done(), work.exception()
            fell = {each.name: each.fell for c in clients for each in c.shown.values() if each.fell}
            assert not fell, f"switch {switch} of seed {SEED}: {fell}"
        await until(lambda: all(client.waited for client in clients), seconds=60)
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


async def _all_equal(connection: Connection, clients: list[Client]) -> None:
    true: dict[int, int] = {}

    async def equal() -> bool:
        # A mutation whose caller has gone may be committed only now.
        cursor = await connection.execute("select id, n from counters")
        true.update(await cursor.fetchall())
        return all(client.present(kind) == true for client in clients for kind in client.shown)

    try:
        await until(equal, seconds=60)
    except TimeoutError:
        held = {(c.number, kind): c.present(kind) for c in clients for kind in c.shown}
        pytest.fail(f"seed {SEED}: {true} in the database, {held} at clients")
