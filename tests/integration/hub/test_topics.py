"""Topics through a hub: signals and changes, what each viewer is sent, restarts and resumes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headwater import limits
from headwater.database import Connection, connect
from headwater.embedded import EmbeddedPostgres
from headwater.errors import CaptureError, Forbidden
from headwater.hub.hub import Hub
from headwater.hub.subscriptions.subscriber import Access
from headwater.hub.topics.rows import of_keys
from headwater.hub.topics.subscription import TopicSubscription
from headwater.log.reading import reader as reader_module
from headwater.log.reading.progress import flush
from headwater.model import Position
from headwater.protocol import Frame, Gap, Poke, Remove, TopicMessage, Upsert
from headwater.settings.groups import LiveSettings, Settings
from headwater.topics.definitions import TopicDefinition, Topics
from tests.support.databases import passable_folder
from tests.support.log_probe import enable, rows, run
from tests.support.subscribers import Recorder

CHAT = TopicDefinition("chat:{id}", entity="messages")
DERIVED = TopicDefinition("room:{chat_id}", table="messages")
PARENTS = TopicDefinition("tree:{chat_id}", table="messages", parents={"chats": "chat_id"})
POKE = TopicDefinition("org:{id}", poke=True)


class Viewer(Recorder):
    """Folds the messages of a topic, and records text that shrinks."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[tuple[str, Any], Any] = {}
        self.gaps = self.pokes = 0
        self.shrunk = False
        self.subscription: TopicSubscription | None = None
        self.refuse = False

    def deliver(self, frame: Frame) -> None:
        if self.refuse:
            assert self.subscription is not None
            self.subscription.pause()
            return
        super().deliver(frame)

    def _fold(self, message: Any) -> None:
        self.position = message.position
        match message:
            case TopicMessage():
                for op in message.ops:
                    self._take(op)
            case Poke():
                self.pokes += 1
            case Gap():
                self.gaps += 1

    def _take(self, op: Upsert | Remove) -> None:
        place = op.entity, tuple(op.key)
        if isinstance(op, Remove):
            self.table.pop(place, None)
            return
        before = self.table.get(place)
        if before is not None and len(before.get("body") or "") > len(op.row.get("body") or ""):
            self.shrunk = True
        self.table[place] = op.row

    @property
    def updates(self) -> list[TopicMessage]:
        return [m for m in self.messages if isinstance(m, TopicMessage) and m.ops]

    @property
    def ops(self) -> list[tuple[str, int]]:
        return [
            ("upsert" if isinstance(op, Upsert) else "remove", op.key[0])
            for message in self.updates
            for op in message.ops
        ]

    async def until_ops(self, count: int) -> None:
        await self.until(lambda: len(self.ops) >= count)

    async def until_bodies(self, bodies: dict[int, str]) -> None:
        await self.until(lambda: self.bodies() == bodies)

    def bodies(self) -> dict[int, str]:
        return {key[0]: row["body"] for (_, key), row in self.table.items()}


@pytest.fixture
async def chats(connection: Connection) -> Connection:
    await run(
        connection,
        "create table chats (id int primary key, title text)",
        "create table messages (id int primary key, chat_id int, body text)",
        "insert into chats values (1, 'one'), (2, 'two')",
    )
    await enable(connection, "messages")
    return connection


@pytest.fixture
async def hub(url: str) -> AsyncIterator[Hub]:
    async with Hub(url) as hub:
        yield hub


async def follow(
    hub: Hub,
    topic: str,
    definition: TopicDefinition = CHAT,
    since: str | None = None,
    viewer: Viewer | None = None,
) -> Viewer:
    viewer = viewer or Viewer()
    position = None if since is None else Position.parse(since)
    viewer.subscription = await hub.topics.subscribe(topic, definition, viewer, position)
    return viewer


