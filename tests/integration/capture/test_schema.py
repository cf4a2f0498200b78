"""Installing, upgrading and removing the schema."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headwater.capture.postgres import schema, triggers
from headwater.database import Connection, connect
from headwater.errors import NotInstalled
from tests.support.applications.shop import until
from tests.support.log_probe import probing, rows, run


@pytest.fixture
async def empty(empty_url: str) -> AsyncIterator[Connection]:
    connection = await connect(empty_url, purpose="test", application_path=True)
    yield connection
    await connection.close()


async def test_install_twice(empty: Connection) -> None:
    assert await schema.install(empty) == len(schema.versions())
    assert await schema.install(empty) == 0
    await schema.require(empty)


async def test_many_processes_at_once(empty_url: str) -> None:
    async def install() -> int:
        connection = await connect(empty_url, purpose="test", application_path=True)
        try:
            return await schema.install(connection)
        finally:
            await connection.close()

    applied = await asyncio.gather(*(install() for _ in range(6)))
    assert sorted(applied) == [0, 0, 0, 0, 0, len(schema.versions())]


@pytest.mark.parametrize("version", schema.versions())
async def test_upgrade_from(version: int, empty: Connection) -> None:
    """The upgraded schema is the same, object by object, as one installed at once."""
    await schema.install(empty, upto=version)
    assert await schema.installed_version(empty) == version
    if version < schema.LATEST:
        with pytest.raises(NotInstalled, match=f"has version {version}"):
            await schema.require(empty)
    await schema.install(empty)
    upgraded = await rows(empty, _OBJECTS)
    await schema.uninstall(empty)
    await schema.install(empty)
    assert await rows(empty, _OBJECTS) == upgraded
    assert len(upgraded) > 50


_OBJECTS = """
    select 'function', p.oid::regprocedure::text, md5(prosrc) from pg_proc p
    where pronamespace = 'headwater'::regnamespace
    union all
    select 'relation', c.oid::regclass::text, relkind::text from pg_class c
    where relnamespace = 'headwater'::regnamespace
    order by 1, 2
"""


async def test_an_upgrade_renews_the_functions_of_captured_tables(empty: Connection) -> None:
    await schema.install(empty)
    await run(empty, "create table orders (id int primary key)")
    await triggers.enable(empty, "orders")
    ((oid,),) = await rows(empty, "select 'orders'::regclass::oid::int")
    # As if an older release had made it.
    await run(
        empty,
        f"create or replace function headwater.capture_{oid}_insert() returns trigger"
        " language plpgsql as 'begin return null; end'",
    )
    await run(empty, schema._RESYNC)
    async with probing(empty.info.dsn) as probe:
        await run(empty, "insert into orders values (1)")
        assert await probe.story() == [("insert", 1)]


async def test_uninstall_leaves_the_tables_alone(empty: Connection) -> None:
    await schema.install(empty)
    await run(empty, "create table orders (id int primary key)", "insert into orders values (1)")
    await triggers.enable(empty, "orders")
    assert await schema.uninstall(empty)
    assert not await schema.uninstall(empty)
    await run(empty, "insert into orders values (2)")
    assert await rows(empty, "select count(*) from orders") == [(2,)]
    assert await rows(empty, "select tgname from pg_trigger where not tgisinternal") == []
    with pytest.raises(NotInstalled, match="not installed") as caught:
        await schema.require(empty)
    assert caught.value.hint == "Run: headwater init"


async def test_uninstall_tries_again_after_a_deadlock(
    connection: Connection, other: Connection, url: str
) -> None:
    """A reader has locked one of the tables, and asks for the log, which is locked already."""
    await run(other, "set deadlock_timeout = '1h'", "begin", "select from headwater.tables")
    await run(connection, "set deadlock_timeout = '3s'")
    uninstalling = asyncio.create_task(schema.uninstall(connection))
    watcher = await connect(url, purpose="test", application_path=True)
    waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = "
    waits += str(connection.info.backend_pid)

    async def is_stuck() -> bool:
        return await rows(watcher, waits) == [(True,)]

    await until(is_stuck)
    await run(other, "select from headwater.log", "commit")  # one of the two must give way
    assert await uninstalling
    assert await schema.installed_version(watcher) == 0
    await watcher.close()
