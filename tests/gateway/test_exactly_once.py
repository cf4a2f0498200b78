"""Random faults between clients and two gateways: each mutation runs once, each message is sent
once, and each caller gets the answer to its own call.

Connections are cut at any byte, in both directions; gateways are killed and started again. The
database is the judge: rows by the number of their call, and the messages of NOTIFY.

A failure names its seed: `SEED=… HEADWATER_FUZZ_CALLS=… pytest …`.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headwater import BlockingConnection, connect
from headwater import Connection as Client
from headwater.channels.bus_messages import signed
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.errors import Refused
from headwater.testing.gateway_process import Served, serving
from headwater.testing.proxies import Cutter, cutting
from tests.gateway.test_oracle import LENIENT, quick
from tests.support.applications.shop import until
from tests.support.databases import fresh_database
from tests.support.generators.sizes import first_seed, size

CALLS = size("calls", 60, large=2_000)
SEED = first_seed(15)
CALLERS = 12
SHARE = 0.03
"""Of all that is read from a connection, how much ends it."""

PROGRAM = """
import asyncio, random
from headwater import Headwater, Refused

hw = Headwater()
hw.channel("room:{id}", history=0)

@hw.mutation
async def place(ctx, number: int) -> dict:
    # Nothing in the table prevents a second row.
    id = await ctx.fetch_value("insert into placed (number) values (%s) returning id", number)
    if random.random() < 0.3:
        await asyncio.sleep(random.random() / 50)
    if random.random() < 0.1:
        raise Refused("sold out", code="sold_out")
    return {"number": number, "id": id}
"""


@pytest.fixture(params=["postgres", "system_postgres"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """All of this on two releases of PostgreSQL."""
    server = request.getfixturevalue(request.param)
    with fresh_database(str(getattr(server, "url", server)), installed=True) as url:
        yield url


@pytest.fixture
async def shop(url: str, connection: Connection, tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(PROGRAM)
    await connection.execute(
        "create table placed (id int generated always as identity primary key, number int)"
    )
    return tmp_path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class Gateways:
    """Two gateways, which are killed and started again on their ports."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self._arguments: tuple[str, Path] = (url, folder)
        self._stack = stack
        self._ports = [free_port(), free_port()]
        with ThreadPoolExecutor(2) as threads:
            self._running = list(threads.map(self._start, self._ports))
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]

    def _start(self, port: int) -> Served:
        return self._stack.enter_context(
            serving(*self._arguments, program="shop:hw", port=port, **LENIENT)
        )

    async def kill_and_start(self, number: int) -> None:
        await asyncio.to_thread(self._running[number].kill)
        self._running[number] = await asyncio.to_thread(self._start, self._ports[number])


class Judge:
    """The answers that callers got, and the content of the database."""

    def __init__(self) -> None:
        self.placed: dict[int, int] = {}
        self.refused: set[int] = set()
        self.published: set[int] = set()
        self.wrong: list[str] = []

    async def place(self, client: Client, number: int) -> None:
        try:
            value = (await client.mutate("place", number=number)).value
        except Refused:
            self.refused.add(number)
        except Exception as error:
            self.wrong.append(f"call {number}: {error!r}")
        else:
            self.answered(number, value)

    def answered(self, number: int, value: Any) -> None:
        if value["number"] != number:
            self.wrong.append(f"call {number} got the answer of {value['number']}")
        self.placed[number] = value["id"]

    async def publish(self, room: Any, number: int) -> None:
        try:
            await room.publish(number)
            self.published.add(number)
        except Exception as error:
            self.wrong.append(f"message {number}: {error!r}")

    async def check(self, connection: Connection) -> None:
        cursor = await connection.execute("select number, id from placed order by number, id")
        rows = await cursor.fetchall()
        assert self.wrong == []
        assert rows == sorted(self.placed.items())
        assert not self.refused & set(self.placed)


@asynccontextmanager
async def notified(url: str) -> AsyncIterator[Counter[int]]:
    """How often each message was sent, according to the database."""
    counts: Counter[int] = Counter()
    connection = await connect_database(url, purpose="test", application_path=True)
    await connection.execute('listen "headwater:bus"')

    async def listen() -> None:
        async for notice in connection.notifies():
            note = json.loads(notice.payload.split(" ", 7)[7])
            if note["note"] == "said":
                counts[note["data"]] += 1

    listening = asyncio.create_task(listen())
    try:
        yield counts
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await connection.close()


async def break_things(
    links: list[Cutter], gateways: Gateways, chance: random.Random, done: asyncio.Event
) -> int:
    """Cut connections and kill gateways until the callers are done; how many were killed."""
    for link in links:
        link.share = SHARE
    kills = 0
    while not done.is_set():
        await gateways.kill_and_start(chance.randrange(2))
        kills += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(3 * chance.random()):
                await done.wait()
    return kills


async def test_random_faults(url: str, shop: Path, connection: Connection) -> None:
    chance, judge, done = random.Random(SEED), Judge(), asyncio.Event()
    numbers = iter(range(CALLS))

    def some(count: int) -> list[int]:
        return [number for _, number in zip(range(count), numbers, strict=False)]

    async def caller(urls: list[str], transport: Any, at_once: int) -> None:
        async with (
            connect(urls, transport=transport, backoff=quick) as client,
            client.channel("room:1") as room,
        ):
            while mine := some(at_once):
                calls = [judge.place(client, number) for number in mine]
                if chance.random() < 0.5:
                    calls.append(judge.publish(room, mine[0]))
                await asyncio.gather(*calls)

    def blocking_caller(urls: list[str]) -> None:
        with BlockingConnection(connect(urls, backoff=quick)) as client:
            while mine := some(1):
                with suppress(Refused):
                    judge.answered(mine[0], client.mutate("place", number=mine[0]).value)

    with ExitStack() as processes:
        gateways = await asyncio.to_thread(Gateways, url, shop, processes)
        async with AsyncExitStack() as stack:
            links = [
                await stack.enter_async_context(cutting(each, chance=chance))
                for each in gateways.urls
            ]
            urls = [link.url for link in links]
            counts = await stack.enter_async_context(notified(url))
            breaking = asyncio.create_task(break_things(links, gateways, chance, done))
            async with asyncio.timeout(100 + CALLS / 2), asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.to_thread(blocking_caller, urls))
                for number in range(CALLERS):
                    transport, at_once = ("ws", "sse")[number % 2], 1 if number % 3 else 4
                    tasks.create_task(caller(chance.sample(urls, 2), transport, at_once))
            done.set()
            kills, cuts = await breaking, sum(link.cuts for link in links)
            print(
                f"seed {SEED}: {CALLS} mutations ({len(judge.refused)} refused),"
                f" {len(judge.published)} messages, {cuts} cuts, {kills} kills"
            )
            await judge.check(connection)
            cursor = await connection.execute("select key from headwater.secret")
            ((key,),) = await cursor.fetchall()
            last = signed(LAST, key)
            await connection.execute("select pg_notify('headwater:bus', %s)", (last,))
            await until(lambda: counts[-1])
            assert counts - Counter([-1]) == Counter(judge.published)
    assert cuts
    assert kills


LAST = '1 test 0 1 1 {"note": "said", "data": -1}'
"""Carried behind all that was published."""