async def on_disk(hub: Hub, connection: Connection) -> None:
    """Wait until the hub sends positions after everything so far, such as the enabling of the
    tables: a client that resumes before it gets a gap. Commits do not wait for the disk here."""
    await hub.flushes.next_flush()
    present = hub.flushes.progress.position
    async with asyncio.timeout(30):
        while not hub.flushes.progress.durable.covers(present):
            await flush(connection)
            await hub.flushes.next_flush()


async def signal(connection: Connection, topic: str, *ids: object) -> None:
    await connection.execute("select headwater.signal(%s, %s)", (topic, list(map(str, ids))))


# ------------------------------------------------------------------------ signals


async def test_a_signal_brings_rows_as_they_are(hub: Hub, chats: Connection) -> None:
    one, other, elsewhere = [await follow(hub, f"chat:{id}") for id in (1, 1, 2)]
    await run(chats, "insert into messages values (1, 1, 'a'), (2, 1, 'b')")
    await signal(chats, "chat:1", 1, 2, 3, 1)
    await one.until(lambda: one.ops)
    assert one.ops == [("upsert", 2), ("remove", 3), ("upsert", 1)]
    assert one.table["messages", (2,)] == {"id": 2, "chat_id": 1, "body": "b"}
    assert one.frames[1:] == other.frames[1:], "encoded once"
    assert not elsewhere.ops
    assert one.resumed == [False]


async def test_a_locked_table_is_not_asked_for_by_every_flush(
    hub: Hub, chats: Connection, url: str
) -> None:
    """Its topics get gaps; flushes soon after one that waited without success do not wait."""
    viewer = await follow(hub, "chat:1")
    async with await connect(url, purpose="test", application_path=True) as locker:
        await run(locker, "begin", "lock table messages in access exclusive mode")
        await signal(chats, "chat:1", 1)
        await viewer.until(lambda: viewer.gaps == 1)
        asked = hub.metrics.questions.labels("topic")._value.get()
        await signal(chats, "chat:1", 2)
        await viewer.until(lambda: viewer.gaps == 2)
        assert hub.metrics.questions.labels("topic")._value.get() == asked
        await run(locker, "rollback")


async def test_rolled_back_signals_are_never_sent(hub: Hub, chats: Connection) -> None:
    viewer = await follow(hub, "chat:1")
    async with chats.transaction(force_rollback=True):
        await run(chats, "insert into messages values (1, 1, 'never')")
        await signal(chats, "chat:1", 1)
    async with chats.transaction():
        await run(chats, "insert into messages values (2, 1, 'ever')")
        async with chats.transaction(force_rollback=True):
            await signal(chats, "chat:1", 99)
        await signal(chats, "chat:1", 2)
    await viewer.until(lambda: viewer.ops)
    assert viewer.ops == [("upsert", 2)]


async def test_signals_of_a_transaction_arrive_together_and_in_order(
    hub: Hub, chats: Connection
) -> None:
    viewer = await follow(hub, "chat:1")
    await run(chats, "insert into messages select i, 1, 'x' from generate_series(1, 100) i")
    for first in range(1, 100, 10):
        async with chats.transaction():
            for id in range(first, first + 10):
                await signal(chats, "chat:1", id)
    await viewer.until(lambda: len(viewer.ops) == 100)
    assert [id for _, id in viewer.ops] == list(range(1, 101))
    assert all(len(message.ops) % 10 == 0 for message in viewer.updates)


async def test_pokes_are_one_a_flush(hub: Hub, chats: Connection) -> None:
    viewer = await follow(hub, "org:7", POKE)
    async with chats.transaction():
        for _ in range(50):
            await signal(chats, "org:7")
    await viewer.until(lambda: viewer.pokes)
    await signal(chats, "org:7", "ignored")
    await viewer.until(lambda: viewer.pokes == 2)
    assert not viewer.updates


async def test_ids_that_cannot_be_keys_are_left_out(hub: Hub, chats: Connection) -> None:
    viewer = await follow(hub, "chat:1")
    await run(chats, "insert into messages values (1, 1, 'a')")
    await signal(chats, "chat:1", "x", "1; drop table messages", 2**31, "", "1.5", "[1]", "01")
    await viewer.until(lambda: viewer.ops)
    assert viewer.ops == [("upsert", 1)]
    assert hub.metrics.registry.get_sample_value("headwater_signal_ids_refused_total") == 6


