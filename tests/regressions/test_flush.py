"""Failures within a flush, values that no Python type can hold, and backlogs: a short test each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from headwater.database import Connection
from headwater.hub.feeds.view import FeedQuery, FeedView
from headwater.hub.hub import Hub
from headwater.hub.live_views import background
from headwater.hub.live_views import view as live_module
from headwater.hub.live_views.part import LivePart
from headwater.hub.live_views.registry import LiveViews
from headwater.hub.reactive.registry import ReactiveQueries
from headwater.identity import ANONYMOUS
from headwater.live import kinds, order
from headwater.live.filters import compile
from headwater.live.state import layout
from headwater.live.state.window import Window
from headwater.log.reading import reader as reader_module
from headwater.log.waking import pace
from headwater.protocol import Frame
from headwater.queries.context import Context
from headwater.queries.events import ChangeEvent, Events, GapEvent
from headwater.queries.functions import Query
from tests.integration.hub.test_reactive import executions, settle
from tests.support.log_probe import enable, run
from tests.support.subscribers import Recorder, answer, live


@pytest.fixture
async def two(connection: Connection) -> Connection:
    await run(
        connection,
        "create table calm (id int primary key, n int)",
        "insert into calm select i, i from generate_series(1, 5) i",
        "create table moments (id int primary key, at timestamp, tz timestamptz, d date, n int)",
        "insert into moments values (1, '2026-01-01', '2026-01-01', '2026-01-01', 1)",
    )
    await enable(connection, "calm", "moments")
    return connection


FAR = ("10000-01-01", "0044-03-15 BC", "infinity", "-infinity", "294276-12-31 23:59:59.999999")


@pytest.mark.parametrize("column", ["at", "tz"])
@pytest.mark.parametrize("mode", ["maintained", "streamed"])
async def test_far_timestamps_do_not_stop_a_flush(
    url: str, two: Connection, column: str, mode: str
) -> None:
    since = "2000-01-01T00:00:00"
    async with Hub(url) as hub:
        calm, filtered, ordered = Recorder(), Recorder(), Recorder()
        await hub.live(live("calm"), calm)
        await hub.live(live("moments", where=[[column, ">", since]], mode=mode), filtered)
        await hub.live(live("moments", order=[f"{column} desc"], limit=3), ordered)
        for id, text in enumerate(FAR, 2):
            await run(two, f"insert into moments values ({id}, '{text}', '{text}', null, 0)")
            await run(two, f"update calm set n = -{id} where id = 1")
            await calm.until_rows(await answer(two, "select * from calm order by id"))
            keys = f"select id from moments where {column} > '{since}' order by id"
            true = [row["id"] for row in await answer(two, keys)]
            await filtered.until(lambda true=true: [r["id"] for r in filtered.rows] == true)  # type: ignore[misc]
            keys = f"select id from moments order by {column} desc, id limit 3"
            true = [row["id"] for row in await answer(two, keys)]
            await ordered.until(lambda true=true: [r["id"] for r in ordered.rows] == true)  # type: ignore[misc]
        await run(two, "delete from moments where id > 1", "update calm set n = 0")
        await calm.until_rows(await answer(two, "select * from calm order by id"))
        await filtered.until(lambda: [row["id"] for row in filtered.rows] == [1])
        assert calm.kinds() == ["snapshot", *["deltas"] * 6]


@pytest.fixture
def beyond_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory cannot represent years beyond Python's, which stands for any other such value."""

    def beyond(text: str) -> Any:
        raise ValueError(text)

    caches = (compile._factory, order._entries, order.ordering, layout.layout)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setitem(kinds.NAMES, "far_moment", beyond)
    monkeypatch.setitem(compile._NAMES, "far_moment", beyond)
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("beyond_python")
async def test_values_that_memory_cannot_compare_are_left_to_the_database(
    url: str, two: Connection
) -> None:
    async with Hub(url) as hub:
        calm, filtered, ordered = Recorder(), Recorder(), Recorder()
        await hub.live(live("calm"), calm)
        where = [["at", ">", "2000-01-01T00:00:00"]]
        await hub.live(live("moments", where=where), filtered)
        await hub.live(live("moments", order=["at desc"], limit=2), ordered)
        await run(two, "insert into moments values (2, '10000-01-01'), (3, '2027-01-01')")
        await filtered.until(lambda: [row["id"] for row in filtered.rows] == [1, 2, 3])
        await ordered.until(lambda: [row["id"] for row in ordered.rows] == [2, 3])
        await run(two, "update moments set at = '20000-01-01' where id = 1")
        await ordered.until(lambda: [row["id"] for row in ordered.rows] == [1, 2])
        await run(two, "delete from moments where id in (1, 2)")
        await ordered.until(lambda: [row["id"] for row in ordered.rows] == [3])
        await filtered.until(lambda: [row["id"] for row in filtered.rows] == [3])
        await run(two, "update calm set n = 0")
        await calm.until_rows(await answer(two, "select * from calm order by id"))
        assert (calm.error, filtered.error, ordered.error) == (None, None, None)


