"""One application, three databases: orders in MariaDB, stock in SQLite, customers in PostgreSQL.

    export SHOP_PASSWORD='only for the example'
    headwater serve shop:hw
    headwater pipeline run --app shop:hw
    python watch.py

The files *.sql make the tables. docs/tutorial-sources.md goes through all of it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from headwater import Context, Headwater, views

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

hw = Headwater()

SHOP = os.environ.get("SHOP_ADDRESS", "localhost:3306")

hw.source(f"mariadb://mirror:${{SHOP_PASSWORD}}@{SHOP}/shop", tables=["orders"], into="shop")
hw.source("sqlite:///warehouse.db", tables=["stock"], into="warehouse")
hw.table("customers")


@hw.query
async def open_orders(ctx: Context) -> list[dict[str, Any]]:
    """Orders from MariaDB with their customers from PostgreSQL."""
    return await ctx.fetch(
        "select o.id, c.name, o.sku, o.amount from shop.orders o"
        " join customers c on c.id = o.customer_id where o.status = 'open' order by o.id"
    )


@hw.query
async def shortages(ctx: Context) -> list[dict[str, Any]]:
    """What was ordered in MariaDB, and is not in stock in SQLite."""
    return await ctx.fetch(
        "select s.sku, s.item, sum(o.quantity) - s.quantity as missing"
        " from warehouse.stock s join shop.orders o on o.sku = s.sku where o.status = 'open'"
        " group by s.sku, s.item, s.quantity having sum(o.quantity) > s.quantity order by s.sku"
    )


@hw.topic("customer:{customer_id}", table="shop.orders")
async def orders_of_customer(ctx: Context, customer_id: int) -> bool:
    """Who may follow it. In an application of yours: the customer, by `ctx.user`."""
    return True


@hw.view(key=["region"], tables={"orders": "shop.orders"})
def revenue(orders: DataFrame, customers: DataFrame) -> DataFrame:
    """Revenue by region, updated by the data pipeline."""
    sold = orders.where("status <> 'cancelled'")
    pairs = views.join(sold, customers.withColumnRenamed("id", "customer_id"), "customer_id")
    return pairs.groupBy("region").agg(
        views.sum("amount").alias("revenue"), views.count().alias("orders")
    )
