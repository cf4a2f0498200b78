"""The JavaScript client in Node, switched to a gateway that is behind.

Each gateway has a client that stays there, so that it has every result in memory, also old ones.
The others move: what they show never goes back, and `waitFor` waits until all of their
subscriptions have the write.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from headwater.database import Connection
from tests.gateway.test_switching import Two, two_gateways
from tests.javascript.test_faults import begin, end
from tests.support.generators.faults import APPLICATION, TABLES, all_get_on, executed, judge
from tests.support.generators.sizes import first_seed, size

SWITCHES = size("switches", 3, large=50)
MOVING = ("ws", "sse")
BEHIND = 10
"""By how many mutations of each client, or more."""


@pytest.mark.timeout(120 + 20 * SWITCHES)
async def test_a_gateway_that_is_behind(url: str, connection: Connection, tmp_path: Path) -> None:
    chance = random.Random(first_seed(15))
    await connection.execute(TABLES)
    (tmp_path / "app.py").write_text(APPLICATION)
    async with two_gateways(url, tmp_path, "app:hw") as two:
        staying = [await begin(each, "ws", writes=False) for each in two.urls]
        urls = [cutter.url for cutter in two.cutters]
        moving = [await begin(urls, transport) for transport in MOVING]
        for number in range(SWITCHES):
            await switch(two, connection, chance, behind=number % 2)
        reports = [await end(client) for client in moving]
        stayed = [await end(client) for client in staying]
    await judge(connection, reports)
    assert [report["backwards"] for report in stayed] == [[], []]


async def switch(two: Two, connection: Connection, chance: random.Random, behind: int) -> None:
    """Clients write at one gateway, and move to the other, which has not read the writes."""
    ahead = 1 - behind
    two.cutters[ahead].is_open = True
    two.cutters[behind].shut()
    await all_get_on(connection, MOVING, await executed(connection))
    two.holders[behind].hold()
    try:
        await all_get_on(connection, MOVING, await executed(connection), BEHIND)
        two.cutters[behind].is_open = True
        two.cutters[ahead].shut()
        await asyncio.sleep(chance.uniform(0.2, 1.0))
    finally:
        two.holders[behind].release()
    await all_get_on(connection, MOVING, await executed(connection))
