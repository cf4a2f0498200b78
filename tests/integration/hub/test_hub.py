"""The hub over a real database: what subscribers are sent equals the database's own answer."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psycopg
import pytest

from headwater import limits
from headwater.database import Connection, connect
from headwater.errors import CaptureError, InvalidQuery
from headwater.hub.hub import Hub
from headwater.hub.live_views.view import LiveSubscription
from headwater.hub.subscriptions.subscriber import Access
from headwater.live.filters.filter import c
from headwater.live.query import Rules
from headwater.live.state.window import Window
from headwater.protocol import Frame
from tests.support.log_probe import enable, run
from tests.support.subscribers import Recorder, answer, live

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
        (view,) = hub.live_views
        assert (view.query.table.label, view.followers, view.live) == ("orders", 2, True)
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
async def test_queries_that_do_not_fit_are_refused(
    url: str, orders: Connection, query: Any, error: type[Exception]
) -> None:
    await run(orders, "create table other_table (id int primary key)")
    rules = {"orders": Rules(filterable=frozenset({"region", "nope"}))}
    async with Hub(url, rules=rules) as hub:
        with pytest.raises(error):
            await hub.live(query, Recorder())
        assert list(hub.live_views) == []


async def test_the_row_filter_of_the_hook_may_use_any_column(url: str, orders: Connection) -> None:
    rules = {"orders": Rules(filterable=frozenset({"region"}))}
    async with Hub(url, rules=rules) as hub:
        recorder = Recorder()
        access = Access(where=c.note == "n7")
        await hub.live(live("orders", where=[["region", "=", 2]]), recorder, access=access)
        assert [row["id"] for row in recorder.rows] == [7]


async def write(url: str, seed: int, stop: asyncio.Event) -> None:
    connection = await connect(url, purpose="writer", application_path=True)
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


async def test_subscriptions_opened_in_a_write_storm(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is missed or doubled after the first result: a replica refuses a delta that does not
    fit, and in the end each equals the database. No query takes too long, also on a busy machine:
    so there is no reason for a reset."""
    monkeypatch.setattr(limits, "FLUSH_QUESTION_SECONDS", 30.0)
    monkeypatch.setattr(limits, "FLUSH_QUESTIONS_SECONDS", 30.0)
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


async def test_a_returning_subscriber_resumes(url: str, orders: Connection) -> None:
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


