"""Defects that reviews found in reactive queries, each as the shortest test."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable
from typing import Any

import psycopg
import pytest

from headwater.database import Connection
from headwater.errors import FunctionFailed, Refused, Unavailable
from headwater.hub.hub import Hub
from headwater.identity import ANONYMOUS, Identity
from headwater.queries.context import Context
from headwater.settings.groups import QuerySettings, Settings
from tests.integration.hub.test_reactive import (
    ANN,
    BOB,
    IN_REGION,
    Follower,
    executions,
    orders,
    query,
    settle,
)
from tests.support.log_probe import enable, rows, run
from tests.support.subscribers import answer

__all__ = ["orders"]

REGION_2 = "select id, note from orders where region = 2 order by id"


async def others(ctx: Context) -> Any:
    return await ctx.fetch("select * from other")


async def test_rows_after_a_resync_are_those_of_the_next_result(
    url: str, orders: Connection
) -> None:
    gate, started = asyncio.Event(), asyncio.Event()
    gate.set()

    async def gated(ctx: Context) -> Any:
        found = await ctx.fetch(REGION_2)
        started.set()
        await gate.wait()
        return found

    async with Hub(url, settings=Settings(query=QuerySettings(cache_entry_bytes=1))) as hub:
        follower = await Follower().follow(hub, query(gated, key="id"), delta=True)
        await settle(hub)
        gate.clear()
        started.clear()
        await run(orders, "update orders set note = 'new' where id = 2")
        await started.wait()
        follower.handle.resync("overflow")
        gate.set()
        await settle(hub)
        assert follower.rows == await answer(orders, REGION_2)


async def test_a_subscriber_that_waits_for_a_whole_result_gets_it_once(
    url: str, orders: Connection
) -> None:
    gate = asyncio.Event()
    gate.set()

    async def gated(ctx: Context) -> Any:
        found = await ctx.fetch(REGION_2)
        if ctx.user == "bob":
            await gate.wait()
        return found

    async with Hub(url) as hub:
        by_row = query(gated, key="id")
        await Follower().follow(hub, by_row, BOB, delta=True)
        follower = await Follower().follow(hub, by_row, ANN, delta=True)
        await settle(hub)
        gate.clear()
        await run(orders, "delete from orders where id = 2")
        await follower.until_rows(await answer(orders, REGION_2))
        moving = asyncio.create_task(follower.handle.change_identity(BOB))
        await hub.flushes.next_flush()
        follower.handle.resync("overflow")
        gate.set()
        await moving
        await settle(hub)
        assert follower.fault is None
        assert follower.kinds() == ["snapshot", "deltas", "reset"]
        assert follower.rows == await answer(orders, REGION_2)


async def test_an_altered_table_without_readers_is_noticed_once(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An analysis that runs at that moment is not cached, and repeated: once is enough."""
    forgotten = list[set[int]]()

    def forget(oids: Iterable[int]) -> set[Any]:
        forgotten.append(set(oids))
        return set()

    async with Hub(url) as hub:
        follower = await Follower().follow(hub, query(others))
        await settle(hub)
        follower.handle.close()
        await Follower().follow(hub, IN_REGION, args={"region": 2})
        monkeypatch.setattr(hub.reactive.analyst, "forget", forget)
        await run(orders, "alter table other add column more int")
        for n in range(5):
            await run(orders, f"update other set n = {n}")
            await hub.flushes.next_flush()
        assert len(forgotten) == 1


async def test_a_table_that_is_enabled_again_is_followed_at_once(
    url: str, orders: Connection
) -> None:
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, query(others))
        await settle(hub)
        await run(orders, "select headwater.disable_reactivity('other')")
        await hub.reactive.recheck()
        await follower.until(lambda: follower.failure is not None)
        await run(orders, "update other set n = 7")
        await enable(orders, "other")
        await follower.until_value([{"id": 1, "n": 7}])


async def test_statements_that_differ_every_time_come_to_an_end(
    url: str, orders: Connection
) -> None:
    numbers = itertools.count()

    async def stamped(ctx: Context) -> Any:
        return await ctx.fetch_value(f"select count(*) from orders -- {next(numbers)}")

    async with Hub(url) as hub:
        follower = await Follower().follow(hub, query(stamped))
        await settle(hub)
        assert executions(hub) < 6
        await run(orders, "delete from orders where id = 1")
        await follower.until_value(49)


