"""The demo: a small shop that sells without pause, and its change feed in the terminal.

Runs on the embedded PostgreSQL in a data folder of its own, so that trying it leaves the user's
databases alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from headwater.app import Headwater
from headwater.child import Child, kept_running
from headwater.database import Connection
from headwater.pipeline import progress, standing
from headwater.pipeline.progress import PipelineStream

STATUSES = ("new", "paid", "packed", "shipped")
USERS = ("ann", "ben", "cho", None)

LOOK_SECONDS = 0.5
REPORT_SECONDS = 15.0
STOP_SECONDS = 5.0
"""How long the demo waits for its pipeline to stop. One that is killed has lost nothing."""

SHOP = """
    create table if not exists orders (
      id bigint generated always as identity primary key,
      region int not null,
      status text not null,
      amount numeric(12, 2) not null,
      updated_at timestamptz not null default now()
    )
"""


async def open_shop(hw: Headwater) -> None:
    """Make the table and have it captured."""
    async with hw.connection("demo") as connection:
        await connection.execute(SHOP)
    await hw.enable("orders")


async def sell(hw: Headwater, *, pause: float = 0.4, seed: int = 7) -> None:
    """Place, advance and clear away orders, for ever."""
    chance = random.Random(seed)
    async with hw.connection("demo") as connection:
        while True:
            async with connection.transaction():
                user = chance.choice(USERS) or ""
                await connection.execute(
                    "select set_config('headwater.user_id', %s, true)", (user,)
                )
                await _one_step(connection, chance)
            await asyncio.sleep(pause * chance.uniform(0.5, 1.5))


async def _one_step(connection: Connection, chance: random.Random) -> None:
    match chance.choices(["place", "advance", "clear"], [5, 6, 1])[0]:
        case "place":
            await connection.execute(
                "insert into orders (region, status, amount) values (%s, 'new', %s)",
                (chance.randint(1, 9), round(chance.uniform(5, 500), 2)),
            )
        case "advance":
            step = chance.randrange(len(STATUSES) - 1)
            await connection.execute(
                "update orders set status = %s, updated_at = now() where id ="
                " (select id from orders where status = %s order by id limit 1)",
                (STATUSES[step + 1], STATUSES[step]),
            )
        case "clear":
            await connection.execute(
                "delete from orders where id in"
                " (select id from orders where status = 'shipped' order by id limit 3)"
            )


async def keep_all(hw: Headwater, lake: str, say: Callable[[str], None]) -> None:
    """Run the data pipeline beside the shop, and tell how it does."""

    def hear(line: str) -> None:
        if line.startswith(("error", "hint", "ended")):  # the rest is Spark's own talk
            say(line)

    child = Child(hw.url, lake, hear, patience=STOP_SECONDS)
    async with kept_running(child), hw.connection("demo") as connection:
        while not standing.find(lake):  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.to_thread(_first_snapshot, hw.url, lake)
        moment = f"{datetime.now(UTC) + timedelta(seconds=5):%Y-%m-%d %H:%M:%S}"
        say(f"it is up, and keeps every change in {lake}. See what was:")
        say(f"headwater asof orders '{moment}' --lake {lake}")
        say(f"headwater history orders 1 --lake {lake}")
        while True:
            for stream in await progress.list_all(connection):
                say(_in_words(stream))
            await asyncio.sleep(REPORT_SECONDS)


def _in_words(stream: PipelineStream) -> str:
    behind = f", {stream.behind_changes} behind" if stream.behind_changes else ""
    trouble = f": {stream.error}" if stream.error else ""
    return f"{stream.name} {stream.state}, {stream.changes} changes in the lake{behind}{trouble}"


def _first_snapshot(url: str, lake: str) -> None:
    """What came before is worked out from a snapshot; one is enough."""
    from headwater.pipeline import snapshots
    from headwater.pipeline.lake import Lake

    opened = Lake(lake)
    if not snapshots.load(opened.places):
        opened.snapshot(url, "orders")


async def stopped_after(seconds: float | None) -> None:
    """Wait for the time to be over; without one, for ever."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
