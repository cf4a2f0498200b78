"""Live queries, reactive queries and feeds over the tables of a source."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater import CaptureError, Forbidden, InvalidQuery, connect
from headwater.capture.declaration import define_source
from headwater.capture.mirror import registry, tables
from headwater.database import Connection
from headwater.testing.gateway_process import Served, serving
from tests.support.running_sources import ScriptedDatabase, running
from tests.support.scripted_source import table
from tests.support.tokens import SECRET, token

URL = "sqlite:///scripted.db"

PROGRAM = """
from headwater import Headwater

hw = Headwater()
hw.source("sqlite:///scripted.db", into="shop", tables=["orders"], feed_only=FEED_ONLY)


@hw.query
async def largest(ctx) -> list:
    return await ctx.fetch("select id, amount from shop.orders order by amount desc limit 3")
"""


def write_program(folder: Path, *, feed_only: bool = False) -> None:
    (folder / "shop.py").write_text(PROGRAM.replace("FEED_ONLY", str(feed_only)))


async def until(condition: Callable[[], Any]) -> Any:
    """The first value of the condition that is true."""
    async with asyncio.timeout(30):
        while not (found := await asyncio.to_thread(condition)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return found


async def live_tables(connection: Connection) -> int:
    cursor = await connection.execute(
        "select count(*) from headwater.source_tables where state = 'live'"
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def until_live(connection: Connection, tables: int) -> None:
    async with asyncio.timeout(30):
        while await live_tables(connection) < tables:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_mirror_is_a_table_like_others(
    url: str, tmp_path: Path, connection: Connection
) -> None:
    write_program(tmp_path)
    database = ScriptedDatabase()
    with running(url, database), serving(url, tmp_path, program="shop:hw", sources_run=False) as at:
        await until_live(connection, 1)
        async with (
            connect(at.url) as client,
            client.live({"table": "shop.orders", "limit": 1000}) as live,
            client.changes("shop.orders") as feed,
            client.subscribe("largest") as largest,
        ):
            before = {str(row["id"]) for row in live.rows}
            assert before == set(database.history.state(0)["orders"])
            database.commits = len(database.history.commits)
            after = set(database.history.state(database.commits)["orders"])
            async for _ in live:
                if {str(row["id"]) for row in live.rows} == after:
                    break
            transaction = await anext(feed.__aiter__())
            assert transaction.changes[0].table == "shop.orders"
            async for _ in largest:
                if largest.value and str(largest.value[0]["id"]) in after:
                    break
        await until(lambda: at.metric("headwater_source_transactions_total", source="shop") > 0)
        assert at.metric("headwater_source_up", source="shop") == 1
        assert at.metric("headwater_source_state", source="shop", state="running") == 1
        assert at.metric("headwater_source_tables_copying", source="shop") == 0


async def test_a_feed_only_source_has_changes_and_no_rows(
    url: str, tmp_path: Path, connection: Connection
) -> None:
    write_program(tmp_path, feed_only=True)
    database = ScriptedDatabase()
    with running(url, database), serving(url, tmp_path, program="shop:hw", sources_run=False) as at:
        await until_live(connection, 1)
        async with connect(at.url) as client, client.changes("shop.orders") as feed:
            database.commits = len(database.history.commits)
            transaction = await anext(feed.__aiter__())
            assert transaction.changes[0].table == "shop.orders"
            no_rows = r"table shop\.orders has no rows: source shop is feed only"
            with pytest.raises(InvalidQuery, match=no_rows):
                await client.live({"table": "shop.orders"}).__aenter__()
            with pytest.raises(CaptureError, match=r"reads shop\.orders \(feed only\)") as refused:
                await client.subscribe("largest").__aenter__()
            assert "change feed" in (refused.value.hint or "")


async def test_a_mirror_that_is_not_copied_yet(
    url: str, tmp_path: Path, connection: Connection
) -> None:
    """The error names the source and its state, with and without a table for the mirror."""
    write_program(tmp_path)
    with serving(url, tmp_path, program="shop:hw", sources_run=False) as at:
        async with connect(at.url) as client:
            waits = r"table shop\.orders is the mirror of source shop, which is waiting"
            with pytest.raises(CaptureError, match=waits) as refused:
                await client.live({"table": "shop.orders"}).__aenter__()
            assert "headwater source status shop" in (refused.value.hint or "")
        await tables.create(connection, "shop", "shop", table("orders"), feed_only=False)
        await connection.execute("update headwater.sources set state = 'copying'")
        async with connect(at.url) as client:
            with pytest.raises(CaptureError, match="of source shop, which is copying"):
                await client.live({"table": "shop.orders"}).__aenter__()


async def opened(at: Served, table: str) -> None:
    async with connect(at.url, token=token(exp=int(time.time()) + 600)) as client:
        await client.live({"table": table}).__aenter__()


async def test_mirrors_of_declared_sources_are_declared(
    url: str, tmp_path: Path, connection: Connection
) -> None:
    """With `[gateway] tables = "closed"`, clients may follow the mirrors of the application's
    sources, and of no other."""
    write_program(tmp_path)
    other = define_source(URL, into="other", tables=["customers"])
    await registry.declare(connection, other, "command")
    settings: dict[str, Any] = {
        "sources_run": False,
        "gateway_tables": "closed",
        "auth_secret": SECRET,
    }
    with (
        running(url, ScriptedDatabase()),
        serving(url, tmp_path, program="shop:hw", **settings) as at,
    ):
        await until_live(connection, 2)
        await opened(at, "shop.orders")
        with pytest.raises(Forbidden, match=r"table other\.customers is not open to clients"):
            await opened(at, "other.customers")


SQLITE = """
from headwater import Headwater, c

hw = Headwater()
hw.source("sqlite:///PATH", into="shop", tables={"orders": {"where": c.status == "open"}})
"""


async def test_a_database_of_sqlite(url: str, tmp_path: Path) -> None:
    """From the declaration to a client: the gateway's child process copies and follows it."""
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as database:
        database.execute("create table orders (id integer primary key, status text)")
        database.execute("insert into orders values (1, 'open'), (2, 'paid')")
    (tmp_path / "shop.py").write_text(SQLITE.replace("PATH", str(path)))
    with serving(url, tmp_path, program="shop:hw") as at:
        await until(lambda: at.metric("headwater_source_state", source="shop", state="running"))
        async with connect(at.url) as client, client.live({"table": "shop.orders"}) as live:
            assert [row["id"] for row in live.rows] == [1]
            with sqlite3.connect(path) as database:
                database.execute("update orders set status = 'open' where id = 2")
            async for _ in live:
                if [row["id"] for row in live.rows] == [1, 2]:
                    break