async def test_a_window_slides(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        recorder, other = Recorder(), Recorder()
        subscription = await hub.live(live("orders", limit=5), recorder)
        await hub.live(live("orders", limit=5), other)
        await subscription.reanchor([5])
        assert [row["id"] for row in recorder.rows] == [6, 7, 8, 9, 10]
        assert recorder.messages[-1].reason == "window"
        assert recorder.views[-1] == subscription.view != recorder.views[0]
        with pytest.raises(InvalidQuery, match="after"):
            await subscription.reanchor(["five"])
        await run(orders, "delete from orders where id in (3, 7)")
        await recorder.until(lambda: [row["id"] for row in recorder.rows] == [6, 8, 9, 10, 11])
        await other.until(lambda: [row["id"] for row in other.rows] == [1, 2, 4, 5, 6])
        await subscription.reanchor(None)
        assert recorder.rows == other.rows


@pytest.mark.parametrize("mode", ["maintained", "streamed"])
async def test_a_subscriber_that_fell_behind_gets_the_whole_state(
    url: str, orders: Connection, mode: str
) -> None:
    async with Hub(url) as hub:
        recorder, other = Recorder(), Recorder()
        subscription = await hub.live(live("orders", mode=mode), recorder)
        await hub.live(live("orders", mode=mode), other)
        await run(orders, "insert into orders values (-1, 1, 1, 'a')")
        await recorder.until(lambda: recorder.replica.row((-1,)))
        subscription.resync("overflow")
        await run(orders, "insert into orders values (-2, 1, 1, 'a')")
        await recorder.until(lambda: recorder.replica.row((-2,)))
        assert "reset" in recorder.kinds()
        assert "reset" not in other.kinds()
        await other.until(lambda: other.rows == recorder.rows)


async def test_falling_behind_in_the_middle_of_a_flush(url: str, orders: Connection) -> None:
    """A session with two subscriptions overflows while it gets a frame of the first: both are sent
    the whole state, and nothing that is already in it."""
    async with Hub(url) as hub:
        subscriptions: list[LiveSubscription] = []

        class Overflowing(Recorder):
            def deliver(self, frame: Frame) -> None:
                super().deliver(frame)
                if self.kinds()[-1] == "deltas":
                    for subscription in subscriptions:
                        subscription.resync("overflow")

        recorders = [Overflowing() for _ in range(3)]
        for recorder, limit in zip(recorders, (50, 50, 60), strict=True):
            query = live("orders", where=[["region", "=", 2]], limit=limit)
            subscriptions.append(await hub.live(query, recorder, verify=True))
        for i in range(5):
            await run(orders, f"update orders set amount = {i + 100} where id = 2 or id = 7")
            truth = await answer(orders, "select * from orders where region = 2 order by id")
            for recorder in recorders:
                await recorder.until_rows(truth)


async def test_a_fault_in_one_subscriber_does_not_affect_others(
    url: str, orders: Connection
) -> None:
    class Faulty(Recorder):
        def deliver(self, frame: Frame) -> None:
            raise RuntimeError("a bug")

    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders", **TOP), Faulty())
        await hub.live(live("orders", **TOP), recorder)
        for i in range(3):
            await run(orders, f"insert into orders values ({900 + i}, 2, {900 + i}, 'a')")
            await recorder.until_rows(await answer(orders, TOP_SQL))


async def test_a_streamed_result_in_parts(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fast as the client reads it, while rows change; exact in the end."""
    monkeypatch.setattr("headwater.live.state.streamed._STREAMED_PAGE_ROWS", 30)
    async with Hub(url) as hub:
        recorder = Recorder()
        recorder.reads.clear()
        await hub.live(live("orders", mode="streamed"), recorder)
        assert len(recorder.rows) == 30
        await run(
            orders,
            "update orders set note = 'changed' where id in (1, 31, 199)",
            "delete from orders where id in (2, 150)",
            "insert into orders values (-5, 1, 1, 'first'), (500, 1, 1, 'last')",
        )
        recorder.reads.set()
        await recorder.until_rows(await answer(orders, "select * from orders order by id"))
        assert recorder.kinds()[-1] == "deltas"


async def test_a_view_lingers_for_returning_subscribers(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.hub.live_views.registry._VIEW_LINGER_SECONDS", 0.0)
    async with Hub(url) as hub:
        subscription = await hub.live(live("orders", **TOP), Recorder())
        subscription.close()
        assert len(list(hub.live_views)) == 1
        await run(orders, "insert into orders values (900, 2, 900, 'a')")
        async with asyncio.timeout(10):
            while list(hub.live_views):  # noqa: ASYNC110 - the loop sweeps
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("coalesce", ["adaptive", "20ms/60ms"])
async def test_coalescing(url: str, orders: Connection, coalesce: str) -> None:
    async with Hub(url, coalesce=coalesce) as hub:
        recorder = Recorder()
        await hub.live(live("orders", **TOP), recorder)
        for i in range(30):
            await run(orders, f"insert into orders values ({900 + i}, 2, {900 + i}, 'a')")
        await recorder.until_rows(await answer(orders, TOP_SQL))
        if coalesce != "adaptive":
            assert len(recorder.messages) < 25


TYPES = {
    "smallint": "-5", "bigint": "9007199254740993", "numeric": "1.50", "real": "0.1",
    "double precision": "'-Infinity'", "boolean": "true", "text": "'a \"b\" é'",
    "char(4)": "'x'", "name": "'n'", "timestamptz": "'2026-01-02 03:04:05.678901+05'",
    "timestamp": "'infinity'", "date": "'0044-03-15 BC'", "time": "'24:00'",
    "timetz": "'12:30:00+02'", "interval": "'1 mon -2 days 03:00:00.5'",
    "uuid": "'00000000-0000-0000-0000-0000000000ff'", "bytea": "'\\x00ff'",
    "json": "'{\"a\":  1.10}'", "jsonb": "'{\"b\": [1, 1.50]}'", "text[]": "array['x', null]",
    "timestamptz[]": "array['2026-01-02'::timestamptz]", "inet": "'10.0.0.1/8'",
    "money": "'12.34'", "point": "'(1,2)'", "int4range": "'[1,5)'", "bit(3)": "'101'",
    "mood": "'ok'", "pair": "row(1, 'z')", "positive": "7", "regclass": "'things'",
    "regtype": "'mood'", "tsvector": "'a:1 b:2'", "oid": "12",
}  # fmt: skip


async def test_a_row_read_equals_the_row_in_the_log(url: str, connection: Connection) -> None:
    """One window learns the rows from the log, another reads them: the same values, of the same
    types, in what is sent and in what is held."""
    names = {f"c{i}": (type_, value) for i, (type_, value) in enumerate(TYPES.items())}
    await run(
        connection,
        "create type mood as enum ('sad', 'ok')",
        "create type pair as (a int, b text)",
        "create domain positive as int check (value > 0)",
        "create table things (id int primary key, "
        + ", ".join(f"{name} {type_}" for name, (type_, _) in names.items())
        + ", doubled int generated always as (id * 2) stored)",
    )
    await enable(connection, "things")
    async with Hub(url) as hub:
        from_log, read = Recorder(), Recorder()
        await hub.live(live("things", limit=10), from_log, verify=True)
        columns = ", ".join(names)
        values = ", ".join(value for _, value in names.values())
        await run(
            connection,
            "set timezone = 'Asia/Tokyo'; set datestyle = 'German'; set extra_float_digits = 0;"
            " set intervalstyle = 'postgres'; set bytea_output = 'escape'",
            f"insert into things (id, {columns}) values (1, {values})",
            "insert into things (id) values (2)",
        )
        await from_log.until(lambda: len(from_log.rows) == 2)
        await hub.live(live("things", limit=11), read, verify=True)
        held = {view.id: view for view in hub.live_views}
        one, other = (held[each.views[-1]].state for each in (from_log, read))
        assert isinstance(one, Window)
        assert isinstance(other, Window)
        assert repr(one.buffer) == repr(other.buffer)
        assert from_log.rows == read.rows
