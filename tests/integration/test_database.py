"""Connections as we open them."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from headwater.database import Connection, connect
from tests.support.applications.shop import until


async def test_a_cancelled_task_whose_connection_is_lost_is_still_cancelled(
    url: str, connection: Connection
) -> None:
    """The driver cancels the statement, finds the connection lost, and raises that alone: a task
    that tries again after a loss could not be ended."""
    process = connection.info.backend_pid
    working = asyncio.create_task(connection.execute("select pg_sleep(60)"))
    with psycopg.connect(url, autocommit=True) as other:
        busy = "select state = 'active' from pg_stat_activity where pid = %s"
        await until(lambda: other.execute(busy, (process,)).fetchone() == (True,), every=0)
        # Nothing of ours runs meanwhile: the task learns of both at once.
        other.execute("select pg_terminate_backend(%s, 10000)", (process,))
        working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_a_connection_may_be_closed_under_a_statement(url: str) -> None:
    """With the driver's own `close`, a waiting task would read freed memory, through a file
    descriptor that belongs to another connection by then."""
    connection = await connect(url, purpose="test", application_path=True)
    working = asyncio.create_task(connection.execute("select pg_sleep(60)"))
    await asyncio.sleep(0)
    process = connection.info.backend_pid
    await connection.close()
    assert connection.closed
    others = [await connect(url, purpose="test", application_path=True) for _ in range(3)]
    with pytest.raises(psycopg.OperationalError):
        await working
    for other in others:
        assert other.info.backend_pid != process
        await (await other.execute("select 1")).fetchone()
        await other.close()
    await connection.close()  # a second time is no trouble
    assert connection.closed
