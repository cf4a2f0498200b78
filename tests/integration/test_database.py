"""Connections as we open them."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from headwater.database import Connection
from tests.gateway.shop import until


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
