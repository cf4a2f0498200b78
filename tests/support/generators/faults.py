"""Random faults between a JavaScript client and two gateways, and the check of what the client saw.

A storm is a number of faults from a seed: connections that are cut at any moment of a request, that
lose bytes silently or are slow, gateways that are killed or replace each other. Each kind comes at
least once, also in a short storm. The database is the judge: each mutation happened once, also if
it was repeated, and its caller has its result; every subscription ends equal to its tables, and
none has ever gone back.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headwater.database import Connection
from headwater.testing.gateway_process import Served, serving
from tests.support.generators.sizes import first_seed, size
from tests.support.proxy import HOWS, MOMENTS, FaultProxy, How, Moment, proxying

FAULTS = size("faults", 10, large=40)
"""How many a storm has."""
CALLERS = 2
"""How many each client has at once, in faults.js. One waits for what it wrote."""
SEED = first_seed(1)

APPLICATION = """
from headwater import Headwater

hw = Headwater()
hw.topic("counter:{name}", table="counters")
hw.channel("room:{id}", history=10)

@hw.query
async def total(ctx) -> int:
    return (await ctx.fetch("select n from counters where name = 'all'"))[0]["n"]

@hw.query(key="id")
async def latest(ctx) -> list[dict]:
    return await ctx.fetch("select id, business, n from executed order by n desc limit 5")

@hw.mutation
async def record(ctx, business: str) -> int:
    sql = "update counters set n = n + 1 where name = 'all' returning n"
    n = (await ctx.fetch(sql))[0]["n"]
    await ctx.execute("insert into executed (business, n) values (%s, %s)", business, n)
    return n
