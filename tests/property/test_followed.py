"""Followed queries are what the database answers after every statement, and after every DDL.

Each history makes a catalog, follows queries in it as several roles, and executes one statement
after the other. After each, the queries are executed in a session that has just begun: what the hub
has told must be the same, an error for an error. Rows must be noticed through the log, and DDL at
the look that is made once a minute, which the test makes at once.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import psycopg
import pytest

from headwater.database import Connection, connect
from headwater.hub import group
from headwater.hub.hub import Hub
from headwater.identity import Identity
from headwater.model import Position
from headwater.queries.context import Context
from headwater.queries.functions import Query
from tests.conftest import fresh_database
from tests.integration.test_groups import Follower, executions
from tests.property.catalogs import CALLER, ROLES, Catalog, Queries, Writer
from tests.support import enable, run

HISTORIES = int(os.environ.get("HEADWATER_FUZZ_FOLLOWED", "1"))
FIRST = int(os.environ.get("HEADWATER_FUZZ_FOLLOWED_FIRST", "0"))
QUERIES = 16
STATEMENTS = 60
DDL = 0.3
"""The share of statements that alter the catalog."""


@pytest.fixture(params=["postgres_url", "icu_postgres_url"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@dataclass
class Followed:
    sql: str
    identity: Identity
    query: Query
    follower: Follower
    answer: Any = None


@pytest.mark.timeout(0)
async def test_what_is_followed_is_what_the_database_answers(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A query that failed is tried again for a reason, and not because time has passed.
    monkeypatch.setattr(group, "_RETRY_FIRST", 3600.0)
    monkeypatch.setattr(group, "_RETRY_LONGEST", 3600.0)
    counted: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + HISTORIES):
        with fresh_database(server_url, installed=True) as url:
            async with roles(server_url):
                await history(seed, url, counted)
    print(dict(sorted(counted.items())))
    assert counted["differs"] > 0


@asynccontextmanager
async def roles(server_url: str) -> AsyncIterator[None]:
    """They belong to the server, not to the database."""
    connection = await connect(server_url, purpose="test")
    await run(connection, *(f"create role {role}" for role in ROLES))
    try:
        yield
    finally:
        await connection.close()


async def history(seed: int, url: str, counted: Counter[str]) -> None:
    chance = random.Random(seed)
    connection = await connect(url, purpose="test")
    catalog = Catalog(chance)
    await run(connection, *catalog.statements())
    await enable(connection, "u", "allowed", *(f"{schema}.t" for schema in catalog.tables))
    writer = Writer(catalog, connection.info.dbname)
    try:
        async with Hub(url) as hub:
            followed = await follow(hub, url, Queries(chance))
            await compare(hub, url, followed, Counter(), f"seed {seed}, at first")
            for number in range(STATEMENTS):
                is_ddl = chance.random() < DDL
                said = writer.alteration() if is_ddl else [writer.row()]
                try:
                    async with connection.transaction():
                        await run(connection, *said)
                except psycopg.Error as error:
                    counted[f"refused {type(error).__name__}"] += 1
                    continue
                counted["ddl" if is_ddl else "rows"] += 1
                before = executions(hub)
                if is_ddl:
                    await hub.groups.recheck()
                story = f"seed {seed}, statement {number}: {said}"
                differing = await compare(hub, url, followed, counted, story)
                kind = "ddl" if is_ddl else "rows"
                counted[f"{kind} executions"] += executions(hub) - before
                counted[f"{kind} differing"] += differing
    finally:
        await connection.close()
        await forget_roles(url)


async def forget_roles(url: str) -> None:
    connection = await connect(url, purpose="test")
    for role in ROLES:
        with suppress(psycopg.Error):
            await run(connection, f"reassign owned by {role} to postgres", f"drop owned by {role}")
    await run(connection, *(f"drop role {role}" for role in ROLES))
    await connection.close()


async def follow(hub: Hub, url: str, queries: Queries) -> list[Followed]:
    """Queries that the database takes, each as one of the roles."""
    followed: list[Followed] = []
    while len(followed) < QUERIES:
        sql = queries.any()
        identity = Identity(role=queries.random.choice((None, CALLER)))
        query = made(sql, len(followed))
        if isinstance(await answer(url, query, identity), str):
            continue
        follower = await Follower().follow(hub, query, identity)
        followed.append(Followed(sql, identity, query, follower))
    return followed


def made(sql: str, number: int) -> Query:
    async def body(ctx: Context) -> Any:
        return await ctx.fetch(sql)

    return Query(f"followed_{number}", body)


async def compare(
    hub: Hub, url: str, followed: list[Followed], counted: Counter[str], story: str
) -> int:
    """Wait until everything that was written has been handed out, then look. How many differ."""
    connection = await connect(url, purpose="test")
    cursor = await connection.execute("select headwater.log_id() || '-' || pg_current_snapshot()")
    ((position,),) = await cursor.fetchall()
    async with asyncio.timeout(60):
        await hub.reached(Position.parse(position), [each.follower.handle for each in followed])
    differing = 0
    for each in followed:
        fresh = await answered(connection, each.query, each.identity)
        shown = each.follower
        told = "failed" if shown.failure is not None else in_order(shown.value)
        expected = "failed" if isinstance(fresh, str) else in_order(fresh)
        assert told == expected, f"{story}\n{each.sql}\nas {each.identity.role}: {fresh}"
        counted["looks"] += 1
        differs = each.answer is not None and each.answer != expected
        differing += differs
        counted["differs"] += differs
        each.answer = expected
    await connection.close()
    return differing


async def answer(url: str, query: Query, identity: Identity) -> Any:
    connection = await connect(url, purpose="test")
    try:
        return await answered(connection, query, identity)
    finally:
        await connection.close()


async def answered(connection: Connection, query: Query, identity: Identity) -> Any:
    """The rows; a text where the database refuses."""
    try:
        async with connection.transaction():
            if identity.role is not None:
                await run(connection, f"set local role {identity.role}")
            context = Context(connection, identity, function=query.name)
            value = await query.run(context, query.bind({}))
    except psycopg.Error as error:
        return str(error)
    return msgspec.json.decode(query.encode(value))


def in_order(rows: list[Any]) -> list[bytes]:
    return sorted(msgspec.json.encode(row, order="deterministic") for row in rows)
