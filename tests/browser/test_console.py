"""The console, in Chromium, against a gateway that is busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from playwright.async_api import BrowserContext, Page, Route, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from headwater import Headwater
from headwater.database import Connection
from headwater.testing.gateway_process import Served, serving
from tests.browser.conftest import SIZES, overflow
from tests.support.applications.busy_gateway import STREAMS, busy
from tests.support.servers import ours

SECRET = "a secret that is long enough for SHA-256 and more"

# For each page, an element that exists only when its data has arrived.
PAGES = {
    "overview": "text=process",
    "tables": "text=has no primary key",
    "sources": "text=the replication slot headwater_crm is lost",
    "views": "text=revenue",
    "sessions": "td >> text=WebSocket",
    "log": "[data-op=update]",
    "history?table=orders&key=8": "text=in the log",
    "pipeline": f"h2 >> text={STREAMS[0]}",
    "playground?table=orders": "text=20 rows, live",
}


@pytest.fixture
async def served(url: str, tmp_path: Path) -> AsyncIterator[Served]:
    async with busy(url, tmp_path) as gateway:
        yield gateway


async def opened(page: Page, served: Served, name: str) -> None:
    await page.goto(f"{served.url}/console/#/{name}")
    await page.wait_for_selector(f"main[data-ready={name.partition('?')[0]}]")


@pytest.mark.parametrize("size", SIZES)
async def test_every_page(served: Served, page: Page, size: str) -> None:
    """It shows its data, writes nothing to the browser's console, and fits the window."""
    width, height = SIZES[size]
    await page.set_viewport_size({"width": width, "height": height})
    for theme in ("light", "dark"):
        await page.emulate_media(color_scheme=theme)
        for name, shown in PAGES.items():
            await opened(page, served, name)
            await expect(page.locator("main").locator(shown).first).to_be_visible()
            assert await overflow(page) == 0, (name, size, theme)
            assert await page.locator("main [role=alert]").count() == 0, name


async def test_every_page_follows_its_data(
    served: Served, page: Page, connection: Connection
) -> None:
    await opened(page, served, "overview")
    changes = page.locator(".tile", has_text="Changes").locator("dd").first
    await expect(changes).not_to_have_text("–")

    # A gateway that writes less often, and is slower.
    await connection.execute(OTHER)
    await expect(page.locator("tr", has_text="elsewhere")).to_be_visible()
    await connection.execute(OTHER_LATER)
    latency = page.locator(".tile", has_text="Latency")
    await expect(latency).to_contain_text("42 s")
    await expect(latency).to_contain_text("the slowest gateway")
    await connection.execute("delete from headwater.activity where gateway = 'other'")

    await opened(page, served, "tables")
    row = page.locator("tr", has_text="customers")
    await expect(row.locator("text=by trigger")).to_be_visible()
    await page.get_by_label("Find a table").fill("order l")
    await expect(page.locator("tbody tr")).to_have_count(1)

    await opened(page, served, "views")
    view = page.locator("tr", has_text="region = 3")
    await expect(view.locator("td").nth(1)).to_have_text("1")
    before = (
        await page.locator("tr", has_text="updated_at desc").locator("td").nth(3).text_content()
    )
    await expect(
        page.locator("tr", has_text="updated_at desc").locator("td").nth(3)
    ).not_to_have_text(str(before))

    await opened(page, served, "history?table=customers&key=7")
    await expect(page.locator("main")).to_contain_text("no change of this record")
    await expect(page.locator(".changes[data-live]")).to_be_attached()
    await connection.execute("update customers set city = 'Basel' where id = 7")
    await expect(page.locator("del")).to_have_text("Bern")
    await expect(page.locator("ins")).to_have_text("Basel")
    await expect(page.locator("main")).to_contain_text("1 version in the log.")
    await expect(page.get_by_label("Rewind")).to_be_hidden()
    # Requested twice at once, and while it changes: each version is shown once.
    show = page.get_by_role("button", name="Show")
    await show.click()
    await show.click()
    await connection.execute("update customers set city = 'Chur' where id = 7")
    await expect(page.locator(".changes > li")).to_have_count(2)
    # The slider shows an earlier version, and stays there when more versions come.
    row = page.locator(".rewind pre")
    await expect(row).to_contain_text("Chur")
    await page.get_by_label("Rewind").press("Home")
    await expect(row).to_contain_text("Basel")
    await connection.execute("delete from customers where id = 7")
    await expect(page.locator(".changes > li")).to_have_count(3)
    await expect(row).to_contain_text("Basel")
    await page.get_by_label("Rewind").press("End")
    await expect(row).to_contain_text("it was deleted")
    await page.get_by_text("Read the lake").click()
    await expect(page.locator("code")).to_have_text("headwater history customers 7")

    await opened(page, served, "pipeline")
    await expect(page.locator("svg.plot polyline").first).to_be_attached()
    await connection.execute(
        "insert into headwater.pipeline (name, state, owner, changes, error, task, task_done,"
        " task_total) values"
        " ('reconcile', 'running', 'x', 7, 'orders: 1 row different', null, null, null),"
        " ('snapshots', 'running', 'x', 9, null, 'reading 3 tables', 2, 5)"
    )
    job = page.locator("tr", has_text="reconcile")
    await expect(job).to_contain_text("7 rows compared")
    await expect(job).to_contain_text("orders: 1 row different")
    await expect(page.locator("tr", has_text="snapshots")).to_contain_text("reading 3 tables: 40 %")