async def test_a_change_that_comes_while_a_query_fails_counts_at_once(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.hub.reactive.registry.retry_pause", lambda retries: 1e6)
    gate, started = asyncio.Event(), asyncio.Event()
    gate.set()

    async def divides(ctx: Context) -> Any:
        n = await ctx.fetch_value("select n from other")
        started.set()
        await gate.wait()
        return 100 // n

    async with Hub(url) as hub:
        await run(orders, "update other set n = 1")
        follower = await Follower().follow(hub, query(divides))
        await settle(hub)
        gate.clear()
        started.clear()
        await run(orders, "update other set n = 0")
        await started.wait()
        await run(orders, "update other set n = 5")
        await hub.flushes.next_flush()
        gate.set()
        await follower.until_value(20)


async def test_a_failure_is_sent_once(url: str, orders: Connection) -> None:
    async def not_for_bob(ctx: Context) -> Any:
        found = [
            await ctx.fetch_value("select count(*) from orders"),
            await ctx.fetch("select * from other"),
        ]
        if ctx.user == "bob":
            raise Refused("not for bob")
        return found

    async with Hub(url) as hub:
        moved = await Follower().follow(hub, query(not_for_bob), ANN)
        await moved.handle.change_identity(BOB)
        uncaptured = await Follower().follow(hub, query(not_for_bob), ANN)
        await run(orders, "select headwater.disable_reactivity('other')")
        await hub.reactive.recheck()
        for i in range(3):
            await run(orders, f"delete from orders where id = {i}")
            await settle(hub)
        assert moved.kinds().count("failed") == 1
        assert uncaptured.kinds().count("failed") == 1


async def test_a_result_is_not_fresh_after_read_all_again(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        await Follower().follow(hub, query(others))
        await settle(hub)
        (group,) = hub.reactive
        hub.reactive.read_all_again()
        assert not group.is_fresh
        await settle(hub)
        assert group.is_fresh


async def test_values_that_python_calls_equal_are_sent(url: str, orders: Connection) -> None:
    await run(
        orders,
        "create table j (id int primary key, v jsonb)",
        "insert into j values (1, '1')",
    )
    await enable(orders, "j")

    async def values(ctx: Context) -> Any:
        return await ctx.fetch("select * from j")

    async with Hub(url) as hub:
        follower = await Follower().follow(hub, query(values, key="id"), delta=True)
        await run(orders, "update j set v = 'true'")
        await follower.until(lambda: follower.rows[0]["v"] is True, 10)


async def test_an_unsupported_statement_is_a_fault_of_the_function(
    url: str, orders: Connection
) -> None:
    async def locked(ctx: Context) -> Any:
        return await ctx.fetch("select region, count(*) from orders group by 1 for update")

    async with Hub(url) as hub:
        with pytest.raises(FunctionFailed):
            await Follower().follow(hub, query(locked))


async def test_statements_prepared_before_a_table_was_altered(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, query(others))
        for n in range(5):
            await run(orders, f"update other set n = {n}")
            await follower.until_value([{"id": 1, "n": n}])
        await run(orders, "alter table other alter n type text", "update other set n = 'x'")
        await follower.until_value([{"id": 1, "n": "x"}])
        assert "failed" not in follower.kinds()


async def test_a_function_that_catches_the_loss_of_its_connection(
    url: str, orders: Connection
) -> None:
    losing = False

    async def careless(ctx: Context) -> Any:
        nonlocal losing
        loses, losing = losing, False
        try:
            await ctx.fetch(
                "select case when %s then pg_terminate_backend(pg_backend_pid()) end", loses
            )
            return await ctx.fetch(REGION_2)
        except psycopg.Error:
            return []

    async with Hub(url) as hub:
        follower = await Follower().follow(hub, query(careless))
        await settle(hub)
        losing = True
        await run(orders, "delete from orders where id = 2")
        await follower.until(lambda: len(follower.messages) > 1)
        assert follower.value == await answer(orders, REGION_2)


async def test_locks_of_a_session_end_with_the_query(url: str, orders: Connection) -> None:
    async def locks(ctx: Context) -> Any:
        await ctx.fetch("select pg_advisory_lock(77)")
        return await ctx.fetch_value("select count(*) from orders")

    async with Hub(url) as hub:
        await Follower().follow(hub, query(locks))
        await settle(hub)
        await hub.flushes.next_flush()
        async with asyncio.timeout(30):
            await run(orders, "select pg_advisory_lock(77)", "select pg_advisory_unlock(77)")


async def test_settings_of_a_query_do_not_reach_the_next(url: str, orders: Connection) -> None:
    async def sets(ctx: Context, i: int) -> Any:
        await ctx.fetch("select set_config('app.who', %s, true)", str(i))
        return await ctx.fetch_value("select count(*) from orders")

    async def reads(ctx: Context, i: int) -> Any:
        return [
            await ctx.fetch_value("select count(*) from orders"),
            await ctx.fetch_value("select coalesce(current_setting('app.who', true), '')"),
        ]

    async with Hub(url, settings=Settings(query=QuerySettings(concurrency=1))) as hub:
        followers = []
        for i in range(5):
            await Follower().follow(hub, query(sets), args={"i": i})
            followers.append(await Follower().follow(hub, query(reads), args={"i": i}))
        for n in (1, 2):
            await run(orders, f"delete from orders where id = {n}")
            await settle(hub)
            assert [each.value for each in followers] == [[50 - n, ""]] * 5


async def test_a_role_does_not_outlive_a_query_that_left_a_statement_behind(
    url: str, orders: Connection
) -> None:
    role = f"reader_{random.randrange(10**9)}"
    await run(orders, f"create role {role}", f"grant select on orders to {role}")
    left = []

    async def hasty(ctx: Context, i: int) -> Any:
        left.append(asyncio.create_task(ctx.fetch(f"select count(*) from orders -- {i}")))
        await asyncio.sleep(0)
        return await asyncio.sleep(0)

    async def who(ctx: Context, i: int) -> Any:
        await ctx.fetch_value("select count(*) from orders")
        return await ctx.fetch_value("select current_user::text")

    try:
        async with Hub(url, settings=Settings(query=QuerySettings(concurrency=1))) as hub:
            guest = Identity("g", role=role)
            follows = []
            for i in range(20):
                follows.append(Follower().follow(hub, query(hasty), guest, args={"i": i}))
                follows.append(Follower().follow(hub, query(who), args={"i": i}))
            followers = await asyncio.gather(*follows)
            await settle(hub)
            assert role not in {each.value for each in followers}
            await asyncio.gather(*left, return_exceptions=True)
    finally:
        await run(orders, f"drop owned by {role}", f"drop role {role}")


async def test_a_function_that_ignores_cancellation_does_not_hold_its_connection(
    url: str, orders: Connection
) -> None:
    started, gate, asked = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stubborn(ctx: Context) -> Any:
        await ctx.fetch("select count(*) from orders")
        started.set()
        try:
            await asked.wait()
        except asyncio.CancelledError:
            await gate.wait()

    async with Hub(url, settings=Settings(query=QuerySettings(concurrency=1))) as hub:
        call = asyncio.create_task(
            hub.reactive.call(query(stubborn), query(stubborn).bind({}), ANONYMOUS)
        )
        await started.wait()
        hub.reactive.lost()
        with pytest.raises(Unavailable):
            await call
        gate.set()
        follower = await Follower().follow(hub, query(others))
        await run(orders, "update other set n = 3")
        await follower.until_value([{"id": 1, "n": 3}])
        await settle(hub)
        ((count,),) = await rows(orders, CONNECTIONS)
        assert count == 1


CONNECTIONS = """
    select count(*) from pg_stat_activity
    where datname = current_database() and application_name like '%queries%'
"""


async def test_a_change_of_a_table_that_a_running_query_reads_next_is_not_missed(
    url: str, orders: Connection
) -> None:
    gate, started = asyncio.Event(), asyncio.Event()
    gate.set()
    await run(orders, "create table more (id int primary key)")
    await enable(orders, "more")

    async def turns(ctx: Context, table: str) -> Any:
        if await ctx.fetch_value("select n from other"):
            table = "more"
        count = await ctx.fetch_value(f"select count(*) from {table}")
        started.set()
        await gate.wait()
        return [table, count]

    async with Hub(url) as hub:
        # No statement may be new: a new statement alone would cause another execution.
        await Follower().follow(hub, query(turns), args={"table": "more"})
        follower = await Follower().follow(hub, query(turns), args={"table": "orders"})
        await settle(hub)
        gate.clear()
        started.clear()
        await run(orders, "update other set n = 1")
        await started.wait()
        await hub.flushes.next_flush()
        await run(orders, "insert into more values (1)")
        await hub.flushes.next_flush()
        gate.set()
        await follower.until_value(["more", 1])
