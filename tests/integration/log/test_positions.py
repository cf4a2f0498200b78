"""The server's files are replaced by an older copy, on the same timeline. Clients have positions of
the history that is gone. Random histories are in tests/simulation/test_restored_files.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headwater import Headwater
from headwater.capture.postgres import schema
from headwater.database import Connection, connect
from headwater.errors import ResyncRequired
from headwater.hub.feeds.view import FeedQuery
from headwater.hub.hub import Hub
from headwater.identity import ANONYMOUS
from headwater.log import cursors
from headwater.log.reading.progress import flush
from headwater.log.reading.reader import LogReader
from headwater.model import Position
from headwater.pipeline.jobs.resnapshot import continue_at_present
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from headwater.protocol import Gap, ResetMessage
from headwater.queries.context import Context
from headwater.queries.functions import Query
from headwater.topics.definitions import TopicDefinition
from tests.support.cluster import Cluster, releases, running
from tests.support.databases import finish
from tests.support.log_probe import enable, rows, run
from tests.support.subscribers import Recorder, answer, live

ALL = "select * from orders order by id"
LIVE = live("orders", order=["id"], limit=100)
TOPIC = TopicDefinition("day:{day}", table="orders")


@pytest.fixture(scope="module", params=sorted(releases()))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running(request.param) as cluster:
        finish(install(cluster.url))
        cluster.stop("fast")
        cluster.copy("empty")
        cluster.start()
        yield cluster


async def install(url: str) -> None:
    connection = await connect(url, purpose="test", application_path=True)
    await schema.install(connection)
    await run(connection, "create table orders (id serial primary key, day int default 1, n int)")
    await enable(connection, "orders")
    await connection.close()


@pytest.fixture
def url(cluster: Cluster) -> str:
    """A database of ten orders, and a copy of its files at this moment."""
    cluster.stop()
    cluster.put_back("empty")
    cluster.start()
    finish(write(cluster.url, 10))
    cluster.stop()
    cluster.copy("ten")
    cluster.start()
    return cluster.url


async def write(url: str, count: int, first: int = 0) -> None:
    """Each in a transaction of its own, and on disk when this returns."""
    async with session(url) as connection:
        for i in range(count):
            await run(connection, f"insert into orders (n) values ({first + i})")
        await flush(connection)


@asynccontextmanager
async def session(url: str) -> AsyncIterator[Connection]:
    connection = await connect(url, purpose="test", application_path=True)
    try:
        yield connection
    finally:
        await connection.close()


async def put_back(cluster: Cluster, count: int, first: int = 0) -> None:
    """Orders are written before any client can connect again."""
    cluster.stop()
    cluster.put_back("ten")
    cluster.start(hidden=True)
    await write(cluster.hidden_url, count, first)
    cluster.stop("fast")
    cluster.start()


async def test_a_position_of_another_history_is_refused(cluster: Cluster, url: str) -> None:
    async with Headwater(url) as hw:
        saved = await hw.position()
        await write(url, 10, 100)
        lost = await hw.position()
    await put_back(cluster, 40, 200)
    async with Headwater(url) as hw:
        assert lost.xmax < (await hw.position()).xmax
        with pytest.raises(ResyncRequired, match="history that this database no longer has"):
            await anext(hw.changes(since=lost))
        seen = []
        async for transaction in hw.changes(since=Position.parse(str(saved))):
            seen += [change.after["n"] for change in transaction.changes if change.after]
            if len(seen) == 40:
                break
        assert seen == list(range(200, 240))


async def test_a_position_without_a_mark_is_accepted(cluster: Cluster, url: str) -> None:
    async with Headwater(url) as hw:
        position = await hw.position()
        plain = f"{position.log}-{position.snapshot}"
        await write(url, 1)
        transaction = await anext(hw.changes(since=Position.parse(plain)))
        assert len(transaction.changes) == 1
        assert transaction.position.mark is not None


async def test_a_lost_transaction_is_noticed_among_later_rows(cluster: Cluster, url: str) -> None:
    """It had the lowest id and number, and ended last: the newest rows are in the copy."""
    async with session(url) as long, session(url) as reading:
        reader = await LogReader.open(reading)
        await run(long, "begin", "insert into orders (n) values (1)", "prepare transaction 'long'")
        await write(url, 1)
        begun = await reader.now(reading)
        await write(url, 3)
        saved = (await reader.read(reading, begun)).position
        assert saved.xip
        cluster.stop()
    cluster.copy("open")
    cluster.start()
    async with session(url) as reading:
        reader = await LogReader.open(reading)
        await run(reading, "commit prepared 'long'")
        lost = (await reader.read(reading, saved)).position, await reader.now(reading)
        assert lost[0].mark is not None
        assert lost[0].mark.late == saved.xip
        cluster.stop()
    cluster.put_back("open")
    cluster.start()
    async with session(url) as reading:
        reader = await LogReader.open(reading)
        await run(reading, "rollback prepared 'long'")
        await write(url, 3)
        await reader.check(reading, saved)
        for position in lost:
            with pytest.raises(ResyncRequired, match="no longer has"):
                await reader.check(reading, position)


async def test_a_connected_hub_notifies_its_subscribers(cluster: Cluster, url: str) -> None:
    async with Hub(url) as hub:
        viewer, feed, topic, query = Recorder(), Recorder(), Recorder(), Recorder()
        await hub.live(LIVE, viewer)
        await hub.feed(FeedQuery(("orders",)), feed)
        await hub.topics.subscribe("day:1", TOPIC, topic)
        await hub.reactive.subscribe(COUNT, COUNT.bind({}), ANONYMOUS, query)
        await write(url, 10, 100)
        await viewer.until(lambda: len(viewer.rows) == 20)
        await query.until(lambda: query.value == 20)
        await on_disk(hub)
        await put_back(cluster, 15, 200)
        async with session(url) as connection:
            await viewer.until_rows(await answer(connection, ALL))
        await query.until(lambda: query.value == 25)
        await feed.until(lambda: any(isinstance(each, Gap) for each in feed.messages))
        await topic.until(lambda: any(isinstance(each, Gap) for each in topic.messages))
        resets = [each.reason for each in viewer.messages if isinstance(each, ResetMessage)]
        assert "resync" in resets


async def test_a_client_that_returns_to_another_hub_is_notified(cluster: Cluster, url: str) -> None:
    async with Hub(url) as hub:
        viewer, feed, topic, query = Recorder(), Recorder(), Recorder(), Recorder()
        await hub.live(LIVE, viewer)
        await hub.feed(FeedQuery(("orders",)), feed)
        await hub.topics.subscribe("day:1", TOPIC, topic)
        await hub.reactive.subscribe(COUNT, COUNT.bind({}), ANONYMOUS, query)
        await write(url, 10, 100)
        await query.until(lambda: query.value == 20)
        await viewer.until(lambda: len(viewer.rows) == 20)
        await on_disk(hub)
        lost = str(hub.flushes.progress.durable)
    await put_back(cluster, 9, 200)
    async with session(url) as connection, Hub(url) as hub:
        early = Recorder()
        await hub.reactive.subscribe(COUNT, COUNT.bind({}), ANONYMOUS, early)
        assert early.value == 19
        for _ in range(20):
            await run(connection, "begin", "select pg_current_xact_id()", "rollback")
        await hub.flushes.next_flush()
        with pytest.raises(ResyncRequired, match="no longer has"):
            await hub.feed(FeedQuery(("orders",), since=Position.parse(lost)), Recorder())
        again = Recorder()
        await hub.topics.subscribe("day:1", TOPIC, again, Position.parse(lost))
        await again.until(lambda: any(isinstance(each, Gap) for each in again.messages))
        returned, value = Recorder(), Recorder()
        await hub.live(LIVE, returned, since=lost)
        assert returned.rows == await answer(connection, ALL)
        await hub.reactive.subscribe(COUNT, COUNT.bind({}), ANONYMOUS, value, since=lost)
        assert value.value == 19


async def test_a_cursor_from_elsewhere_is_lost(cluster: Cluster, url: str) -> None:
    await write(url, 10)
    async with Headwater(url) as hw:
        lost = await hw.position()
    await put_back(cluster, 40)
    async with session(url) as connection, Headwater(url) as hw:
        await cursors.save(connection, "mail", lost)
        await cursors.save(connection, "good", await hw.position())
        found = {each.name: each.lost for each in await cursors.list_all(connection)}
        assert found == {"mail": True, "good": False}
        with pytest.raises(ResyncRequired):
            await anext(hw.changes(cursor="mail"))


async def test_a_stream_stops_with_a_hint(
    cluster: Cluster, url: str, request: pytest.FixtureRequest
) -> None:
    planner = Planner(url)
    request.addfinalizer(planner.close)
    start = Offset(planner.now())
    await write(url, 10)
    first = planner.latest(start, None)
    await put_back(cluster, 40)
    restored = Offset.from_dict(first.to_dict())
    for broken in (
        lambda: planner.latest(restored, None),
        lambda: planner.parts(start, restored),
        lambda: planner.latest(Offset(start.position, restored.position, 12), 5),
    ):
        with pytest.raises(ResyncRequired, match="no longer has") as raised:
            broken()
        assert "another checkpoint" in str(raised.value.hint)
    assert planner.latest(start, None) != start


async def test_rows_that_were_trimmed_are_remembered(cluster: Cluster, url: str) -> None:
    """A position of a quiet database stays good when its rows are older than the retention, and
    one of another history is noticed then, too."""
    await write(url, 3)
    async with session(url) as connection:
        lost = await (await LogReader.open(connection)).now(connection)
    await put_back(cluster, 3)
    async with session(url) as connection:
        reader = await LogReader.open(connection)
        good = await reader.now(connection)
        await run(connection, "select headwater.set_retention('1 second')")
        await emptied(connection)
        later = await reader.now(connection)
        for position in (good, later):
            await reader.check(connection, position)
        assert lost.xmin >= (await rows(connection, "table headwater.log_floor"))[0][0]
        with pytest.raises(ResyncRequired, match="no longer has"):
            await reader.check(connection, lost)


async def test_a_lake_continues_with_another_log(
    cluster: Cluster, url: str, tmp_path: Path
) -> None:
    """It identifies transactions by log and id: those of the history that is gone do not change."""
    lake = Lake(str(tmp_path))
    assert continue_at_present(lake, url) is None
    await write(url, 10)
    same = continue_at_present(lake, url)
    assert same is not None
    assert same.since.log == same.until.log
    await put_back(cluster, 5)
    async with session(url) as connection, Hub(url) as hub:
        saved, viewer = hub.position, Recorder()
        await hub.live(LIVE, viewer)
        replaced = continue_at_present(lake, url)
        assert replaced is not None
        assert replaced.since.log != replaced.until.log
        # Connected readers notice it, and so do clients that return with the old log id.
        await write(url, 1)
        await viewer.until_rows(await answer(connection, ALL))
        assert Position.parse(viewer.position or "").log == replaced.until.log
        with pytest.raises(ResyncRequired, match="another log"):
            await hub.feed(FeedQuery(("orders",), since=saved), Recorder())
    again = continue_at_present(lake, url)
    assert again is not None
    assert again.since.log == again.until.log


async def on_disk(hub: Hub) -> None:
    """Until what the hub delivered so far is on disk, and the hub knows it."""
    await hub.flushes.next_flush()
    present = hub.flushes.progress.position
    async with asyncio.timeout(30):
        while not hub.flushes.progress.durable.covers(present):
            await write(hub.url, 0)
            await hub.flushes.next_flush()


async def emptied(connection: Connection) -> None:
    async with asyncio.timeout(30):
        while await rows(connection, "select from headwater.log limit 1"):
            await run(connection, "select headwater.trim_log()", "select pg_sleep(0.1)")


async def count(ctx: Context) -> Any:
    return (await ctx.fetch("select count(*)::int as n from orders"))[0]["n"]


COUNT = Query("count", count)