@pytest.mark.parametrize(
    ("key", "values", "ids"),
    [
        ("id text", ["a", 'b "c" \\ {,}', "ä"], ["a", 'b "c" \\ {,}', "ä", "missing"]),
        ("id uuid", ["00000000-0000-0000-0000-000000000001"], ["{1}", "0" * 31 + "1"]),
        ("id numeric", ["1.50"], ["1.5", "x"]),
        ("id date", ["2026-01-02"], ["2026-01-02", "never"]),
        ("id timestamptz", ["2026-01-02 03:04:05+00"], ["2026-01-02T03:04:05Z"]),
        ("id char(4)", ["ab"], ["ab", "cd"]),
        ("id varchar(2)", ["ab"], ["ab", "abc"]),
        ("id boolean", ["t"], ["true"]),
        ("id inet", ["10.0.0.1"], ["10.0.0.1"]),
        ("id bytea", ["\\x00ff"], ["\\x00ff", "zz"]),
        ("id bigint", ["9007199254740993"], ["9007199254740993"]),
    ],
)
async def test_keys_of_any_type(
    hub: Hub, connection: Connection, key: str, values: list[str], ids: list[str]
) -> None:
    """Of a table that is not even captured."""
    await run(connection, f"create table things ({key} primary key, n int)")
    for n, value in enumerate(values):
        await connection.execute("insert into things values (%s, %s)", (value, n))
    viewer = await follow(hub, "thing:1", TopicDefinition("thing:{id}", entity="things"))
    await signal(connection, "thing:1", *ids)
    await viewer.until(lambda: viewer.ops)
    assert sorted(row["n"] for row in viewer.table.values()) == list(range(len(values)))
    assert not viewer.gaps


async def test_keys_of_several_columns(hub: Hub, connection: Connection) -> None:
    await run(connection, "create table pairs (a int, b text, n int, primary key (a, b))")
    await run(connection, "insert into pairs values (1, 'x', 7), (1, 'y', 8)")
    viewer = await follow(hub, "pair:1", TopicDefinition("pair:{id}", entity="pairs"))
    await signal(connection, "pair:1", '[1,"x"]', '["1","z"]', "[1]", "1", '{"a":1}')
    await viewer.until(lambda: viewer.updates)
    (message,) = viewer.updates
    assert [(type(op).__name__, tuple(op.key)) for op in message.ops] == [
        ("Upsert", (1, "x")),
        ("Remove", (1, "z")),
    ]


# ------------------------------------------------------------------------ derived


async def test_changes_of_rows_are_signals(hub: Hub, chats: Connection) -> None:
    one, two = [await follow(hub, f"room:{id}", DERIVED) for id in (1, 2)]
    await run(chats, "insert into messages values (1, 1, 'a'), (2, 2, 'b'), (3, null, 'c')")
    await run(chats, "update messages set body = 'aa' where id = 1")
    await one.until(lambda: one.bodies() == {1: "aa"})
    await two.until(lambda: two.bodies() == {2: "b"})
    await run(chats, "update messages set chat_id = 2 where id = 1")
    await one.until(lambda: one.bodies() == {})
    await two.until(lambda: two.bodies() == {1: "aa", 2: "b"})
    await run(chats, "delete from messages where id = 2", "update messages set id = 9 where id = 1")
    await two.until(lambda: two.bodies() == {9: "aa"})
    await run(chats, "truncate messages")
    await one.until(lambda: one.gaps == 1)
    await two.until(lambda: two.gaps == 1)
    await run(chats, "insert into messages values (4, 1, 'd')")
    await one.until(lambda: one.bodies() == {4: "d"})


