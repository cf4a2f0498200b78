"""Tables and databases that change while a hub runs: altered, reset, slow, lost, restarted."""

from __future__ import annotations

import asyncio
from typing import Any, Literal
from uuid import uuid4

import pytest

from headwater import limits
from headwater.capture.postgres import schema
from headwater.database import Connection, connect
from headwater.embedded import EmbeddedPostgres
from headwater.errors import DatabaseError, Unavailable
from headwater.fair_queue import Owner
from headwater.hub.hub import Hub
from headwater.hub.live_views import initial_snapshots
from headwater.hub.live_views.initial_snapshots import (
    _OPENING_CONNECTIONS,
    _OPENING_CONNECTIONS_MAX,
    _OPENINGS_PER_TABLE,
    _OPENINGS_PER_USER,
)
from headwater.hub.subscriptions.subscriber import Access
from headwater.log.reading import reader as reader_module
from headwater.protocol import ResetMessage
from tests.support.databases import passable_folder
from tests.support.log_probe import enable, rows, run
from tests.support.subscribers import Recorder, answer, live

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
    monkeypatch.setattr("headwater.live.state.streamed._STREAMED_PAGE_ROWS", 2)
    reset = "select headwater.disable_reactivity('orders')"
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders", mode="streamed"), recorder)
        await recorder.until(lambda: len(recorder.rows) == 20)
        await hub.flushes.next_flush()
        recorder.reads.clear()
        await run(orders, reset)
        await recorder.until(lambda: recorder.kinds()[-1] == "reset")
        assert recorder.messages[-1].more
        if cause == "reset":
            await enable(orders, "orders")
            await hub.flushes.next_flush()
        else:
            await kill_connections(orders, "snapshot")
        recorder.reads.set()
        await recorder.until(lambda: recorder.kinds().count("reset") > 1)
        await recorder.until_rows(await answer(orders, ALL))
        resets = [message for message in recorder.messages if isinstance(message, ResetMessage)]
        assert [message.reason for message in resets] == ["table"] * len(resets)


@BOTH
async def test_a_column_added_and_one_dropped(url: str, orders: Connection, mode: str) -> None:
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
        assert [view.followers for view in hub.live_views] == [1]


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


async def test_a_slow_first_result_delays_no_other(url: str, orders: Connection) -> None:
    """Its table is locked by another session and cannot be read; the other table is not."""
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
    """A policy makes it slow; no lock is held."""
    role = f"r{uuid4().hex}"
    await run(
        orders,
        "create table slow (id int primary key)",
        "insert into slow values (1)",
        f"create role {role}",
        f"grant select on slow to {role}",
        "create policy wait on slow using (pg_sleep(60) is not null)",
        "alter table slow enable row level security",
    )
    await enable(orders, "slow")
    async with Hub(url) as hub:
        with monkeypatch.context() as quickly:
            quickly.setattr(initial_snapshots, "_OPTIONS", "-c statement_timeout=200ms")
            with pytest.raises(DatabaseError, match="took longer") as caught:
                await hub.live(live("slow"), Recorder(), access=Access(role=role))
        assert caught.value.code == "slow_query"
        assert "index" in (caught.value.hint or "")
        assert list(hub.live_views) == []
    await run(orders, "drop table slow", f"drop role {role}")