async def test_json_that_cannot_be_decoded_does_not_stop_a_flush(url: str, two: Connection) -> None:
    await run(two, "create table docs (id int primary key, at timestamp, j json)")
    await enable(two, "docs")
    async with Hub(url) as hub:
        docs, calm, feed = Recorder(), Recorder(), Recorder()
        await hub.live(live("docs"), docs, verify=True)
        await hub.live(live("calm"), calm)
        await hub.feed(FeedQuery(("docs",)), feed)
        deep, long = "[" * 900 + "]" * 900, "1" * 5000
        for id, text in enumerate((deep, long, "1e400", '"\\u0000"', ' {"a" : 1}\n'), 1):
            await two.execute("insert into docs values (%s, 'infinity', %s)", (id, text))
        await run(two, "update calm set n = 0")
        await calm.until_rows(await answer(two, "select * from calm order by id"))
        await docs.until(lambda: len(docs.rows) == 5)
        assert docs.rows[0]["j"] == deep
        assert docs.rows[4]["j"] == {"a": 1}
        await feed.until(lambda: sum(len(m.transactions) for m in feed.messages) == 5)


@pytest.mark.parametrize("mode", ["maintained", "streamed"])
async def test_a_lost_reader_while_others_leave_loses_no_deltas(
    url: str, two: Connection, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost during questions, after views of clients that left were dropped."""
    await run(two, "create table notes (id int primary key, n int, t text)")
    await run(two, "insert into notes select i, i, 'é' || i from generate_series(1, 5) i")
    await enable(two, "notes")
    asked = asyncio.Event()
    async with Hub(url) as hub:
        leaving = [
            # Only the database can decide which of these rows match.
            await hub.live(live("notes", where=[["t", "ilike", f"{letter}%"]]), Recorder())
            for letter in "éèà"
        ]
        victims = [Recorder() for _ in range(4)]
        for n, victim in enumerate(victims):
            await hub.live(live("notes", where=[["n", ">", -n - 2]], mode=mode), victim)

        async def lost(*args: Any, **options: Any) -> Any:
            asked.set()
            monkeypatch.undo()
            for each in leaving:
                each.close()
            for view in list(hub.live_views):
                if not view.followers:
                    hub.live_views._remove(view)
            raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(background, "ask_in_flush", lost)
        await run(
            two, "begin", "delete from notes where id < 4", "update notes set n = 9", "commit"
        )
        for victim in victims:
            await victim.until_rows(await answer(two, "select * from notes order by id"))
        assert asked.is_set()


async def test_a_fault_in_one_view_does_not_affect_others(
    url: str, two: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Window.apply

    def faulty(window: Window, changes: Any) -> Any:
        if window._query.limit == 3:
            raise RuntimeError("not foreseen")
        return apply(window, changes)

    monkeypatch.setattr(Window, "apply", faulty)
    async with Hub(url) as hub:
        good, bad = Recorder(), Recorder()
        await hub.live(live("calm", limit=3), bad)
        await hub.live(live("calm"), good)
        for n in range(3):
            await run(two, f"update calm set n = {n} where id = 2")
            true = await answer(two, "select * from calm order by id")
            await good.until_rows(true)
            await bad.until_rows(true[:3])
        assert good.kinds() == ["snapshot", "deltas", "deltas", "deltas"]
        assert bad.kinds() == ["snapshot", "reset", "reset", "reset"]


async def test_a_flush_that_always_fails_is_skipped(
    url: str, two: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unforeseen error, before any view has applied a change."""
    route = LivePart._route

    def faulty(part: Any, new: Any) -> Any:
        if any(change.table.name == "calm" for each in new for change in each.changes):
            raise RuntimeError("not foreseen")
        return route(part, new)

    monkeypatch.setattr(LivePart, "_route", faulty)
    async with Hub(url) as hub:
        calm, moments, feed = Recorder(), Recorder(), Recorder()
        await hub.live(live("calm"), calm)
        await hub.live(live("moments"), moments)
        await hub.feed(FeedQuery(("calm",)), feed)
        for n in range(3):
            await run(two, f"update calm set n = {n} where id = 2")
            await calm.until_rows(await answer(two, "select * from calm order by id"))
        await run(two, "update moments set n = 7")
        await moments.until(lambda: moments.rows[0]["n"] == 7)
        await feed.until(lambda: sum(len(m.transactions) for m in feed.messages) == 3)
        assert moments.kinds() == ["snapshot", "deltas"]


async def test_a_frame_that_cannot_be_made_is_read_again(
    url: str, two: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(100))

    def faulty(view: Any, *args: Any) -> Frame | None:
        if next(times) == 0:
            raise RuntimeError("not foreseen")
        return made(view, *args)

    made = live_module.LiveView.frame
    monkeypatch.setattr(live_module.LiveView, "frame", faulty)
    async with Hub(url) as hub:
        recorders = [Recorder() for _ in range(3)]
        for limit, recorder in enumerate(recorders, 3):
            await hub.live(live("calm", limit=limit), recorder)
        await run(two, "update calm set n = 0")
        true = await answer(two, "select * from calm order by id")
        for limit, recorder in enumerate(recorders, 3):
            await recorder.until_rows(true[:limit])


async def test_a_fault_in_one_feed_reads_it_from_the_log(
    url: str, two: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, faults = FeedView.seen, iter(range(100))

    def faulty(view: FeedView[Any], transaction: Any) -> Any:
        if view.everything and next(faults) == 1:
            raise RuntimeError("not foreseen")
        return seen(view, transaction)

    monkeypatch.setattr(FeedView, "seen", faulty)
    async with Hub(url) as hub:
        one, all_ = Recorder(), Recorder()
        await hub.feed(FeedQuery(), all_)
        await hub.feed(FeedQuery(("calm",)), one)
        for n in range(4):
            await run(two, f"update calm set n = {n} where id = 1")
            await one.until(lambda n=n: _notes(one, "n")[-1:] == [n])  # type: ignore[misc]
        await all_.until(lambda: _notes(all_, "n") == [0, 1, 2, 3])
        assert _notes(one, "n") == [0, 1, 2, 3]


async def test_a_subscriber_that_raises_does_not_affect_others(url: str, two: Connection) -> None:
    class Raising(Recorder):
        def deliver(self, frame: Frame) -> None:
            if self.messages:
                raise RuntimeError("no")
            super().deliver(frame)

    async with Hub(url) as hub:
        raising, others = [Raising(), Raising()], [Recorder(), Recorder()]
        for recorder in (*raising, *others):
            await hub.live(live("calm"), recorder)
        feeds = [Raising(), Recorder()]
        for feed in feeds:
            await hub.feed(FeedQuery(("calm",)), feed)
        await run(two, "update calm set n = 0")
        for recorder in others:
            await recorder.until_rows(await answer(two, "select * from calm order by id"))
        for recorder in (*raising, feeds[0]):
            await recorder.until(lambda recorder=recorder: recorder.error is not None)  # type: ignore[misc]
            assert recorder.error is not None
            assert recorder.error.retryable
        await feeds[1].until(lambda: _notes(feeds[1], "n") == [0] * 5)


def _notes(feed: Recorder, column: str) -> list[Any]:
    return [
        change["after"][column]
        for message in feed.messages
        for transaction in message.transactions
        for change in transaction.changes
    ]


# ------------------------------------------------------------------------ backlogs


async def of_calm(ctx: Context) -> Any:
    return await ctx.fetch("select * from calm order by id")


async def test_a_backlog_concerns_only_its_tables(
    url: str, two: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 50)
    query = Query("of_calm", of_calm)
    async with Hub(url) as hub:
        calm, streamed, moments, value = Recorder(), Recorder(), Recorder(), Recorder()
        feed, other = Recorder(), Recorder()
        await hub.live(live("calm"), calm)
        await hub.live(live("calm", mode="streamed"), streamed)
        await hub.live(live("moments", limit=500), moments)
        await hub.reactive.subscribe(query, query.bind({}), ANONYMOUS, value)
        await hub.feed(FeedQuery(("calm",)), feed)
        await hub.feed(FeedQuery(("moments",)), other)
        await settle(hub)
        before = executions(hub)
        await run(two, "insert into moments select i from generate_series(100, 300) i")
        await moments.until(lambda: len(moments.rows) == 202)
        await other.until(lambda: len(_notes(other, "id")) == 201)
        await run(two, "update calm set n = 0 where id = 1")
        true = await answer(two, "select * from calm order by id")
        for recorder in (calm, streamed):
            await recorder.until_rows(true)
            assert recorder.kinds() == ["snapshot", "deltas"]
        await value.until(lambda: value.value == true)
        assert executions(hub) == before + 1
        assert moments.kinds() == ["snapshot", "reset"]
        await feed.until(lambda: _notes(feed, "n") == [0])


@pytest.mark.parametrize("part", [LiveViews, ReactiveQueries])
async def test_a_fault_in_a_backlog_does_not_affect_other_parts(
    url: str, two: Connection, part: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live queries, reactive queries, feeds and handlers all skip the same changes."""
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 50)
    events, called, query = Events(), list[Any](), Query("of_calm", of_calm)
    events.on("change", lambda event: called.append(event.key[0]))
    async with Hub(url, events=events) as hub:
        calm, value, feed = Recorder(), Recorder(), Recorder()
        await hub.live(live("calm", limit=500), calm)
        await hub.reactive.subscribe(query, query.bind({}), ANONYMOUS, value)
        await hub.feed(FeedQuery(("calm",)), feed)
        await settle(hub)
        failed = asyncio.Event()
        name = {LiveViews: "reshape", ReactiveQueries: "_altered"}[part]
        act = getattr(part, name)

        def faulty(*args: Any) -> Any:
            if not failed.is_set():
                failed.set()
                raise RuntimeError("not foreseen")
            return act(*args)

        monkeypatch.setattr(part, name, faulty)
        await run(two, "insert into calm select i, i from generate_series(10, 200) i")
        await failed.wait()
        true = await answer(two, "select * from calm order by id")
        await calm.until_rows(true)
        await value.until(lambda: value.value == true)
        await feed.until(lambda: _notes(feed, "id") == list(range(10, 201)))
        async with asyncio.timeout(30):
            while called != list(range(10, 201)):  # noqa: ASYNC110 - handlers have no event
                await asyncio.sleep(0.01)


async def test_queries_are_executed_after_a_backlog_without_another_write(
    url: str, two: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 50)
    query = Query("of_calm", of_calm)
    async with Hub(url) as hub:
        value = Recorder()
        await hub.reactive.subscribe(query, query.bind({}), ANONYMOUS, value)
        await settle(hub)
        monkeypatch.setattr(pace, "_SAFETY_POLL_SECONDS", 3600.0)
        await hub.flushes.next_flush()
        await run(two, "insert into calm select i, i from generate_series(10, 200) i")
        true = await answer(two, "select * from calm order by id")
        await value.until(lambda: value.value == true)


@pytest.mark.parametrize("is_async", [False, True])
async def test_handlers_are_called_with_every_change_of_a_backlog(
    url: str, two: Connection, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 50)
    events, called, done = Events(), list[Any](), asyncio.Event()

    def handle(event: ChangeEvent) -> None:
        called.append((event.table, *event.key))
        if event.key == (1,):
            done.set()

    async def handle_later(event: ChangeEvent) -> None:
        await asyncio.sleep(0)
        handle(event)

    events.on("change", handle_later if is_async else handle)
    events.on("gap", called.append)
    async with Hub(url, events=events), asyncio.timeout(30):
        await run(two, "insert into moments select i from generate_series(100, 400) i")
        await run(
            two, "begin", "insert into calm select i from generate_series(10, 40) i", "commit"
        )
        await run(two, "update moments set n = 5 where id = 1")
        await done.wait()
        expected = [
            *(("moments", i) for i in range(100, 401)),
            *(("calm", i) for i in range(10, 41)),
            ("moments", 1),
        ]
        assert called == expected


async def test_handlers_get_a_gap_if_the_log_was_trimmed(url: str, two: Connection) -> None:
    events, gaps, called = Events(), asyncio.Queue[GapEvent](), asyncio.Queue[ChangeEvent]()
    events.on("gap", gaps.put_nowait)
    events.on("change", called.put_nowait)
    async with Hub(url, events=events) as hub, asyncio.timeout(30):
        assert hub.position is not None
        await run(two, f"select setval('headwater.log_floor', {hub.position.xmax + 1})")
        await run(two, "update calm set n = 7 where id = 1")
        gap = await gaps.get()
        assert gap.since is not None
        await run(two, "update calm set n = 8 where id = 2")
        assert (await called.get()).key == (2,)
