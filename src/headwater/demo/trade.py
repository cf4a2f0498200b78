"""The shop's business: orders are placed, paid, packed, shipped and cleared away."""

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
"""On whose behalf the log has it; nobody's, at times."""

ENOUGH = 120
"""With more orders than this, shipped ones are cleared away."""

PAUSE_SECONDS = 0.5
AGAIN_SECONDS = 0.5

Execute = Callable[[str, dict[str, Any]], Awaitable[int]]
"""Executes a statement; how many rows it wrote."""


async def go_on(hw: Headwater, *, seed: int | None = None) -> None:
    """Trade for ever, also when the database was away for a while."""
    chance = random.Random(seed)
    while True:
        try:
            async with hw.connection("demo") as connection:
                while True:
                    await _one_transaction(connection, chance)
                    await asyncio.sleep(PAUSE_SECONDS * chance.uniform(0.4, 1.6))
        except (psycopg.Error, DatabaseError) as error:
            # It is away, or a visitor does something to the table.
            logger.debug("The demo waits for its database: %s", error)
            await asyncio.sleep(AGAIN_SECONDS)


async def _one_transaction(connection: Connection, chance: random.Random) -> None:
    async def execute(sql: str, values: dict[str, Any]) -> int:
        return (await connection.execute(sql.encode(), values)).rowcount

    async with connection.transaction():
        staff = chance.choice(STAFF)
        await connection.execute("select set_config('headwater.user_id', %s, true)", (staff,))
        await step(execute, chance)


async def step(execute: Execute, chance: random.Random) -> int:
    """Place, advance or clear away an order: one row is written."""
    written = 0
    match chance.choices(["place", "advance", "clear"], [3, 12, 4])[0]:
        case "advance":
            written = await execute(ADVANCE, {})
        case "clear":
            written = await execute(CLEAR, {"enough": ENOUGH})
    # There may be nothing to advance, or too little to clear anything away.
    return written or await execute(PLACE, msgspec.structs.asdict(NewOrder.any(chance)))
