"""Subscribers of generated queries have the answer of the database whenever no transaction runs.

Generated statements are followed through a hub while several writers write generated transactions
at once and connections are cut. When the writers pause, every subscriber's result must equal a
fresh execution, without help from a sweep.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import psycopg
import pytest

from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.hub.hub import Hub
from headwater.identity import Identity
from headwater.model import Position
from headwater.queries.context import Context
from headwater.queries.functions import Query
from tests.integration.hub.test_reactive import Follower
from tests.property.test_analysis import SCHEMA, SHAPES, TABLES, Shop, Written
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, run

HISTORIES = size("queries", 1, large=40)
FIRST = first_seed(0)
QUERIES = 40
WRITERS = 3
ROUNDS = 6
TRANSACTIONS = 12


@pytest.fixture
async def shop(connection: Connection) -> AsyncIterator[Connection]:
    await run(connection, *SCHEMA)
    await enable(connection, *TABLES)
    yield connection
    await run(connection, "drop owned by reads_reader", "drop role reads_reader")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
async def test_subscribed_results_equal_the_answer_of_the_database(
    seed: int, url: str, shop: Connection
) -> None:
    chance = random.Random(seed)
    await Shop(shop, random.Random(seed)).fill()
    async with Hub(url) as hub:
        followed = [await follow(hub, chance, number) for number in range(QUERIES)]
        writers = [
            await connect(url, purpose="test", application_path=True) for _ in range(WRITERS)
        ]
        for round_ in range(ROUNDS):
            cutting = asyncio.create_task(cut(shop, chance if round_ % 2 else None))
            await asyncio.gather(
                *(write(writer, seed * 1000 + round_ * 10 + i) for i, writer in enumerate(writers))
            )
            await cutting
            await compare(hub, shop, followed, seed)
        for writer in writers:
            await writer.close()
        (found,) = hub.metrics.reconcile_drift.labels("query").collect()
        assert found.samples[0].value == 0


async def write(connection: Connection, seed: int) -> None:
    shop = Shop(connection, random.Random(seed))
    for _ in range(TRANSACTIONS):
        try:
            await shop.transact()
        except psycopg.errors.OperationalError:  # they met each other
            continue


async def cut(connection: Connection, chance: random.Random | None) -> None:
    """End some of the hub's connections."""
    if chance is not None:
        purpose = chance.choice(("queries", "reader", "analysis"))
        await run(
            connection,
            "select pg_terminate_backend(pid) from pg_stat_activity"
            f" where application_name = 'headwater {purpose}' and datname = current_database()",
        )


async def follow(hub: Hub, chance: random.Random, number: int) -> tuple[Query, Identity, Follower]:
    """A subscriber of a statement that the database accepts."""
    while True:
        query = generated(chance, number)
        identity = Identity(role=chance.choice((None, None, "reads_reader")))
        try:
            return query, identity, await Follower().follow(hub, query, identity)
        except HeadwaterError:
            continue  # the types of its values do not fit


def generated(chance: random.Random, number: int) -> Query:
    written = Written(chance)
    sql = chance.choice(SHAPES)(written).replace("%", "%%")
    text = re.sub(r"\$(\d+)", r"%(p\1)s", sql)
    values = {f"p{n}": value for n, value in enumerate(written.values, 1)}

    async def body(ctx: Context) -> Any:
        return await ctx.fetch(text if values else sql.replace("%%", "%"), **values)

    body.__doc__ = f"{text} {values}"
    return Query(f"generated_{number}", body)


async def compare(
    hub: Hub, connection: Connection, followed: list[tuple[Query, Identity, Follower]], seed: int
) -> None:
    """Wait until every change has been sent, then compare."""
    cursor = await connection.execute("select headwater.log_id() || '-' || pg_current_snapshot()")
    ((position,),) = await cursor.fetchall()
    async with asyncio.timeout(60):
        await hub.flushes.until_ready()
        await hub.reached(Position.parse(position), [each.handle for *_, each in followed])
    for query, identity, follower in followed:
        assert follower.failure is None, (seed, query.__doc__, follower.failure)
        fresh = await answer(connection, query, identity)
        assert in_order(follower.value) == in_order(fresh), (seed, query.__doc__)


async def answer(connection: Connection, query: Query, identity: Identity) -> Any:
    async with connection.transaction():
        if identity.role is not None:
            await run(connection, f"set local role {identity.role}")
        context = Context(connection, identity, function=query.name)
        value = await query.run(context, query.bind({}))
    return msgspec.json.decode(query.encode(value))


def in_order(rows: list[Any]) -> list[bytes]:
    return sorted(msgspec.json.encode(row, order="deterministic") for row in rows)
