"""`Headwater` as a program uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from headwater import (
    CaptureError,
    ConfigError,
    Headwater,
    InvalidQuery,
    NotInstalled,
    Position,
    ResyncRequired,
    c,
)
from headwater.capture.postgres import schema
from headwater.database import Connection, connect
from headwater.model import Change
from headwater.settings import Settings
from tests.support.databases import passable_folder
from tests.support.log_probe import rows, run


@pytest.fixture
async def hw(empty_url: str) -> AsyncIterator[Headwater]:
    """In a database without Headwater's schema."""
    connection = await connect(empty_url, purpose="test", application_path=True)
    await run(connection, "create table orders (id int primary key)")
    await connection.close()
    hw = Headwater(empty_url)
    hw.table("orders")
    async with hw:
        yield hw


@pytest.fixture
async def writer(hw: Headwater) -> AsyncIterator[Connection]:
    async with hw.connection() as connection:
        yield connection


async def first(hw: Headwater, count: int, *tables: str, **options: object) -> list[Change]:
    """The first `count` changes of a feed; the feed is closed then."""
    found: list[Change] = []
    async with asyncio.timeout(20), aclosing(hw.changes(*tables, **options)) as feed:  # type: ignore[arg-type]
        async for transaction in feed:
            found += transaction.changes
            if len(found) >= count:
                break
    return found


def keys(changes: list[Change]) -> list[object]:
    return [change.key[0] for change in changes if change.key]


async def test_declared_tables_are_captured(hw: Headwater, writer: Connection) -> None:
    start = await hw.position()
    await run(writer, "insert into orders values (1)", "insert into orders values (2)")
    assert keys(await first(hw, 2, since=start)) == [1, 2]


@pytest.mark.parametrize("kind", ["filterable", "sortable"])
async def test_a_table_is_declared_with_columns_that_it_has(hw: Headwater, kind: str) -> None:
    url = hw.url
    some: dict[str, Any] = {kind: ["id", "nope"]}
    wrong = Headwater(url)
    wrong.table("orders", **some)
    with pytest.raises(ConfigError, match=f"orders has no column 'nope', .* as {kind}"):
        async with wrong:
            pass
    with pytest.raises(ConfigError, match="is a text"):
        Headwater(url).table("orders", **some | {kind: "id"})
    with pytest.raises(ConfigError, match="is not a number of rows"):
        Headwater(url).table("orders", limit_max=0)
    with pytest.raises(ConfigError, match="limit_max='5' is not a number of rows"):
        Headwater(url).table("orders", limit_max="5")  # type: ignore[arg-type]
    right = Headwater(url)
    right.table("orders", **some | {kind: ["id"], "limit_max": 3})
    async with right:
        pass


async def test_a_feed_of_some_tables_survives_a_rename(hw: Headwater, writer: Connection) -> None:
    await run(writer, "create table pears (id int primary key)")
    await hw.enable("pears")
    start = await hw.position()
    await run(
        writer,
        "insert into pears values (7)",
        "insert into orders values (1)",
        "alter table orders rename to purchases",
        "insert into purchases values (2)",
    )
    assert keys(await first(hw, 2, "purchases", since=start)) == [1, 2]


async def test_a_filtered_feed(hw: Headwater, writer: Connection) -> None:
    start = await hw.position()
    await run(writer, "insert into orders select i from generate_series(1, 9) i")
    await run(writer, "update orders set id = id + 100 where id = 5", "truncate orders")
    found = await first(hw, 4, "orders", where=c.id.between(4, 5), since=start)
    assert [(change.op, *change.key) for change in found] == [
        ("insert", 4),
        ("insert", 5),
        ("delete", 5),
        ("truncate",),
    ]
    with pytest.raises(InvalidQuery, match="no filterable column 'colour'"):
        await first(hw, 1, "orders", where=c.colour == "red")
    with pytest.raises(InvalidQuery, match="exactly one table"):
        await first(hw, 1, where=c.id == 1)


async def test_a_cursor_delivers_unfinished_changes_again(
    hw: Headwater, writer: Connection
) -> None:
    """A transaction counts as done when the next one is asked for."""
    assert keys(await self_started(hw, writer, "insert into orders values (1)")) == [1]
    # The loop ended while it had 1: it is delivered again.
    await run(writer, "insert into orders values (2)")
    assert keys(await first(hw, 2, cursor="billing")) == [1, 2]


async def test_a_new_cursor_is_saved_before_anything_is_delivered(
    hw: Headwater, writer: Connection
) -> None:
    """Or a crash at the first transaction would begin after it."""
    start = await hw.position()
    await run(writer, "insert into orders values (1)")
    async with aclosing(hw.changes(cursor="new", since=start)) as feed:
        await anext(feed)
        saved = await rows(writer, "select position from headwater.cursors where name = 'new'")
    assert saved == [(str(start),)]


