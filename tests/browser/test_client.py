"""The JavaScript client in a real browser: over each transport, and shared by tabs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import BrowserContext, Page

from headwater.database import Connection
from headwater.testing.gateway_process import Served, serving
from tests.support.stage import APPLICATION, TABLES

TABS = 10
CONNECT = """async (transport) => {
  const { connect } = await import("/client/index.js");
  const backoff = { seconds: [0.1, 0.5], failuresMax: 1000 };
  window.hw = connect(undefined, { transport, backoff, tabs: "everybody" });
  window.live = hw.live({ table: "orders", order: [["id", "asc"]] }, undefined, { verify: true });
  await live.ready;
}"""
IDS = "() => window.live.value.map((row) => row.id)"


@pytest.fixture
async def served(url: str, connection: Connection, tmp_path: Path) -> AsyncIterator[Served]:
    await connection.execute(TABLES)
    (tmp_path / "shop.py").write_text(APPLICATION)
    with serving(url, tmp_path, program="shop:hw", limits_requests_per_second=10_000) as gateway:
        yield gateway


async def until(holds: Callable[[], Any], what: str) -> None:
    for _ in range(1500):
        if await holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it did not come to pass: {what}")


async def shows(page: Page, *ids: int) -> None:
    async def holds() -> bool:
        return bool(await page.evaluate(IDS) == list(ids))

    await until(holds, f"a tab shows {ids}")


async def insert(connection: Connection, id: int) -> None:
    await connection.execute("insert into orders (id, region, amount) values (%s, 7, 1)", (id,))


@pytest.mark.parametrize("transport", ["ws", "sse"])
async def test_a_page_follows_the_table_across_a_restart(
    served: Served,
    context: BrowserContext,
    connection: Connection,
    url: str,
    tmp_path: Path,
    transport: str,
) -> None:
    # Not the fixture's page: a stopped gateway is an error in the browser's console.
    page = await context.new_page()
    await page.goto(f"{served.url}/healthz")
    await page.evaluate(CONNECT, transport)
    await insert(connection, 1001)
    await shows(page, 1001)
    placed = await page.evaluate("hw.mutate('place_order', { region: 8, amount: 2 })")
    assert await page.evaluate("hw.query('count')") == 2
    await connection.execute("delete from orders where id = %s", (placed["value"],))
    await asyncio.to_thread(served.stop)
    await insert(connection, 1003)
    port = urlsplit(served.url).port or 0
    with serving(url, tmp_path, program="shop:hw", port=port):
        await shows(page, 1001, 1003)
        assert await page.evaluate("[hw.diverged, hw.reconnects]") == [0, 1]


@pytest.mark.parametrize("transport", ["ws", "sse"])
async def test_ten_tabs_use_one_connection(
    served: Served, context: BrowserContext, connection: Connection, transport: str
) -> None:
    def sessions() -> float:
        return served.metric("headwater_sessions")

    tabs = [await context.new_page() for _ in range(TABS)]
    for tab in tabs:
        await tab.goto(f"{served.url}/healthz")
        await tab.evaluate(CONNECT, transport)
    assert sessions() == 1
    await insert(connection, 1001)
    await asyncio.gather(*(shows(tab, 1001) for tab in tabs))

    # The others receive the position of a write at once.
    placed = await tabs[4].evaluate("hw.mutate('place_order', { region: 7, amount: 2 })")

    async def all_know() -> bool:
        positions = [await tab.evaluate("hw.written.value") for tab in tabs]
        return positions == [placed["position"]] * TABS

    await until(all_know, "every tab knows of the write")
    await connection.execute("delete from orders where id = %s", (placed["value"],))

    # The first tab leads: it is closed, and then the next. The others continue.
    for number in (0, 1):
        await tabs[number].close()
        await insert(connection, 1002 + number)
        rows = range(1001, 1003 + number)
        await asyncio.gather(*(shows(tab, *rows) for tab in tabs[number + 1 :]))
        assert sessions() == 1
    reconnects = [await tab.evaluate("hw.reconnects") for tab in tabs[2:]]
    assert reconnects == [2] * (TABS - 2)

    async def left() -> bool:
        return served.metric("headwater_subscriptions", kind="live") == TABS - 3

    await tabs[5].close()
    await until(left, "a tab that is closed takes its subscription with it")
