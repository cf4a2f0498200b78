"""The React example, as its README has it built and served, in Chromium."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from playwright.async_api import Page, expect

from tests.browser.conftest import SIZES, overflow
from tests.support.node import INSTALL_SECONDS, alone, node, npm, on_path, packages
from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(INSTALL_SECONDS + 120)

EXAMPLE = ROOT / "examples" / "react"
CLIENT = ROOT / "clients" / "js"
REGIONS = ("North", "East", "South", "West")
WAIT_SECONDS = 30


@pytest.fixture(scope="module")
def built() -> None:
    """The page, built from what there is now; by one process, before any serves it."""
    packages(EXAMPLE)
    sources = [EXAMPLE / "index.html", EXAMPLE / "vite.config.js", EXAMPLE / "package.json"]
    for folder in (EXAMPLE / "src", CLIENT / "src"):
        sources += folder.iterdir()
    page = EXAMPLE / "dist" / "index.html"
    with alone(EXAMPLE):
        if page.exists() and page.stat().st_mtime > max(s.stat().st_mtime for s in sources):
            return
        build = [*npm(), "run", "build", "--silent"]
        subprocess.run(build, cwd=EXAMPLE, env=on_path(), timeout=120, check=True)


@pytest.fixture
def address(built: None, url: str) -> Iterator[str]:
    """Where the example is served."""
    command = [sys.executable, "-m", "uvicorn", "server:app", "--port", "0", "--no-access-log"]
    with running(
        command, HEADWATER_URL=url, HEADWATER_LIMITS_REQUESTS_PER_SECOND="100000"
    ) as found:
        yield found


@contextmanager
def running(command: list[str], **settings: str) -> Iterator[str]:
    """Serve the example by a command, inside the block; where."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    process = subprocess.Popen(
        command,
        cwd=EXAMPLE,
        env=inherited | settings | {"PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield where(process)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def where(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0]
    raise AssertionError(f"the example is not served:\n{''.join(said)}")


@pytest.fixture
async def database(address: str, url: str) -> Any:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        yield connection


async def fill(database: psycopg.AsyncConnection[Any], count: int) -> None:
    await database.execute(
        "insert into orders (item, region, amount) select 'item ' || n,"
        " (array['North', 'East', 'South', 'West'])[n %% 4 + 1], n * 10"
        " from generate_series(1, %s) n",
        (count,),
    )


async def shown(page: Page) -> dict[int, int]:
    """The orders in order, and how often each was rendered."""
    rows: list[list[str]] = await page.eval_on_selector_all(
        "tbody tr", "rows => rows.map(row => [row.dataset.id, row.cells[5].textContent])"
    )
    return {int(id): int(renders) for id, renders in rows}


async def texts(page: Page) -> list[list[str]]:
    """What is shown of the orders: number, item, region, amount, status."""
    found: list[list[str]] = await page.eval_on_selector_all(
        "tbody tr",
        "rows => rows.map(row => [...row.cells].slice(0, 5).map(cell => cell.textContent))",
    )
    return found


async def test_only_the_changed_row_is_rendered(
    page: Page, address: str, database: psycopg.AsyncConnection[Any]
) -> None:
    await fill(database, 30)
    await page.goto(address)
    await expect(page.locator("tbody tr")).to_have_count(20)
    before = await shown(page)
    assert list(before) == list(range(30, 10, -1))

    await database.execute("update orders set status = 'packed' where id = 25")
    await expect(page.locator("tr[data-id='25'] .status")).to_have_text("packed")
    assert await shown(page) == before | {25: before[25] + 1}

    # A row that moves to the top pushes no row out, and the others do not change.
    await database.execute("update orders set amount = 1000 where id = 12")
    await expect(page.locator("tbody tr").first).to_have_attribute("data-id", "12")
    after = await shown(page)
    assert after == before | {25: before[25] + 1, 12: before[12] + 1}
    assert list(after)[:2] == [12, 30]

    # A row that enters is rendered, and another leaves.
    await database.execute("insert into orders (item, region, amount) values ('x', 'West', 500)")
    await expect(page.locator("tr[data-id='31']")).to_have_count(1)
    entered = await shown(page)
    assert entered == {k: v for k, v in after.items() if k != 11} | {31: entered[31]}


async def test_an_order_is_placed_advanced_and_removed(
    page: Page, address: str, database: psycopg.AsyncConnection[Any]
) -> None:
    await page.goto(address)
    await expect(page.get_by_text("No orders yet.")).to_be_visible()
    await page.get_by_role("button", name="North").click()
    await page.get_by_label("Item").fill("A lamp")
    await page.get_by_label("Amount").fill("40")
    await page.keyboard.press("Enter")
    await expect(page.locator("tr[data-id='1']")).to_be_visible()
    assert await texts(page) == [["1", "A lamp", "North", "40", "new"]]
    await expect(page.get_by_role("button", name="North")).to_have_text("North 40")
    await page.get_by_role("button", name="Pack").click()
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator(".status")).to_have_text("sent")
    await page.get_by_role("button", name="Remove order 1").click()
    await expect(page.get_by_text("No orders yet.")).to_be_visible()
    await expect(page.get_by_role("button", name="North")).to_have_text("North 0")
    rows = await (await database.execute("select * from orders")).fetchall()
    assert rows == []


