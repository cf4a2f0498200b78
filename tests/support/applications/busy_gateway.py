"""A gateway with much to do: tables, writers, clients of every kind, and a pipeline's reports."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from headwater import connect as connect_client
from headwater.client.subscriptions.subscription import Feed
from headwater.database import Connection, connect
from headwater.testing.gateway_process import Served, serving

TABLES = """
    create table orders (
      id int primary key, region int not null, status text not null, amount numeric(12, 2) not null,
      note text, updated_at timestamptz not null default clock_timestamp());
    create index on orders (region, amount desc, id);
    create table customers (id int primary key, name text not null, city text);
    create table "Order Lines" (order_id int, line int, item text, primary key (order_id, line));
    create table parcels (id bigint primary key, content json);
    create table imports (payload text);
    insert into orders select i, i % 7, 'open', (i * 37 % 1000) / 10.0, 'order ' || i
    from generate_series(1, 300) i;
    insert into parcels values (9007199254740992), (9007199254740993);
    insert into customers select i, 'customer ' || i, 'Bern' from generate_series(1, 40) i;
"""

PROGRAM = """
from headwater import Headwater

hw = Headwater()
hw.table("orders")
hw.table("customers")
hw.table("Order Lines")
hw.table("parcels")

@hw.authorize
def rule(identity, request):
    return identity.user != "root" or request.table != "customers"

@hw.query
async def revenue(db):
    return await db.fetch("select region, sum(amount) as total from orders group by region")
"""

STREAMS = ("events", "view revenue_by_region")


@asynccontextmanager
async def busy(url: str, folder: Path, **settings: Any) -> AsyncIterator[Served]:
    """A gateway with many clients, inside the block. Clients send the token `user_token`, if one is
    given."""
    token = settings.pop("user_token", None)
    (folder / "busy_shop.py").write_text(PROGRAM)
    connection = await connect(url, purpose="test", application_path=True)
    await connection.execute(TABLES.encode())
    with serving(url, folder, program="busy_shop:hw", **settings) as served:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(connection.close)
            for query in QUERIES:
                client = await stack.enter_async_context(connect_client(served.url, token=token))
                await stack.enter_async_context(client.live(query))
            feed = await stack.enter_async_context(client.changes("orders"))
            tasks = [asyncio.create_task(_read(feed))]
            await stack.enter_async_context(client.subscribe("revenue"))
            tasks += [asyncio.create_task(_forever(url, work)) for work in (_write, _report)]
            try:
                yield served
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


QUERIES: list[dict[str, Any]] = [
    {"table": "orders", "where": [["region", "=", 3]], "order": [["amount", "desc"]], "limit": 20},
    {"table": "orders", "order": [["updated_at", "desc"]], "limit": 50},
    {"table": "orders", "where": [["note", "ilike", "%order 1%"]], "limit": 10},
    {"table": "customers", "limit": 100},
    {"table": "parcels", "where": [["id", "=", 9007199254740993]]},
]


async def _read(feed: Feed) -> None:
    async for _ in feed:
        pass


async def _forever(url: str, work: Any) -> None:
    connection = await connect(url, purpose="test", application_path=True)
    try:
        for turn in itertools.count():
            await work(connection, turn)
            await asyncio.sleep(0.1)
    finally:
        await connection.close()


async def _write(connection: Connection, turn: int) -> None:
    user = ("ann", "bob", "carol")[turn % 3]
    await connection.execute("select set_config('headwater.user_id', %s, false)", (user,))
    await connection.execute(
        "update orders set amount = amount + 1, status = %s, updated_at = clock_timestamp()"
        " where id = 1 + %s %% 300",
        (("open", "paid", "shipped")[turn % 3], turn * 7),
    )
    if turn % 10 == 0:
        values = (1000 + turn, turn % 7, f"new <b>order</b> {turn}")
        await connection.execute(
            "insert into orders values (%s, %s, 'open', 5, %s) on conflict do nothing", values
        )
    if turn % 15 == 14:
        await connection.execute("delete from orders where id = 1 + %s %% 300", (turn,))


async def _report(connection: Connection, turn: int) -> None:
    """Write the reports of a pipeline and of the runner of sources, as these do."""
    if turn % 10:
        return
    await connection.execute(_REPORT_SOURCES, {"turn": turn})
    for number, name in enumerate(STREAMS):
        values = (name, turn, turn * 40, 30 + turn % 7, 900 - turn % 50, number * 3, 0.2 + turn % 3)
        await connection.execute(_REPORT, values)


_REPORT = """
    insert into headwater.pipeline (name, state, owner, batch, changes, input_rate, processed_rate,
                                    behind_changes, behind_seconds)
    values (%s, 'running', 'test', %s, %s, %s, %s, %s, %s)
    on conflict (name) do update
    set (batch, changes, input_rate, processed_rate, behind_changes, behind_seconds, updated_at)
      = (excluded.batch, excluded.changes, excluded.input_rate, excluded.processed_rate,
         excluded.behind_changes, excluded.behind_seconds, clock_timestamp())
"""

_REPORT_SOURCES = """
    insert into headwater.sources (name, kind, into_schema, tables, position, committed_at, lag,
                                   state, error, hint, changes, transactions, lag_bytes, runner)
    values
      ('shop', 'mysql', 'shop_mysql',
       '[{"name": "orders", "target": "orders", "state": "live", "copied": 812345},
         {"name": "customers", "target": "customers", "state": "copying", "copied": 250000,
          "estimate": 1000000}]',
       'mysql-bin.000042:1337', clock_timestamp(), 0.02, 'copying', null, null,
       %(turn)s * 12, %(turn)s * 3, null, 'db-host:4711'),
      ('crm', 'postgresql', 'crm', '[]', '0/16B3748', clock_timestamp(), 3600, 'lost',
       'the replication slot headwater_crm is lost',
       'Copy its tables again: headwater source resnapshot crm', 5, 5, 7000000000, null)
    on conflict (name) do update
    set (changes, transactions, committed_at, updated_at)
      = (excluded.changes, excluded.transactions, excluded.committed_at, clock_timestamp())
"""