async def test_sources(served: Served, page: Page, connection: Connection, tmp_path: Path) -> None:
    """The page follows the table: states, the copy of each table, errors with their hints."""
    await opened(page, served, "sources")
    shop = page.locator("tr", has_text="shop_mysql")
    await expect(shop.locator(".badge").first).to_have_text("copying")
    await expect(shop.locator("td").nth(1)).to_have_text("1 of 2")
    crm = page.locator("tr", has_text="postgresql → crm")
    await expect(crm).to_contain_text("headwater source resnapshot crm")
    customers = page.locator("section", has=page.get_by_role("heading", name="shop", exact=True))
    progress = customers.get_by_role("progressbar", name="Copy of customers")
    await expect(progress).to_have_attribute("value", "250000")
    await expect(customers.locator("svg.plot polyline").first).to_be_attached()
    await page.screenshot(path=tmp_path / "sources.png", full_page=True)
    assert (tmp_path / "sources.png").stat().st_size > 10_000

    await connection.execute(SHOP_IS_LIVE)
    await expect(shop.locator(".badge").first).to_have_text("running")
    await expect(shop.locator("td").nth(1)).to_have_text("2")
    await expect(progress).to_have_count(0)
    await connection.execute(
        "update headwater.sources set state = 'running', error = null where name = 'crm'"
    )
    await expect(page.locator("main")).not_to_contain_text("the replication slot")


SHOP_IS_LIVE = """
    update headwater.sources
    set state = 'running', tables = (
      select json_agg(t::jsonb || '{"state": "live"}') from json_array_elements(tables) t)
    where name = 'shop'
"""


OTHER = """
    insert into headwater.activity (gateway, kind, id, name, detail, since, alive_until)
    values ('other', 'gateway', 'other', 'elsewhere', '{"changes": 0, "sessions": 0, "views": 0}',
            now(), now() + interval '10 minutes')
"""
OTHER_LATER = """
    update headwater.activity
    set detail = '{"changes": 1, "sessions": 0, "views": 0, "lag": {"p50": 42, "p99": 43}}',
        updated_at = updated_at + interval '2 minutes', alive_until = now() + interval '12 minutes'
    where gateway = 'other'
"""


async def test_the_browsers_clock_may_be_wrong(served: Served, page: Page) -> None:
    await page.add_init_script("const now = Date.now; Date.now = () => now() + 400_000")
    await opened(page, served, "overview")
    await expect(page.locator("svg.plot polyline").first).to_be_attached()


