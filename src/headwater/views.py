"""The aggregates and the join for functions of streaming views.

    from headwater import views

    @hw.view(key=["region"])
    def revenue(orders):
        return orders.groupBy("region").agg(views.sum("amount").alias("revenue"))

PySpark is imported when one of them is called.
"""

from __future__ import annotations

from headwater.pipeline.views.aggregates import avg, count, count_distinct, join, max, min, sum

__all__ = ["avg", "count", "count_distinct", "join", "max", "min", "sum"]
