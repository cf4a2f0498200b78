"""The application of the database and lake in `data/`.

A streaming view stores a digest of its function's source. Do not edit the function: the pipeline
would build the view again, and the test is that it does not.
"""

from __future__ import annotations

from typing import Any

from headwater import Headwater, MutationContext, views

hw = Headwater()


@hw.view(key=["region"])
def revenue(orders: Any) -> Any:
    return (
        orders.where("status <> 'cancelled'")
        .groupBy("region")
        .agg(
            views.count().alias("orders"),
            views.sum("amount").alias("revenue"),
            views.max("amount").alias("largest"),
        )
    )


@hw.mutation
async def pay(ctx: MutationContext, id: int) -> str:
    await ctx.execute("update orders set status = 'paid', amount = amount + 1 where id = %s", id)
    return f"order {id} is paid"
