"""Revenue by region, updated by the data pipeline, and live.

    psql "$HEADWATER_URL" -c "create table orders (id int primary key, region text, amount numeric)"
    headwater init && headwater enable orders
    headwater pipeline run --app views:hw

In another terminal, and then write to the table:

    headwater watch revenue --order 'revenue desc'
    psql "$HEADWATER_URL" -c "insert into orders values (1, 'west', 12.50), (2, 'east', 7)"
"""

from __future__ import annotations

from pyspark.sql import DataFrame

from headwater import Headwater, views

hw = Headwater()


@hw.view(key=["region"])
def revenue(orders: DataFrame) -> DataFrame:
    return orders.groupBy("region").agg(
        views.sum("amount").alias("revenue"),
        views.count().alias("orders"),
        views.avg("amount").alias("average"),
        views.max("amount").alias("largest"),
    )