async def test_a_signal_cannot_bring_rows_of_another_topic(hub: Hub, chats: Connection) -> None:
    viewer = await follow(hub, "room:1", DERIVED)
    await run(chats, "insert into messages values (1, 1, 'a'), (2, 2, 'secret')")
    await viewer.until(lambda: viewer.bodies() == {1: "a"})
    await signal(chats, "room:1", 1, 2)
    await viewer.until(lambda: len(viewer.ops) == 3)
    assert viewer.ops[1:] == [("upsert", 1), ("remove", 2)]


async def test_parents_are_sent_with_their_rows(hub: Hub, chats: Connection) -> None:
    viewer = await follow(hub, "tree:1", PARENTS)
    await run(chats, "insert into messages values (1, 1, 'a'), (2, 1, 'b')")
    await viewer.until(lambda: viewer.updates)
    (message,) = viewer.updates
    assert [(op.entity, tuple(op.key)) for op in message.ops] == [
        ("chats", (1,)),
        ("messages", (1,)),
        ("messages", (2,)),
    ]
    assert viewer.table["chats", (1,)] == {"id": 1, "title": "one"}


async def test_an_altered_table(hub: Hub, chats: Connection) -> None:
    signalled, derived = await follow(hub, "chat:1"), await follow(hub, "room:1", DERIVED)
    await run(chats, "alter table messages add column extra int default 5")
    await run(chats, "insert into messages values (1, 1, 'a')")
    await signal(chats, "chat:1", 1)
    await signalled.until_ops(1)
    assert signalled.table["messages", (1,)]["extra"] == 5
    await derived.until(lambda: derived.gaps)  # the default is in rows that were not written
    await run(chats, "insert into messages values (2, 1, 'b')")
    await derived.until_ops(1)
    assert derived.table["messages", (2,)]["extra"] == 5
    await run(chats, "alter table messages drop column extra")
    await signal(chats, "chat:1", 1)
    await signalled.until(
        lambda: signalled.gaps or "extra" not in signalled.table["messages", (1,)]
    )


# ------------------------------------------------------------------------ the database's work


async def test_one_statement_per_flush_for_any_number_of_viewers(
    url: str, postgres: EmbeddedPostgres, chats: Connection
) -> None:
    """Counted in the log of PostgreSQL itself."""
    name = chats.info.dbname
    await run(
        chats,
        f"alter database {name} set log_statement = 'all'",
        "select set_config('log_statement', 'none', false)",
    )
    log = postgres.data_dir / "postgres.log"
    before = log.stat().st_size
    async with Hub(url) as hub:
        flushes = await _hundred_viewers(hub, chats)
    with log.open("rb") as said:
        said.seek(before)
        asked = said.read().decode().count('from "public"."messages"')
    assert 0 < asked <= min(20, flushes)


async def _hundred_viewers(hub: Hub, chats: Connection) -> int:
    viewers = [await follow(hub, f"chat:{id % 5}") for id in range(100)]
    await run(chats, "insert into messages select i, i % 5, '' from generate_series(1, 50) i")
    flushes = hub.flushes.number
    for round in range(20):
        async with chats.transaction():
            await run(chats, f"update messages set body = body || '{round},'")
            for topic in range(5):
                await signal(chats, f"chat:{topic}", *range(topic or 5, 51, 5))
    final = {id: ",".join(map(str, range(20))) + "," for id in range(1, 51)}
    for number, viewer in enumerate(viewers):
        mine = {id: body for id, body in final.items() if id % 5 == number % 5}
        await viewer.until_bodies(mine)
        assert not viewer.shrunk
    return hub.flushes.number - flushes


async def test_the_index_is_used(hub: Hub, chats: Connection) -> None:
    await run(chats, "insert into messages select i, 1, 'x' from generate_series(1, 20000) i")
    await run(chats, "analyze messages")
    question = of_keys(await hub.tables.find("messages"), [(7,), (9,)])
    cursor = await chats.execute(f"explain {question.sql.text}".encode(), question.sql.values)
    plan = str(await cursor.fetchall())
    assert "messages_pkey" in plan
    assert "Seq Scan" not in plan


# ------------------------------------------------------------------------ listening


