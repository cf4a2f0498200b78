"""The connections of reactive queries, without a database."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from headwater.errors import Unavailable
from headwater.hub.reactive.query_pool import Primary


async def test_a_database_that_refuses_connections_is_not_flooded() -> None:
    """While a query waits, the pool looks every 20 ms whether it needs more connections."""
    attempts = 0

    async def refuse(_url: str) -> Any:
        nonlocal attempts
        attempts += 1
        raise Unavailable("too many clients", hint="Try again.")

    execution: Any = SimpleNamespace(open=refuse, is_current=lambda _: True)
    pool = Primary("postgresql://unused", 64, lambda: None, execution)
    pool._queue.add(cast(Any, object()))
    for _ in range(10):
        pool._see()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert attempts == 1
    await pool.close()
