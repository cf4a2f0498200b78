"""Queries on a real replica that is late, stopped and started. No client gets older data after
newer, and none misses a change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from headwater.capture.postgres import schema
from headwater.database import Connection, connect
from headwater.embedded import EmbeddedPostgres
from headwater.hub.hub import Hub
from headwater.queries.context import Context
from headwater.queries.functions import Query
from headwater.settings.groups import ReplicaSettings, Settings
from headwater.testing.replica import ReplicaServer, replica_of
from tests.integration.hub.test_reactive import Follower
from tests.support.databases import passable_folder
from tests.support.log_probe import enable, run
from tests.support.subscribers import Recorder


@pytest.fixture(scope="module")
def primary() -> Iterator[EmbeddedPostgres]:
    # Commits wait for the disk: a replica gets only what is on disk.
    with passable_folder() as folder, EmbeddedPostgres(folder / "p", settings=FAST) as server:
        yield server


@pytest.fixture(scope="module")
def replica(primary: EmbeddedPostgres) -> Iterator[ReplicaServer]:
    with passable_folder() as folder, replica_of(primary, folder / "r") as server:
        yield server


FAST = {"full_page_writes": "off", "wal_sync_method": "fdatasync"}


@pytest.fixture
async def counter(primary: EmbeddedPostgres, replica: ReplicaServer) -> AsyncIterator[Connection]:
    replica.delay(0)
    connection = await connect(primary.url, purpose="test", application_path=True)
    await run(connection, "drop table if exists counter")
    await schema.install(connection)
    await run(connection, "create table counter (id int primary key, n int)")
    await run(connection, "insert into counter values (1, 0)")
    await enable(connection, "counter")
    await has_all(replica, connection)
    yield connection
    await connection.close()


async def has_all(replica: ReplicaServer, connection: Connection) -> None:
    """Wait until the replica has what was written: a replica without the schema is not used."""
    cursor = await connection.execute("select pg_current_wal_insert_lsn()::text")
    ((written,),) = await cursor.fetchall()
    there = await connect(replica.url, purpose="test", application_path=True)
    async with asyncio.timeout(30):
        while True:
            question = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
            cursor = await there.execute(question, (written,))
            if await cursor.fetchall() == [(True,)]:
                break
            await asyncio.sleep(0.01)
    await there.close()


async def counted(ctx: Context) -> Any:
    return await ctx.fetch_value("select n from counter")


async def server(ctx: Context) -> Any:
    kind = "select case when pg_is_in_recovery() then 'replica' else 'primary' end"
    return [await ctx.fetch_value(kind), await ctx.fetch_value("select n from counter")]


COUNTED, SERVER = Query("counted", counted), Query("server", server)
CONSISTENT = Query("consistent", server, consistent=True)


class Watcher(Follower):
    """Checks that the values it is sent never go back."""

    def deliver(self, frame: Any) -> None:
        before = self.value
        Recorder.deliver(self, frame)
        if self.fault is None and isinstance(before, int) and self.failure is None:
            assert self.value >= before, f"{self.value} after {before}"


def hub_with(primary: EmbeddedPostgres, replica: ReplicaServer, wait: str = "10 seconds") -> Hub:
    return Hub(primary.url, settings=Settings(replica=ReplicaSettings(url=replica.url, wait=wait)))


async def count(connection: Connection, until: asyncio.Event | None = None) -> int:
    """Add one, or one after the other until stopped; returns the number."""
    while True:
        await run(connection, "update counter set n = n + 1")
        if until is None or until.is_set():
            cursor = await connection.execute("select n from counter")
            ((n,),) = await cursor.fetchall()
            return int(n)
        await asyncio.sleep(0.005)


async def test_a_query_runs_on_the_replica_once_that_has_the_change(
    primary: EmbeddedPostgres, replica: ReplicaServer, counter: Connection
) -> None:
    # Long enough: WAL that no commit follows may lie for 15 s before the replica gets it.
    async with hub_with(primary, replica, wait="50 seconds") as hub:
        follower = await Follower().follow(hub, SERVER)
        consistent = await Follower().follow(hub, CONSISTENT)
        assert follower.value == ["replica", 0]
        assert hub.metrics.replica_up._value.get() == 1
        assert consistent.value == ["primary", 0]
        for delay in (0.0, 0.2):
            replica.delay(delay)
            for _ in range(5):
                n = await count(counter)
                await follower.until_value(["replica", n])
                await consistent.until_value(["primary", n])


async def test_a_replica_that_is_late_is_skipped(
    primary: EmbeddedPostgres, replica: ReplicaServer, counter: Connection
) -> None:
    async with hub_with(primary, replica, wait="0 seconds") as hub:
        follower = await Follower().follow(hub, SERVER)
        replica.delay(3600)
        n = await count(counter)
        await follower.until_value(["primary", n])
        replica.delay(0)
        async with asyncio.timeout(30):
            while follower.value[0] == "primary":
                await asyncio.sleep(0.1)
                n = await count(counter)
                await follower.until(lambda n=n: follower.value[1] == n)  # type: ignore[misc]


async def test_no_client_sees_older_data_after_newer(
    primary: EmbeddedPostgres, replica: ReplicaServer, counter: Connection
) -> None:
    """The replica is early, late, gone and back while a counter counts."""
    async with hub_with(primary, replica, wait="1 second") as hub:
        watchers = [await Watcher().follow(hub, COUNTED) for _ in range(3)]
        place = await Follower().follow(hub, SERVER)
        stop = asyncio.Event()
        writer = await connect(primary.url, purpose="test", application_path=True)
        counting = asyncio.create_task(count(writer, stop))
        for step in (0.0, 0.05, None, 0.0, 3.0, 0.0):
            if step is None:
                await asyncio.to_thread(replica.stop_now)
                await place.until(lambda: place.value[0] == "primary")
                await asyncio.to_thread(replica.start)
                await place.until(lambda: place.value[0] == "replica")
            else:
                await asyncio.to_thread(replica.delay, step)
                wanted = "primary" if step > 1 else "replica"
                await place.until(lambda wanted=wanted: place.value[0] == wanted)  # type: ignore[misc]
            seen = watchers[0].value
            await watchers[0].until(lambda seen=seen: watchers[0].value > seen + 20)  # type: ignore[misc]
        stop.set()
        last = await counting
        await writer.close()
        for watcher in watchers:
            await watcher.until_value(last)
            assert watcher.kinds().count("failed") == 0


async def test_a_server_that_is_no_replica_is_not_used(
    primary: EmbeddedPostgres, replica: ReplicaServer, counter: Connection
) -> None:
    settings = Settings(replica=ReplicaSettings(url=primary.url, wait="1 second"))
    async with Hub(primary.url, settings=settings) as hub:
        follower = await Follower().follow(hub, SERVER)
        assert follower.value == ["primary", 0]
        assert hub.metrics.replica_up._value.get() == 0


async def test_nothing_runs_after_the_hub_is_closed(
    primary: EmbeddedPostgres, replica: ReplicaServer, counter: Connection
) -> None:
    async with hub_with(primary, replica, wait="50ms") as hub:
        replica.delay(60)
        follower = await Follower().follow(hub, COUNTED)
        await follower.until_value(await count(counter))
        before = asyncio.all_tasks()
    replica.delay(0)
    assert not {task for task in before if not task.done()} - {asyncio.current_task()}
    assert asyncio.all_tasks() == {asyncio.current_task()}
