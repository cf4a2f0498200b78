"""What a source promises when something fails: a runner that is killed, a second runner, a server
that is killed, a position that is lost; and while its tables are copied again."""

from __future__ import annotations

import asyncio
import random
from decimal import Decimal
from functools import partial

import psycopg
import pytest

from headwater.capture.mirror import registry
from tests.contract.sources.capture import MirrorCapture
from tests.contract.sources.driver import SourceDriver
from tests.contract.sources.test_contract import fold, need, random_steps, row, write


@pytest.mark.parametrize("seed", range(2))
async def test_a_runner_that_crashes(
    driver: SourceDriver, mirror: MirrorCapture, seed: int
) -> None:
    """At random moments under writes. Each change is in the log once, in order."""
    generator = random.Random(seed)
    await driver.create_table("orders")
    present = set(range(1, 60))
    await write(driver, ("insert_many", "orders", [row(id) for id in sorted(present)]))
    await mirror.begin("orders", chunk_rows=20)
    state = dict(await mirror.images("orders"))
    number = 1_000
    for _ in range(6):
        for _ in range(generator.randrange(1, 12)):
            number += 1
            await write(driver, *random_steps(generator, present, number))
            await asyncio.sleep(generator.choice([0, 0, 0.005]))
        await mirror.crash()
        await mirror.start(20)
    await mirror.same("orders")
    changes = await mirror.changes("orders")
    assert fold(state, changes) == dict(await mirror.images("orders"))


async def test_a_crash_during_the_copy(driver: SourceDriver, mirror: MirrorCapture) -> None:
    """The copy continues where it was, and the result is the same."""
    generator = random.Random(1)
    await driver.create_table("orders")
    present = set(range(1, 300))
    await write(driver, ("insert_many", "orders", [row(id) for id in sorted(present)]))
    await mirror.declare("orders")
    number = 1_000
    while await mirror.states("orders") != ["live"]:
        await mirror.start(15)
        for _ in range(3):
            number += 1
            await write(driver, *random_steps(generator, present, number))
        await asyncio.sleep(generator.choice([0.05, 0.2]) + (number - 1_000) / 100)
        await mirror.crash()
    await mirror.start(15)
    await mirror.same("orders")


async def test_a_second_runner_waits(driver: SourceDriver, mirror: MirrorCapture) -> None:
    await driver.create_table("orders")
    await mirror.begin("orders")
    second = MirrorCapture(driver, mirror.connection, mirror.url)
    await second.start()
    try:
        for id in range(1, 20):
            await write(driver, ("insert", "orders", row(id)))
        await mirror.same("orders")
        await mirror.crash()
        await write(driver, ("insert", "orders", row(20)))
        await second.same("orders")
    finally:
        await second.end()
    assert [change.key for change in await mirror.changes("orders")] == list(range(1, 21))


async def test_connections_that_are_ended(driver: SourceDriver, mirror: MirrorCapture) -> None:
    """By Headwater's PostgreSQL, again and again; the runner comes back by itself."""
    await driver.create_table("orders")
    await mirror.begin("orders")
    for id in range(1, 40):
        await write(driver, ("insert", "orders", row(id)))
        if id % 8 == 0:
            await mirror.connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and application_name like 'headwater source%'"
            )
    await mirror.same("orders")
    assert [change.key for change in await mirror.changes("orders")] == list(range(1, 40))


async def test_a_server_that_is_killed(driver: SourceDriver, mirror: MirrorCapture) -> None:
    need(driver, "restart")
    await driver.create_table("orders")
    await mirror.begin("orders")
    await write(driver, ("insert", "orders", row(1)))
    await mirror.same("orders")
    await driver.kill_server()
    await mirror.eventually(mirror.state, "failed")
    await driver.start_server()
    await write(driver, ("insert", "orders", row(2)))
    await mirror.same("orders")
    assert [change.key for change in await mirror.changes("orders")] == [1, 2]


async def test_a_lost_position(driver: SourceDriver, mirror: MirrorCapture) -> None:
    """It is a state with a name; the mirror serves what it has, and a resnapshot continues with
    exactly the differences in the log."""
    need(driver, "lose_position")
    await driver.create_table("orders")
    await write(driver, ("insert_many", "orders", [row(id) for id in range(1, 30)]))
    await mirror.begin("orders")
    state = dict(await mirror.images("orders"))
    await mirror.stop()
    await write(driver, ("insert", "orders", row(100)))
    await driver.lose_position()
    await write(driver, ("delete", "orders", 5), ("update", "orders", 6, {"name": "missed"}))
    await mirror.start()
    await mirror.eventually(mirror.state, "lost")
    (source,) = await registry.sources(mirror.connection)
    assert source.error
    assert "headwater source resnapshot shop" in (source.hint or "")
    assert dict(await mirror.images("orders")) == state
    await registry.request_resnapshot(mirror.connection, "shop")
    await mirror.same("orders")
    changes = await mirror.changes("orders")
    assert {change.op for change in changes} == {"insert", "update", "delete"}
    assert len(changes) == 3
    assert len({change.xid for change in changes}) == 1
    assert fold(state, changes) == dict(await mirror.images("orders"))
    await write(driver, ("insert", "orders", row(200)))
    await mirror.same("orders")


