"""Headwater never calls operators, functions and types that an attacker created, in any of its
statements (tests/support/hostile_objects.py)."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headwater import connect as connect_client
from headwater.database import Connection, connect
from headwater.gateway.auth.tickets import Tickets
from headwater.testing.gateway_process import Served, serving
from tests.integration.commands.test_cli import headwater
from tests.support.hostile_objects import CALLED, PATH, plant
from tests.support.log_probe import rows, run

PROGRAM = """
    from headwater import Headwater

    hw = Headwater()
    hw.channel("room:{id}", history=5)
    hw.topic("orders:{id}", entity="orders")

    @hw.query
    async def notes(ctx):
        return await ctx.fetch("select id, note from public.orders order by id")

    @hw.mutation
    async def place(ctx, id: int, note: str):
        await ctx.execute("insert into public.orders (id, note) values (%s, %s)", id, note)
        await ctx.signal(f"orders:{id}", [id])
"""
TABLES = (
    "create type public.mood as enum ('sad', 'glad')",
    "create table public.orders (id int primary key, region varchar, price numeric, code char(5),"
    " note text, mood public.mood, at timestamptz, day date, spot inet, doc jsonb, share real)",
    "create table public.parted (a int, b varchar, c text, primary key (a, b))"
    " partition by list (a)",
    "create table public.parted_1 partition of public.parted for values in (1)",
)

ORDERS = ["region", "price desc", "note", "code", "at desc nulls last", "mood", "spot"]
WHERES: list[list[Any]] = [
    [["region", "=", "north"]],
    [["region", "!=", "north"], ["note", "ilike", "%x%"]],
    [["note", "in", ["x", "y"]]],
    [["code", "like", "a%"]],
    [["price", ">", 1]],
    [["mood", "in", ["sad"]]],
    [["day", ">=", "2020-01-01"]],
]


@pytest.fixture(params=["postgres", "system_postgres"])
def server_url(request: pytest.FixtureRequest) -> str:
    server = request.getfixturevalue(request.param)
    return str(server if isinstance(server, str) else server.url)


@dataclass
class Site:
    url: str
    """Of Headwater's role, in whose path everything planted comes first."""
    admin: Connection
    maker: Connection


@pytest.fixture
async def site(empty_url: str) -> AsyncIterator[Site]:
    admin = await connect(empty_url, purpose="test")
    database = admin.info.dbname
    ours, maker = f"ours_{database}", f"maker_{database}"
    await run(
        admin,
        *(f"create role {role} login" for role in (ours, maker)),
        f"grant create on database {database} to {ours}",
        f"grant create, usage on schema public to {maker}",
        f"alter role {ours} in database {database} set search_path = {PATH}",
        f"alter database {database} set track_functions = 'all'",
    )
    made_by = await connect(empty_url.replace("postgres@", f"{maker}@"), purpose="test")
    await run(made_by, *TABLES)
    await plant(made_by)
    await run(
        made_by,
        f"grant all on public.orders, public.parted to {ours}",
        "grant select, insert, update on public.orders to public",
    )
    await run(admin, f"grant {maker} to {ours}")
    yield Site(empty_url.replace("postgres@", f"{ours}@"), admin, made_by)
    await made_by.close()
    await run(admin, f"drop owned by {ours}, {maker} cascade", f"drop role {ours}, {maker}")
    await admin.close()


async def test_hostile_objects_are_never_called(site: Site, tmp_path: Path) -> None:
    await works_when_called(site)
    for command in ("init", "doctor"):
        done = headwater(command, "--url", site.url)
        assert done.returncode == 0, done.stderr
    for name in ("orders", "parted"):
        assert headwater("enable", name, "--url", site.url).returncode == 0
    await write(site.maker, 1)
    (tmp_path / "planted.py").write_text(textwrap.dedent(PROGRAM))
    with serving(site.url, tmp_path, program="planted:hw") as gateway:
        await use(gateway, site)
        for arguments in (["status"], ["doctor"], ["disable", "parted"]):
            done = headwater(*arguments, "--url", site.url)
            assert done.returncode == 0, done.stderr
    assert await called(site) == []


async def works_when_called(site: Site) -> None:
    """The attack would work: with the search path of the role, and without schema names."""
    naive = await connect(site.url, purpose="test", application_path=True)
    await run(naive, "select 1 from public.orders where region = 'a' or lower(note) = 'b'")
    await run(naive, "insert into public.orders (id, region) values (99, 'north')")
    await run(naive, "select 1 from public.orders where region = 'a' or lower(note) = 'b'")
    await naive.close()
    async with asyncio.timeout(20):
        while await called(site) == []:  # the server counts when the session has ended
            pass
    await run(site.admin, "select pg_stat_reset()")
    assert await called(site) == []


async def called(site: Site) -> list[str]:
    await run(site.admin, "select pg_stat_clear_snapshot()")
    return [name for (name,) in await rows(site.admin, CALLED)]


async def write(connection: Connection, key: int) -> None:
    """Every kind of write, with statements that name no operator."""
    await run(
        connection,
        "insert into public.orders (id, region, note, code, mood)"
        f" values ({key}, 'north', 'x', 'a', 'sad')",
        "update public.orders set note = 'y', price = 2.5, at = pg_catalog.now(), doc = '[1]'",
        f"insert into public.orders (id) values ({key})"
        " on conflict (id) do update set region = 'east'",
        f"insert into public.parted values (1, '{key}', 'x')",
        f"insert into public.parted_1 values (1, 'b{key}', 'x')",
        "update public.parted set c = 'z'",
        "begin isolation level serializable; update public.orders set note = 'z'; commit",
        "delete from public.parted_1",
        "alter table public.orders add column if not exists extra text",
        "update public.orders set extra = 'slow path'",
        "truncate public.parted",
    )


async def use(gateway: Served, site: Site) -> None:
    async with connect_client(gateway.url) as client:
        lives = [
            client.live("orders", where=where, order=[order], limit=2)
            for where, order in zip(WHERES, ORDERS, strict=True)
        ]
        lives.append(client.live("parted"))
        feed = client.changes("orders")
        query = client.subscribe("notes")
        topic = client.topic("orders:7")
        channel = client.channel("room:1", present=True)
        subscriptions: list[Any] = [*lives, feed, query, topic, channel]
        async with asyncio.timeout(60):
            for each in subscriptions:
                await each.__aenter__()
            await channel.publish({"hello": 1})
            await client.mutate("place", id=7, note="n")
            for key in (11, 12):
                await write(site.maker, key)
                await run(site.maker, "update public.orders set region = 'north', price = 7")
            await client.query("notes")
            for path in ("overview", "tables", "log?text=x&table=orders", "history/orders/7"):
                gateway.get(f"/v1/admin/{path}").raise_for_status()
            gateway.get(
                '/v1/admin/explain?q={"table":"orders","order":["note"]}'
            ).raise_for_status()
            async with Tickets(site.url) as tickets:
                ticket = await tickets.issue("ann", "token")
                assert await tickets.redeem(ticket.text) == "token"
            for each in reversed(subscriptions):
                await each.__aexit__(None, None, None)
