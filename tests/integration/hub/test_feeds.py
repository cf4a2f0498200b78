"""Change feeds through the hub: new changes, past changes, and the switch between them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater.database import Connection, connect
from headwater.errors import CaptureError, InvalidQuery, ResyncRequired
from headwater.hub.feeds.view import FeedQuery
from headwater.hub.hub import Hub
from headwater.hub.subscriptions.arrival import Arrival
from headwater.hub.subscriptions.subscriber import Access
from headwater.live.filters.filter import c
from headwater.log.reading import reader as reader_module
from headwater.model import Position
from headwater.protocol import Changes, Frame
from tests.support.applications.shop import until
from tests.support.log_probe import enable, run
from tests.support.mirrors import declare_mirror, source_transaction
from tests.support.subscribers import Recorder


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(connection, "create table orders (id int primary key, owner int, amount numeric)")
    await enable(connection, "orders")
    return connection


def changes(recorder: Recorder) -> list[Any]:
    return [
        change
        for message in recorder.messages
        if isinstance(message, Changes)
        for transaction in message.transactions
        for change in transaction.changes
    ]


def ids(recorder: Recorder) -> list[int]:
    return [change["key"]["id"] for change in changes(recorder) if change.get("key")]


async def test_new_changes_arrive(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        one, other, filtered = Recorder(), Recorder(), Recorder()
        a = await hub.feed(FeedQuery(("orders",)), one)
        b = await hub.feed(FeedQuery(("orders",)), other)
        await hub.feed(FeedQuery(("orders",), where=c.amount > 5), filtered)
        assert a.view == b.view
        await run(orders, "insert into orders values (1, 7, 1.50)")
        await run(orders, "update orders set amount = 9 where id = 1", "delete from orders")
        await one.until(lambda: len(changes(one)) == 3)
        # Each begins with a message of its own that has its position.
        assert one.frames[1:] == other.frames[1:]
        first, second, third = changes(one)
        assert (first["op"], first["table"], first["key"]) == ("insert", "orders", {"id": 1})
        assert first["after"] == {"id": 1, "owner": 7, "amount": "1.50"}
        assert (second["op"], second["changed"]) == ("update", ["amount"])
        assert (third["op"], third["before"]["amount"]) == ("delete", "9")
        await filtered.until(lambda: len(changes(filtered)) == 2)
        a.close()
        await run(orders, "insert into orders values (2, 7, 1)")
        await other.until(lambda: len(changes(other)) == 4)
        assert len(changes(one)) == 3


async def test_debezium_envelopes(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.feed(FeedQuery(("orders",), format="debezium"), recorder)
        await run(orders, "insert into orders values (1, 7, 1.50)", "truncate orders")
        await recorder.until(lambda: len(changes(recorder)) == 2)
        inserted, truncated = changes(recorder)
        assert (inserted["op"], inserted["before"]) == ("c", None)
        assert inserted["after"] == {"id": 1, "owner": 7, "amount": "1.50"}
        assert inserted["source"]["table"] == "orders"
        assert truncated["op"] == "t"


async def test_changes_of_a_mirror_carry_their_origin(url: str, orders: Connection) -> None:
    """Also in the shape of Debezium, and where a filter shows a part of the change."""
    await declare_mirror(orders, "orders")
    async with Hub(url) as hub:
        plain, guarded, debezium = Recorder(), Recorder(), Recorder()
        mine = Access(where=c.owner == 7)
        await hub.feed(FeedQuery(("orders",)), plain)
        await hub.feed(FeedQuery(("orders",)), guarded, access=mine)
        await hub.feed(FeedQuery(("orders",), format="debezium"), debezium)
        async with source_transaction(orders, "0-1-4711", "2026-11-18T09:30:00Z"):
            await run(orders, "insert into orders values (1, 7, 1)")
            await run(orders, "update orders set owner = 8 where id = 1")
        await plain.until(lambda: len(changes(plain)) == 2)
        await guarded.until(lambda: len(changes(guarded)) == 2)
        await debezium.until(lambda: len(changes(debezium)) == 2)
        origin = {"source": "shop", "position": "0-1-4711", "committed_at": "2026-11-18T09:30:00Z"}
        expected = [origin | {"kind": "mysql"}] * 2
        assert [change["origin"] for change in changes(plain)] == expected
        assert [change["op"] for change in changes(guarded)] == ["insert", "delete"]
        assert [change["origin"] for change in changes(guarded)] == expected
        source = changes(debezium)[0]["source"]
        assert (source["connector"], source["name"]) == ("mysql", "shop")
        assert (source["position"], source["ts_ms"]) == ("0-1-4711", 1_794_994_200_000)


async def test_tables_that_cannot_be_followed(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        with pytest.raises(CaptureError, match="not enabled"):
            await hub.feed(FeedQuery(("nowhere",)), Recorder())
        with pytest.raises(InvalidQuery, match="exactly one table"):
            await hub.feed(FeedQuery((), where=c.id == 1), Recorder())
        with pytest.raises(ResyncRequired):
            await hub.feed(FeedQuery(("orders",), since=Position("abc", 1, 1)), Recorder())
        assert list(hub.feeds) == []


async def test_all_tables_and_those_enabled_later(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.feed(FeedQuery(), recorder)
        await run(orders, "create table later (id int primary key)")
        await enable(orders, "later")
        await run(orders, "insert into later values (5)", "insert into orders values (6, 1, 1)")
        await recorder.until(lambda: ids(recorder) == [5, 6])


@pytest.mark.parametrize("page", [50_000, 7])
async def test_past_and_new_changes_join_under_load(
    url: str, orders: Connection, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feeds that begin in the past while writers write, are paused and resumed, and read page by
    page: each sees every change once, in order."""
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", page)
    stop = asyncio.Event()

    async def write(number: int) -> None:
        connection = await connect(url, purpose="writer", application_path=True)
        i = 0
        while not stop.is_set():
            key = number * 100_000 + (i := i + 1)
            async with connection.transaction():
                await run(connection, f"insert into orders values ({key}, {number}, 0)")
                await asyncio.sleep(0.002)
                await run(connection, f"update orders set amount = 1 where id = {key}")
        await connection.close()

    async with Hub(url) as hub:
        start = hub.position
        writers = [asyncio.create_task(write(number)) for number in range(1, 5)]
        recorders: list[tuple[Recorder, Position]] = []
        assert start is not None
        for i in range(8):
            recorder = Recorder()
            since = start if i % 2 or hub.position is None else hub.position
            feed = await hub.feed(FeedQuery(("orders",), since=since), recorder)
            recorders.append((recorder, since))
            await asyncio.sleep(0.03)
            feed.pause()
            seen = len(recorder.messages)
            await asyncio.sleep(0.03)
            assert len(recorder.messages) == seen
            feed.resume()
        stop.set()
        await asyncio.gather(*writers)
        async with orders.cursor() as cursor:
            await cursor.execute("select seq, xid::text::bigint from headwater.log where op <> 'R'")
            logged = await cursor.fetchall()
        for recorder, since in recorders:
            wanted = sorted(seq for seq, xid in logged if not since.contains(xid))
            await recorder.until(lambda r=recorder, w=wanted: len(changes(r)) >= len(w))  # type: ignore[misc]
            assert sorted(change["seq"] for change in changes(recorder)) == wanted
            by_key: dict[int, list[str]] = {}
            for change in changes(recorder):
                by_key.setdefault(change["key"]["id"], []).append(change["op"])
            assert set(map(tuple, by_key.values())) <= {("insert", "update")}


