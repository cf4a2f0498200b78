"""Closing must end everything, also if the database does not answer or was just lost."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from headwater import Headwater, limits
from headwater.client.blocking import _Loop
from headwater.database import Connection, connect
from headwater.hub.feeds.view import FeedQuery, FeedView
from headwater.hub.hub import Hub
from headwater.identity import ANONYMOUS
from headwater.log import maintenance
from headwater.log.waking import waker
from headwater.log.waking.waker import Waker
from headwater.queries.context import Context
from headwater.queries.functions import Query
from headwater.settings import Settings
from headwater.tasks import ended
from tests.support.applications.shop import until
from tests.support.log_probe import enable, run
from tests.support.subscribers import Recorder


@asynccontextmanager
async def frozen(connection: Connection, *purposes: str) -> AsyncIterator[None]:
    """Sessions that do not answer any more; the kernel still accepts what is sent to them."""
    names = [f"headwater {purpose}" for purpose in purposes]
    cursor = await connection.execute(
        "select pid from pg_stat_activity where application_name = any(%s)"
        " and datname = current_database()",
        (names,),
    )
    processes = [pid for (pid,) in await cursor.fetchall()]
    assert len(processes) >= len(purposes)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(connection, "create table orders (id int primary key, amount int)")
    await enable(connection, "orders")
    return connection


async def test_a_polling_hub_reports_that_the_database_does_not_answer(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds a lock then, which it need not release at a server that does not answer."""
    monkeypatch.setattr(limits, "FLUSH_SECONDS_MAX", 0.5)
    async with Hub(url) as hub:
        waker = hub.flushes.waker
        assert isinstance(waker, Waker)
        waker.pace.never_sleep()
        await until(lambda: waker._lock is not None and waker._lock._held)
        async with frozen(orders, "reader", "poller", "listener"):
            hub.flushes.wake()
            await until(lambda: not hub.ready, seconds=60)
        await until(lambda: hub.ready)


async def test_a_hub_stops_while_a_query_waits_for_something_else(
    url: str, connection: Connection
) -> None:
    began = asyncio.Event()

    async def asks_elsewhere(ctx: Context) -> Any:
        await ctx.fetch("select 1")
        began.set()
        await asyncio.Event().wait()

    query = Query("asks_elsewhere", asks_elsewhere, timeout=3000)
    async with Hub(url) as hub:
        call = asyncio.create_task(hub.reactive.call(query, query.bind({}), ANONYMOUS))
        await began.wait()
        leaving = frozen(connection, "queries")
        await leaving.__aenter__()
    await leaving.__aexit__(None, None, None)
    await asyncio.gather(call, return_exceptions=True)


async def test_maintenance_ends_when_its_connection_is_lost(
    url: str, connection: Connection
) -> None:
    await run(
        connection,
        "create or replace function headwater.trim_log() returns int language sql"
        " as $$ select 0 from pg_sleep(60) $$",
    )
    task = asyncio.create_task(maintenance.run(url, every=60))
    busy = (
        "select pid from pg_stat_activity where application_name = 'headwater maintenance'"
        " and query like '%trim_log%' and state = 'active' and datname = current_database()"
    )
    with psycopg.connect(url, autocommit=True) as other:
        await until(lambda: other.execute(busy).fetchone() is not None, every=0)
        # No other task of ours runs meanwhile: the task gets both at once.
        other.execute(f"select pg_terminate_backend(pid, 10000) from ({busy}) busy")
        task.cancel()
    async with asyncio.timeout(30):
        await asyncio.wait({task})
    assert task.cancelled()


async def test_a_start_that_is_cancelled_leaves_nothing(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = asyncio.Event()

    async def slow(*arguments: Any, **options: Any) -> Connection:
        held.set()
        await asyncio.Event().wait()
        raise AssertionError

    before = asyncio.all_tasks()
    hw = Headwater(settings=Settings(url=url))
    hw.asgi()
    with monkeypatch.context() as patch:
        patch.setattr(waker, "connect", slow)  # the database takes its time, just now
        starting = asyncio.create_task(hw.__aenter__())
        await held.wait()
        await ended(starting)
    assert asyncio.all_tasks() - before <= {starting}
    async with hw:
        assert hw.gateway is not None


async def test_a_connection_is_closed_without_a_free_file_descriptor(url: str) -> None:
    connection = await connect(url, purpose="test", application_path=True)
    working = asyncio.create_task(connection.execute("select pg_sleep(60)"))
    await asyncio.sleep(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        await connection.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(psycopg.OperationalError):
        await working


async def test_an_unforeseen_error_ends_a_feed(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FeedView[Any], transaction: Any) -> Any:
        raise ValueError("unforeseen")

    async with Hub(url) as hub:
        since = hub.position
        await run(orders, "insert into orders values (1, 1)")
        monkeypatch.setattr(FeedView, "seen", fail)
        recorder = Recorder()
        await hub.feed(FeedQuery(("orders",), since=since), recorder)
        await recorder.until(lambda: recorder.error)
        assert recorder.error is not None
        assert recorder.error.code == "unavailable"


def test_an_interrupted_call_ends() -> None:
    """Of the blocking client, by Ctrl-C."""
    loop = _Loop()
    begun = threading.Event()

    async def wait_for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def interrupt() -> None:
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        loop.call(wait_for_ever())
    loop.stop()


async def test_waiting_for_an_end_can_be_cancelled() -> None:
    async def reluctant() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    may_end = asyncio.Event()
    task = asyncio.create_task(reluctant())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(ended(task))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not task.done()
    may_end.set()
    await ended(task)
