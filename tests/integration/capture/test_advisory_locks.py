"""A role that may only connect to the database can still take any advisory lock. Headwater then
waits a moment longer, or fails with an error that names the role."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headwater.capture.mirror import registry
from headwater.capture.postgres import doctor, schema, triggers
from headwater.capture.running import runner as source_runner
from headwater.capture.running.runner import LEASE_CLASS, _take_lease
from headwater.capture.source import SourceDefinition
from headwater.database import Connection, connect
from headwater.errors import CaptureError, DatabaseError
from headwater.gateway.auth import tickets
from headwater.log import maintenance
from headwater.log.reading.follow import follow
from tests.support.log_probe import enable, probing, rows, run
from tests.support.running_sources import ScriptedDatabase, running
from tests.support.wal_capture import capturing, enable_wal

LOCK = "select pg_advisory_lock(1752654962, {})"

SHOP = SourceDefinition("shop", "postgresql://nowhere/shop", into="shop")


@pytest.fixture
async def stranger(connection: Connection, url: str) -> AsyncIterator[Connection]:
    await run(connection, "create role stranger login")
    opened = await connect(url.replace("postgres@", "stranger@"), purpose="test")
    yield opened
    await opened.close()
    await run(connection, "drop owned by stranger", "drop role stranger")


async def test_changes_arrive_while_another_role_holds_the_poller_lock(
    connection: Connection, stranger: Connection, url: str
) -> None:
    await run(connection, "create table t (id int primary key)")
    await enable(connection, "t")
    await run(stranger, LOCK.format(1))
    seen = []
    async with asyncio.timeout(60):
        changes = follow(url)
        reading = asyncio.create_task(anext(changes))
        for number in range(5):
            while not reading.done():  # it begins where the log is when it has connected
                await run(connection, f"insert into t values ({number}) on conflict do nothing")
                await run(connection, f"delete from t where id = {number}")
                await asyncio.wait([reading], timeout=0.05)
            seen.append(await reading)
            reading = asyncio.create_task(anext(changes))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert len(seen) == 5
    (found,) = [each for each in await doctor.examine(connection) if each.topic == "locks"]
    assert f"process {stranger.info.backend_pid} of role stranger" in found.detail


async def test_maintenance_runs_while_another_role_holds_its_lock(
    connection: Connection, stranger: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await run(connection, "create table t (id int primary key)")
    await enable(connection, "t")
    await run(connection, "alter table t add column a int")
    await run(stranger, LOCK.format(3))
    with caplog.at_level(logging.WARNING):
        done = await maintenance.once(connection)
    assert done.tables_synced == 1
    assert "of role stranger holds the maintenance lock" in caplog.text


async def test_maintenance_continues_while_another_role_holds_the_lock_of_one_step(
    connection: Connection, stranger: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await run(
        connection,
        "insert into headwater.published values ('s', 'k', 'd', now() - interval '1 day')",
    )
    await run(stranger, LOCK.format(4))
    with caplog.at_level(logging.WARNING):
        await maintenance.once(connection)
    assert "sync_tables is skipped" in caplog.text
    assert await rows(connection, "select count(*) from headwater.published") == [(0,)]


async def test_the_wal_is_captured_while_another_role_holds_locks(
    connection: Connection, stranger: Connection, url: str
) -> None:
    """Also the one that capture once took."""
    await run(connection, "create table t (id int primary key)")
    for number in (1, 3, 5, 6):
        await run(stranger, LOCK.format(number))
    await enable_wal(connection, "t")
    await run(stranger, LOCK.format(4))
    async with capturing(url), probing(url) as probe:
        await run(connection, "insert into t values (1)")
        assert await probe.story() == [("insert", 1)]


async def test_a_source_runs_while_another_role_holds_its_lease(
    connection: Connection, stranger: Connection, url: str
) -> None:
    await run(stranger, f"select pg_advisory_lock({LEASE_CLASS}, hashtext('shop'))")
    await registry.declare(connection, SHOP, "command")
    with running(url, ScriptedDatabase()):
        async with asyncio.timeout(20):
            while True:
                found = await registry.sources(connection)
                if found and found[0].state == "running":
                    break
                await asyncio.sleep(0.05)
    assert f"process {stranger.info.backend_pid} of role stranger" in str(found[0].warning)
    assert f"pg_terminate_backend({stranger.info.backend_pid})" in str(found[0].warning)


async def test_a_source_waits_over_one_connection_while_headwater_holds_its_lease(
    connection: Connection, other: Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_runner, "_LEASE_LOOK_SECONDS", 0.02)
    opened = CountingConnect()
    monkeypatch.setattr(source_runner, "connect", opened)
    looks = CountingLooks()
    monkeypatch.setattr(source_runner, "_take_lease", looks)
    await run(other, f"select pg_advisory_lock({LEASE_CLASS}, hashtext('shop'))")
    await registry.declare(connection, SHOP, "command")
    with running(url, ScriptedDatabase()):
        async with asyncio.timeout(20):
            while looks.count < 5:  # noqa: ASYNC110 - a thread makes it true
                await asyncio.sleep(0.02)
    assert opened.count == 1


class CountingConnect:
    count = 0

    async def __call__(self, url: str, **options: Any) -> Connection:
        self.count += 1
        return await connect(url, **options)


class CountingLooks:
    count = 0

    async def __call__(self, connection: Connection, name: str) -> Any:
        self.count += 1
        return await _take_lease(connection, name)


async def test_tickets_do_not_wait_for_another_role(
    connection: Connection, stranger: Connection
) -> None:
    await run(stranger, "select pg_advisory_lock(1752654963, hashtext('ann'))")
    async with asyncio.timeout(3):
        await tickets.issue(connection, "ann", "a token")


async def test_maintenance_does_nothing_while_headwater_holds_its_lock(
    connection: Connection, other: Connection
) -> None:
    await run(other, LOCK.format(3))
    assert await maintenance.once(connection) == maintenance.MaintenanceRound()


async def test_enabling_names_the_role_that_holds_the_lock(
    connection: Connection, stranger: Connection
) -> None:
    await run(connection, "create table t (id int primary key)")
    await run(stranger, LOCK.format(4))
    with pytest.raises(CaptureError, match="role stranger holds the lock") as caught:
        await triggers.enable(connection, "t")
    assert "pg_terminate_backend" in str(caught.value.hint)


async def test_installing_does_not_wait_for_ever(
    empty_url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MIGRATION_LOCK_TIMEOUT", "50ms")
    async with (
        await connect(empty_url, purpose="test") as stranger,
        await connect(empty_url, purpose="test") as ours,
    ):
        await run(stranger, LOCK.format(2))
        with pytest.raises(DatabaseError, match="holds the lock"):
            await schema.install(ours)