async def test_the_history_continues_after_its_time_limit(
    served: Served, page: Page, connection: Connection
) -> None:
    await connection.execute("update customers set city = 'Olten' where id = 9")

    async def first_part(route: Route) -> None:
        if "before=" in route.request.url:
            await route.continue_()
        else:
            log = {"changes": [], "scanned": 9, "before": "999999999.1", "searched_to": None}
            await route.fulfill(json={"log": log, "lake": None, "command": "", "lake_error": None})

    await page.route("**/v1/admin/history/**", first_part)
    await opened(page, served, "history?table=customers&key=9")
    await expect(page.locator("main")).to_contain_text("the log has more to search")
    await page.get_by_role("button", name="Older changes").click()
    await expect(page.locator("ins")).to_have_text("Olten")
    await expect(page.locator("main")).to_contain_text("1 version in the log.")
    await expect(page.get_by_role("button", name="Older changes")).to_be_hidden()


async def follows(page: Page, connection: Connection) -> None:
    """Follow the log, and see the changes that are written from then on."""
    await page.get_by_role("button", name="Follow").click()
    following = page.get_by_role("button", name="Following")
    await expect(following).to_have_attribute("aria-pressed", "true")
    await connection.execute("set headwater.user_id = 'dora'")
    await connection.execute("update customers set name = 'Called' where id = 3")
    await expect(page.locator(".changes > li").first).to_contain_text("Called")
    await expect(page.locator(".changes > li").first).to_contain_text("dora")


async def test_the_change_log(served: Served, page: Page, connection: Connection) -> None:
    await opened(page, served, "log?table=public.customers")
    changes = page.locator(".changes > li")
    await follows(page, connection)
    # Values that look the same can be distinguished.
    await connection.execute("update customers set city = null where id = 3")
    await expect(changes.first.locator("ins.null")).to_have_text("null")
    await connection.execute("update customers set city = 'null' where id = 3")
    await expect(changes.first.locator("ins")).to_have_text('"null"')
    await page.get_by_role("button", name="Following").click()

    # Older changes belong to the same search, also if the fields have changed by now.
    await connection.execute("update customers set name = name || '!' where id <> 4")
    await connection.execute("update customers set name = name || '!' where id <> 4")
    await page.get_by_role("button", name="Search").click()
    await expect(page.locator("main")).to_contain_text("50 changes, the newest first.")
    await page.get_by_label("Text").fill("nowhere")
    await page.get_by_role("button", name="Older changes").click()
    await expect(page.locator("main")).to_contain_text("there are no more")
    assert await changes.count() > 80  # of 39 rows, twice, and some

    # A value of a row is shown as text, also if it looks like HTML.
    await connection.execute("update customers set name = '<i id=bad>x</i>' where id = 4")
    await page.get_by_label("Text").fill("<I ID=bad>")
    await page.get_by_role("button", name="Search").click()
    await expect(changes).to_have_count(1)
    await expect(changes.locator("ins")).to_have_text("<i id=bad>x</i>")
    assert await page.locator("#bad").count() == 0
    await changes.get_by_role("link", name="4").click()
    await page.wait_for_selector("main[data-ready=history]")
    await expect(page.locator(".changes > li")).to_have_count(1)

    # A refused request is an error in the browser's console: so it needs a tab of its own.
    other = await page.context.new_page()
    await opened(other, served, "log?table=nothing")
    await expect(other.get_by_role("alert")).to_contain_text("headwater enable nothing")
    # The results stay when the search for more fails.
    await opened(other, served, "log?table=customers")
    await expect(other.locator(".changes > li")).to_have_count(50)
    await other.route("**/v1/admin/log?**", lambda route: route.abort())
    await other.get_by_role("button", name="Older changes").click()
    await expect(other.get_by_role("alert")).to_contain_text("does not answer")
    await expect(other.locator(".changes > li")).to_have_count(50)


