"""What one hostile user costs another: `python -m benchmarks.hostile [--large]`.

Ann follows a live query, opens new ones and runs mutations, and her latencies are measured alone
and again under each attack of Eve, who has a token of her own and uses all that it allows: patterns
over long texts, a slow policy, large results under a quick one, a locked table, clients that do not
read, storms of subscriptions.
Attack and measurement take turns in one run, and the figures are ratios. Eve's clients run in a
process of their own with a low priority, so that a ratio is about the gateway and not the cores.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import jwt
import msgspec
import psycopg

from benchmarks.measure import Result, execute, percentile, report, scratch_server
from headwater import Connection as Client
from headwater import HeadwaterError, connect
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.queries.execution.idempotent_requests import REQUIRED_FUNCTIONS
from headwater.testing.gateway_process import serving

SECRET = "a secret of the benchmark that is long enough"
PROGRAM = """
from headwater import Headwater

hw = Headwater()

@hw.mutation
async def touch(ctx, id: int) -> None:
    await ctx.execute("update calls set at = clock_timestamp() where id = %s", id)

@hw.mutation
async def wait_for_parts(ctx) -> None:
    await ctx.execute("update parts set note = note")
"""
TABLES = """
    create table orders (id int primary key, region int not null, note text);
    insert into orders select i, i % 100, '' from generate_series(1, 2000) i;
    create index on orders (region, id);
    create table calls (id int primary key, at timestamptz);
    insert into calls select i, now() from generate_series(1, 100) i;
    create table texts (id int primary key, body text);
    insert into texts select i, repeat('a', 1000000) from generate_series(1, 4) i;
    create table parts (id int primary key, note text);
    insert into parts select i, '' from generate_series(1, 100) i;
    create table guarded (id int primary key, note text);
    insert into guarded select i, '' from generate_series(1, 20) i;
    alter table guarded enable row level security;
    create function slow() returns boolean language plpgsql as
      $$ begin perform pg_sleep(0.3); return true; end $$;
    create policy slow on guarded using ((select slow()));
    create table many (id int primary key, note text);
    insert into many select i, '' from generate_series(1, 110000) i;
    alter table many enable row level security;
    create policy quick on many using (true);
    create role web nologin;
    grant web to current_user;
    grant select on orders, texts, parts, guarded, many to web;
    grant select, update on calls, parts to web;
    create role questions login noinherit;
    grant web to questions;
"""
ENABLED = ("orders", "texts", "parts", "guarded", "many")


class Size(msgspec.Struct, frozen=True):
    samples: int
    attackers: int
    """How much of everything Eve does at once."""
    rounds: int


TINY = Size(samples=3, attackers=2, rounds=1)
SMALL = Size(samples=60, attackers=60, rounds=3)
LARGE = Size(samples=300, attackers=400, rounds=5)


def token(user: str) -> str:
    claims = {"sub": user, "role": "web", "exp": time.time() + 3600}
    return jwt.encode(claims, SECRET, "HS256")


# ------------------------------------------------------------------------ Ann


class Times(msgspec.Struct):
    """Latencies of Ann, in milliseconds."""

    change: list[float] = []
    """From a commit to her live query."""
    subscribe: list[float] = []
    """From the request to the first result."""
    mutate: list[float] = []


async def measure(url: str, writer: Connection, samples: int) -> Times:
    """Each kind of request of Ann, one after the other."""
    times = Times()
    query = {"table": "orders", "where": [["region", "=", 1]]}
    async with connect(url, token=token("ann")) as hw, hw.live(query) as live:
        row, batches = live.rows[0]["id"], live.deltas()
        for number in range(samples):
            times.change.append(await _change(writer, live, batches, row, str(number)))
            times.subscribe.append(await _subscribe(hw, number))
            times.mutate.append(await _mutate(hw, number))
        await batches.aclose()
    return times


async def _change(writer: Connection, live: Any, batches: Any, row: int, note: str) -> float:
    note = f"{note} {time.time_ns()}"
    await writer.execute("update orders set note = %s where id = %s", (note, row), prepare=True)
    committed = time.perf_counter()
    async for _ in batches:
        if next(each["note"] for each in live.rows if each["id"] == row) == note:
            break
    return (time.perf_counter() - committed) * 1e3


async def _subscribe(hw: Client, number: int) -> float:
    asked = time.perf_counter()
    where = [["region", "=", 2 + number % 90], ["id", ">", number // 90]]
    async with hw.live({"table": "orders", "where": where, "limit": 5}):
        return (time.perf_counter() - asked) * 1e3


async def _mutate(hw: Client, number: int) -> float:
    asked = time.perf_counter()
    await hw.mutate("touch", id=1 + number % 100)
    return (time.perf_counter() - asked) * 1e3


# ------------------------------------------------------------------------ Eve


async def _open_all(url: str, queries: list[dict[str, Any]]) -> None:
    """Hold as many live queries as are allowed, for ever."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(connect(url, token=token("eve"))) for _ in "1234"
        ]

        async def hold(number: int, query: dict[str, Any]) -> None:
            with suppress(HeadwaterError):
                async for _ in clients[number % len(clients)].live(query):
                    pass

        await asyncio.gather(*(hold(number, query) for number, query in enumerate(queries)))
        await asyncio.sleep(3600)