async def test_a_refused_update_is_rolled_back_with_its_reason(
    page: Page, address: str, database: psycopg.AsyncConnection[Any]
) -> None:
    await fill(database, 1)
    await page.goto(address)
    await expect(page.locator("tbody tr")).to_have_count(1)
    await page.get_by_label("Amount").fill("40")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_have_text("an order needs an item")
    assert await texts(page) == [["1", "item 1", "East", "10", "new"]]


async def test_a_storm_ends_equal_to_the_database(
    page: Page, address: str, database: psycopg.AsyncConnection[Any]
) -> None:
    """Other clients write, the page itself writes, and its region is changed meanwhile. Another tab
    shares its connection and follows."""
    chance = random.Random(7)
    await fill(database, 60)
    other = await page.context.new_page()
    for tab in (page, other):
        await tab.goto(address)
        await expect(tab.locator("tbody tr")).to_have_count(20)
    await expect(page.get_by_text("2 here")).to_be_visible()
    for step in range(300):
        await storm(database, chance)
        if step % 10 == 0:
            await act(page, chance)
    region = chance.choice(REGIONS)
    await page.get_by_role("button", name=region).click()
    await ends_equal(page, database, "where region = %s", region)
    await page.get_by_role("button", name="All").click()
    for tab in (page, other):
        await ends_equal(tab, database, "")


async def storm(database: psycopg.AsyncConnection[Any], chance: random.Random) -> None:
    """A transaction of another client."""
    statements = (
        "insert into orders (item, region, amount) values ('storm', %(region)s, %(amount)s)",
        "update orders set amount = %(amount)s where id %% 10 = %(digit)s",
        "update orders set region = %(region)s, amount = amount + 1 where id %% 7 = %(digit)s",
        "delete from orders where id in (select id from orders where id %% 10 = %(digit)s"
        " order by amount limit 2)",
    )
    values = {
        "region": chance.choice(REGIONS),
        "amount": chance.randrange(1, 900),
        "digit": chance.randrange(10),
    }
    async with database.transaction():
        for statement in chance.sample(statements, chance.randrange(1, 3)):
            await database.execute(statement, values)


async def act(page: Page, chance: random.Random) -> None:
    """An action of a visitor. A row may be gone before it is clicked, which is not an error."""
    match chance.randrange(3):
        case 0:
            await page.get_by_label("Item").fill(f"mine {chance.random()}")
            await page.get_by_label("Amount").fill(str(chance.randrange(1, 900)))
            await page.keyboard.press("Enter")
        case 1:
            await page.evaluate("document.querySelector('.actions button')?.click()")
        case 2:
            await page.get_by_role("button", name=chance.choice(REGIONS)).click()


async def ends_equal(
    page: Page, database: psycopg.AsyncConnection[Any], where: str, *values: str
) -> None:
    """The last writes of the page may still be running: both are read until they agree."""
    query = "select id::text, item, region, amount::text, status from orders"
    top = f"{query} {where} order by orders.amount desc, orders.id limit 20".encode()
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        rows = await (await database.execute(top, values)).fetchall()
        there, seen = [list(row) for row in rows], await texts(page)
        if there == seen or time.monotonic() > deadline:
            assert seen == there
            return


async def test_the_example_with_the_vite_server(
    page: Page, address: str, database: psycopg.AsyncConnection[Any]
) -> None:
    """Served by Vite, which passes on what is for the server; in React's strict mode."""
    await fill(database, 1)
    vite = EXAMPLE / "node_modules" / "vite" / "bin" / "vite.js"
    command = [str(node()), str(vite), "--host", "127.0.0.1", "--port", "0"]
    with running(command, SERVER=address) as developed:
        await page.goto(developed)
        await expect(page.locator(".item")).to_have_text("item 1")
        await database.execute("update orders set item = 'another'")
        await expect(page.locator(".item")).to_have_text("another")
        await page.goto("about:blank")


async def test_the_page_fits_the_window(
    page: Page, address: str, database: psycopg.AsyncConnection[Any], tmp_path: Path
) -> None:
    await page.emulate_media(reduced_motion="reduce")
    await fill(database, 30)
    await database.execute("update orders set status = 'packed' where id % 3 = 0")
    await database.execute("update orders set status = 'sent' where id % 5 = 0")
    await page.goto(address)
    await expect(page.locator("tbody tr")).to_have_count(20)
    for name, (width, height) in SIZES.items():
        await page.set_viewport_size({"width": width, "height": height})
        await page.screenshot(path=tmp_path / f"{name}.png")
        assert await overflow(page) == 0
