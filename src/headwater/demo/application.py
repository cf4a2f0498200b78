"""What the page may call and follow: the shop's mutations, and the topics of its chat.

They run as the database role of who calls, so a clerk writes to the orders of one region only, and
nothing here has to say so. In the chat each has a room of their own, with their name; all who
follow a topic get the same rows, so there it has to be said who may.
"""

from __future__ import annotations

import random
from typing import Annotated, Any

import msgspec

from headwater.app import Headwater
from headwater.demo.shop import PLACE, NewOrder
from headwater.demo.trade import step
from headwater.queries.context import Context, MutationContext
from headwater.settings import Settings

MESSAGES = 40
"""So many of a room are shown to who comes."""

_chance = random.Random()

Writes = Annotated[int, msgspec.Meta(ge=1, le=100)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


def application(settings: Settings) -> Headwater:
    """The shop as an application of Headwater."""
    hw = Headwater(settings=settings)
    hw.table("orders")
    hw.table("messages")

    @hw.topic("chat:{room}", table="messages", trusted=True)
    async def chat(ctx: Context, room: str) -> bool:
        """Only the one whose room it is: the assistant tells what that one may know."""
        return room == ctx.user

    @hw.query
    async def said_before(ctx: Context) -> list[Any]:
        """The last messages of the caller's room, the oldest first."""
        found = await ctx.fetch(
            "select * from messages where room = %s order by id desc limit %s", ctx.user, MESSAGES
        )
        return found[::-1]

    @hw.mutation
    async def place_order(ctx: MutationContext) -> None:
        """An order by whoever comes; where the caller has a region, one of that region."""
        order = NewOrder.any(_chance, ctx.claims.get("region"))
        await ctx.execute(PLACE, **msgspec.structs.asdict(order))

    @hw.mutation
    async def trade(ctx: MutationContext, writes: Writes = 1) -> int:
        """So many steps of the shop's business, in one transaction; how many rows were written."""

        async def execute(sql: str, values: dict[str, Any]) -> int:
            return await ctx.execute(sql, **values)

        return sum([await step(execute, _chance) for _ in range(writes)])

    @hw.mutation
    async def say(ctx: MutationContext, text: Text) -> Any:
        """Something that the caller says in their room. The assistant answers it."""
        new = "insert into messages (room, author, content) values (%s, 'visitor', %s) returning id"
        return await ctx.fetch_value(new, ctx.user, text)

    return hw