async def test_a_resnapshot_keeps_what_people_added(
    driver: SourceDriver, mirror: MirrorCapture
) -> None:
    """Grants, policies and indexes of a mirror; and while it is copied, its rows are served and its
    changes arrive."""
    await driver.create_table("orders")
    await write(driver, ("insert_many", "orders", [row(id) for id in range(1, 120)]))
    await mirror.begin("orders", chunk_rows=10)
    await mirror.connection.execute(
        "create index orders_by_name on shop.orders (name);"
        "grant select on shop.orders to public;"
        "alter table shop.orders enable row level security;"
        "create policy cheap on shop.orders using (amount < 20)"
    )
    before = await _additions(mirror)
    await registry.request_resnapshot(mirror.connection, "shop")
    for number in range(1_000, 1_030):
        await write(driver, ("insert", "orders", row(number)))
        assert await mirror.count("orders") >= 119
    await mirror.eventually(partial(_requests, mirror), [])
    await mirror.same("orders")
    assert await _additions(mirror) == before
    changes = await mirror.changes("orders")
    assert sorted(change.key for change in changes) == list(range(1_000, 1_030))
    assert {change.op for change in changes} == {"insert"}


async def _requests(mirror: MirrorCapture) -> list[str]:
    """The tables that are still to be copied again."""
    (declared,) = await registry.definitions(mirror.connection)
    copying = [s for s in await mirror.states("orders") if s != "live"]
    return [*declared.resnapshot, *map(str, copying)]


async def _additions(mirror: MirrorCapture) -> list[tuple[str, ...]]:
    cursor = await mirror.connection.execute(
        "select relacl::text, relrowsecurity::text, oid::text,"
        " (select string_agg(indexrelid::regclass::text, ' ' order by 1) from pg_index"
        "  where indrelid = c.oid),"
        " (select string_agg(polname, ' ') from pg_policy where polrelid = c.oid)"
        " from pg_class c where oid = 'shop.orders'::regclass"
    )
    return await cursor.fetchall()


async def test_a_mirror_is_read_only(driver: SourceDriver, mirror: MirrorCapture) -> None:
    await driver.create_table("orders")
    await write(driver, ("insert", "orders", row(1)))
    await mirror.begin("orders")
    for statement in ("delete from shop.orders", "truncate shop.orders"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="read-only"):
            await mirror.connection.execute(statement)
    await mirror.same("orders")


async def test_a_table_that_is_added_later(driver: SourceDriver, mirror: MirrorCapture) -> None:
    for table in ("orders", "lines"):
        await driver.create_table(table)
        await write(driver, ("insert_many", table, [row(id) for id in range(1, 50)]))
    await mirror.begin("orders")
    await mirror.declare("orders", "lines")
    for number in range(100, 110):
        await write(driver, ("insert", "orders", row(number)), ("insert", "lines", row(number)))
    await mirror.eventually(partial(mirror.states, "orders", "lines"), ["live", "live"])
    await mirror.same("orders", "lines")
    assert len(await mirror.changes("orders")) == 10


async def test_pause_and_resume(driver: SourceDriver, mirror: MirrorCapture) -> None:
    await driver.create_table("orders")
    await mirror.begin("orders")
    await registry.request_pause(mirror.connection, "shop")
    await mirror.eventually(mirror.state, "paused")
    await write(driver, ("insert", "orders", row(1)))
    assert await mirror.rows("orders") == []
    await registry.request_resume(mirror.connection, "shop")
    await mirror.same("orders")


async def test_remove(driver: SourceDriver, mirror: MirrorCapture) -> None:
    """Nothing stays behind at the source, and the mirror becomes an ordinary table."""
    await driver.create_table("orders")
    await write(driver, ("insert", "orders", row(1)))
    await mirror.begin("orders")
    await registry.request_remove(mirror.connection, "shop")
    await mirror.eventually(partial(registry.sources, mirror.connection), [])
    assert await driver.leftovers() == []
    await mirror.connection.execute("update shop.orders set name = 'mine'")
    await write(driver, ("update", "orders", 1, {"amount": Decimal(7)}))
    assert (await mirror.rows("orders"))[0][1] == "mine"
