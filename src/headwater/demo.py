"""The demo: a small shop that sells without pause, and its change feed in the terminal.

Runs on the embedded PostgreSQL in a data folder of its own, so that trying it leaves the user's
databases alone.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from headwater.app import Headwater
from headwater.database import Connection

STATUSES = ("new", "paid", "packed", "shipped")
USERS = ("ann", "ben", "cho", None)

SHOP = """
    create table if not exists orders (
      id bigint generated always as identity primary key,
      region int not null,
      status text not null,
      amount numeric(12, 2) not null,
      updated_at timestamptz not null default now()
    )
"""


async def open_shop(hw: Headwater) -> None:
    """Make the table and have it captured."""
    async with hw.connection("demo") as connection:
        await connection.execute(SHOP)
    await hw.enable("orders")


async def sell(hw: Headwater, *, pause: float = 0.4, seed: int = 7) -> None:
    """Place, advance and clear away orders, for ever."""
    chance = random.Random(seed)
    async with hw.connection("demo") as connection:
        while True:
            async with connection.transaction():
                user = chance.choice(USERS) or ""
                await connection.execute(
                    "select set_config('headwater.user_id', %s, true)", (user,)
                )
                await _one_step(connection, chance)
            await asyncio.sleep(pause * chance.uniform(0.5, 1.5))


async def _one_step(connection: Connection, chance: random.Random) -> None:
    match chance.choices(["place", "advance", "clear"], [5, 6, 1])[0]:
        case "place":
            await connection.execute(
                "insert into orders (region, status, amount) values (%s, 'new', %s)",
                (chance.randint(1, 9), round(chance.uniform(5, 500), 2)),
            )
        case "advance":
            step = chance.randrange(len(STATUSES) - 1)
            await connection.execute(
                "update orders set status = %s, updated_at = now() where id ="
                " (select id from orders where status = %s order by id limit 1)",
                (STATUSES[step + 1], STATUSES[step]),
            )
        case "clear":
            await connection.execute(
                "delete from orders where id in"
                " (select id from orders where status = 'shipped' order by id limit 3)"
            )


async def stopped_after(seconds: float | None) -> None:
    """Wait for the time to be over; without one, for ever."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
