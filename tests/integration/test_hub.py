"""The hub over a real database: what subscribers are told equals the database's own answer."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psycopg
import pytest

from headwater.database import Connection, connect
from headwater.errors import CaptureError, InvalidQuery
from headwater.hub.hub import Hub
from headwater.hub.subscriber import Access
from headwater.live.filter import c
from headwater.live.query import Rules
from tests.hub import Recorder, answer, live
from tests.support import enable, run

ORDERS = "create table orders (id int primary key, region int, amount int, note text)"


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(
        connection,
        ORDERS,
        "create index on orders (region, amount desc)",
        "insert into orders select i, i % 5, i % 37, 'n' || i from generate_series(1, 200) i",
    )
    await enable(connection, "orders")
    return connection


TOP = {"where": [["region", "=", 2]], "order": ["amount desc"], "limit": 7}
TOP_SQL = "select * from orders where region = 2 order by amount desc, id limit 7"


async def test_a_snapshot_and_deltas_equal_the_databases_answer(
    url: str, orders: Connection
) -> None:
    async with Hub(url) as hub:
        assert hub.ready
        recorder = Recorder()
        subscription = await hub.live(live("orders", **TOP), recorder, verify=True)
        assert recorder.rows == await answer(orders, TOP_SQL)
        assert recorder.views == [subscription.view]
        chance = random.Random(5)
        for i in range(60):
            await run(orders, random_change(chance, i))
            await recorder.until_rows(await answer(orders, TOP_SQL))
        assert set(recorder.kinds()) == {"snapshot", "deltas"}
        assert all(message.hash is not None for message in recorder.messages)


def random_change(chance: random.Random, i: int) -> str:
    key = chance.randint(1, 220)
    return chance.choice(
        [
            f"insert into orders values ({1000 + i}, 2, {chance.randint(0, 60)}, 'new')",
            f"update orders set amount = {chance.randint(0, 60)} where id = {key}",
            f"update orders set region = {chance.choice([1, 2, 2])} where id = {key}",
            f"delete from orders where id = {key}",
            f"delete from orders where region = 2 and amount > {chance.randint(20, 60)}",
        ]
    )


async def test_identical_queries_share_a_view_and_its_frames(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        one, other = Recorder(), Recorder()
        a = await hub.live(live("orders", **TOP), one)
        b = await hub.live(live("orders", **TOP), other)
        assert a.view == b.view
        await run(orders, "insert into orders values (999, 2, 1000, 'top')")
        await one.until(lambda: one.rows[0]["id"] == 999)
        await other.until(lambda: other.rows[0]["id"] == 999)
        assert one.frames[-1] is other.frames[-1]
        (info,) = hub.describe()
        assert (info.table, info.subscribers, info.live) == ("orders", 2, True)
        b.close()
        await run(orders, "delete from orders where id = 999")
        await one.until(lambda: one.rows[0]["id"] != 999)
        assert other.rows[0]["id"] == 999


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (live("nowhere"), CaptureError),
        (live("a.b.c.d"), CaptureError),
        (live("other_table"), CaptureError),
        (live("orders", where=[["nope", "=", 1]]), InvalidQuery),
        (live("orders", where=[["note", "=", "x"]]), InvalidQuery),
    ],
)
async def test_what_does_not_fit_is_refused(
    url: str, orders: Connection, query: Any, error: type[Exception]
) -> None:
    await run(orders, "create table other_table (id int primary key)")
    rules = {"orders": Rules(filterable=frozenset({"region", "nope"}))}
    async with Hub(url, rules=rules) as hub:
        with pytest.raises(error):
            await hub.live(query, Recorder())
        assert hub.describe() == []


async def test_the_row_filter_of_the_hook_may_use_any_column(url: str, orders: Connection) -> None:
    rules = {"orders": Rules(filterable=frozenset({"region"}))}
    async with Hub(url, rules=rules) as hub:
        recorder = Recorder()
        access = Access(where=c.note == "n7")
        await hub.live(live("orders", where=[["region", "=", 2]]), recorder, access=access)
        assert [row["id"] for row in recorder.rows] == [7]


async def write(url: str, seed: int, stop: asyncio.Event) -> None:
    connection = await connect(url, purpose="writer")
    chance = random.Random(seed)
    while not stop.is_set():
        try:
            async with connection.transaction():
                for _ in range(chance.randint(1, 3)):
                    key, amount = chance.randint(1, 300), chance.randint(0, 90)
                    await run(
                        connection,
                        chance.choice(
                            [
                                f"insert into orders values ({key}, {key % 5}, {amount}, 'w')"
                                f" on conflict (id) do update set amount = {amount}",
                                f"update orders set amount = {amount} where id = {key}",
                                f"update orders set region = {amount % 5} where id = {key}",
                                f"delete from orders where id = {key}",
                            ]
                        ),
                    )
                    await asyncio.sleep(chance.random() * 0.005)
        except psycopg.errors.DeadlockDetected:
            pass
    await connection.close()


async def test_subscriptions_opened_in_a_write_storm(url: str, orders: Connection) -> None:
    """No missed and no doubled row at the seam: a replica refuses what does not fit, and in the
    end each equals the database."""
    stop = asyncio.Event()
    async with Hub(url) as hub:
        writers = [asyncio.create_task(write(url, seed, stop)) for seed in range(8)]
        recorders: list[tuple[Recorder, str]] = []

        async def subscribe(i: int) -> None:
            recorder = Recorder()
            region, limit, mode = i % 5, 3 + i % 11, "streamed" if i % 4 == 3 else "maintained"
            order = {} if mode == "streamed" else {"order": ["amount desc"]}
            await hub.live(
                live("orders", where=[["region", "=", region]], limit=limit, mode=mode, **order),
                recorder,
                verify=True,
            )
            by = "id" if mode == "streamed" else f"amount desc, id limit {limit}"
            recorders.append(
                (recorder, f"select * from orders where region = {region} order by {by}")
            )

        for start in range(0, 100, 10):
            await asyncio.gather(*(subscribe(i) for i in range(start, start + 10)))
            await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*writers)
        for recorder, statement in recorders:
            await recorder.until_rows(await answer(orders, statement))
            assert "reset" not in recorder.kinds()
            assert recorder.error is None


async def test_one_who_comes_back_resumes(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        one = Recorder()
        subscription = await hub.live(live("orders", **TOP), one)
        await run(orders, "insert into orders values (900, 2, 900, 'a')")
        await one.until(lambda: one.rows[0]["id"] == 900)
        since = one.position
        subscription.close()
        await run(orders, "insert into orders values (901, 2, 901, 'b')")
        await run(orders, "update orders set note = 'c' where id = 900")
        back = Recorder()
        back.replica = one.replica
        keeper = Recorder()
        await hub.live(live("orders", **TOP), keeper)
        await keeper.until(lambda: keeper.rows[1]["note"] == "c")
        await hub.live(live("orders", **TOP), back, since=since)
        assert back.resumed == [True]
        assert back.kinds() == ["deltas"] * len(back.messages)
        assert back.rows == await answer(orders, TOP_SQL)
        stranger = Recorder()
        await hub.live(live("orders", **TOP), stranger, since="abc-1:1:")
        assert (stranger.resumed, stranger.kinds()) == ([False], ["snapshot"])
