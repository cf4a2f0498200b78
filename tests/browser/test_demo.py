"""The demo in Chromium: what a visitor sees, also when parts of it are restarted."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, LiteralString

import httpx
import jwt
import psycopg
import pytest
from playwright.async_api import Browser, BrowserContext, Error, Locator, Page, expect

from headwater import Forbidden, connect
from tests.browser.conftest import SIZES, overflow
from tests.support.applications.demo import Demo, opened
from tests.support.applications.shop import until
from tests.support.databases import passable_folder

ORDER = """
    insert into orders (item, customer, region, status, amount)
    values ('Samovar', 'You', %s, 'new', %s) returning id
"""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """A shop for the tests that do not change it."""
    with passable_folder() as folder, opened(folder, "--no-pipeline") as demo:
        yield demo


@pytest.fixture
def own_demo() -> Iterator[Demo]:
    """A shop that the test may change."""
    with passable_folder() as folder, opened(folder, "--no-pipeline") as demo:
        yield demo


async def look(page: Page, demo: Demo) -> None:
    """Open the page with the largest orders first, so that what a test writes is on top."""
    await page.goto(demo.page)
    await page.select_option("[name=order]", "amount desc")
    await expect(page.locator("#manager .line:not(.leaving)")).to_have_count(8)


def line(page: Page, board: str, id: int) -> Locator:
    return page.locator(f"#{board} .line[data-id='{id}']:not(.leaving)")


async def seen(page: Page, board: str, id: int, *, at: int | None = None) -> None:
    """The order is on the board; at that place, if one is given."""
    if at is None:
        await expect(line(page, board, id)).to_have_count(1)
    else:
        rows = page.locator(f"#{board} .line:not(.leaving)")
        await expect(rows.nth(at)).to_have_attribute("data-id", str(id))


async def unseen(page: Page, board: str, id: int) -> None:
    await expect(line(page, board, id)).to_have_count(0)


async def found(demo: Demo, statement: LiteralString, *values: Any) -> Any:
    """The result of the statement, once there is one."""
    while (value := demo.write(statement, *values)) is None:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.05)
    return value


async def test_the_board_follows_psql(page: Page, demo: Demo) -> None:
    await look(page, demo)
    order = """
        insert into orders (item, customer, region, status, amount)
        values ('Samovar', 'You', 'north', 'new', 9000), ('Kettle', 'You', 'north', 'new', 8000)
        returning id
    """
    first, second = map(int, demo.psql(order).split())
    await seen(page, "manager", first, at=0)
    await seen(page, "manager", second, at=1)
    demo.psql(f"update orders set amount = 9500, status = 'shipped' where id = {second}")
    await seen(page, "manager", second, at=0)
    await expect(line(page, "manager", second)).to_contain_text("shipped")
    await expect(line(page, "manager", second)).to_contain_text("9,500.00")
    demo.psql(f"delete from orders where id in ({first}, {second})")
    await unseen(page, "manager", first)
    await unseen(page, "manager", second)


async def test_filter_order_and_limit_can_be_changed(page: Page, demo: Demo) -> None:
    await look(page, demo)
    new, shipped = demo.write(ORDER, "east", 7001), demo.write(ORDER, "north", 7000)
    # The demo itself advances every order, except those that are shipped.
    demo.write("update orders set status = 'shipped' where id = %s", shipped)
    await seen(page, "manager", shipped, at=1)
    await page.get_by_text("Shipped", exact=True).click()
    await seen(page, "manager", shipped, at=0)
    await unseen(page, "manager", new)
    await page.get_by_text("All", exact=True).click()
    await page.select_option("[name=region]", "east")
    await seen(page, "manager", new, at=0)
    await expect(page.locator("#clerk .empty")).to_be_visible()
    await page.select_option("[name=region]", "")
    await page.select_option("[name=limit]", "20")
    await expect(page.locator("#manager .line:not(.leaving)")).to_have_count(20)
    await page.select_option("[name=order]", "amount")
    await unseen(page, "manager", new)
    await page.fill("[name=least]", "300")
    await seen(page, "manager", new)
    demo.write("delete from orders where id = any(%s)", [new, shipped])


async def test_each_user_sees_the_rows_that_the_database_allows(page: Page, demo: Demo) -> None:
    await look(page, demo)
    order = demo.write(ORDER, "south", 6000)
    await seen(page, "manager", order, at=0)
    await unseen(page, "clerk", order)
    demo.write("update orders set region = 'north' where id = %s", order)
    await seen(page, "clerk", order, at=0)
    demo.write("update orders set region = 'west' where id = %s", order)
    await unseen(page, "clerk", order)
    await seen(page, "manager", order, at=0)
    regions = await page.locator("#clerk .line .region").all_inner_texts()
    assert set(regions) == {"north"}
    await page.select_option("[name=order]", "id desc")
    await page.locator("#clerk").get_by_text("New order").click()
    # The clerk may see the clerk's own order, so it is the newest for both.
    placed = await found(
        demo, "select (key ->> 'id')::int from headwater.changes where user_id = 'Nils'"
    )
    await seen(page, "clerk", placed)
    demo.write("delete from orders where id = %s", order)


async def test_a_burst_of_a_thousand_writes(page: Page, demo: Demo) -> None:
    await look(page, demo)
    written = "select count(*) from headwater.changes where function_name = 'trade'"
    before = demo.write(written)
    await page.click("#burst")
    await expect(page.locator("#note")).to_contain_text("1,000 rows written")
    assert demo.write(written) - before == 1000
    order = demo.write(ORDER, "north", 5000)
    for board in ("manager", "clerk"):
        await seen(page, board, order, at=0)
        await expect(page.locator(f"#{board} .leaving")).to_have_count(0)
    await expect(page.locator("#manager .line:not(.leaving)")).to_have_count(8)
    demo.write("delete from orders where id = %s", order)


async def test_the_latency_is_shown(page: Page, demo: Demo) -> None:
    await look(page, demo)
    for id in ("p50", "p95"):
        await expect(page.locator(f"#{id}")).to_contain_text(" ms")
    await expect(page.locator("#latency .line")).to_have_attribute("d", re.compile("M.*L"))


async def test_the_chat_answers_word_by_word(page: Page, demo: Demo) -> None:
    await look(page, demo)
    await expect(page.locator(".message").last).to_be_visible()  # earlier messages
    await page.evaluate(WATCH_THE_CHAT)
    await page.fill("#say input", "How does this work?")
    await page.press("#say input", "Enter")
    await expect(page.locator(".message.visitor").last).to_have_text("How does this work?")
    answer = page.locator(".message.assistant").last
    await expect(answer).to_contain_text("that follows this room gets it.")
    await expect(answer).to_have_class("message assistant")
    lengths = await page.evaluate("window.lengths")
    assert len(set(lengths)) > 3
    assert lengths == sorted(lengths)
    # A visitor who comes later sees the earlier messages.
    await page.reload()
    await expect(page.locator(".message.assistant").last).to_contain_text(
        "that follows this room gets it."
    )


WATCH_THE_CHAT = """
    () => {
      const list = document.getElementById("messages");
      window.lengths = [];
      new MutationObserver(() => {
        const last = list.lastElementChild;
        if (last.matches(".assistant")) window.lengths.push(last.textContent.length);
      }).observe(list, { childList: true, subtree: true, characterData: true });
    }
