"""Follows what shop.py offers, and prints each of it whenever it has changed.

    python watch.py

SHOP_URL is the URL of the gateway, if it is not the one that `headwater serve` has by itself.
"""

import asyncio
import os
from collections.abc import AsyncIterable
from typing import Any

from headwater import connect

URL = os.environ.get("SHOP_URL", "http://localhost:8484")


async def show(name: str, values: AsyncIterable[Any]) -> None:
    async for value in values:
        print(name, value, flush=True)


async def main() -> None:
    async with connect(URL) as live, asyncio.TaskGroup() as tasks:
        followed: dict[str, AsyncIterable[Any]] = {
            "orders": live.live("shop.orders", order="id desc", limit=5),
            "stock": live.live("warehouse.stock", order="sku"),
            "customers": live.live("customers", order="id"),
            "open orders": live.subscribe("open_orders"),
            "shortages": live.subscribe("shortages"),
            "orders of customer 1": live.topic("customer:1"),
        }
        for name, values in followed.items():
            tasks.create_task(show(name, values))


if __name__ == "__main__":
    asyncio.run(main())
