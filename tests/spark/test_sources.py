"""The application of examples/sources: orders in MariaDB, stock in SQLite, customers in PostgreSQL.

One gateway serves it. Live queries over each, joins between them, a topic, a streaming view and the
past of the mirrors follow what is written to the three databases. The documentation shows the same
files.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headwater import Headwater, connect
from headwater.pipeline.jobs.plan import JOBS, views_job
from headwater.pipeline.reading.lake import Lake
from headwater.settings.groups import GatewaySettings
from headwater.testing.gateway_process import Served, serving
from tests.support.lake.tables import execute, run_once
from tests.support.mariadb import MariaDB, running_mariadb
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "sources"
PAGE = ROOT / "docs" / "tutorial-sources.md"
WAIT_SECONDS = 60.0

pytestmark = pytest.mark.timeout(300)


class Shop:
    """The three databases, the folder of the example, and a gateway over it."""

    def __init__(self, folder: Path, url: str, mariadb: MariaDB) -> None:
        self.folder = folder
        self.url = url
        self.mariadb = mariadb

    def create(self) -> None:
        for file in EXAMPLE.iterdir():
            if file.is_file():
                shutil.copy(file, self.folder)
        self.mariadb.run(*statements("shop.sql"))
        self.write_stock(*statements("warehouse.sql"))
        execute(self.url, *statements("customers.sql"))

    def write_stock(self, *written: str) -> None:
        with closing(sqlite3.connect(self.folder / "warehouse.db")) as file, file:
            for statement in written:
                file.execute(statement)

    def write_orders(self, *written: str) -> None:
        self.mariadb.run(*written, database="shop")

    @property
    def hw(self) -> Headwater:
        """The application in this process, for the pipeline."""
        values: dict[str, Any] = {"__name__": "shop"}
        exec(compile((EXAMPLE / "shop.py").read_text(), "shop.py", "exec"), values)
        hw: Headwater = values["hw"]
        return hw


def statements(name: str) -> list[str]:
    lines = [line for line in (EXAMPLE / name).read_text().splitlines() if line[:2] != "--"]
    return [text for text in "\n".join(lines).split(";") if text.strip()]


@pytest.fixture
def shop(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    with running_mariadb() as mariadb:
        shop = Shop(tmp_path, url, mariadb)
        shop.create()
        monkeypatch.setenv("SHOP_PASSWORD", "only for the example")
        monkeypatch.setenv("SHOP_ADDRESS", f"127.0.0.1:{mariadb.port}")
        monkeypatch.setenv("HEADWATER_URL", url)
        yield shop


@pytest.fixture
def gateway(shop: Shop) -> Iterator[Served]:
    """Of the application, when all tables are copied."""
    with serving(shop.url, shop.folder, program="shop:hw") as gateway:
        deadline = time.monotonic() + WAIT_SECONDS
        while (states := _states(shop.url)) != {"shop": "running", "warehouse": "running"}:
            assert time.monotonic() < deadline, (states, gateway.log.read_text())
            time.sleep(0.05)
        yield gateway


def _states(url: str) -> dict[str, str]:
    return dict(execute(url, "select name, state from headwater.sources"))


@asynccontextmanager
async def following(gateway: Served) -> AsyncIterator[dict[str, Any]]:
    """Everything that the example's clients follow."""
    async with AsyncExitStack() as stack:
        live = await stack.enter_async_context(connect(gateway.url))
        followed: dict[str, Any] = {
            "orders": live.live("shop.orders", order="id desc", limit=5),
            "stock": live.live("warehouse.stock", order="sku"),
            "customers": live.live("customers", order="id"),
            "open_orders": live.subscribe("open_orders"),
            "shortages": live.subscribe("shortages"),
            "topic": live.topic("customer:1"),
        }
        for each in followed.values():
            await stack.enter_async_context(each)
        yield followed | {"live": live}