async def test_the_server_listens_to_what_is_followed(hub: Hub, chats: Connection) -> None:
    dice = random.Random(7)
    open_: list[Viewer] = []
    for step in range(1000):
        if open_ and dice.random() < 0.5:
            viewer = open_.pop(dice.randrange(len(open_)))
            assert viewer.subscription is not None
            viewer.subscription.close()
        else:
            open_.append(await follow(hub, f"chat:{dice.randrange(200)}"))
        if step % 100 == 99:
            used = {v.subscription.topic.name for v in open_ if v.subscription}
            expected = {
                row[0]
                for row in await rows(
                    chats,
                    "select 'headwater:' || left(md5(t), 16) from unnest(array["
                    + ",".join(f"'{name}'" for name in used)
                    + "]::text[]) t",
                )
            }
            assert await hub.topics.listener.channels() == expected
    for viewer in open_:
        assert viewer.subscription is not None
        viewer.subscription.close()
    assert await hub.topics.listener.channels() == set()
    assert not hub.topics


async def test_many_sessions_open_and_close_at_once(hub: Hub, chats: Connection) -> None:
    async def session(seed: int) -> list[Viewer]:
        dice = random.Random(seed)
        mine: list[Viewer] = []
        for _ in range(5):
            mine.append(await follow(hub, f"chat:{dice.randrange(100)}"))
            if dice.random() < 0.5:
                viewer = mine.pop()
                assert viewer.subscription is not None
                viewer.subscription.close()
        return mine

    found = await asyncio.gather(*(session(seed) for seed in range(200)))
    used = {v.subscription.topic.channel for each in found for v in each if v.subscription}
    assert await hub.topics.listener.channels() == used
    for each in found:
        for viewer in each:
            assert viewer.subscription is not None
            viewer.subscription.close()
    assert await hub.topics.listener.channels() == set()


async def test_a_signal_wakes_without_the_safety_poll(
    url: str, chats: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.log.waking.pace._SAFETY_POLL_SECONDS", 3600.0)
    async with Hub(url) as hub:
        viewer = await follow(hub, "org:1", POKE)
        await signal(chats, "org:1")
        await viewer.until(lambda: viewer.pokes == 1)
        await run(chats, _KILL)
        await signal(chats, "org:1")
        await viewer.until(lambda: viewer.pokes == 2)


_KILL = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where application_name = 'headwater topics' and datname = current_database()"
)


async def test_the_listener_is_killed_repeatedly(hub: Hub, chats: Connection) -> None:
    viewer = await follow(hub, "chat:1")
    await run(chats, "insert into messages values (1, 1, '')")
    for step in range(40):
        async with chats.transaction():
            await run(chats, f"update messages set body = body || '{step},'")
            await signal(chats, "chat:1", 1)
        if step % 5 == 0:
            await run(chats, _KILL)
    whole = "".join(f"{step}," for step in range(40))
    await viewer.until(lambda: viewer.bodies() == {1: whole})
    assert not viewer.shrunk
    assert not viewer.gaps
    async with asyncio.timeout(30):
        while await hub.topics.listener.channels() != {viewer_channel(viewer)}:
            await hub.flushes.next_flush()


def viewer_channel(viewer: Viewer) -> str:
    assert viewer.subscription is not None
    return viewer.subscription.topic.channel


@pytest.mark.parametrize("crash", [False, True])
async def test_postgres_is_restarted(crash: bool) -> None:
    settings = {"fsync": "off", "synchronous_commit": "on"}
    with passable_folder() as folder, EmbeddedPostgres(folder / "d", settings=settings) as server:
        await _through_a_restart(server, crash)


