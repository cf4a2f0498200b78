"""The streaming view of the demo, for its pipeline: `headwater pipeline run --app
headwater.demo.revenue:hw`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater import views
from headwater.app import Headwater

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

hw = Headwater()


@hw.view(key=["region"])
def revenue(orders: DataFrame) -> DataFrame:
    """Revenue and number of orders by region."""
    return orders.groupBy("region").agg(
        views.sum("amount").alias("revenue"), views.count().alias("orders")
    )