async def test_the_playground(served: Served, page: Page, connection: Connection) -> None:
    await opened(page, served, "playground")
    await page.get_by_label("Table").fill("customers")
    await page.get_by_role("button", name="Add a condition").click()
    await page.get_by_label("Column", exact=True).fill("id")
    await page.get_by_label("Operator").select_option("<=")
    await page.get_by_label("Value").fill("5")
    await page.get_by_role("button", name="Add a column").click()
    await page.get_by_label("Order by").fill("name")
    await page.get_by_label("Direction").select_option("desc")
    query = '{"table":"customers","where":[["id","<=",5]],"order":[["name","desc"]],"limit":20}'
    written = await page.locator("textarea").input_value()
    assert "".join(written.split()) == query
    await page.get_by_role("button", name="Run").click()
    await expect(page.locator("main")).to_contain_text("5 rows, live")
    await expect(page.locator("main")).to_contain_text("range: id ≤ 5")
    await expect(page.locator("main")).to_contain_text('where "id" <= $1')
    await expect(page.locator("main")).to_contain_text("create index on customers (name desc, id)")

    await connection.execute("update customers set name = 'zz' where id = 1")
    await expect(page.locator("[aria-label=Deltas] > li").first).to_contain_text("move")
    await expect(page.locator("tbody tr").first).to_contain_text("zz")
    await connection.execute("delete from customers where id = 1")
    await expect(page.locator("[aria-label=Deltas] > li").first).to_contain_text("leave")
    await expect(page.locator("main")).to_contain_text("4 rows, live")

    other = await page.context.new_page()
    await opened(other, served, "playground")
    await other.locator("textarea").fill('{"table": "customers", "where": [["nothing", "=", 1]]}')
    await other.get_by_role("button", name="Run").click()
    await expect(other.get_by_role("alert").first).to_contain_text("nothing")


async def test_a_suggested_table_does_not_replace_typed_text(served: Served, page: Page) -> None:
    tables = asyncio.Event()

    async def later(route: Route) -> None:
        await tables.wait()
        await route.continue_()

    await page.route("**/v1/admin/tables", later)
    await page.goto(f"{served.url}/console/#/playground")
    await page.get_by_label("Table").focus()
    async with page.expect_response("**/v1/admin/tables"):
        tables.set()
    await expect(page.locator("datalist option[value=customers]").first).to_be_attached()
    assert await page.get_by_label("Table").input_value() == ""


async def test_a_query_is_sent_as_it_is_written(served: Served, page: Page) -> None:
    await opened(page, served, "views")
    await page.locator("tr", has_text="9007199254740993").get_by_role("link").click()
    await page.wait_for_selector("main[data-ready=playground]")
    await expect(page.locator("main")).to_contain_text("1 row, live")
    await expect(page.locator("tbody td").first).to_have_text("9007199254740993")
    await expect(page.locator("main")).to_contain_text("$1 = 9007199254740993")

    written, limit = page.locator("textarea"), page.get_by_label("At most")

    async def shown() -> str:
        return "".join((await written.input_value()).split())

    texts = '[["a","=","123"],["b","=","null"],["c","=",9007199254740993],["d","=","x"]]'
    await written.fill(f'{{"table":"t","where":{texts},"order":["e desc",["f"]]}}')
    await limit.fill("6")
    order = '[["e","desc"],["f","asc"]]'
    assert await shown() == f'{{"table":"t","where":{texts},"order":{order},"limit":6}}'
    for more in (
        '"where":{"or":[["a","=",1],["b","=",2]]}',
        '"where":[["a","=",1],{"not":["b","=",2]}]',
        '"order":["e desc nulls last"]',
        '"mode":"streamed"',
    ):
        await written.fill(f'{{"table":"t",{more}}}')
        await expect(limit).to_be_disabled()
        await expect(page.get_by_label("Table")).to_be_disabled()
        await expect(page.locator("main")).to_contain_text("the form cannot show")
    await written.fill('{"table":"t"}')
    await expect(limit).to_be_enabled()


