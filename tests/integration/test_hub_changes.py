"""What happens to tables and the database under a hub: altered, reset, slow, lost, restarted."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from headwater import limits
from headwater.capture.postgres import schema
from headwater.database import Connection, connect
from headwater.embedded import EmbeddedPostgres
from headwater.errors import DatabaseError, Unavailable
from headwater.hub.hub import Hub
from headwater.log import read as read_module
from headwater.protocol import Reset
from tests.conftest import passable_folder
from tests.hub import Recorder, answer, live
from tests.support import enable, run

ALL = "select * from orders order by id"


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(connection, "create table orders (id int primary key, amount int)")
    await run(connection, "insert into orders select i, i from generate_series(1, 20) i")
    await enable(connection, "orders")
    return connection


BOTH = pytest.mark.parametrize("mode", ["maintained", "streamed"])


@BOTH
async def test_truncated(url: str, orders: Connection, mode: str) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders", mode=mode), recorder)
        async with orders.transaction():
            await run(orders, "truncate orders", "insert into orders values (5, 5)")
        await recorder.until_rows([{"id": 5, "amount": 5}])
        assert recorder.kinds()[0] == "snapshot"
        assert len(recorder.kinds()) == 2


@BOTH
async def test_disabled_and_enabled_again(url: str, orders: Connection, mode: str) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders", mode=mode), recorder)
        await run(orders, "select headwater.disable_reactivity('orders')", "delete from orders")
        await run(orders, "insert into orders values (7, 7)")
        await enable(orders, "orders")
        await recorder.until_rows([{"id": 7, "amount": 7}])
        assert recorder.messages[-1].reason == "table"
        await run(orders, "insert into orders values (8, 8)")
        await recorder.until_rows(await answer(orders, ALL))


@pytest.mark.parametrize("cause", ["reset", "connection"])
async def test_a_reset_keeps_its_reason_when_it_is_read_twice(
    url: str, orders: Connection, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the new result was sent when it has to be read once more."""
    monkeypatch.setattr(limits, "STREAMED_PAGE_ROWS", 2)
    reset = "select headwater.disable_reactivity('orders')"
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders", mode="streamed"), recorder)
        await recorder.until(lambda: len(recorder.rows) == 20)
        await hub.next_flush()
        recorder.reads.clear()
        await run(orders, reset)
        await recorder.until(lambda: recorder.kinds()[-1] == "reset")
        assert recorder.messages[-1].more
        if cause == "reset":
            await enable(orders, "orders")
            await hub.next_flush()
        else:
            await kill_connections(orders, "opening")
        recorder.reads.set()
        await recorder.until(lambda: recorder.kinds().count("reset") > 1)
        await recorder.until_rows(await answer(orders, ALL))
        resets = [message for message in recorder.messages if isinstance(message, Reset)]
        assert [message.reason for message in resets] == ["table"] * len(resets)


@BOTH
async def test_a_column_more_and_one_less(url: str, orders: Connection, mode: str) -> None:
    async with Hub(url) as hub:
        recorder, picky = Recorder(), Recorder()
        await hub.live(live("orders", mode=mode), recorder)
        await hub.live(live("orders", where=[["amount", ">", 3]], mode=mode), picky)
        await run(orders, "alter table orders add column note text default 'x'")
        await run(orders, "update orders set amount = 100 where id = 3")
        await recorder.until_rows(await answer(orders, ALL))
        assert recorder.messages[-1].reason == "table"
        assert len(recorder.views) == 2
        await run(orders, "alter table orders drop column amount")
        await run(orders, "insert into orders values (50, 'new')")
        await recorder.until_rows(await answer(orders, ALL))
        await picky.until(lambda: picky.error)
        assert picky.error is not None
        assert picky.error.code == "invalid_query"
        assert [info.subscribers for info in hub.describe()] == [1]