async def _through_a_restart(server: EmbeddedPostgres, crash: bool) -> None:
    from headwater.capture.postgres import schema

    connection = await connect(server.url, purpose="test", application_path=True)
    await schema.install(connection)
    await run(connection, "create table messages (id int primary key, chat_id int, body text)")
    await enable(connection, "messages")
    await run(connection, "insert into messages values (1, 1, 'a')")
    async with Hub(server.url) as hub:
        signalled, derived = await follow(hub, "chat:1"), await follow(hub, "room:1", DERIVED)
        async with connection.transaction():
            await run(connection, "update messages set body = 'ab'")
            await signal(connection, "chat:1", 1)
        await signalled.until(lambda: signalled.bodies() == {1: "ab"})
        await connection.close()
        await asyncio.to_thread(_restart, server, crash)
        connection = await connect(server.url, purpose="test", application_path=True)
        async with connection.transaction():
            await run(connection, "update messages set body = 'abc'")
            await signal(connection, "chat:1", 1)
        for viewer in (signalled, derived):
            await viewer.until_bodies({1: "abc"})
            assert not viewer.shrunk
            assert not viewer.gaps
        expected = {viewer_channel(viewer) for viewer in (signalled, derived)}
        assert await hub.topics.listener.channels() == expected
    await connection.close()


def _restart(server: EmbeddedPostgres, crash: bool) -> None:
    server.restart("immediate" if crash else "fast")


# ------------------------------------------------------------------------ resuming


async def test_resuming_from_a_position(hub: Hub, chats: Connection) -> None:
    await run(chats, "insert into messages select i, 1, 'x' from generate_series(1, 9) i")
    for definition, topic in ((CHAT, "chat:1"), (DERIVED, "room:1")):
        await on_disk(hub, chats)
        viewer = await follow(hub, topic, definition)
        assert viewer.position is not None
        assert viewer.subscription is not None
        viewer.subscription.close()
        for id in (1, 2, 1, 3):
            async with chats.transaction():
                await run(chats, f"update messages set body = body || 'y' where id = {id}")
                await signal(chats, topic, id)
        await run(chats, "update messages set chat_id = 2 where id = 3")
        again = await follow(hub, topic, definition, viewer.position)
        await again.until_ops(3)
        assert again.resumed == [True]
        last = "remove" if definition is DERIVED else "upsert"
        assert again.ops == [("upsert", 2), ("upsert", 1), (last, 3)], "each row once"
        await run(chats, "update messages set body = 'z', chat_id = 1 where id = 3")
        await signal(chats, topic, 3)
        await again.until_bodies({**again.bodies(), 3: "z"})
        await run(chats, "update messages set body = 'x'")


@pytest.mark.parametrize("window", ["adaptive", "16 ms"])
async def test_resuming_while_others_write(url: str, chats: Connection, window: str) -> None:
    """Viewers are cut off and resumed many times, also at another hub, or paused: they are exact,
    and no text ever shrinks."""
    settings = Settings(live=LiveSettings(topic_window=window))
    await run(chats, "insert into messages select i, 1, '' from generate_series(1, 5) i")

    async def write() -> None:
        for step in range(200):
            async with chats.transaction():
                await run(
                    chats, f"update messages set body = body || 'x' where id = {step % 5 + 1}"
                )
                await signal(chats, "chat:1", step % 5 + 1)
            await asyncio.sleep(0.002)

    async with Hub(url, settings=settings) as one, Hub(url, settings=settings) as two:
        viewers = [Viewer() for _ in range(10)]
        for viewer in viewers:
            await follow(one, "chat:1", viewer=viewer)
        writing = asyncio.create_task(write())
        dice = random.Random(3)
        while not writing.done():
            viewer = dice.choice(viewers)
            assert viewer.subscription is not None
            if dice.random() < 0.5:
                viewer.subscription.pause()
                await asyncio.sleep(0.003)
                viewer.subscription.resume()
                continue
            viewer.subscription.close()
            await asyncio.sleep(0.003)
            viewer.views.clear()
            await follow(dice.choice((one, two)), "chat:1", CHAT, viewer.position, viewer)
        await writing
        for viewer in viewers:
            await viewer.until_bodies(dict.fromkeys(range(1, 6), "x" * 40))
            assert not viewer.shrunk
            assert not viewer.gaps


