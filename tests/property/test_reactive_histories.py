"""Subscribed queries equal the answer of the database after every statement, and after every DDL.

Each history makes a catalog, follows queries in it as several roles, and executes one statement
after the other. After each, the queries are executed in a new session: the results that the hub has
sent must be the same, also if they are errors. Rows must be noticed through the log, and DDL at the
recheck that runs once a minute, which the test runs at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.rows import dict_row, tuple_row

from headwater.database import Connection, connect
from headwater.hub.hub import Hub
from headwater.hub.reactive import group
from headwater.identity import Identity
from headwater.model import Position
from headwater.queries.context import Context
from headwater.queries.functions import Query
from tests.integration.hub.test_reactive import Follower, executions
from tests.support.databases import fresh_database
from tests.support.generators.catalogs import CALLER, ROLES, Catalog, Queries, Writer
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, run

HISTORIES = size("followed", 1, large=50)
FIRST = first_seed(0)
QUERIES = 10
STATEMENTS = 100 if HISTORIES > 1 else 50
DDL = 0.15
"""The share of statements that alter the catalog."""


@pytest.fixture(params=["postgres_url", "icu_postgres_url"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@dataclass
class Followed:
    sql: str
    role: str | None
    follower: Follower
    answer: list[bytes] | None = None


@pytest.mark.timeout(0)
async def test_subscribed_queries_equal_the_answer_of_the_database(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A query that failed is tried again for a reason, and not because time has passed.
    monkeypatch.setattr(group, "_RETRY_FIRST", 3600.0)
    monkeypatch.setattr(group, "_RETRY_LONGEST", 3600.0)
    counted: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + HISTORIES):
        with fresh_database(server_url, installed=True) as url:
            await history(seed, url, counted)
    print(dict(sorted(counted.items())))
    assert counted["rows differing"] > 0 < counted["ddl differing"]


async def history(seed: int, url: str, counted: Counter[str]) -> None:
    chance = random.Random(seed)
    connection = await connect(url, purpose="test", application_path=True)
    catalog = Catalog(chance)
    try:
        await run(connection, *(f"create role {role}" for role in ROLES), *catalog.statements())
        await enable(connection, "u", "allowed", *(f"{schema}.t" for schema in catalog.tables))
        writer = Writer(catalog, connection.info.dbname)
        async with Hub(url) as hub, Judge(url) as judge:
            followed = await follow(hub, judge, Queries(chance))
            for number in range(STATEMENTS):
                kind = "ddl" if chance.random() < DDL else "rows"
                said = writer.alteration() if kind == "ddl" else [writer.row()]
                try:
                    async with connection.transaction():
                        await run(connection, *said)
                except psycopg.Error as error:
                    counted[f"refused {type(error).__name__}"] += 1
                    continue
                before = executions(hub)
                if kind == "ddl":
                    await hub.reactive.recheck()
                    await judge.begin()
                differing = await compare(hub, judge, followed, f"seed {seed}, {number}: {said}")
                counted[kind] += 1
                counted[f"{kind} looks"] += len(followed)
                counted[f"{kind} executions"] += executions(hub) - before
                counted[f"{kind} differing"] += differing
    finally:
        await forget_roles(connection)
        await connection.close()


async def forget_roles(connection: Connection) -> None:
    """They belong to the server, not to the database."""
    for role in ROLES:
        await run(connection, f"reassign owned by {role} to postgres", f"drop owned by {role}")
        await run(connection, f"drop role {role}")


class Judge:
    """A session like a new one, which has the answers of the database."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Connection | None = None

    async def __aenter__(self) -> Judge:
        await self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._connection is not None
        await self._connection.close()

    async def begin(self) -> None:
        """With the present settings, and without old plans."""
        if self._connection is not None:
            await self._connection.close()
        self._connection = await connect(self._url, purpose="test", application_path=True)

    async def position(self) -> Position:
        ((position,),) = await self._rows(
            "select headwater.log_id() || '-' || pg_catalog.pg_current_snapshot()"
        )
        return Position.parse(position)

    async def answers(self, asked: Iterable[tuple[str, str | None]]) -> list[list[bytes] | str]:
        """The rows in some order, or the error."""
        found: list[list[bytes] | str] = []
        acting: str | None = None
        for sql, role in asked:
            if role != acting:
                await self._rows(f"set role {role or 'none'}")
                acting = role
            try:
                found.append(in_order(await self._rows(sql, dict_row)))
            except psycopg.Error as error:
                found.append(str(error))
        await self._rows("set role none")
        return found

    async def _rows(self, sql: str, made: Any = tuple_row) -> list[Any]:
        assert self._connection is not None
        cursor = self._connection.cursor(row_factory=made)
        await cursor.execute(sql.encode(), prepare=False)
        return await cursor.fetchall() if cursor.description else []


async def follow(hub: Hub, judge: Judge, queries: Queries) -> list[Followed]:
    """Queries that the database accepts, each as one of the roles."""
    followed: list[Followed] = []
    while len(followed) < QUERIES:
        sql, role = queries.any(), queries.random.choice((None, CALLER))
        ((answer),) = await judge.answers([(sql, role)])
        if isinstance(answer, str):
            continue
        query, identity = made(sql, len(followed)), Identity(role=role)
        followed.append(Followed(sql, role, await Follower().follow(hub, query, identity)))
    followed.sort(key=lambda each: each.role or "")
    await compare(hub, judge, followed, "at first")
    return followed


def made(sql: str, number: int) -> Query:
    async def body(ctx: Context) -> Any:
        return await ctx.fetch(sql)

    return Query(f"followed_{number}", body)


async def compare(hub: Hub, judge: Judge, followed: list[Followed], story: str) -> int:
    """Wait until every change has been sent, then compare. Returns how many differ."""
    async with asyncio.timeout(60):
        position = await judge.position()
        await hub.reached(position, [each.follower.handle for each in followed])
    differing = 0
    fresh = await judge.answers((each.sql, each.role) for each in followed)
    for each, answer in zip(followed, fresh, strict=True):
        shown = each.follower
        failed = shown.failure is not None or isinstance(answer, str)
        if failed:
            agreed = shown.failure is not None and isinstance(answer, str)
        else:
            agreed = in_order(shown.value) == answer
        assert agreed, f"{story}\n{each.sql}\nas {each.role}: {answer}\n{shown.value}"
        now = [] if isinstance(answer, str) else answer
        differing += each.answer is not None and each.answer != now
        each.answer = now
    return differing


def in_order(rows: list[Any]) -> list[bytes]:
    return sorted(msgspec.json.encode(row, order="deterministic") for row in rows)
