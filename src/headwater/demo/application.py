"""The application of the demo: the queries and mutations that the page calls, and its chat topics.

Functions run as the database role of the caller: the policies of the database limit a clerk to the
orders of one region. In the chat each user has a room with their name. All followers of a topic get
the same rows, so an access function decides who may follow it.
"""

from __future__ import annotations

import random
from typing import Annotated, Any

import msgspec

from headwater.app import Headwater
from headwater.demo.shop import PLACE, NewOrder
from headwater.demo.workload import step
from headwater.queries.context import Context, MutationContext
from headwater.settings import Settings

MESSAGES = 40
"""How many of the last messages of a room are shown when the page opens."""

_chance = random.Random()

Writes = Annotated[int, msgspec.Meta(ge=1, le=100)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


def application(settings: Settings) -> Headwater:
    """The Headwater object of the demo, with its functions and topics."""
    hw = Headwater(settings=settings)
    hw.table("orders")
    hw.table("messages")

    @hw.topic("chat:{room}", table="messages", trusted=True)
    async def chat(ctx: Context, room: str) -> bool:
        """Only the user of the room: the answers contain what that user may read."""
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
        """Insert a random order; in the region of the caller, if the token has one."""
        order = NewOrder.any(_chance, ctx.claims.get("region"))
        await ctx.execute(PLACE, **msgspec.structs.asdict(order))

    @hw.mutation
    async def trade(ctx: MutationContext, writes: Writes = 1) -> int:
        """Write this many rows in one transaction. Returns how many were written."""

        async def execute(sql: str, values: dict[str, Any]) -> int:
            return await ctx.execute(sql, **values)

        return sum([await step(execute, _chance) for _ in range(writes)])

    @hw.mutation
    async def say(ctx: MutationContext, text: Text) -> Any:
        """Add a message to the caller's room. The assistant answers it."""
        new = "insert into messages (room, author, content) values (%s, 'visitor', %s) returning id"
        return await ctx.fetch_value(new, ctx.user, text)

    return hw