"""


async def test_the_assistant_answers_with_the_rights_of_the_user(demo: Demo) -> None:
    order = demo.write(ORDER, "south", 77_777)
    answer = """
        select content from messages
        where room = %s and author = 'assistant' and state = 'done' and content like '%%largest%%'
    """
    for person, knows in (("Nils", False), ("Mira", True)):
        role = "clerk" if person == "Nils" else "manager"
        async with connect(demo.home, token=token_of(demo, role)) as client:
            await client.mutate("say", text="Which is the largest?")
            reply = await found(demo, answer, person)
            assert ("77777" in reply) is knows
            said = await client.query("said_before")
            assert {row["room"] for row in said} == {person}
    demo.write("delete from orders where id = %s", order)


async def test_a_room_is_only_for_its_members(demo: Demo) -> None:
    demo.write("insert into messages (room, author) values ('Mira', 'assistant')")
    async with connect(demo.home, token=token_of(demo, "clerk")) as client:
        async with client.topic("chat:Nils"):
            pass
        with pytest.raises(Forbidden, match="you may not follow topic chat:Mira"):
            async with client.topic("chat:Mira"):
                pass
        async with client.live("messages") as messages:
            assert {row["room"] for row in messages.rows} == {"Nils"}


def token_of(demo: Demo, person: str) -> str:
    answer = httpx.post(f"{demo.home}/demo/tokens/{person}", trust_env=False)
    token: str = answer.json()["token"]
    return token


async def test_a_link_leads_to_the_console(context: BrowserContext, demo: Demo) -> None:
    page = await context.new_page()
    await look(page, demo)
    await page.get_by_text("Console", exact=True).click()
    await page.wait_for_url("**/console/")
    token = await page.evaluate("sessionStorage.getItem('headwater.token')")
    claims = jwt.decode(token, options={"verify_signature": False})
    assert (claims["sub"], claims["headwater_admin"]) == ("Mira", True)
    # A token that has expired is renewed, and the console stays on its page.
    ended = jwt.encode(claims | {"exp": 1}, "x" * 32, algorithm="HS256")
    await page.evaluate("token => sessionStorage.setItem('headwater.token', token)", ended)
    await page.evaluate("location.hash = '#/tables'")
    with suppress(Error):  # the page goes elsewhere before it has loaded
        await page.reload(wait_until="commit")
    await page.wait_for_url("**/console/#/tables")
    await expect(page.locator("main[data-ready=tables]")).to_be_visible()
    assert await page.evaluate("sessionStorage.getItem('headwater.token')") != ended


async def test_a_refused_user_can_try_again(context: BrowserContext, demo: Demo) -> None:
    page = await context.new_page()
    await page.route("**/demo/tokens/*", lambda route: route.fulfill(json={"token": "wrong"}))
    await page.goto(demo.page)
    again = page.get_by_role("button", name="Try again")
    await expect(again).to_be_visible()
    await expect(page.locator("#link")).to_have_text("Lost")
    await page.unroute("**/demo/tokens/*")
    await again.focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#link")).to_have_text("Live")
    await expect(again).to_be_hidden()


async def test_nothing_moves_with_reduced_motion(browser: Browser, demo: Demo) -> None:
    context = await browser.new_context(reduced_motion="reduce")
    page = await context.new_page()
    await look(page, demo)
    order = demo.write(ORDER, "north", 4000)
    await seen(page, "manager", order, at=0)
    assert await page.evaluate("document.getAnimations().length") == 0
    demo.write("delete from orders where id = %s", order)
    await context.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_nothing_overflows(browser: Browser, demo: Demo, size: str, scheme: str) -> None:
    width, height = SIZES[size]
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page = await context.new_page()
    await look(page, demo)
    assert await overflow(page) == 0
    clipped = await page.evaluate(CLIPPED)
    assert clipped == []
    await context.close()


CLIPPED = """
    () => [...document.querySelectorAll("h2, button, .status, .amount, .region, dd")]
      .filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0)
      .map(each => each.textContent)
