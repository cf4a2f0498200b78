"""The Python client with a real gateway; tests/integration/client has it with a fake one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jwt
import pytest

from headwater import Backoff, connect, connect_sync
from headwater.database import Connection
from headwater.errors import CaptureError, InvalidQuery, Unauthorized
from headwater.live.filters.filter import c
from headwater.testing.gateway_process import serving
from headwater.testing.proxies import cutting
from tests.support.log_probe import run

SECRET = "a secret that is long enough for everyone"
WAIT_SECONDS = 30.0


@pytest.fixture(params=["ws", "sse"])
def transport(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(
        connection,
        "create table orders (id int primary key, amount numeric)",
        "insert into orders select i, i * 10 from generate_series(1, 10) i",
        "select headwater.enable_reactivity('orders')",
    )
    return connection


def quick() -> Backoff:
    return Backoff((0.02, 0.2), failures_max=100)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def ids(rows: list[Any]) -> list[int]:
    return [row["id"] for row in rows]


async def test_a_query_a_slide_and_refusals(
    url: str, orders: Connection, tmp_path: Path, transport: Any
) -> None:
    with serving(url, tmp_path) as gateway:
        async with connect(gateway.url, transport=transport) as hw:
            cheap = hw.live("orders", where=c.amount < 75, order="amount desc", limit=3)
            async with cheap as rows:
                assert rows.rows[0] == {"id": 7, "amount": "70"}
                await rows.reanchor(rows.cursor((6,)))
                assert ids(rows.rows) == [5, 4, 3]
                await run(orders, "delete from orders where id = 4")
                await until(lambda: ids(rows.rows) == [5, 3, 2])
                with pytest.raises(InvalidQuery):
                    await rows.reanchor(["not a number", 1])
                await run(orders, "delete from orders where id = 3")
                await until(lambda: ids(rows.rows) == [5, 2, 1])
            with pytest.raises(CaptureError, match="not enabled"):
                await hw.live("nowhere").__aenter__()
            with pytest.raises(InvalidQuery, match="colour"):
                await hw.live("orders", order="colour").__aenter__()
            assert (hw.reconnects, hw.diverged) == (0, 0)


async def test_the_same_query_twice_and_a_cut(
    url: str, orders: Connection, tmp_path: Path, transport: Any
) -> None:
    with serving(url, tmp_path) as gateway:
        async with (
            cutting(gateway.url) as cutter,
            connect(cutter.url, transport=transport, backoff=quick) as hw,
        ):
            first = await hw.live("orders", mode="streamed").__aenter__()
            second = await hw.live("orders", mode="streamed").__aenter__()
            for id in range(11, 16):
                await run(orders, f"insert into orders values ({id}, 1)")
                cutter.cut_some(Random(0), 1.1)
                await run(orders, f"delete from orders where id = {id - 10}")
                await until(lambda id=id: ids(first.rows)[-1:] == [id])  # type: ignore[misc]
            await until(lambda: ids(first.rows) == ids(second.rows) == list(range(6, 16)))
            assert hw.diverged == 0
            assert hw.reconnects


async def test_a_feed_over_cuts(
    url: str, orders: Connection, tmp_path: Path, transport: Any
) -> None:
    """Every change once, in order, although the connection is cut after each of them."""
    seen = list[int]()
    with serving(url, tmp_path) as gateway:
        async with (
            cutting(gateway.url) as cutter,
            connect(cutter.url, transport=transport, backoff=quick) as hw,
        ):
            async with hw.changes("orders") as feed:
                await run(orders, "insert into orders values (100, 1)")
                async for transaction in feed:
                    seen += [change.key["id"] for change in transaction.changes]
                    if seen[-1] == 120:
                        break
                    await run(orders, f"insert into orders values ({seen[-1] + 1}, 1)")
                    cutter.cut_some(Random(0), 1.1)
            assert hw.reconnects
    assert seen == list(range(100, 121))


async def test_tokens(url: str, orders: Connection, tmp_path: Path, transport: Any) -> None:
    made = list[str]()

    def token() -> str:
        claims = {"sub": "ann", "exp": time.time() + 3}
        made.append(jwt.encode(claims, SECRET, algorithm="HS256"))
        return made[-1]

    with serving(url, tmp_path, auth_secret=SECRET, auth_leeway="1 second") as gateway:
        with pytest.raises(Unauthorized):
            await connect(gateway.url, transport=transport).__aenter__()
        async with connect(gateway.url, transport=transport, token=token) as hw:
            async with hw.live("orders") as rows:
                await until(lambda: len(made) >= 4)
                await run(orders, "delete from orders where id = 1")
                await until(lambda: len(rows.rows) == 9)
            assert hw.reconnects == 0


async def test_blocking(url: str, orders: Connection, tmp_path: Path, transport: Any) -> None:
    def work(address: str) -> list[Any]:
        with connect_sync(address, transport=transport) as hw:
            return next(iter(hw.live("orders", order="id desc", limit=2)))

    with serving(url, tmp_path) as gateway:
        assert ids(await asyncio.to_thread(work, gateway.url)) == [10, 9]