async def until(condition: Callable[[], bool], report: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, report()
        await asyncio.sleep(0.01)


async def test_live_queries_joins_and_a_topic(shop: Shop, gateway: Served) -> None:
    async with following(gateway) as followed:
        orders, stock, customers = followed["orders"], followed["stock"], followed["customers"]
        waiting, missing, topic = followed["open_orders"], followed["shortages"], followed["topic"]

        def names() -> list[Any]:
            return [(row["id"], row["name"]) for row in waiting.value]

        assert [row["id"] for row in orders.rows] == [2, 1]
        assert [(row["sku"], row["quantity"]) for row in stock.rows] == [("cup", 0), ("tea", 5)]
        assert names() == [(1, "Ann"), (2, "Bob")]
        assert [(row["sku"], row["missing"]) for row in missing.value] == [("cup", 1)]

        # MariaDB: the live query, both joins and the topic follow.
        shop.write_orders(
            "insert into orders (customer_id, sku, quantity, amount) values (1, 'tea', 9, 37.80)"
        )
        await until(lambda: len(orders.rows) == 3, lambda: orders.rows)
        assert str(orders.rows[0]["amount"]) == "37.80"
        await until(lambda: names() == [(1, "Ann"), (2, "Bob"), (3, "Ann")], names)
        await until(lambda: len(missing.value) == 2, lambda: missing.value)
        await until(lambda: len(topic.rows("shop.orders")) == 1, lambda: topic.rows("shop.orders"))

        # SQLite: the live query and its join.
        shop.write_stock("update stock set quantity = 100")
        await until(lambda: [r["quantity"] for r in stock.rows] == [100, 100], lambda: stock.rows)
        await until(lambda: missing.value == [], lambda: missing.value)

        # PostgreSQL: the live query and the join with MariaDB.
        execute(shop.url, "update customers set name = 'Anna' where id = 1")
        await until(lambda: customers.rows[0]["name"] == "Anna", lambda: customers.rows)
        await until(lambda: names() == [(1, "Anna"), (2, "Bob"), (3, "Anna")], names)
        shop.write_orders("update orders set status = 'sent' where id < 3", "delete from orders")
        await until(lambda: (orders.rows, waiting.value) == ([], []), lambda: waiting.value)


async def test_a_streaming_view_and_the_past(
    shop: Shop, gateway: Served, spark: SparkSession
) -> None:
    lake = Lake(str(shop.folder / "lake"), spark)
    view = shop.hw.views["revenue"]

    def pipeline() -> None:
        run_once(spark, shop.url, lake, jobs=(*JOBS, views_job([view])))

    await asyncio.to_thread(pipeline)
    async with connect(gateway.url) as live, live.live("revenue", order="region") as revenue:

        def found() -> list[tuple[Any, ...]]:
            return [(row["region"], Decimal(row["revenue"]), row["orders"]) for row in revenue.rows]

        assert found() == [("east", Decimal("9.00"), 1), ("west", Decimal("8.40"), 1)]
        before = datetime.now(UTC)
        shop.write_orders("update orders set amount = 10 where id = 1")
        shop.write_stock("update stock set quantity = 3 where sku = 'tea'")
        execute(shop.url, "update customers set region = 'west'")
        await until(lambda: arrived(shop.url), lambda: execute(shop.url, CHANGES))
        await asyncio.to_thread(pipeline)
        await until(lambda: found() == [("west", Decimal("19.00"), 2)], found)

    def past() -> None:
        whole = Lake(lake.root, spark, url=shop.url)

        def rows(table: str, when: datetime) -> dict[Any, Any]:
            return {row[0]: row[-2:] for row in whole.as_of(table, when).collect()}

        assert rows("shop.orders", before)[1] == (Decimal("8.40"), "open")
        assert rows("shop.orders", datetime.now(UTC))[1] == (Decimal("10.00"), "open")
        assert rows("warehouse.stock", before) == {"tea": ("Tea", 5), "cup": ("Cup", 0)}
        last = whole.history("shop.orders", 1).collect()[-1]
        assert (last["op"], last["source"]) == ("update", "shop")
        assert last["source_position"]

    await asyncio.to_thread(past)


CHANGES = """
    select source, table_name, op, source_position from headwater.changes
    where op <> 'reset' order by seq
"""


def arrived(url: str) -> bool:
    found = {(source, table) for source, table, _, _ in execute(url, CHANGES)}
    return found >= {("shop", "orders"), ("warehouse", "stock"), (None, "customers")}


def test_the_watcher_of_the_example(shop: Shop, gateway: Served) -> None:
    environment = os.environ | {"SHOP_URL": gateway.url, "PYTHONUNBUFFERED": "1"}
    watcher = subprocess.Popen(
        [sys.executable, "watch.py"], cwd=shop.folder, env=environment, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert watcher.stdout is not None
    try:
        lines: set[str] = set()
        for line in watcher.stdout:
            lines.add(re.split(r" [\[{]", line)[0])
            if len(lines) == 5:  # all but the topic
                break
        assert lines == {"orders", "stock", "customers", "open orders", "shortages"}
    finally:
        watcher.terminate()
        watcher.wait(30)
        watcher.stdout.close()


@pytest.mark.parametrize(
    "name", ["shop.sql", "warehouse.sql", "customers.sql", "shop.py", "watch.py"]
)
def test_the_page_shows_the_files(name: str) -> None:
    shown = re.search(rf"```\w+ {re.escape(name)}\n(.*?)```", PAGE.read_text(), re.S)
    assert shown, f"{PAGE.name} does not show {name}"
    assert shown[1] == (EXAMPLE / name).read_text()


def test_the_watcher_uses_the_port_that_a_gateway_has() -> None:
    assert f"http://localhost:{GatewaySettings().port}" in (EXAMPLE / "watch.py").read_text()
