"""Marks in the positions that clients send: what they may cost, and what is not a position."""

from __future__ import annotations

import asyncio

import pytest

from headwater.database import Connection, connect
from headwater.hub.hub import Hub
from headwater.model import Position
from tests.support import enable, rows, run


@pytest.mark.parametrize(
    "text",
    [
        "a-0:9:",  # PostgreSQL has no transaction 0
        "a-0:0:~0.0.0.000000000000",
        "a-5:9223372036854775808:",
        "a-5:9:~10.0.1.000000000000",  # rows from behind the position
        "a-5:9:~99999999999999999999.1.1.000000000000",
        "a-5:9:~5.9223372036854775808.1.000000000000",
        "a-5:9:5,6~7.1.1.000000000000.6",  # a late transaction that it does not contain
        "a-5:9:~7.1.1.000000000000.8",  # one that is among the newest
        "a-5:9:~7.1.1.000000000000.6,5",
        "a-5:9:~7.1.1.000000000000.5,5",
        "a-5:9:~7.1.1.000000000000.99999999999999999999",
    ],
)
def test_text_with_numbers_out_of_range_is_not_a_position(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        Position.parse(text)


async def test_positions_are_checked_beside_other_lookups(url: str, connection: Connection) -> None:
    await run(connection, "create table orders (id int primary key)")
    await enable(connection, "orders")
    async with Hub(url) as hub, await connect(url, purpose="test", application_path=True) as other:
        await hub.until_ready()
        await hub.next_flush()
        assert hub.position is not None
        own = Position.parse(str(hub.position))
        forged = Position.parse(f"{str(own).partition('~')[0]}~0.0.50000.000000000000")
        assert await hub.contains(own)
        assert not await hub.contains(forged)
        await run(other, "begin", "lock table headwater.trimmed in access exclusive mode")
        unchecked = Position.parse(f"{str(own).partition('~')[0]}~0.0.50000.000000000001")
        checking = asyncio.create_task(hub.is_of_this_history(unchecked))
        async with asyncio.timeout(30):
            while not await rows(connection, "select 1 from pg_locks where not granted"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await hub.tables.find("orders")).table.name == "orders"
        assert not checking.done()
        await run(other, "rollback")
        assert not await checking