async def test_the_error_names_the_lock(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(initial_snapshots, "_OPTIONS", "-c lock_timeout=1s")
    monkeypatch.setattr("headwater.hub.live_views.initial_snapshots._OPENING_LOOK_SECONDS", 0.05)
    await run(orders, "create table slow (id int primary key)")
    await enable(orders, "slow")
    locker = await connect(url, purpose="test", application_path=True)
    async with Hub(url) as hub:
        await run(locker, "begin", "lock table slow in access exclusive mode")
        with pytest.raises(DatabaseError, match="slow is locked by another") as caught:
            await hub.live(live("slow"), Recorder())
        error = caught.value
        assert (error.code, error.retryable) == ("table_locked", True)
        assert f"process {locker.info.backend_pid} of the database, idle in transaction" in str(
            error
        )
        assert "index" not in (error.hint or "")
        # What the other session does is for the log of the server only.
        assert "lock table" not in f"{error} {error.hint}"
        assert "lock table slow" in caplog.text
        assert list(hub.live_views) == []
        await run(locker, "rollback")
        await hub.live(live("slow"), Recorder())
    await locker.close()


STUCK = (
    "select count(*) from pg_locks l join pg_database d on d.oid = l.database"
    " where d.datname = current_database() and l.relation is not null and not l.granted"
)


async def until_stuck(connection: Connection, count: int) -> None:
    """Wait until this many processes wait for a table."""
    async with asyncio.timeout(30):
        while (await rows(connection, STUCK))[0][0] < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("owner", [None, ("user", "ann")])
async def test_a_locked_table_delays_no_other(
    url: str, orders: Connection, owner: Owner | None
) -> None:
    """More of its results are requested than there are connections; the other table is not
    locked."""
    await run(orders, "create table slow (id int primary key)", "insert into slow values (1)")
    await enable(orders, "slow")
    locker = await connect(url, purpose="test", application_path=True)
    async with Hub(url) as hub:
        await run(locker, "begin", "lock table slow in access exclusive mode")
        waiting = [Recorder() for _ in range(2 * _OPENING_CONNECTIONS_MAX)]
        tasks = [
            asyncio.create_task(hub.live(live("slow", limit=1 + i), each, owner=owner))
            for i, each in enumerate(waiting)
        ]
        most = _OPENINGS_PER_TABLE if owner is None else _OPENINGS_PER_USER
        await until_stuck(orders, most)
        for limit in (3, 4):
            late = Recorder()
            await hub.live(live("orders", limit=limit), late, owner=("user", "bob"))
            assert len(late.rows) == limit
        assert not any(task.done() for task in tasks)
        assert await rows(orders, STUCK) == [(most,)]
        await run(locker, "commit")
        await asyncio.gather(*tasks)
        assert [each.rows for each in waiting] == [[{"id": 1}]] * len(waiting)
    await locker.close()


async def test_many_locked_tables_delay_no_other(url: str, orders: Connection) -> None:
    """They hold all of the usual connections; more are opened."""
    names = [f"slow{i}" for i in range(_OPENING_CONNECTIONS + 1)]
    for name in names:
        await run(orders, f"create table {name} (id int primary key)")
    await enable(orders, *names)
    locker = await connect(url, purpose="test", application_path=True)
    async with Hub(url) as hub:
        await run(
            locker, "begin", *(f"lock table {name} in access exclusive mode" for name in names)
        )
        tasks = [asyncio.create_task(hub.live(live(name), Recorder())) for name in names]
        await until_stuck(orders, _OPENING_CONNECTIONS)
        late = Recorder()
        await hub.live(live("orders", limit=3), late)
        assert len(late.rows) == 3
        assert not any(task.done() for task in tasks)
        await run(locker, "commit")
        await asyncio.gather(*tasks)
    await locker.close()


async def test_abandoned_results_do_not_pile_up_behind_a_lock(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.hub.live_views.initial_snapshots._OPENING_SHARE", 10)
    await run(orders, "create table slow (id int primary key)")
    await enable(orders, "slow")
    locker = await connect(url, purpose="test", application_path=True)
    async with Hub(url) as hub:
        await run(locker, "begin", "lock table slow in access exclusive mode")
        for i in range(200):
            opening = asyncio.create_task(hub.live(live("slow", limit=1 + i), Recorder()))
            while not list(hub.live_views):  # noqa: ASYNC110
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        assert len(hub.live_views.snapshots._own._queue) < 50
        await run(locker, "commit")
    await locker.close()


async def test_a_question_in_a_flush_that_takes_too_long(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view is read outside the flush instead; other views are not affected."""
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
async def test_after_a_large_backlog_results_are_read_again(
    url: str, orders: Connection, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 50)
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
@pytest.mark.parametrize("purpose", ["reader", "listener", "snapshot", "tables", "%"])
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
    """Subscribe as a client does that tries again."""
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
    """On a server of its own. `ready` is right meanwhile."""
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
            assert "database" in (hub.problem or "")
            with pytest.raises(Unavailable):
                await hub.live(live("orders"), Recorder())
        await connection.close()