class Choosy(Recorder):
    """Has no room for every third frame: it is paused then, and continues a little later."""

    feed: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.offered = 0

    def deliver(self, frame: Frame) -> None:
        self.offered += 1
        if self.offered % 3 or self.feed is None:
            super().deliver(frame)
        else:
            self.feed.pause()
            asyncio.get_running_loop().call_later(0.01, self.feed.resume)


async def test_a_refused_frame_comes_again(url: str, orders: Connection) -> None:
    """Live, catching up, and at the switch: a feed that pauses during a delivery refuses the
    frame."""
    async with Hub(url) as hub:
        choosy = [Choosy() for _ in range(4)]
        start = hub.position
        for number, recorder in enumerate(choosy):
            since = start if number % 2 else None
            recorder.feed = await hub.feed(FeedQuery(("orders",), since=since), recorder)
        for i in range(300):
            await run(orders, f"insert into orders values ({i}, 1, 1)")
        for recorder in choosy:
            await recorder.until(lambda r=recorder: len(ids(r)) >= 300)  # type: ignore[misc]
            assert sorted(ids(recorder)) == list(range(300))
            assert len(recorder.frames) < recorder.offered


class Full(Recorder):
    """Has no room at first, and can pause only once it has its feed."""

    is_full = True

    def deliver(self, frame: Frame) -> None:
        if not self.is_full:
            super().deliver(frame)


