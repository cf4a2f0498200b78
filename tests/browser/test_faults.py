"""The JavaScript client in a real browser, under random faults of its connection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import BrowserContext, Page

from headwater.database import Connection
from tests.javascript.test_client import CLIENT
from tests.support.generators.faults import judge, staged, storm
from tests.support.generators.sizes import size

FAULTS = size("faults", 6, large=40)
TABS = {"alone": ("ws", False), "one": ("sse", "ann"), "two": ("sse", "ann")}
"""The transport of each, and who is logged in: the last two share a connection."""

EXPECTED = ("Failed to load resource: ", "WebSocket connection to ")
"""What Chromium itself writes about a connection that is lost, and a session that is unknown at the
other gateway."""

WORK = """async ({ source, transport, name, tabs }) => {
  const { connect } = await import("/client/index.js");
  const module = new Blob([source], { type: "text/javascript" });
  const { work } = await import(URL.createObjectURL(module));
  window.isOver = false;
  await new Promise((onReady) => {
    window.report = work(connect, { transport, name, tabs, onReady, isOver: () => window.isOver });
  });
}"""


@pytest.mark.timeout(300 + 10 * FAULTS)
async def test_each_mutation_happens_once(
    context: BrowserContext, url: str, connection: Connection, tmp_path: Path
) -> None:
    complaints: list[str] = []
    source = (CLIENT / "tests" / "faults.js").read_text()
    async with staged(url, connection, tmp_path) as (gateways, proxy):
        pages = dict[str, Page]()
        for name, (transport, tabs) in TABS.items():
            page = pages[name] = await context.new_page()
            listen(page, complaints)
            await page.goto(f"{proxy.url}/healthz")
            options = {"source": source, "transport": transport, "name": name, "tabs": tabs}
            await page.evaluate(WORK, options)
        await storm(proxy, gateways, connection, list(pages), faults=FAULTS)
        for page in pages.values():
            await page.evaluate("window.isOver = true")
        reports: list[dict[str, Any]] = await asyncio.gather(
            *(page.evaluate("window.report") for page in pages.values())
        )
    await judge(connection, reports)
    assert [each for each in complaints if not each.startswith(EXPECTED)] == []


def listen(page: Page, complaints: list[str]) -> None:
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: complaints.append(message.text) if message.type == "error" else None,
    )
