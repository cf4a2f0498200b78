"""Slots in every state, positions that are lost, and what is refused, against real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from headwater.capture.postgres.wal import replication, slots
from headwater.capture.postgres.wal.positions import parse_position
from headwater.capture.postgres.wal.source import PostgresSource
from headwater.capture.source import Item, Problem, SourceDefinition, TableSpec, TransactionPart
from headwater.errors import (
    ConfigError,
    PositionLost,
    SourceError,
    SourceRefused,
    SourceUnavailable,
)
from tests.contract.sources.drivers.postgres_wal import SETTINGS, PostgresWalDriver
from tests.support.cluster import Cluster, releases, running
from tests.support.databases import database_url
from tests.support.wal_replica import Replica, eventually


async def slots_of(driver: PostgresWalDriver) -> list[tuple[Any, ...]]:
    async with await psycopg.AsyncConnection.connect(driver.url, autocommit=True) as connection:
        cursor = await connection.execute(
            "select to_jsonb(s) from pg_replication_slots s where database = current_database()"
        )
        return await cursor.fetchall()


async def publications_of(driver: PostgresWalDriver) -> list[tuple[Any, ...]]:
    async with await psycopg.AsyncConnection.connect(driver.url, autocommit=True) as connection:
        return await (await connection.execute("select pubname from pg_publication")).fetchall()


async def test_removal_leaves_nothing_also_while_the_slot_is_read(
    driver: PostgresWalDriver,
) -> None:
    await driver.create_table("orders")
    source = PostgresSource(driver.definition("orders"))
    await source.remove()  # nothing to remove
    await source.tables()
    items = source.changes(await source.start())
    reading = asyncio.ensure_future(anext(items))

    async def is_read() -> bool:
        return any(row[0]["active"] for row in await slots_of(driver))

    await eventually(is_read)
    ((slot,),) = await slots_of(driver)
    assert slot.get("failover", True)
    other = PostgresSource(driver.definition("orders"))
    await other.remove()
    assert (await slots_of(driver), await publications_of(driver)) == ([], [])
    with pytest.raises(SourceUnavailable):
        await _read_on(reading, items)
    await items.aclose()
    await other.close()
    await source.close()


async def _read_on(reading: asyncio.Future[Item], items: AsyncGenerator[Item, None]) -> None:
    await reading
    async for _ in items:
        pass


async def test_a_second_runner_is_refused(
    driver: PostgresWalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "SLOT_RELEASE_SECONDS", 0.2)
    await driver.create_table("orders")
    one, two = (PostgresSource(driver.definition("orders")) for _ in range(2))
    position = await one.start()
    items = one.changes(position)
    await driver.execute("insert into orders values (1, 'a', 1, null)")
    await anext(items)
    with pytest.raises(SourceUnavailable, match="is active for PID") as error:
        await anext(two.changes(position))
    assert "Another runner" in (error.value.hint or "")
    assert await two.check() == []  # the one that reads it is one of ours
    await items.aclose()
    await two.remove()
    for source in (one, two):
        await source.close()


async def test_a_slot_that_another_program_reads(driver: PostgresWalDriver) -> None:
    await driver.create_table("orders")
    source = PostgresSource(driver.definition("orders"))
    await source.start()
    reader = await psycopg.AsyncConnection.connect(
        driver.url, autocommit=True, replication="database", application_name="pg_recvlogical"
    )
    reader.pgconn.send_query(
        f"START_REPLICATION SLOT {driver.slot} LOGICAL 0/0"
        f" (proto_version '1', publication_names '{driver.slot}')".encode()
    )

    async def is_read() -> bool:
        return any(row[0]["active"] for row in await slots_of(driver))

    await eventually(is_read)
    (problem,) = await source.check()
    assert problem.warning
    assert "is read by another program (pg_recvlogical, process" in problem.what
    await reader.close()
    await source.remove()
    await source.close()


async def test_a_server_that_does_not_run() -> None:
    url = "postgresql://me:hunter2@127.0.0.1:1/shop"
    source = PostgresSource(SourceDefinition("shop", url, "shop", (TableSpec("orders"),)))
    for call in (source.check, source.tables, source.start):
        with pytest.raises(SourceUnavailable, match="cannot reach") as caught:
            await call()
        assert "hunter2" not in str(caught.value)
        assert caught.value.hint
    await source.close()


async def test_a_slot_that_was_dropped_is_a_lost_position(driver: PostgresWalDriver) -> None:
    await driver.create_table("orders")
    source = PostgresSource(driver.definition("orders"))
    position = await source.start()
    assert (await source.health()).state == "ok"
    await driver.lose_position()
    health = await source.health()
    assert (health.state, health.lag_bytes) == ("missing", None)
    assert "resnapshot" in (health.warning or "")
    with pytest.raises(PositionLost, match="does not exist"):
        await anext(source.changes(position))
    replica = Replica(source)
    await replica.begin()  # a new slot
    await driver.execute("insert into orders values (1, 'a', 1, null)")
    await replica.catch_up(driver.url)
    assert len(replica.rows["orders"]) == 1
    await source.remove()
    await source.close()


async def test_positions_of_other_servers_and_times_are_lost(driver: PostgresWalDriver) -> None:
    await driver.create_table("orders")
    source = PostgresSource(driver.definition("orders"))
    replica = Replica(source)
    await replica.begin()
    begun = parse_position(replica.position)
    await driver.execute("insert into orders values (1, 'a', 1, null)")
    await replica.run(lambda: any(isinstance(i, TransactionPart) for i in replica.items))
    items = source.changes(replica.position)
    reading = asyncio.ensure_future(anext(items))

    async def is_confirmed() -> bool:
        await source.acknowledge(replica.position)
        ((slot,),) = await slots_of(driver)
        high, low = slot["confirmed_flush_lsn"].split("/")
        return (int(high, 16) << 32 | int(low, 16)) >= parse_position(replica.position).lsn

    await eventually(is_confirmed)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await items.aclose()
    for position, reason in [
        (str(begun), "beyond our position"),
        (f"1{begun}", "another server"),
        (f"{begun.system}/7/{str(begun).split('/', 2)[2]}", "timeline"),
        (str(begun.at(begun.lsn + 10**12)), "restored from a backup"),
        ("nonsense", "not a position"),
    ]:
        with pytest.raises(PositionLost, match=reason):
            await anext(source.changes(position))
    await source.remove()
    await source.close()


async def test_a_publication_that_was_dropped_or_altered_is_a_lost_position(
    driver: PostgresWalDriver,
) -> None:
    await driver.create_table("orders")
    await driver.create_table("others")
    source = PostgresSource(driver.definition("orders", "others"))
    made = PostgresSource(driver.definition("orders", "others"))
    for statements in (
        ["drop publication headwater_shop"],
        ["drop publication headwater_shop", "made again"],
        ["drop publication headwater_shop", "create publication headwater_shop for all tables"],
        ["alter publication headwater_shop drop table orders"],
        ["drop table orders", "create table orders (id int primary key, name text)"],
    ):
        position = await source.start()
        for statement in statements:
            await (made.start() if statement == "made again" else driver.execute(statement))
        await driver.execute("insert into orders (id, name) values (1, 'a')")
        await source.tables()
        with pytest.raises(PositionLost, match=r"was (dropped|removed)"):
            await anext(source.changes(position))
        await driver.execute("truncate orders")
        if "all tables" in statements[-1]:
            await driver.execute("drop publication headwater_shop")
    await made.close()
    await source.remove()
    await source.close()


async def test_lag_is_named_before_the_disk_is_full(driver: PostgresWalDriver) -> None:
    await driver.create_table("orders")
    options = {"lag_warning_bytes": 1_000_000}
    source = PostgresSource(driver.definition("orders", options=options))
    await source.start()
    await driver.execute(
        "insert into orders select i, 'x', 1, repeat('x', 900) from generate_series(1, 3000) i"
    )
    health = await source.health()
    assert health.state == "lagging"
    assert (health.lag_bytes or 0) > 1_000_000
    assert "fill the disk" in (health.warning or "")
    await source.remove()
    await source.close()


async def test_a_slot_that_the_server_gave_up_is_lost() -> None:
    release = max(releases(), key=int)
    small = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB"}
    with running(release, SETTINGS | small) as cluster:
        async with PostgresWalDriver.opened(cluster) as driver:
            await driver.create_table("orders")
            source = PostgresSource(driver.definition("orders"))
            position = await source.start()
            states = []
            for _ in range(20):
                await driver.execute("select pg_switch_wal()", "checkpoint")
                await driver.execute("select pg_logical_emit_message(true, 'x', 'y')")
                states.append((await source.health()).state)
                if states[-1] == "lost":
                    break
            assert states[-1] == "lost"
            with pytest.raises(PositionLost, match="invalidated"):
                await anext(source.changes(position))
            await source.start()  # a new slot in its place
            assert (await source.health()).state in ("ok", "unreserved")
            await source.remove()
            await source.close()


async def test_after_a_kill_of_the_server_reading_continues(newest: Cluster) -> None:
    async with PostgresWalDriver.opened(newest) as driver:
        await driver.create_table("orders")
        replica = Replica(PostgresSource(driver.definition("orders")))
        await replica.begin()
        await driver.execute("insert into orders values (1, 'a', 1, null)")
        await replica.catch_up(driver.url)
        await driver.kill_server()
        with pytest.raises(SourceUnavailable):
            await replica.run(lambda: False)
        await driver.start_server()
        await driver.execute("insert into orders values (2, 'b', 1, null)")
        await replica.source.close()
        await replica.crash(PostgresSource(driver.definition("orders")))
        await replica.catch_up(driver.url)
        assert sorted(replica.rows["orders"]) == [("1",), ("2",)]
        await replica.source.remove()
        await replica.source.close()


# ------------------------------------------------------------------------ refused


async def problems(driver: PostgresWalDriver, *tables: str, **options: Any) -> list[Problem]:
    source = PostgresSource(driver.definition(*tables, **options))
    try:
        return await source.check()
    finally:
        await source.close()


@pytest.mark.parametrize(
    ("statements", "what", "fix"),
    [
        (["create table t (id int)"], "no primary key", "add primary key"),
        (
            ["create table t (id int primary key)", "alter table t replica identity nothing"],
            "REPLICA IDENTITY NOTHING",
            'alter table "public"."t" replica identity default',
        ),
        (["create view t as select 1 as id"], "is a view", "tables that it reads"),
        (["create unlogged table t (id int primary key)"], "unlogged", "set logged"),
        (
            [
                "create table p (id int primary key) partition by range (id)",
                "create table t partition of p for values from (0) to (9)",
            ],
            "is a partition",
            "partitioned table",
        ),
        (
            [
                "create table t (id int primary key) partition by range (id)",
                "create table t1 partition of t for values from (0) to (9)",
                "alter table t1 replica identity nothing",
            ],
            "the partition public.t1",
            "alter table public.t1 replica identity default",
        ),
    ],
)
async def test_tables_that_cannot_be_captured(
    driver: PostgresWalDriver, statements: list[str], what: str, fix: str
) -> None:
    await driver.execute(*statements)
    (problem,) = [each for each in await problems(driver, "t") if not each.warning]
    assert what in problem.what
    assert fix in problem.fix
    source = PostgresSource(driver.definition("t"))
    for refused in (source.tables, source.start):
        with pytest.raises(SourceRefused, match=what):
            await refused()
    await source.close()
    assert (await slots_of(driver), await publications_of(driver)) == ([], [])


async def test_a_table_that_does_not_exist(driver: PostgresWalDriver) -> None:
    """Only the runner knows whether it was mirrored before: the others are described."""
    await driver.create_table("orders")
    (problem,) = [each for each in await problems(driver, "orders", "t") if not each.warning]
    assert (problem.what, problem.missing) == ("there is no table t", "t")
    source = PostgresSource(driver.definition("orders", "t"))
    assert [table.name for table in await source.tables()] == ["orders"]
    await source.close()


async def test_definitions_that_do_not_fit(driver: PostgresWalDriver) -> None:
    await driver.create_table("orders")
    for spec, what in [
        (TableSpec("orders", columns=("id", "nope")), "no column nope"),
        (TableSpec("orders", exclude=("id",)), "belongs to its key"),
        (TableSpec("orders", where=["nope", "=", 1]), "the filter of orders"),
    ]:
        found = await problems(driver, tables=(spec,))
        assert any(what in each.what for each in found if not each.warning), spec
    with pytest.raises(ConfigError, match="unknown"):
        PostgresSource(driver.definition("orders", options={"unknown": 1}))


async def test_types_without_an_equal_are_named(driver: PostgresWalDriver) -> None:
    await driver.execute("create table t (id int primary key, p pair, m mood)")
    found = await problems(driver, "t")
    assert [each.what for each in found if "column" in each.what] == [
        "the column p of t has a type that the mirror's database may not have; the mirror has it"
        " as text"
    ]


async def test_a_role_without_rights(driver: PostgresWalDriver) -> None:
    await driver.create_table("orders")
    await driver.execute("drop role if exists reader", "create role reader login")
    url = driver.url.replace("postgres@", "reader@")
    definition = SourceDefinition("shop", url, "shop", (TableSpec("orders"),))
    source = PostgresSource(definition)
    found = {each.what for each in await source.check() if not each.warning}
    assert found == {
        "the role reader may not replicate",
        "the role may not read the table orders",
        'the role reader does not own the table "public"."orders", so it cannot publish it',
        "the role reader may not make a publication",
    }
    with pytest.raises(SourceRefused, match="may not replicate"):
        await source.start()
    await source.close()

    # One statement for the publication, whatever the number of tables.
    await driver.execute("create table lines (id int primary key)")
    source = PostgresSource(SourceDefinition("shop", url, "shop"))
    (problem,) = [each for each in await source.check() if "does not own" in each.what]
    await source.close()
    statement = problem.fix.partition("as the owner: ")[2].partition(";")[0]
    assert 'for table "public"."lines", "public"."orders" with' in statement
    await driver.execute(statement, "drop publication headwater_shop", "drop table lines")

    # With a publication of an administrator, and only the rights that are needed.
    await driver.execute(
        "alter role reader replication",
        "grant usage on schema public to reader",
        "grant select on orders to reader",
        "create publication shop for table orders",
        "insert into orders values (1, 'a', 1, null)",
    )
    options = {"publication": "shop", "slot": driver.slot}
    source = PostgresSource(
        SourceDefinition("shop", url, "shop", (TableSpec("orders"),), options=options)
    )
    assert await source.check() == []
    replica = Replica(source)
    await replica.begin()
    await driver.execute("insert into orders values (2, 'b', 1, null)")
    await replica.catch_up(driver.url)
    assert len(replica.rows["orders"]) == 2
    await source.remove()
    assert await publications_of(driver) == [("shop",)]
    await source.close()
    await driver.execute("drop owned by reader", "drop role reader")


async def test_urls_that_do_not_work_have_no_password_in_the_error(
    driver: PostgresWalDriver,
) -> None:
    secret = "s3cr3t/!"
    for url in (
        f"postgresql://ann:{quote(secret)}@127.0.0.1:1/shop",
        database_url(driver.url.replace("postgres@", f"ann:{quote(secret)}@"), "nowhere"),
        f"postgresql://ann:{quote(secret)}@127.0.0.1:x/shop",
    ):
        source = PostgresSource(SourceDefinition("shop", url, "shop", (TableSpec("t"),)))
        with pytest.raises((SourceError, ConfigError)) as error:
            await source.start()
        assert secret not in f"{error.value} {error.value.hint}"
        assert quote(secret) not in f"{error.value} {error.value.hint}"


async def test_a_server_that_does_not_log_enough() -> None:
    with running(max(releases(), key=int), {"wal_level": "replica"}) as cluster:
        async with PostgresWalDriver.opened(cluster) as driver:
            await driver.create_table("orders")
            (problem,) = await problems(driver, "orders")
            assert problem.what == "wal_level is replica"
            with pytest.raises(SourceRefused, match="wal_level is replica"):
                await PostgresSource(driver.definition("orders")).start()


def test_a_slot_is_judged_by_its_state() -> None:
    server = slots.Server(180000, "1", 1, 5_000_000_000, 5_000_000_000)
    slot = slots.Slot("pgoutput", "shop", True, 1, "0/0", "0/0", "reserved")
    cases = [
        (slot, 10_000_000_000, "ok"),
        (slot, 1_000_000_000, "lagging"),
        (slots.Slot("pgoutput", "d", True, 1, "0/0", "0/0", "unreserved"), 1, "unreserved"),
        (slots.Slot("pgoutput", "d", False, None, None, "0/0", "lost"), 1, "lost"),
        (slots.Slot("pgoutput", "d", False, None, "0/0", "0/0", "reserved", conflicting=True),
         1, "lost"),
        (None, 1, "missing"),
    ]  # fmt: skip
    for found, limit, state in cases:
        assert slots.judge(found, server, "s", limit, -1).state == state