async def self_started(hw: Headwater, writer: Connection, statement: str) -> list[Change]:
    """Start a feed with a new cursor and write once it has saved its beginning."""
    task = asyncio.create_task(first(hw, 1, cursor="billing"))
    async with asyncio.timeout(20):
        while not await rows(writer, "select 1 from headwater.cursors"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await run(writer, statement)
    return await task


async def test_a_cursor_follows_its_consumer(hw: Headwater, writer: Connection) -> None:
    async def consume() -> None:
        async for _ in hw.changes(cursor="billing"):
            pass

    task = asyncio.create_task(consume())
    async with asyncio.timeout(20):
        while not await rows(writer, "select 1 from headwater.cursors"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await run(writer, "insert into orders values (1)")
        target = await hw.position()
        while True:
            ((text,),) = await rows(writer, "select position from headwater.cursors")
            if Position.parse(text).covers(target):
                break
            await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_unknown_tables(hw: Headwater) -> None:
    with pytest.raises(CaptureError, match="table pears is not enabled"):
        await first(hw, 1, "pears")
    with pytest.raises(CaptureError, match="there is no table pears"):
        await hw.enable("pears")


async def test_declared_too_late(hw: Headwater) -> None:
    with pytest.raises(ConfigError, match="declared too late"):
        hw.table("pears")


async def test_a_declared_table_that_is_missing(empty_url: str) -> None:
    hw = Headwater(empty_url)
    hw.table("pears")
    with pytest.raises(CaptureError, match="there is no table pears"):
        async with hw:
            pass


async def test_uninstalled_under_a_feed(hw: Headwater, writer: Connection) -> None:
    feed = asyncio.create_task(first(hw, 10))
    await run(writer, "insert into orders values (1)")
    assert await schema.uninstall(writer)
    with pytest.raises(NotInstalled, match="not installed"):
        await feed


async def test_retention_is_the_databases_own_unless_given(
    hw: Headwater, writer: Connection
) -> None:
    async def retention() -> str:
        ((text,),) = await rows(writer, "select retention::text from headwater.installation")
        return str(text)

    assert await retention() == "30 days"
    async with Headwater(hw.url, log_retention="7 days"):
        assert await retention() == "7 days"
    async with Headwater(hw.url):
        assert await retention() == "7 days"


async def test_the_embedded_server() -> None:
    with passable_folder() as folder:
        hw = Headwater(data_dir=str(folder / "data"))
        with pytest.raises(ConfigError, match="not running yet"):
            _ = hw.url
        async with hw, hw.connection() as connection:
            await run(connection, "create table orders (id int primary key)")
            await hw.enable("orders")
            start = await hw.position()
            await run(connection, "insert into orders values (1)")
            assert keys(await first(hw, 1, since=start)) == [1]
        assert not list((folder / "data" / "run").glob(".s.PGSQL*")), "the server has stopped"
        # Positions outlive the server.
        async with hw:
            assert keys(await first(hw, 1, since=start)) == [1]


class TestMoved:
    """A database that came here as a copy or a dump."""

    async def test_a_copied_database(self, hw: Headwater, writer: Connection) -> None:
        await run(writer, "insert into orders values (1)")
        before = await hw.position()
        original = writer.info.dbname
        name = f"{original}_copy"
        await writer.close()
        admin = await connect(
            hw.url.replace(original, "postgres"), purpose="test", application_path=True
        )
        try:
            await run(
                admin,
                "select pg_terminate_backend(pid) from pg_stat_activity"
                f" where datname = '{original}'",
                f"create database {name} template {original}",
            )
            copy = Headwater(hw.url.replace(original, name))
            async with copy, copy.connection() as connection:
                start = await copy.position()
                await run(connection, "insert into orders values (2)")
                assert keys(await first(copy, 1, since=start)) == [2]
                with pytest.raises(ResyncRequired, match="another log"):
                    await first(copy, 1, since=before)
        finally:
            await run(admin, f"drop database if exists {name} with (force)")
            await admin.close()

    async def test_a_restored_dump(self, hw: Headwater, writer: Connection) -> None:
        """As after pg_restore: names are the same, oids, ids and the cluster are not."""
        await run(
            writer,
            "insert into orders values (1)",
            "update headwater.installation set home = 'elsewhere'",
            "create table orders_new (like orders including all)",
            "insert into orders_new table orders",
            "create trigger headwater_insert after insert on orders_new referencing new table as"
            " new_rows for each statement execute function headwater.capture_row()",
            "drop table orders",
            "alter table orders_new rename to orders",
            "insert into headwater.log (op, shape, xid) select op, shape, '999999999' from"
            " headwater.log limit 1",
        )
        async with Headwater(hw.url) as restored:
            start = await restored.position()
            await run(writer, "insert into orders values (2)")
            assert keys(await first(restored, 1, since=start)) == [2]
            assert await rows(writer, "select count(*) from headwater.changes") == [(2,)]


def test_settings_are_given_once() -> None:
    with pytest.raises(ConfigError, match="settings are given twice"):
        Headwater("postgresql://db", settings=Settings())
    with pytest.raises(ConfigError, match="settings are given twice"):
        Headwater(settings=Settings(), gateway_tables="closed")
