"""Faults at every await and every step of a flush: afterwards every client equals the database.

Live queries, streamed ones, reactive queries, topics and feeds follow a table while random
transactions change it. At every await and every hand-over of a flush a fault may come, chosen by
the seed: the connection is lost or the statement cancelled, an unforeseen error is raised, a
subscriber leaves or raises. Then the faults end, and every client must have the rows of the
database; feeds lose nothing and deliver nothing twice. `SEED=…` repeats or prolongs a run.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import psycopg
import pytest

from headwater import limits
from headwater.database import Connection, connect
from headwater.hub import hub as hub_module
from headwater.hub.feeds.registry import FeedRegistry
from headwater.hub.feeds.view import FeedQuery, FeedView
from headwater.hub.hub import Hub
from headwater.hub.live_views import background as side_jobs_module
from headwater.hub.live_views import delivery as delivery_module
from headwater.hub.live_views.initial_snapshots import InitialSnapshots
from headwater.hub.live_views.registry import LiveViews
from headwater.hub.live_views.steps import ViewStep
from headwater.hub.live_views.view import LiveView
from headwater.hub.reactive import group as group_module
from headwater.hub.reactive.registry import ReactiveQueries
from headwater.hub.reading.snapshot_queries import SnapshotQuery
from headwater.hub.topics.registry import TopicRegistry
from headwater.hub.topics.topic import TopicView, UpdateCollector
from headwater.identity import ANONYMOUS
from headwater.live.view import Views
from headwater.log import reconnect
from headwater.log.images import ImageDecoder
from headwater.log.reading import follow as follow_module
from headwater.log.reading import reader as reader_module
from headwater.log.reading.progress import Progress
from headwater.model import Position
from headwater.protocol import Changes, Frame, Gap, TopicMessage, Upsert
from headwater.queries.analysis.watches import Watches
from headwater.queries.context import Context
from headwater.queries.functions import Query
from headwater.topics.definitions import TopicDefinition
from tests.support.databases import fresh_database
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, run
from tests.support.subscribers import Resubscriber, answer, live

SEED = first_seed(1)
FAULTS = size("failures", 40, large=1_000)
"""About how many faults on each server."""

ROOM = TopicDefinition("room:{region}", table="orders")
STEPS: tuple[tuple[Any, str], ...] = (
    (ViewStep, "apply"), (ViewStep, "answer"), (LiveView, "frame"), (LiveView, "rows"),
    (FeedView, "seen"), (FeedRegistry, "frame"), (FeedRegistry, "flushed"),
    (UpdateCollector, "take"), (TopicView, "frame"), (TopicRegistry, "_late"),
    (Watches, "touched"), (Views, "touched"),
    (SnapshotQuery, "of_need"), (ImageDecoder, "__call__"), (LiveViews, "make_live"),
    (LiveViews, "welcome"), (LiveViews, "reshape"), (LiveViews, "skipped"),
    (ReactiveQueries, "skipped"), (FeedRegistry, "skipped"),
    (ReactiveQueries, "_hand_out"), (ReactiveQueries, "_learn"), (Progress, "advance"),
    (InitialSnapshots, "start"), (side_jobs_module, "hide"), (delivery_module, "fan_out"),
)  # fmt: skip


_NOT_AFTER = ("Progress.advance",)
"""What is no place for a fault: between it and the next statement nothing can fail."""


_RARE_STEPS = 8.0
"""How much more often than a wait a step fails that has not failed yet."""


class Unforeseen(Exception):
    """An error that no code expects."""


class Faults:
    """Decides where the next fault comes, and its kind."""

    def __init__(self, chance: random.Random, url: str) -> None:
        self.chance = chance
        self.url = url
        self.share = 0.0
        self.happened: list[str] = []
        self._often = Counter[str]()
        self.leave: Callable[[], None] = lambda: None

    def comes(self, share: float = 1.0) -> bool:
        return self.chance.random() < self.share * share

    def step(self, name: str) -> None:
        """Rare steps fail as often as those that run for every row."""
        if self.comes(_RARE_STEPS / (1 + self._often[name])):
            self._often[name] += 1
            self.happened.append(name)
            raise Unforeseen(name)

    async def waiting(self, connection: Connection) -> None:
        """At an await of the flush."""
        if not self.comes():
            return
        kind = self.chance.choice(("lost", "cancelled", "unforeseen", "left", "left and lost"))
        self.happened.append(kind)
        if kind.startswith("left"):
            self.leave()
        match kind:
            case "lost" | "left and lost":
                async with await connect(self.url, purpose="test", application_path=True) as other:
                    pid = connection.info.backend_pid
                    await other.execute("select pg_terminate_backend(%s, 5000)", (pid,))
            case "cancelled":
                raise psycopg.errors.QueryCanceled("canceling statement due to user request")
            case "unforeseen":
                raise Unforeseen("while it waited")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for owner, name in STEPS:
            original = getattr(owner, name)
            label = f"{owner.__name__}.{name}"
            if isinstance(owner.__dict__.get(name), classmethod):
                wrapped: Any = classmethod(self._around(label, original.__func__))
            else:
                wrapped = self._around(label, original)
            monkeypatch.setattr(owner, name, wrapped)
        session = follow_module.reading_session

        @asynccontextmanager
        async def faulty(*args: Any, **options: Any) -> AsyncIterator[Any]:
            async with session(*args, **options) as (connection, reader, waker):
                yield _Faulty(connection, self), reader, waker

        monkeypatch.setattr(hub_module, "reading_session", faulty)

    def _around(self, label: str, original: Any) -> Any:
        def before(*args: Any, **options: Any) -> Any:
            late = self.chance.random() < 0.5 and label not in _NOT_AFTER
            if not late:
                self.step(label)
            made = original(*args, **options)
            if late and not asyncio.iscoroutine(made):
                self.step(f"{label} (after)")
            return made

        return before


class _Faulty:
    """The connection of a flush. Each of its answers may fail."""

    def __init__(self, connection: Connection, faults: Faults) -> None:
        self._connection = connection
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def execute(self, *args: Any, **options: Any) -> Any:
        await self._faults.waiting(self._connection)
        return await self._connection.execute(*args, **options)


class Client(Resubscriber):
    """Raises or leaves when a fault comes."""

    def __init__(self, faults: Faults, begin: Callable[[Client], Any]) -> None:
        super().__init__(begin)
        self._faults = faults

    def deliver(self, frame: Frame) -> None:
        if self._faults.comes(0.3):
            self._faults.happened.append("raises")
            raise Unforeseen("a subscriber")
        super().deliver(frame)
        if self._faults.comes(0.3):
            self._faults.happened.append("leaves")
            self.leave()


class FeedClient(Client):
    """Records every change that it is sent; on one connection none may come twice."""

    def __init__(self, faults: Faults, begin: Callable[[Client], Any]) -> None:
        super().__init__(faults, begin)
        self.seen: set[int] = set()
        self._seen_now: set[int] = set()

    async def subscribe(self) -> None:
        self._seen_now = set()
        await super().subscribe()

    def _fold(self, message: Any) -> None:
        assert isinstance(message, Changes), message
        for transaction in message.transactions:
            for change in transaction.changes:
                assert change["seq"] not in self._seen_now, "twice over one connection"
                self._seen_now.add(change["seq"])
        self.seen |= self._seen_now
        self.position = message.position


class Viewer(Client):
    """Folds a topic. After a gap it reads the table, as an application does."""

    def __init__(self, faults: Faults, begin: Callable[[Client], Any]) -> None:
        super().__init__(faults, begin)
        self.table: dict[int, Any] = {}
        self.gap = True

    def _fold(self, message: Any) -> None:
        self.position = message.position
        match message:
            case TopicMessage():
                for op in message.ops:
                    if isinstance(op, Upsert):
                        self.table[op.key[0]] = op.row
                    else:
                        self.table.pop(op.key[0], None)
            case Gap():
                self.gap = True

    def filled(self, rows: dict[int, Any]) -> dict[int, Any]:
        if self.gap:
            self.table, self.gap = dict(rows), False
        return self.table


async def in_region(ctx: Context, region: int) -> Any:
    return await ctx.fetch("select * from orders where region = %s order by id", region)


IN_REGION = Query("in_region", in_region, key="id")


class Stage:
    """A hub, its clients, and the table they follow."""

    def __init__(self, hub: Hub, connection: Connection, faults: Faults) -> None:
        self.hub, self.connection, self.faults = hub, connection, faults
        self.chance = faults.chance
        self.expected: list[tuple[Client, str]] = []
        self.feeds: list[FeedClient] = []
        self.viewers: list[tuple[Viewer, int]] = []
        faults.leave = self._someone_leaves

    @property
    def clients(self) -> list[Client]:
        live = [client for client, _ in self.expected]
        return [*live, *self.feeds, *(viewer for viewer, _ in self.viewers)]

    def _someone_leaves(self) -> None:
        for client in self.chance.sample(self.clients, 4):
            client.leave()
        for view in list(self.hub.live_views):  # as if they had been left for long enough
            if not view.followers and view.live:
                self.hub.live_views._remove(view)

    def open(self) -> None:
        hub, faults = self.hub, self.faults
        for region in (0, 1, 2):
            where = f"where region = {region}"
            for query, sql in (
                (live("orders", where=[["region", "=", region]], order=["amount desc"], limit=4),
                 f"select * from orders {where} order by amount desc, id limit 4"),
                (live("orders", where=[["region", "=", region]], mode="streamed"),
                 f"select * from orders {where} order by id"),
                (live("orders", where=[["note", ">", f"{region}"]], order=["note"], limit=6),
                 f"select * from orders where note > '{region}' order by note, id limit 6"),
            ):  # fmt: skip
                begin = lambda client, query=query: hub.live(query, client)  # noqa: E731
                self.expected.append((Client(faults, begin), sql))
            args = IN_REGION.bind({"region": region})
            for delta in (False, True):
                ask = lambda client, args=args, delta=delta: hub.reactive.subscribe(  # noqa: E731
                    IN_REGION, args, ANONYMOUS, client, delta=delta
                )
                sql = f"select * from orders {where} order by id"
                self.expected.append((Client(faults, ask), sql))
            follow = lambda client, region=region: hub.topics.subscribe(  # noqa: E731
                f"room:{region}", ROOM, client, _position(client)
            )
            self.viewers.append((Viewer(faults, follow), region))
        self.expected.append((Client(faults, lambda c: hub.live(live("calm"), c)), _CALM))
        for _ in range(2):
            feed = lambda c: hub.feed(FeedQuery(("orders",), since=_position(c)), c)  # noqa: E731
            self.feeds.append(FeedClient(faults, feed))

    async def subscribe_all(self) -> None:
        for client in self.clients:
            if not client.follows:
                await client.subscribe()

    async def until_all_follow(self) -> None:
        """Until every client follows; faults may end a new subscription."""
        async with asyncio.timeout(60):
            while not all(client.follows for client in self.clients):
                await self.hub.flushes.until_ready()
                await self.subscribe_all()

    async def agree(self) -> None:
        """Without faults, every client gets the rows of the database."""
        await self.until_all_follow()
        for client, sql in self.expected:
            true = await answer(self.connection, sql)
            await self._until(client, sql, partial(self._has, client), true)
        for viewer, region in self.viewers:
            true = await answer(self.connection, f"select * from orders where region = {region}")
            rows = {row["id"]: row for row in true}
            await self._until(viewer, f"room:{region}", partial(viewer.filled, rows), rows)
        cursor = await self.connection.execute(_LOGGED)
        logged = {seq for (seq,) in await cursor.fetchall()}
        for feed in self.feeds:
            await self._until(feed, "feed", lambda f=feed: f.seen & logged, logged)  # type: ignore[misc]

    async def _until(self, client: Client, what: str, has: Callable[[], Any], true: Any) -> None:
        try:
            async with asyncio.timeout(30):
                while has() != true:
                    if not client.follows:  # an earlier fault has ended it, with an error
                        await self.until_all_follow()
                    await client.until(lambda: has() == true or not client.follows)
        except TimeoutError as error:
            error.add_note(f"{what}: has {has()}, not {true}; {client.error}, {client.handle}")
            raise

    def _has(self, client: Client) -> Any:
        if client.handle is None or client.failure is not None:
            return None
        if hasattr(client.handle, "group") and not client.handle.delta:
            return client.value
        return client.rows


def _position(client: Client) -> Position | None:
    return None if client.position is None else Position.parse(client.position)


_CALM = "select * from calm order by id"
_LOGGED = (
    "select l.seq from headwater.log l join headwater.shapes s on s.id = l.shape"
    " where s.table_name = 'orders' and l.op <> 'R'"
)


@pytest.fixture(params=["embedded", "system"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    server = (
        request.getfixturevalue("postgres").url
        if request.param == "embedded"
        else request.getfixturevalue("system_postgres")
    )
    with fresh_database(server, installed=True) as url:
        yield url


async def create_tables(connection: Connection) -> None:
    await run(
        connection,
        "create table orders (id int primary key, region int, amount int, note text)",
        "insert into orders select i, i % 3, i % 9, 'n' || i from generate_series(1, 20) i",
        "create table calm (id int primary key, n int)",
        "insert into calm select i, 0 from generate_series(1, 25) i",
    )
    await enable(connection, "orders", "calm")


def random_write(chance: random.Random) -> str:
    key, region, amount = chance.randint(1, 25), chance.randint(0, 2), chance.randint(0, 9)
    note = chance.choice(["null", "'a'", "'1 b'", "'2'", "'é'"])
    return chance.choices(
        [
            f"insert into orders values ({key}, {region}, {amount}, {note})"
            f" on conflict (id) do update set amount = {amount}, region = {region}",
            f"update orders set amount = {amount}, note = {note} where id = {key}",
            f"update orders set region = {region} where id % 7 = {key % 7}",
            f"delete from orders where id = {key}",
            f"update calm set n = n + 1 where id = {key}",
            "truncate orders",
        ],
        [40, 25, 5, 15, 10, 0.4],
    )[0]


@pytest.mark.timeout(120 + FAULTS)
async def test_every_client_equals_the_database_after_faults_at_every_step(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(SEED)
    faults = Faults(chance, database)
    monkeypatch.setattr(reconnect, "RECONNECT_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(limits, "RECONNECT_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(group_module, "_RETRY_FIRST", 0.01)
    async with await connect(database, purpose="test", application_path=True) as connection:
        await create_tables(connection)
        faults.install(monkeypatch)
        async with Hub(database) as hub:
            stage = Stage(hub, connection, faults)
            stage.open()
            await stage.agree()
            for number in range(10_000):
                # A backlog now and then: more than a page is skipped.
                page = chance.choice((50_000, 50_000, 50_000, 3))
                monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", page)
                faults.share = chance.choice((0.002, 0.01, 0.05))
                for _ in range(chance.randint(1, 12)):
                    writes = [random_write(chance) for _ in range(chance.choice((1, 1, 2, 6)))]
                    await run(connection, "begin", *writes, "commit")
                    if chance.random() < 0.5:
                        await asyncio.sleep(0)
                        await stage.subscribe_all()
                faults.share = 0.0
                try:
                    await stage.agree()
                except BaseException as error:
                    error.add_note(f"SEED={SEED}, round {number}: {faults.happened[-30:]}")
                    raise
                if len(faults.happened) >= FAULTS:
                    break
    kinds = Counter(each.removesuffix(" (after)") for each in faults.happened)
    print(f"\nseed {SEED}: {len(faults.happened)} faults in {number + 1} rounds: {dict(kinds)}")
    assert [client.fault for client in stage.clients if client.fault] == []
