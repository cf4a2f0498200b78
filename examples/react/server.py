"""A board of orders: the table, the queries and the mutations. The page is beside it.

    uvicorn server:app --timeout-graceful-shutdown 5

It uses the embedded PostgreSQL, or the database in HEADWATER_URL. What `npm run build` made is
served at http://localhost:8000.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypedDict

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from headwater import Context, Headwater, MutationContext, Refused

NEXT = {"new": "packed", "packed": "sent"}

hw = Headwater()
hw.channel("board")  # who looks at it


class Total(TypedDict):
    region: str
    orders: int
    amount: int


@hw.query
async def totals(ctx: Context) -> list[Total]:
    return await ctx.fetch(
        "select region, count(*)::int as orders, sum(amount)::int as amount from orders"
        " group by region order by region"
    )


@hw.mutation
async def place_order(ctx: MutationContext, item: str, region: str, amount: int) -> int:
    if not item.strip():
        raise Refused("an order needs an item", code="item")
    if not 0 < amount < 1_000_000:
        raise Refused("an amount is between 1 and 999,999", code="amount")
    insert = "insert into orders (item, region, amount) values (%s, %s, %s) returning id"
    return int(await ctx.fetch_value(insert, item.strip(), region, amount))


@hw.mutation
async def advance_order(ctx: MutationContext, id: int, status: str) -> None:
    before = {after: status for status, after in NEXT.items()}.get(status)
    update = "update orders set status = %s where id = %s and status = %s returning id"
    if await ctx.fetch_value(update, status, id, before) is None:
        raise Refused(f"order {id} cannot become {status}", code="status")


@hw.mutation
async def remove_order(ctx: MutationContext, id: int) -> None:
    await ctx.execute("delete from orders where id = %s", id)


TABLE = """create table if not exists orders (
  id int generated always as identity primary key,
  item text not null,
  region text not null,
  amount int not null,
  status text not null default 'new')"""


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with hw:
        async with hw.connection() as connection:
            await connection.execute(TABLE)
        await hw.enable("orders")
        yield


built = Path(__file__).parent / "dist"
page = [Mount("/", StaticFiles(directory=built, html=True))] if built.exists() else []
app = Starlette(routes=[Mount("/live", hw.asgi()), *page], lifespan=lifespan)