"""


async def test_memory_stays_flat_over_ten_thousand_updates(page: Page, demo: Demo) -> None:
    await look(page, demo)
    devtools = await page.context.new_cdp_session(page)
    ids = [demo.write(ORDER, "north", 3000 + number) for number in range(8)]
    await seen(page, "clerk", ids[-1], at=0)

    async def used() -> tuple[float, float]:
        """Bytes of objects, and nodes of documents, that are still referenced."""
        await devtools.send("HeapProfiler.collectGarbage")
        found = await devtools.send("Performance.getMetrics")
        metrics = {each["name"]: each["value"] for each in found["metrics"]}
        return metrics["JSHeapUsedSize"], metrics["Nodes"]

    await devtools.send("Performance.enable")
    await asyncio.to_thread(update, demo, ids, 1_000)
    await expect(line(page, "manager", ids[0])).to_contain_text("3,125.00")
    heap, nodes = await used()
    await asyncio.to_thread(update, demo, ids, 10_000)
    await expect(line(page, "manager", ids[0])).to_contain_text("4,375.00")
    heap_after, nodes_after = await used()
    assert heap_after < heap * 1.3
    assert nodes_after < nodes * 1.3
    demo.write("delete from orders where id = any(%s)", ids)


def update(demo: Demo, ids: list[int], times: int) -> None:
    """Add 1 to the amounts of orders, one after the other, this many times in all."""
    with psycopg.connect(demo.postgres.url, autocommit=True) as connection:
        connection.execute("set synchronous_commit = off")
        for number in range(times):
            id = ids[number % len(ids)]
            connection.execute("update orders set amount = amount + 1 where id = %s", (id,))


async def test_ten_tabs_use_one_connection(context: BrowserContext, demo: Demo) -> None:
    """One for each of the two people. When the tab that holds them closes, another takes over."""
    await until(lambda: demo.sessions() == 0)
    tabs = [await context.new_page() for _ in range(10)]
    for tab in tabs:
        await tab.goto(demo.page)
        await tab.select_option("[name=order]", "amount desc")
    first = demo.write(ORDER, "north", 9000)
    for tab in tabs:
        await seen(tab, "manager", first, at=0)
        await seen(tab, "clerk", first, at=0)
    assert demo.sessions() == 2
    await tabs[0].close()
    second = demo.write(ORDER, "north", 9001)
    for tab in tabs[1:]:
        await seen(tab, "manager", second, at=0)
        await seen(tab, "clerk", second, at=0)
    await until(lambda: demo.sessions() == 2)
    demo.write("delete from orders where id in (%s, %s)", first, second)


# ------------------------------------------------------------------------ what is restarted


async def test_restarts_need_no_reload(context: BrowserContext, own_demo: Demo) -> None:
    """The gateway is killed and started again, with another key for its tokens; then PostgreSQL is
    restarted."""
    demo, page = own_demo, await context.new_page()
    await look(page, demo)
    await page.evaluate("window.stillTheSame = true")
    demo.close(signal.SIGKILL)
    await expect(page.locator("#link")).to_have_text("Connecting")
    demo.open(demo.port)
    first = demo.write(ORDER, "north", 9000)
    await seen(page, "manager", first, at=0)
    await seen(page, "clerk", first, at=0)
    await expect(page.locator("#link")).to_have_text("Live")

    postgres = demo.postgres
    await asyncio.to_thread(postgres.restart)
    second = demo.write(ORDER, "north", 9001)
    await seen(page, "manager", second, at=0)
    await seen(page, "clerk", second, at=0)
    demo.write("delete from orders where id = %s", first)
    await unseen(page, "manager", first)
    # The demo also continues to write by itself.
    latest = demo.write("select max(seq) from headwater.changes")
    await found(demo, "select seq from headwater.changes where seq > %s", latest)
    postgres.close()
    assert await page.evaluate("window.stillTheSame")


# ------------------------------------------------------------------------ the command


def test_the_other_routes_of_the_demo(demo: Demo) -> None:
    def get(path: str, **options: str) -> httpx.Response:
        return httpx.get(demo.home + path, trust_env=False, headers=options)

    assert get("/").headers["location"] == "/demo/"
    assert get("/demo/about").json()["psql"].endswith(f"'{demo.postgres.url}'")
    assert get("/demo/about").json()["lake"] is None
    assert get("/readyz").json()["status"] == "ok"
    unknown = httpx.post(f"{demo.home}/demo/tokens/unknown", trust_env=False)
    assert unknown.status_code == 404
    # A page of another host whose name points to this machine gets no token.
    foreign = httpx.post(
        f"{demo.home}/demo/tokens/manager", trust_env=False, headers={"host": "shop.example"}
    )
    assert foreign.status_code == 403


def test_the_clerk_is_bound_by_the_database(demo: Demo) -> None:
    """Independent of the gateway: as that role, other regions do not exist."""
    claims = "select set_config('request.jwt.claims', '{\"region\": \"north\"}', false)"
    with psycopg.connect(demo.postgres.url, autocommit=True) as connection:
        connection.execute("set role shop_clerk")
        connection.execute(claims)
        regions = connection.execute("select distinct region from orders").fetchall()
        assert regions == [("north",)]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(ORDER, ("south", 1))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("select from headwater.pipeline")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_command_prints_its_steps_and_stops(own_demo: Demo, number: signal.Signals) -> None:
    own_demo.process.send_signal(number)
    own_demo.wait_for("Closing the shop")
    # A supervisor, or a closed terminal, may not wait for its end.
    own_demo.process.send_signal(signal.SIGHUP)
    assert own_demo.close(signal.SIGTERM) == 0
    said = "\n".join(own_demo.said)
    assert "The shop is open" in said
    assert f"console    {own_demo.home}/demo/console.html" in said
    assert own_demo.postgres.url in said
    assert own_demo.said[-1] == "Closing the shop …"
    assert own_demo.postgres.pid is None


def test_a_port_that_was_asked_for_and_is_taken_is_an_error(demo: Demo) -> None:
    command = [sys.executable, "-m", "headwater", "demo", "--no-pipeline", "--no-browser"]
    with passable_folder() as folder:
        place = ["--port", str(demo.port), "--data-dir", str(folder / "shop")]
        done = subprocess.run([*command, *place], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{demo.port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_only_one_demo_runs_in_a_folder(demo: Demo) -> None:
    command = [sys.executable, "-m", "headwater", "demo", "--no-pipeline", "--no-browser"]
    place = ["--port", "0", "--data-dir", str(demo.data)]
    done = subprocess.run([*command, *place], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"the demo is already running in this data folder: {demo.page}" in done.stderr
    assert "--data-dir" in done.stderr
    assert "Traceback" not in done.stderr
    assert demo.write("select 1") == 1  # the first has lost nothing


def test_another_port_is_used_if_the_usual_one_is_taken() -> None:
    with socket.socket() as taken, passable_folder() as folder:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8484))
            taken.listen()
        except OSError:
            pass  # another process uses it, which serves the test as well
        demo = Demo(folder, "--no-pipeline", "--seconds", "0.1", port=None)
        assert demo.port != 8484
        assert demo.close() == 0


# ------------------------------------------------------------------------ with Spark


def processes(word: str) -> list[str]:
    """Those that have this word in their command line."""
    listed = subprocess.run(
        ["ps", "-eww", "-o", "args="], capture_output=True, text=True, check=True
    )
    return [line for line in listed.stdout.splitlines() if word in line]


async def test_the_view_comes_when_spark_is_up(context: BrowserContext) -> None:
    with passable_folder() as folder, opened(folder) as demo:
        page = await context.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        await look(page, demo)
        await expect(page.locator("#starting")).to_be_visible()
        await expect(page.locator("#pipeline")).to_have_text("Spark is starting")
        bars = page.locator(".bar")
        await expect(bars).to_have_count(4, timeout=200_000)
        await expect(page.locator("#starting")).to_be_hidden()
        order = demo.write(ORDER, "north", 1_000_000)
        north = page.locator(".bar[data-region=north] .amount").first
        await expect(north).to_contain_text("1,00")
        demo.write("delete from orders where id = %s", order)
        await expect(north).not_to_contain_text("1,00")
        assert complaints == []
        assert demo.close() == 0
        assert f"writes every change to {demo.lake}" in "\n".join(demo.said)
        assert processes(str(folder)) == []