async def test_nothing_is_delivered_before_the_feed_can_be_paused(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes that come before the opener of a feed has its handle."""
    async with Hub(url) as hub:
        wait = Arrival.wait

        async def late(arrival: Arrival) -> None:
            await wait(arrival)
            await run(orders, "insert into orders values (1, 1, 1)")
            await hub.flushes.next_flush()
            await hub.flushes.next_flush()

        monkeypatch.setattr(Arrival, "wait", late)
        recorder = Full()
        feed = await hub.feed(FeedQuery(("orders",), since=hub.position), recorder)
        feed.pause()
        recorder.is_full = False
        feed.resume()
        await recorder.until(lambda: ids(recorder) == [1])


async def test_a_feed_from_now_on_receives_its_position(url: str, orders: Connection) -> None:
    """A client that is cut off before the first change has a position to resume from."""
    async with Hub(url) as hub:
        recorder = Recorder()
        feed = await hub.feed(FeedQuery(("orders",)), recorder)
        assert changes(recorder) == []
        assert recorder.position is not None
        feed.close()
        await run(orders, "insert into orders values (1, 1, 1)")
        again = Recorder()
        since = Position.parse(recorder.position)
        await hub.feed(FeedQuery(("orders",), since=since), again)
        await again.until(lambda: ids(again) == [1])


async def test_a_feed_from_now_on_has_nothing_from_before(url: str, orders: Connection) -> None:
    """Neither at once, nor when it resumes from a position that it was sent. Commits do not wait
    for the disk here, and the positions that are sent do."""
    async with Hub(url) as hub:
        for id in range(0, 40, 2):
            await run(orders, f"insert into orders values ({id}, 1, 1)")
            await hub.flushes.next_flush()
            recorder = Recorder()
            feed = await hub.feed(FeedQuery(("orders",)), recorder)
            await run(orders, f"insert into orders values ({id + 1}, 1, 1)")
            await hub.flushes.next_flush()
            await hub.reached(hub.flushes.progress.position, [feed])
            feed.close()
            assert ids(recorder) == [id + 1]
            for message in recorder.messages:
                since = Position.parse(message.position)
                again = Recorder()
                feed = await hub.feed(FeedQuery(("orders",), since=since), again)
                await hub.reached(hub.flushes.progress.position, [feed])
                feed.close()
                assert ids(again) in ([], [id + 1])
                assert all(Position.parse(each.position).covers(since) for each in again.messages)


async def test_resuming_from_any_message_misses_nothing(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.feed(FeedQuery(("orders",)), recorder)
        for i in range(20):
            await run(orders, f"insert into orders values ({i}, 1, 1)")
        await recorder.until(lambda: len(ids(recorder)) == 20)
        for message in recorder.messages[1::5]:  # the first only says where it begins
            again = Recorder()
            since = Position.parse(message.position)
            await hub.feed(FeedQuery(("orders",), since=since), again)
            assert again.resumed == [True]
            had = [c["key"]["id"] for t in message.transactions for c in t.changes]
            missing = set(range(had[-1] + 1 if had else 0, 20))
            await again.until(lambda a=again, m=missing: m <= set(ids(a)))  # type: ignore[misc]


async def test_a_mandatory_filter_hides_rows(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.feed(FeedQuery(("orders",)), recorder, access=Access(where=c.owner == 1))
        await run(
            orders,
            "insert into orders values (1, 1, 0), (2, 2, 0)",
            "update orders set owner = 3 - owner",
            "update orders set amount = 5",
            "delete from orders",
        )
        await recorder.until(lambda: len(changes(recorder)) == 5)
        story = [(change["op"], change["key"]["id"]) for change in changes(recorder)]
        assert story[0] == ("insert", 1)
        assert sorted(story[1:3]) == [("delete", 1), ("insert", 2)]
        assert story[3:] == [("update", 2), ("delete", 2)]
        images = [image for change in changes(recorder) for image in
                  (change.get("before"), change.get("after")) if image]  # fmt: skip
        assert {image["owner"] for image in images} == {1}


async def test_a_filter_that_memory_cannot_decide_ends_the_feed(
    url: str, orders: Connection
) -> None:
    await run(orders, "create table spans (id int primary key, span interval)")
    await enable(orders, "spans")
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.feed(FeedQuery(("spans",)), recorder, access=Access(where=c.span == "1 day"))
        await run(orders, "insert into spans values (1, '24:00:00')")
        await recorder.until(lambda: recorder.error)
        assert recorder.error is not None
        assert recorder.error.code == "forbidden"
        assert changes(recorder) == []


async def test_a_backlog_is_read_in_the_log(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 50)
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.feed(FeedQuery(("orders",)), recorder)
        await run(orders, "insert into orders select i, 1, 1 from generate_series(1, 500) i")
        await run(orders, "insert into orders values (1000, 1, 1)")
        await recorder.until(lambda: ids(recorder) == [*range(1, 501), 1000])


async def test_leaving_while_catching_up_stops_the_next_page(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is being read, over a connection that is closed then."""
    fetch, ended = reader_module._fetch_page, asyncio.Queue[bool]()

    async def noted(connection: Connection, *args: Any) -> bytes:
        if ended.qsize() == 1:
            asyncio.get_running_loop().call_soon(lambda: feed.close())
        try:
            return await fetch(connection, *args)
        finally:
            ended.put_nowait(connection.closed)

    monkeypatch.setattr(reader_module, "_fetch_page", noted)
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 50)
    async with Hub(url) as hub:
        since = hub.position
        for i in range(100):
            await run(orders, f"insert into orders values ({i}, 1, 1)")
        recorder = Recorder()
        feed = await hub.feed(FeedQuery(("orders",), since=since), recorder)
        await until(lambda: ended.qsize() == 2)
        assert [ended.get_nowait(), ended.get_nowait()] == [False, False]
        assert ids(recorder) == []


async def test_a_trimmed_log_is_a_gap(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        feed = await hub.feed(FeedQuery(("orders",)), recorder)
        await run(orders, "insert into orders values (1, 1, 1)")
        await recorder.until(lambda: ids(recorder) == [1])
        feed.pause()
        await run(orders, "insert into orders values (2, 1, 1)")
        await run(orders, f"select setval('headwater.log_floor', {hub.position.xmax + 1})")  # type: ignore[union-attr]
        feed.resume()
        await recorder.until(lambda: "gap" in recorder.kinds())