async def test_renamed(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders"), recorder)
        await run(orders, "alter table orders rename to sales", "insert into sales values (50, 1)")
        await recorder.until(lambda: recorder.error)
        assert recorder.error is not None
        assert "orders is not enabled" in str(recorder.error)


async def test_altered_without_a_write_is_noticed_in_time(url: str, orders: Connection) -> None:
    async with Hub(url, recheck=0.4) as hub:
        recorder = Recorder()
        await hub.live(live("orders"), recorder)
        await run(orders, "alter table orders add column note text default 'x'")
        await recorder.until_rows(await answer(orders, ALL))
        await run(orders, "drop table orders")
        await recorder.until(lambda: recorder.error)


async def test_a_slow_first_result_delays_nobody(url: str, orders: Connection) -> None:
    """Its table is locked by somebody, so that it cannot be read; the other's is not."""
    await run(orders, "create table slow (id int primary key)")
    await enable(orders, "slow")
    locker = await connect(url, purpose="test", application_path=True)
    async with Hub(url) as hub:
        quick, slow = Recorder(), Recorder()
        await hub.live(live("orders"), quick)
        # Looked up before the lock is there: looking up needs one, too.
        await hub.tables.find("slow")
        await run(locker, "begin", "lock table slow in access exclusive mode")
        opening = asyncio.create_task(hub.live(live("slow"), slow))
        await run(orders, "insert into orders values (100, 1)")
        await quick.until(lambda: quick.rows[-1]["id"] == 100)
        late = Recorder()
        await hub.live(live("orders", limit=3), late)
        assert len(late.rows) == 3
        assert not opening.done()
        await run(locker, "insert into slow values (1)", "commit")
        await opening
        await slow.until_rows([{"id": 1}])
    await locker.close()


async def test_a_first_result_that_takes_too_long(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater.hub import openings

    monkeypatch.setattr(openings, "_OPTIONS", "-c statement_timeout=200ms")
    await run(orders, "create table slow (id int primary key)")
    await enable(orders, "slow")
    locker = await connect(url, purpose="test", application_path=True)
    async with Hub(url) as hub:
        await run(locker, "begin", "lock table slow in access exclusive mode")
        with pytest.raises(DatabaseError, match="took longer") as caught:
            await hub.live(live("slow"), Recorder())
        assert caught.value.code == "slow_query"
        assert "index" in (caught.value.hint or "")
        assert hub.describe() == []
        await run(locker, "rollback")
        await hub.live(live("slow"), Recorder())
    await locker.close()


async def test_a_question_in_a_flush_that_takes_too_long(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view is read beside the flush instead; nobody else notices."""
    monkeypatch.setattr(limits, "FLUSH_QUESTION_SECONDS", 0.05)
    await run(
        orders,
        "create table things (id int primary key, amount int)",
        "insert into things select i, i from generate_series(1, 40) i",
    )
    await enable(orders, "things")
    async with Hub(url) as hub:
        things, other = Recorder(), Recorder()
        await hub.live(live("things", limit=4), things)
        await hub.live(live("orders"), other)
        locker = await connect(url, purpose="test", application_path=True)
        await run(locker, "begin", "lock table things in access exclusive mode")
        await run(locker, "delete from things where id < 20")
        await run(orders, "insert into orders values (100, 1)")
        await other.until(lambda: other.rows[-1]["id"] == 100)
        await run(locker, "commit", "begin", "lock table things in access exclusive mode")
        await run(orders, "insert into orders values (101, 1)")
        await other.until(lambda: other.rows[-1]["id"] == 101)
        await run(locker, "commit")
        await things.until_rows(await answer(orders, "select * from things order by id limit 4"))
        await locker.close()


@BOTH
async def test_a_backlog_is_read_anew(
    url: str, orders: Connection, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_module, "LOG_PAGE_CHANGES", 50)
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders", mode=mode), recorder)
        await run(orders, "insert into orders select i, i from generate_series(100, 300) i")
        await recorder.until(lambda: "reset" in recorder.kinds())
        assert recorder.messages[-1].reason == "resync"
        await run(orders, "delete from orders where id > 100")
        await run(orders, "insert into orders values (1000, 1)")
        await recorder.until_rows(await answer(orders, ALL))


@BOTH
async def test_the_log_was_trimmed(url: str, orders: Connection, mode: str) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders", mode=mode), recorder)
        assert hub.position is not None
        await run(orders, f"select setval('headwater.log_floor', {hub.position.xmax + 1})")
        await run(orders, "insert into orders values (50, 1)", "insert into orders values (51, 1)")
        await recorder.until_rows(await answer(orders, ALL))
        assert recorder.messages[-1].reason == "resync"


async def kill_connections(connection: Connection, purpose: str = "%") -> None:
    await run(
        connection,
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where datname = current_database()"
        f" and application_name like 'headwater {purpose}' and pid <> pg_backend_pid()",
    )


@BOTH
@pytest.mark.parametrize("purpose", ["reader", "listener", "opening", "tables", "%"])
async def test_connections_killed(url: str, orders: Connection, mode: str, purpose: str) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders", mode=mode, limit=40), recorder, verify=True)
        for i in range(30, 34):
            await run(orders, f"insert into orders values ({i}, 1)")
            await kill_connections(orders, purpose)
            await run(orders, f"update orders set amount = 2 where id = {i}")
            await recorder.until_rows(await answer(orders, ALL))
            assert await opened_again(hub, mode) == recorder.rows
        if mode == "maintained":
            assert set(recorder.kinds()) == {"snapshot", "deltas"}


async def opened_again(hub: Hub, mode: str) -> list[dict[str, Any]]:
    """By a client that tries again."""
    async with asyncio.timeout(20):
        while True:
            another = Recorder()
            try:
                subscription = await hub.live(live("orders", mode=mode, limit=41), another)
            except Unavailable:
                await asyncio.sleep(0.02)
                continue
            subscription.close()
            return another.rows


async def test_postgresql_restarted() -> None:
    """On a server of its own. `ready` tells the truth meanwhile."""
    with passable_folder() as folder, EmbeddedPostgres(folder / "data") as server:
        connection = await connect(server.url, purpose="test", application_path=True)
        await schema.install(connection)
        await run(connection, "create table orders (id int primary key, amount int)")
        await enable(connection, "orders")
        async with Hub(server.url) as hub:
            recorder = Recorder()
            await hub.live(live("orders"), recorder, verify=True)
            ways: tuple[Literal["fast", "immediate"], ...] = ("fast", "immediate")
            for i, how in enumerate(ways):
                await run(connection, f"insert into orders values ({i}, 1)")
                await recorder.until(lambda n=i: len(recorder.rows) == n + 1)  # type: ignore[misc]
                await connection.close()
                await asyncio.to_thread(server.restart, how)
                connection = await connect(server.url, purpose="test", application_path=True)
                await run(connection, f"update orders set amount = 5 where id = {i}")
                await recorder.until_rows(await answer(connection, ALL))
            assert hub.ready
            await asyncio.to_thread(server.stop_now)
            async with asyncio.timeout(20):
                while hub.ready:  # noqa: ASYNC110 - another process makes it true
                    await asyncio.sleep(0.01)
            assert "database" in (hub.trouble or "")
            with pytest.raises(Unavailable):
                await hub.live(live("orders"), Recorder())
        await connection.close()