async def test_the_keyboard_is_enough(served: Served, page: Page) -> None:
    async def focused() -> Any:
        return await page.evaluate("document.activeElement.textContent.trim()")

    await opened(page, served, "overview")
    await page.keyboard.press("Tab")
    assert await focused() == "Skip to the content"
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "main"

    await page.locator("nav a").first.focus()
    await page.keyboard.press("ArrowDown")
    assert await focused() == "Tables"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert await page.evaluate(outline) == "solid"
    await page.keyboard.press("Enter")
    await page.wait_for_selector("main[data-ready=tables]")
    assert await page.locator("nav a[aria-current=page]").text_content() == "Tables"
    await page.locator("nav a", has_text="Tables").focus()
    await page.keyboard.press("End")
    assert await focused() == "Playground"

    colour = "getComputedStyle(document.body).backgroundColor"
    theme = page.get_by_role("button", name="Theme")
    await theme.focus()
    await page.keyboard.press("Enter")
    light = await page.evaluate(colour)
    await page.keyboard.press("Enter")
    assert await page.evaluate(colour) != light
    await page.reload()
    await expect(theme).to_have_accessible_name("Theme: dark")

    width, height = SIZES["phone"]
    await page.set_viewport_size({"width": width, "height": height})
    menu = page.get_by_role("button", name="Menu")
    await expect(page.locator("nav")).to_be_hidden()
    await menu.focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("nav")).to_be_visible()
    assert await overflow(page) == 0
    await page.keyboard.press("Escape")
    await expect(page.locator("nav")).to_be_hidden()
    assert await focused() == "Menu"


def token(**claims: Any) -> str:
    return jwt.encode({"sub": "ann", "exp": time.time() + 600, **claims}, SECRET, "HS256")


async def test_a_token_is_asked_for(
    url: str, tmp_path: Path, context: BrowserContext, connection: Connection
) -> None:
    page = await context.new_page()  # Refused requests are errors in the browser's console.
    async with busy(url, tmp_path, auth_secret=SECRET, user_token=token()) as served:
        await page.goto(f"{served.url}/console/#/sessions")
        await expect(page.get_by_role("heading")).to_have_text("A token is needed")
        assert await page.get_by_role("alert").count() == 0
        field = page.get_by_label("Token")
        await expect(field).to_be_focused()
        for wrong, why in [("nonsense", "three parts"), (token(), "for admins only")]:
            await field.fill(wrong)
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("alert")).to_contain_text(why)
            assert await page.evaluate("sessionStorage.length") == 0
        await expect(page.get_by_role("alert")).to_contain_text("headwater_admin")
        await field.fill(token(sub="root", headwater_admin=True))
        await page.keyboard.press("Enter")
        await page.wait_for_selector("main[data-ready=sessions]")
        await expect(page.locator("td >> text=ann").first).to_be_visible()
        await page.reload()
        await page.wait_for_selector("main[data-ready=sessions]")
        assert await page.evaluate("localStorage.length") == 1  # the theme

        # The hook hides the table from this user; an admin may read the log nevertheless.
        await opened(page, served, "log?table=public.customers")
        await follows(page, connection)


async def test_no_token_is_asked_for_where_none_would_help(
    url: str, tmp_path: Path, context: BrowserContext
) -> None:
    page = await context.new_page()  # Refused requests are errors in the browser's console.
    with serving(url, tmp_path, options=["--insecure"]) as served:
        await page.goto(f"{served.url}/console/")
        await expect(page.get_by_role("alert")).to_contain_text("Configure authentication")
        assert await page.get_by_label("Token").count() == 0


async def test_below_another_path(url: str, context: BrowserContext) -> None:
    page = await context.new_page()  # Refused requests are errors in the browser's console.
    hw = Headwater(url, auth_secret=SECRET)
    app = Starlette(routes=[Mount("/data", hw.asgi())], lifespan=hw.lifespan)
    async with hw, ours(app) as port:
        await page.goto(f"http://127.0.0.1:{port}/data/console/")
        await page.get_by_label("Token").fill(token(headwater_admin=True))
        await page.keyboard.press("Enter")
        await page.wait_for_selector("main[data-ready=overview]")
        await expect(page.locator("#link")).to_have_text("Connected")
