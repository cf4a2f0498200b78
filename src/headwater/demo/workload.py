"""The writes of the demo: orders are placed, paid, packed, shipped and deleted."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import psycopg

from headwater.app import Headwater
from headwater.database import Connection
from headwater.demo.shop import ADVANCE, CLEAR, PLACE, NewOrder
from headwater.errors import DatabaseError

logger = logging.getLogger(__name__)

STAFF = ("ann", "ben", "cho", "")
"""Users that the log names for the writes; the empty name is for writes without a user."""

ORDERS_MAX = 120
"""With more orders than this, shipped ones are deleted."""

PAUSE_SECONDS = 0.5
RETRY_SECONDS = 0.5

Execute = Callable[[str, dict[str, Any]], Awaitable[int]]
"""Executes a statement, and returns how many rows it wrote."""


async def run(hw: Headwater, *, seed: int | None = None) -> None:
    """Write until cancelled. While the database cannot be reached, try again."""
    chance = random.Random(seed)
    while True:
        try:
            async with hw.connection("demo") as connection:
                while True:
                    await _one_transaction(connection, chance)
                    await asyncio.sleep(PAUSE_SECONDS * chance.uniform(0.4, 1.6))
        except (psycopg.Error, DatabaseError) as error:
            # The database restarts, or a visitor has locked or altered the table.
            logger.debug("The demo cannot write to its database and tries again: %s", error)
            await asyncio.sleep(RETRY_SECONDS)


async def _one_transaction(connection: Connection, chance: random.Random) -> None:
    async def execute(sql: str, values: dict[str, Any]) -> int:
        return (await connection.execute(sql.encode(), values)).rowcount

    async with connection.transaction():
        staff = chance.choice(STAFF)
        await connection.execute("select set_config('headwater.user_id', %s, true)", (staff,))
        await step(execute, chance)


async def step(execute: Execute, chance: random.Random) -> int:
    """Insert, advance or delete an order. Returns how many rows were written: one."""
    written = 0
    match chance.choices(["place", "advance", "clear"], [3, 12, 4])[0]:
        case "advance":
            written = await execute(ADVANCE, {})
        case "clear":
            written = await execute(CLEAR, {"orders_max": ORDERS_MAX})
    # There may be no order to advance, or too few to delete one.
    return written or await execute(PLACE, msgspec.structs.asdict(NewOrder.any(chance)))