async def test_a_position_that_the_log_no_longer_reaches(hub: Hub, chats: Connection) -> None:
    viewer = await follow(hub, "chat:1", CHAT, "abcdef-1:1:")
    await viewer.until(lambda: viewer.gaps == 1)
    assert viewer.resumed == [False]
    await run(chats, "insert into messages values (1, 1, 'a')")
    await signal(chats, "chat:1", 1)
    await viewer.until(lambda: viewer.bodies() == {1: "a"})


async def test_more_than_can_be_sent_is_a_gap(
    hub: Hub, chats: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TOPIC_ROWS_MAX", 10)
    viewer = await follow(hub, "room:1", DERIVED)
    await run(chats, "insert into messages select i, 1, 'x' from generate_series(1, 11) i")
    await viewer.until(lambda: viewer.gaps == 1)
    assert not viewer.updates
    resumed = await follow(hub, "room:1", DERIVED, viewer.messages[0].position)
    await resumed.until(lambda: resumed.gaps == 1)


async def test_a_hub_that_falls_behind(
    hub: Hub, chats: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewer = await follow(hub, "room:1", DERIVED)
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 20)
    await run(chats, "insert into messages select i, 1, 'x' from generate_series(1, 100) i")
    await viewer.until(lambda: len(viewer.bodies()) == 100)
    assert not viewer.gaps


async def test_pausing(hub: Hub, chats: Connection) -> None:
    viewer = await follow(hub, "room:1", DERIVED)
    assert viewer.subscription is not None
    viewer.refuse = True
    await run(chats, "insert into messages values (1, 1, 'a')")
    await hub.flushes.next_flush()
    await run(chats, "insert into messages values (2, 1, 'b')")
    await hub.flushes.next_flush()
    assert not viewer.updates
    # Resumed while there is no room: the frame that it missed is refused once more.
    viewer.subscription.resume()
    async with asyncio.timeout(30):
        while viewer.subscription.state != "paused":
            await hub.flushes.next_flush()
    viewer.refuse = False
    viewer.subscription.resume()
    await viewer.until(lambda: viewer.bodies() == {1: "a", 2: "b"})
    await run(chats, "insert into messages values (3, 1, 'c')")
    await viewer.until(lambda: len(viewer.bodies()) == 3)


# ------------------------------------------------------------------------ the window


async def test_a_window_collects(url: str, chats: Connection) -> None:
    async with Hub(url, settings=Settings(live=LiveSettings(topic_window="300 ms"))) as hub:
        viewer, other = await follow(hub, "chat:1"), await follow(hub, "room:1", DERIVED)
        await run(chats, "insert into messages values (1, 1, '')")
        for _ in range(20):
            async with chats.transaction():
                await run(chats, "update messages set body = body || 'x'")
                await signal(chats, "chat:1", 1)
            await hub.flushes.next_flush()
        await viewer.until(lambda: viewer.bodies() == {1: "x" * 20})
        await other.until(lambda: other.bodies() == {1: "x" * 20})
        assert len(viewer.updates) < 20
        assert len(other.updates) < 20


async def test_positions_do_not_pass_collected_signals(url: str, chats: Connection) -> None:
    """A position is sent to one topic while the signals of another are being collected: a client
    that resumes both from it misses nothing."""
    async with Hub(url, settings=Settings(live=LiveSettings(topic_window="200 ms"))) as hub:
        await on_disk(hub, chats)
        first, second = await follow(hub, "room:1", DERIVED), await follow(hub, "room:2", DERIVED)
        await run(chats, "insert into messages values (1, 1, 'a')")
        await hub.flushes.next_flush()
        # Its window begins later, so it is still open when the first topic gets its message.
        await run(chats, "insert into messages values (2, 2, 'b')")
        await hub.flushes.next_flush()
        await first.until(lambda: first.updates)
        if not second.updates:
            assert first.position is not None
            resumed = await follow(hub, "room:2", DERIVED, first.position)
            await resumed.until(lambda: resumed.bodies() == {2: "b"})
        await second.until(lambda: second.bodies() == {2: "b"})


async def test_the_position_moves_while_signals_are_always_collected(
    url: str, chats: Connection
) -> None:
    async with Hub(url, settings=Settings(live=LiveSettings(topic_window="200 ms"))) as hub:
        viewers = [await follow(hub, f"room:{n}", DERIVED) for n in range(4)]
        places = set()
        for step in range(60):
            await run(chats, f"insert into messages values ({step}, {step % 4}, '')")
            await hub.flushes.next_flush()
            places.add(str(hub.topics.place.reached))
            await asyncio.sleep(0.01)
        assert len(places) > 5
        for viewer in viewers:
            await viewer.until_ops(15)


async def test_resuming_while_a_flush_reads_rows_misses_nothing(
    url: str, chats: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flush was gathered for the topics that were followed when it began."""
    async with Hub(url) as hub:
        await on_disk(hub, chats)
        slow = await follow(hub, "chat:1")
        before = (await follow(hub, "room:7", DERIVED)).position
        assert before is not None
        reading, go_on = asyncio.Event(), asyncio.Event()
        read = hub.topics._read

        async def read_slowly(*arguments: Any) -> None:
            reading.set()
            await go_on.wait()
            await read(*arguments)

        monkeypatch.setattr(hub.topics, "_read", read_slowly)
        async with chats.transaction():
            await run(chats, "insert into messages values (1, 9, 'a')")
            await signal(chats, "chat:1", 1)
        await reading.wait()
        late = Viewer()
        resuming = asyncio.create_task(follow(hub, "room:9", DERIVED, before, late))
        await late.until(lambda: bool(late.views))
        go_on.set()
        await resuming
        await late.until_bodies({1: "a"})
        await slow.until_bodies({1: "a"})


# ------------------------------------------------------------------------ rights


async def test_tables_under_row_level_security(hub: Hub, chats: Connection) -> None:
    await run(chats, "alter table messages enable row level security")
    with pytest.raises(Forbidden, match="row-level security"):
        await follow(hub, "chat:1")
    trusted = TopicDefinition("chat:{id}", entity="messages", trusted=True)
    viewer = await follow(hub, "chat:1", trusted)
    await run(chats, "insert into messages values (1, 1, 'a')")
    await signal(chats, "chat:1", 1)
    await viewer.until(lambda: viewer.bodies() == {1: "a"})


async def test_a_role_must_be_allowed_to_read(hub: Hub, chats: Connection) -> None:
    await run(chats, "drop role if exists topic_reader", "create role topic_reader")
    try:
        with pytest.raises(Forbidden, match="may not read messages"):
            await hub.topics.subscribe("chat:1", CHAT, Viewer(), access=Access("topic_reader"))
        await run(chats, "grant select on messages to topic_reader")
        viewer = Viewer()
        await hub.topics.subscribe("chat:1", CHAT, viewer, access=Access("topic_reader"))
        await run(chats, "revoke select on messages from topic_reader")
        await hub.topics.recheck(0.0)
        assert isinstance(viewer.error, Forbidden)
        assert not hub.topics
    finally:
        await run(chats, "drop owned by topic_reader", "drop role topic_reader")


async def test_tables_that_do_not_fit(hub: Hub, chats: Connection) -> None:
    with pytest.raises(CaptureError, match="not enabled"):
        await follow(hub, "a:1", TopicDefinition("a:{id}", table="chats"))
    with pytest.raises(CaptureError, match="there is no table nothing"):
        await follow(hub, "a:1", TopicDefinition("a:{id}", entity="nothing"))
    with pytest.raises(CaptureError, match="no column other"):
        await follow(hub, "a:1", TopicDefinition("a:{other}", table="messages"))
    definition = TopicDefinition("a:{id}", entity="messages", parents={"chats": "other"})
    with pytest.raises(CaptureError, match="no column other"):
        await follow(hub, "a:1", definition)
    assert not hub.topics


def test_names() -> None:
    topics = Topics()
    assert topics.add(CHAT) is CHAT
    assert topics.find("chat:42") == (CHAT, {"id": "42"})
