"""Statements of the source that change rows without changes in its log: the mirror equals the
table afterwards, whether the runner was there or not. Statements that change no row copy nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import psycopg
import pytest

from headwater.capture.mirror import tables
from headwater.capture.postgres.wal import source as source_module
from headwater.database import Connection
from tests.contract.sources.capture import MirrorCapture
from tests.contract.sources.drivers.postgres_wal import PostgresWalDriver
from tests.support.cluster import Cluster

TABLE = (
    "create type kind as enum ('new', 'old')",
    "create table pairs (id int primary key, k kind default 'new', a int, b int)",
    "insert into pairs values (1, 'new', 10, 100), (2, 'old', 20, 200)",
)
SWAP = (
    "begin",
    "alter table pairs rename a to t",
    "alter table pairs rename b to a",
    "alter table pairs rename t to b",
    "commit",
)
REWRITES = [
    SWAP,
    ("begin", "alter table pairs drop b", "alter table pairs add b int default 7", "commit"),
    ("alter table pairs alter a type int using a + 1",),
    ("alter type kind rename value 'old' to 'former'",),
]
HARMLESS = (
    "alter table pairs alter a set statistics 100",
    "alter table pairs alter a set default 5",
    "alter table pairs alter b set not null",
    "alter type kind add value 'next'",
    "vacuum full pairs",
    "analyze pairs",
)


@pytest.fixture
async def driver(newest: Cluster) -> AsyncIterator[PostgresWalDriver]:
    async with PostgresWalDriver.opened(newest) as found:
        yield found


@pytest.fixture
async def mirror(
    driver: PostgresWalDriver, connection: Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MirrorCapture]:
    monkeypatch.setattr(source_module, "CATALOG_SECONDS", 0.1)
    capture = MirrorCapture(driver, connection, url)
    try:
        yield capture
    finally:
        await capture.end()


async def execute(driver: PostgresWalDriver, *statements: str) -> None:
    async with await psycopg.AsyncConnection.connect(driver.url, autocommit=True) as writer:
        for statement in statements:
            await writer.execute(statement.encode())


async def _differences(driver: PostgresWalDriver, mirror: MirrorCapture) -> list[object]:
    statement = "select to_jsonb(t) from {}pairs t order by id"
    async with await psycopg.AsyncConnection.connect(driver.url) as reader:
        there = await (await reader.execute(statement.format("").encode())).fetchall()
    cursor = await mirror.connection.execute(statement.format("shop.").encode(), prepare=False)
    here = await cursor.fetchall()
    return [] if there == here else [there, here]


async def same(driver: PostgresWalDriver, mirror: MirrorCapture) -> None:
    await mirror.eventually(partial(_differences, driver, mirror), [])
    await mirror.eventually(partial(mirror.states, "pairs"), ["live"])
    assert await _differences(driver, mirror) == []


@pytest.mark.parametrize("statements", REWRITES)
async def test_rows_that_change_without_changes_while_running(
    driver: PostgresWalDriver, mirror: MirrorCapture, statements: tuple[str, ...]
) -> None:
    await execute(driver, *TABLE)
    await mirror.begin("pairs")
    await execute(driver, *statements)
    await same(driver, mirror)
    await execute(driver, "insert into pairs (id, a, b) values (3, 30, 300)")
    await same(driver, mirror)


@pytest.mark.parametrize("statements", REWRITES)
async def test_rows_that_change_without_changes_while_stopped(
    driver: PostgresWalDriver, mirror: MirrorCapture, statements: tuple[str, ...]
) -> None:
    """Changes from before the statements are read after them, and are not of their version."""
    await execute(driver, *TABLE)
    await mirror.begin("pairs")
    await mirror.stop()
    await execute(
        driver,
        "update pairs set a = 21 where id = 2",
        *statements,
        "insert into pairs (id, a, b) values (3, 30, 300)",
    )
    await mirror.start()
    await same(driver, mirror)


async def test_the_columns_of_a_table_are_swapped_again_and_again(
    driver: PostgresWalDriver, mirror: MirrorCapture
) -> None:
    await execute(driver, *TABLE)
    await mirror.begin("pairs")
    for number in range(10, 20):
        await execute(
            driver, *SWAP, f"insert into pairs (id, a, b) values ({number}, {number}, 0)", *SWAP,
            f"update pairs set a = {number} + 1 where id = {number}",
            f"insert into pairs (id, a, b) values ({number} + 50, {number}, 0)", *SWAP,
        )  # fmt: skip
    await same(driver, mirror)


async def test_statements_that_change_no_row_copy_nothing(
    driver: PostgresWalDriver, mirror: MirrorCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[str] = []
    begin_copy = tables.begin_copy

    async def counted(connection: Connection, found: tables.Mirror, **options: bool) -> None:
        copies.append(found.name)
        await begin_copy(connection, found, **options)

    monkeypatch.setattr(tables, "begin_copy", counted)
    await execute(driver, *TABLE)
    await mirror.begin("pairs")
    for number, statement in enumerate(HARMLESS, 10):
        await execute(driver, statement)
        await execute(driver, f"insert into pairs (id, a, b) values ({number}, 1, 2)")
        await same(driver, mirror)
    await execute(driver, *SWAP)  # what follows the others in the catalog
    await same(driver, mirror)
    assert copies == ["pairs"]
    await mirror.stop()
    await mirror.start()
    await execute(driver, "insert into pairs (id, a, b) values (40, 1, 2)")
    await same(driver, mirror)
    assert copies == ["pairs"]
