"""After every statement the log chains, and ends with the rows of the table; so do live clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from headwater.database import connect
from headwater.hub.hub import Hub
from tests.support.databases import fresh_database
from tests.support.generators.histories import Connection, Player, Wrong, make, play, shrink
from tests.support.generators.sizes import first_seed, size
from tests.support.subscribers import Recorder, answer, live

STATEMENTS = size("statements", 40, large=5_000)
SEED = first_seed(1)
TRANSACTIONS = 25


@pytest.fixture(params=["postgres_url", "icu_postgres_url"], ids=["embedded", "system"])
def writer(request: pytest.FixtureRequest) -> Iterator[Connection]:
    with (
        fresh_database(request.getfixturevalue(request.param), installed=True) as url,
        psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection,
    ):
        yield connection


@pytest.mark.timeout(600 + STATEMENTS)
@pytest.mark.parametrize("forging", [False, True], ids=["", "forging"])
def test_every_statement_leaves_a_log_that_chains(writer: Connection, forging: bool) -> None:
    counts: Counter[str] = Counter()
    seed = SEED
    while counts["statements"] < STATEMENTS:
        history = make(seed, TRANSACTIONS, forging=forging)
        try:
            # A session of its own: PostgreSQL keeps the plans of functions that are gone.
            with psycopg.connect(writer.info.dsn, autocommit=True, prepare_threshold=None) as fresh:
                counts += play(fresh, history)
        except Wrong as wrong:
            steps = shrink(writer, history)
            script = [*steps.setup, "-- enabled", *(step.sql for step in steps.steps)]
            pytest.fail(f"SEED={seed}: {wrong}\n\n" + ";\n".join(script))
        seed += 1
    print(f"seeds {SEED} to {seed - 1}: {dict(counts)}")


@pytest.mark.timeout(600 + STATEMENTS)
async def test_a_live_client_equals_the_table(writer: Connection) -> None:
    """After every transaction of a share of the histories."""
    reader = await connect(writer.info.dsn, purpose="test", application_path=True)
    for seed in range(SEED, SEED + 1 + STATEMENTS // 500):
        player = Player(writer, make(seed, TRANSACTIONS))
        await asyncio.to_thread(player.start)
        try:
            async with Hub(writer.info.dsn) as hub:
                await _follow(hub, player, reader)
        finally:
            await asyncio.to_thread(player.finish)
    await reader.close()


async def _follow(hub: Hub, player: Player, reader: Any) -> None:
    tables = player.history.captured
    recorders = {table: Recorder() for table in tables}
    columns = dict.fromkeys(tables, "*")
    if any("id numeric" in sql for sql in player.history.setup):
        columns["t"] = "*, id::text as id"  # numbers without bounds are text on the wire
    for table, recorder in recorders.items():
        await hub.live(live(f"h.{table}", limit=100), recorder)
    for step in player.history.steps:
        await asyncio.to_thread(player.step, step)
        if step.kind in ("commit", "rollback"):
            for table in tables:
                order = ", ".join(f"{table}.{name}" for name in player.keys[table])
                rows = await answer(
                    reader, f"select {columns[table]} from h.{table} order by {order}"
                )
                try:
                    await recorders[table].until_rows(rows)
                except TimeoutError:
                    seen = recorders[table].rows
                    pytest.fail(f"SEED={player.history.seed}: {table} is {rows}, seen is {seen}")