async def patterns(url: str, count: int) -> None:
    """Patterns that try every place of a text of 1 MB with every place of the pattern."""
    queries = []
    for number in range(count):
        length = (980, 900, 250, 60)[number % 4]  # 1,000 characters are allowed
        pattern = "%" + "_a%a" * (length // 4) + f"b{number}"
        queries.append({"table": "texts", "where": [["body", "like", pattern]], "columns": ["id"]})
    await _open_all(url, queries)


async def policies(url: str, count: int) -> None:
    """Live queries in which every row costs the database 0.3 s."""
    await _open_all(
        url, [{"table": "guarded", "where": [["id", ">", number]]} for number in range(count)]
    )


async def windows(url: str, count: int) -> None:
    """Large results under row-level security, all of which one change concerns."""
    count = min(count, 100)
    queries = [
        {"table": "many", "where": [["id", ">", number * 1000]], "limit": 1000}
        for number in range(count)
    ]
    await _open_all(url, queries)


async def locks(url: str, count: int) -> None:
    """Live queries and mutations that wait for a lock."""

    async def mutate() -> None:
        async with connect(url, token=token("eve")) as hw:
            while True:
                with suppress(HeadwaterError):
                    await hw.mutate("wait_for_parts")

    queries = [{"table": "parts", "where": [["id", ">", number]]} for number in range(count)]
    await asyncio.gather(_open_all(url, queries), *(mutate() for _ in range(4)))


async def silent_clients(url: str, count: int) -> None:
    """Streams of 1 MB rows that are not read."""
    address = urlsplit(url)
    sockets = []
    for number in range(min(count, 8)):
        line = socket.create_connection((address.hostname, address.port))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        query = quote(json.dumps({"table": "texts", "where": [["id", ">", number % 3]]}))
        head = f"GET /v1/live?q={query} HTTP/1.1\r\nhost: localhost\r\n"
        line.sendall(f"{head}authorization: Bearer {token('eve')}\r\n\r\n".encode())
        sockets.append(line)
    await asyncio.sleep(3600)


async def storm(url: str, count: int) -> None:
    """Subscriptions that come and go as fast as possible, with the widest possible filters."""

    async def one(number: int) -> None:
        async with connect(url, token=token("eve")) as hw:
            while True:
                values = list(range(number, number + 900))
                with suppress(HeadwaterError):
                    where = [["id", "in", values], ["region", ">=", 0]]
                    async with hw.live({"table": "orders", "where": where}):
                        number += 1
                await asyncio.sleep(0)

    await asyncio.gather(*(one(number * 1000) for number in range(min(count, 8))))


Attack = Callable[[str, int], Awaitable[None]]
ATTACKS: dict[str, Attack] = {
    "patterns over 1 MB": patterns,
    "a policy of 0.3 s": policies,
    "large results under a policy": windows,
    "a locked table": locks,
    "clients that do not read": silent_clients,
    "storms of subscriptions": storm,
}


def _attack(attack: Attack, url: str, count: int) -> None:
    os.nice(10)
    asyncio.run(attack(url, count))  # type: ignore[arg-type]


def _writing(url: str, locked: bool) -> None:
    """Change what Eve follows, five times a second; or hold the lock that she waits for."""
    os.nice(10)
    with psycopg.connect(url, autocommit=not locked) as connection:
        if locked:
            connection.execute("lock table parts in access exclusive mode")
            time.sleep(3600)
        while True:
            connection.execute("update guarded set note = clock_timestamp()::text where id < 10")
            connection.execute("update many set note = clock_timestamp()::text where id = 110000")
            connection.execute("update texts set body = reverse(body) || 'a' where id = 4")
            time.sleep(0.2)


@contextmanager
def attacked(attack: Attack, gateway: str, database: str, count: int) -> Iterator[None]:
    """Eve attacks inside the block, and is stopped."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_writing, args=(database, attack is locks)),
        context.Process(target=_attack, args=(attack, gateway, count)),
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


# ------------------------------------------------------------------------ both


@contextmanager
def _program() -> Iterator[Path]:
    """A folder with what is served."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "app.py").write_text(PROGRAM)
        yield Path(folder)


async def _run(size: Size) -> list[Result]:
    with scratch_server() as server, _program() as folder:
        execute(server.url, TABLES)
        questions = server.url.replace("postgres@", "questions@")
        settings: dict[str, Any] = {
            "auth_secret": SECRET,
            "auth_roles": "web",
            "question_url": questions,
        }
        with serving(server.url, folder, program="app:hw", **settings) as gateway:
            writer = await connect_database(server.url, purpose="benchmark", application_path=True)
            for table in ENABLED:
                await writer.execute("select headwater.enable_reactivity(%s)", (table,))
            for function in REQUIRED_FUNCTIONS:
                await writer.execute(f"grant execute on function {function} to questions".encode())
            results = []
            await measure(gateway.url, writer, size.samples // 3)
            for name, attack in ATTACKS.items():
                alone, under = Times(), Times()
                for _ in range(size.rounds):
                    _add(alone, await measure(gateway.url, writer, size.samples))
                    with attacked(attack, gateway.url, server.url, size.attackers):
                        await asyncio.sleep(2.0 if size is not TINY else 0.5)
                        _add(under, await measure(gateway.url, writer, size.samples))
                results += _results(name, alone, under)
            await writer.close()
        return results


def _add(times: Times, more: Times) -> None:
    for field in times.__struct_fields__:
        getattr(times, field).extend(getattr(more, field))


def _results(name: str, alone: Times, under: Times) -> list[Result]:
    results = []
    for field in alone.__struct_fields__:
        before, after = getattr(alone, field), getattr(under, field)
        pairs = [(percentile(before, share), percentile(after, share)) for share in (0.5, 0.9)]
        (p50, with_p50), (p90, with_p90) = pairs
        ratio = with_p50 / p50
        results.append(
            Result(
                f"{name}: {field}",
                f"p50 {ratio:.2f} times",
                "within 2 times",
                ratio <= 2,
                f"p50 {p50:.1f} → {with_p50:.1f} ms, p90 {p90:.1f} → {with_p90:.1f} ms,"
                f" most {max(before):.0f} → {max(after):.0f} ms",
            )
        )
    return results


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    return asyncio.run(_run(TINY if tiny else LARGE if large else SMALL))


if __name__ == "__main__":
    report("What one hostile user costs another", run(large="--large" in sys.argv))