"""

TABLES = """
create table counters (name text primary key, n int not null);
create table executed (
  id bigint generated always as identity primary key,
  business text not null,
  n int not null
);
insert into counters values ('all', 0);
select headwater.enable_reactivity('counters'), headwater.enable_reactivity('executed');
"""

NETWORK = {"connection", "unavailable", "limit", "behind", "session_unknown"}
"""Errors that a client may report while it is out of luck."""


class Gateways:
    """Two gateways on one database. Each may be killed, and is started again at its port."""

    def __init__(self, database: str, folder: Path) -> None:
        self._database = database
        self._folder = folder
        self._served: list[tuple[ExitStack, Served]] = []

    async def start(self) -> None:
        both = (asyncio.to_thread(self._serve, 0) for _ in range(2))
        self._served += await asyncio.gather(*both)

    @property
    def urls(self) -> list[str]:
        return [served.url for _, served in self._served]

    async def kill(self, number: int) -> None:
        """Kill a gateway, and start it again."""
        stack, served = self._served[number]
        await asyncio.to_thread(served.kill)
        stack.close()
        port = urlsplit(served.url).port or 0
        self._served[number] = await asyncio.to_thread(self._serve, port)

    def _serve(self, port: int) -> tuple[ExitStack, Served]:
        stack = ExitStack()
        settings: dict[str, Any] = {
            "gateway_keepalive": "1 second",
            "limits_requests_per_second": 100_000,
            "limits_subscriptions_per_user": 1000,
            "limits_sessions_per_user": 1000,
        }
        running = serving(self._database, self._folder, program="app:hw", port=port, **settings)
        return stack, stack.enter_context(running)

    async def stop(self) -> None:
        for stack, _ in self._served:
            await asyncio.to_thread(stack.close)


@asynccontextmanager
async def staged(
    database: str, connection: Connection, folder: Path
) -> AsyncIterator[tuple[Gateways, FaultProxy]]:
    """Two gateways, and a proxy before them."""
    await connection.execute(TABLES)
    (folder / "app.py").write_text(APPLICATION)
    gateways = Gateways(database, folder)
    try:
        await gateways.start()
        async with proxying(*gateways.urls) as proxy:
            yield gateways, proxy
    finally:
        await gateways.stop()


KINDS = ("call", "cut", "silence", "delay", "switch", "kill")
"""A connection is cut at a moment of a mutation; some connections are cut; all are silent in one
direction; all are slow; new ones go to the other gateway; the present gateway is killed."""


async def storm(
    proxy: FaultProxy,
    gateways: Gateways,
    connection: Connection,
    clients: Sequence[str],
    seed: int = SEED,
    faults: int = FAULTS,
) -> None:
    """Faults for the clients of these names. Each fault waits until all clients have recovered from
    the one before."""
    chance = random.Random(seed)
    calls = _calls(chance)
    happened = Counter[str]()
    restarts = set[asyncio.Task[None]]()
    for kind in _plan(chance, faults):
        before = await executed(connection)
        if kind in ("switch", "kill"):
            await asyncio.gather(*restarts)  # One of the two must be running.
            present, proxy.present = proxy.present, 1 - proxy.present
        match kind:
            case "call":
                moment, how = next(calls)
                for name in clients:
                    proxy.arm(f'"{name}.'.encode(), moment, how)
            case "cut":
                proxy.cut(chance.choice(("fin", "rst")), chance, 0.7)
            case "silence":
                proxy.swallow(chance.choice(("up", "down")))
            case "delay":
                proxy.delay = (0.0, chance.choice((0.02, 0.1)))
            case "switch":
                proxy.cut(chance.choice(("fin", "rst")))
            case "kill":
                restarts.add(asyncio.create_task(gateways.kill(present)))
        await all_get_on(connection, clients, before)
        assert proxy.armed == [], "an armed fault did not happen"
        happened[kind] += 1
        await asyncio.sleep(chance.uniform(0, 0.1))
        if kind != "delay":  # The fault after it meets slow connections.
            proxy.heal()
    proxy.heal()
    await asyncio.gather(*restarts)
    print(f"seed {seed}: {faults} faults, {dict(happened)}")
    assert set(happened) == set(KINDS)


def _plan(chance: random.Random, faults: int) -> list[str]:
    """Kinds of faults: first each once, then calls until each cut at each moment has been, then
    any."""
    first = chance.sample(KINDS, len(KINDS))
    calls = ["call"] * (len(MOMENTS) * len(HOWS) - 1)
    weights = [2 if kind == "call" else 0.5 if kind == "kill" else 1 for kind in KINDS]
    return (first + calls + chance.choices(KINDS, weights, k=faults))[:faults]


def _calls(chance: random.Random) -> Iterator[tuple[Moment, How]]:
    """Cuts at moments of a mutation: first each once."""
    cuts = [(moment, how) for moment in MOMENTS for how in HOWS]
    yield from chance.sample(cuts, len(cuts))
    while True:
        yield chance.choice(cuts)


async def all_get_on(
    connection: Connection, clients: Sequence[str], before: dict[str, int], more: int = CALLERS
) -> None:
    """Wait until more mutations of each client were executed than its callers had under way."""
    try:
        async with asyncio.timeout(60):
            while True:
                now = await executed(connection)
                if all(now.get(name, 0) > before.get(name, 0) + more for name in clients):
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"a client does not get on: {before}, then {now}") from None


async def executed(connection: Connection) -> dict[str, int]:
    sql = "select split_part(business, '.', 1), count(*) from executed group by 1"
    return dict(await _rows(connection, sql))


async def judge(connection: Connection, reports: list[dict[str, Any]]) -> None:
    """What clients say happened, against the database."""
    cursor = await connection.execute("select business, n from executed order by n")
    rows = await cursor.fetchall()
    twice = [name for name, count in Counter(name for name, _ in rows).items() if count > 1]
    assert twice == [], "executed more than once"
    got = {business: value for report in reports for business, value, _ in report["results"]}
    assert got == dict(rows), "each caller has its own result"
    reconnects = [report["reconnects"] for report in reports]
    print(f"{len(rows)} mutations, each once; {reconnects} reconnects")
    newest = [
        {"id": id, "business": business, "n": n}
        for id, business, n in await _rows(
            connection, "select id, business, n from executed order by n desc limit 5"
        )
    ]
    first = [
        n for (n,) in await _rows(connection, "select n from executed where n <= 20 order by n")
    ]
    for report in reports:
        shown, last = report["shown"], report["results"][-1][1]
        assert report["backwards"] == []
        assert report["early"] == []
        assert report["reconnects"] > 0
        assert [said for said, n in Counter(report["received"]).items() if n > 1] == []
        assert report["diverged"] == 0
        assert [error for error in report["errors"] if error[0] not in NETWORK] == []
        fed = shown["fed"]
        breaks = [(one, other) for one, other in pairwise(fed) if other != one + 1]
        assert breaks == [], "the feed: each once, in order"
        assert fed[-1] >= last
        assert shown["query"] >= last
        assert shown["live"][0]["n"] >= last
        assert shown["topic"]["counters"][0]["n"] >= last
        assert sorted(row["n"] for row in shown["streamed"]) == first
        if last == len(rows):
            assert shown["window"] == newest
            assert shown["rows"] == newest
            assert [shown["query"], shown["live"][0]["n"]] == [last, last]


async def _rows(connection: Connection, sql: str) -> list[tuple[Any, ...]]:
    return await (await connection.execute(sql.encode())).fetchall()
