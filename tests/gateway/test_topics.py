"""Topics through a gateway in a process of its own: access, what viewers are sent over SSE and
WebSocket, and lost connections."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from headwater import Forbidden, Headwater, HeadwaterError, InvalidQuery, connect_sync
from headwater.capture.postgres import schema
from headwater.client.connection import Transport
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.embedded import EmbeddedPostgres
from headwater.protocol import Remove, Upsert
from headwater.testing.gateway_process import Served, serving
from headwater.testing.proxies import cutting
from tests.gateway.auth.test_authorization import SECRET, token
from tests.gateway.test_oracle import LENIENT
from tests.support.applications.chat import (
    Client,
    EventSource,
    connect,
    following,
    open_chat,
    quick,
)
from tests.support.applications.shop import until
from tests.support.databases import FAST, passable_folder
from tests.support.log_probe import rows
from tests.support.node import node

GENEROUS = LENIENT | {"limits_subscriptions_per_user": 10_000, "limits_sessions_per_user": 1000}


@pytest.fixture
async def gateway(url: str, connection: Connection, tmp_path: Path) -> AsyncIterator[Served]:
    await open_chat(connection, tmp_path)
    with serving(url, tmp_path, program="chat:hw", **GENEROUS) as gateway:
        yield gateway


@pytest.fixture
async def guarded(url: str, connection: Connection, tmp_path: Path) -> AsyncIterator[Served]:
    """The same with tokens; rights are checked again every second."""
    await open_chat(connection, tmp_path)
    settings = GENEROUS | {"auth_secret": SECRET, "gateway_recheck": "1 second"}
    with serving(url, tmp_path, program="chat:hw", **settings) as gateway:
        yield gateway


async def write_message(connection: Connection, id: int, content: str, chat: int = 42) -> None:
    async with connection.transaction():
        await connection.execute(
            "insert into messages values (%s, %s, %s)"
            " on conflict (id) do update set content = excluded.content",
            (id, chat, content),
        )
        await connection.execute("select headwater.signal(%s, %s)", (f"chat:{chat}", [str(id)]))


# ------------------------------------------------------------------------ the client


@pytest.mark.parametrize("transport", ["ws", "sse"])
async def test_a_topic_brings_rows_as_they_are_signalled(
    gateway: Served, connection: Connection, transport: Any
) -> None:
    await write_message(connection, 1, "before")
    async with (
        connect(gateway.url, transport=transport, backoff=quick) as hw,
        hw.topic("chat:42") as chat,
    ):
        chat.fill("messages", await hw.query("messages", chat=42))
        assert [row["content"] for row in chat.rows("messages")] == ["before"]
        batches = chat.__aiter__()
        await hw.mutate("say", id=2, chat=42, content="hello")
        ops = await anext(batches)
        assert [*ops] == [
            Upsert("messages", (2,), {"id": 2, "chat_id": 42, "content": "hello", "state": None})
        ]
        assert ops.position == chat.position
        assert not ops.pull
        await connection.execute("delete from messages where id = 1")
        await connection.execute("select headwater.signal('chat:42', '{1,2,9}')")
        assert [(type(op), op.key) for op in await anext(batches)] == [
            (Remove, (1,)),
            (Upsert, (2,)),
            (Remove, (9,)),
        ]
        assert [row["content"] for row in chat.rows("messages")] == ["hello"]
        await batches.aclose()


async def test_derived_topics_bring_their_parents(gateway: Served, connection: Connection) -> None:
    async with connect(gateway.url, backoff=quick) as hw, hw.topic("room:1") as room:
        batches = room.__aiter__()
        await connection.execute("insert into messages values (1, 1, 'a'), (2, 42, 'b')")
        ops = await anext(batches)
        assert [(op.entity, op.key) for op in ops] == [("chats", (1,)), ("messages", (1,))]
        assert room.rows("chats") == [{"id": 1, "title": "one"}]
        await connection.execute("update messages set chat_id = 42 where id = 1")
        assert [*await anext(batches)] == [Remove("messages", (1,))]
        await connection.execute("truncate messages")
        assert (await anext(batches)).pull
        await batches.aclose()


async def test_a_poke_asks_the_client_to_pull(gateway: Served, connection: Connection) -> None:
    async with connect(gateway.url, backoff=quick) as hw, hw.topic("org:7") as org:
        batches = org.__aiter__()
        await connection.execute("select headwater.signal('org:7')")
        ops = await anext(batches)
        assert (ops.ops, ops.pull) == ((), True)
        await batches.aclose()


async def test_without_an_event_loop(gateway: Served, url: str) -> None:
    def follow() -> list[Any]:
        with connect_sync(gateway.url) as hw, hw.topic("chat:42") as chat:
            chat.fill("messages", hw.query("messages", chat=42))
            hw.mutate("say", id=1, chat=42, content="hello")
            for ops in chat:
                assert ops.position == chat.position
                return [*ops, *chat.rows("messages")]
        return []

    op, row = await asyncio.to_thread(follow)
    assert op.row == row == {"id": 1, "chat_id": 42, "content": "hello", "state": None}


async def test_a_slow_reader_gets_each_row_once(gateway: Served, connection: Connection) -> None:
    async with connect(gateway.url, backoff=quick) as hw, hw.topic("chat:42") as chat:
        for number in range(30):
            await write_message(connection, number % 3, f"{number}")
        await until(lambda: {r["content"] for r in chat.rows("messages")} == {"27", "28", "29"})
        batches = chat.__aiter__()
        ops = await anext(batches)
        assert [isinstance(op, Upsert) and op.row["content"] for op in ops] == ["27", "28", "29"]
        await batches.aclose()


# ------------------------------------------------------------------------ who is let in

NOT_LET_IN = [
    ("chat:1", "forbidden"),
    ("chat:abc", "invalid_query"),
    ("chat:42:7", "topic_unknown"),
    ("chat:%", "invalid_query"),
    ("chat:", "topic_unknown"),
    ("chat:42\n", "invalid_query"),
    ("chat:42\norg:1", "invalid_query"),
    ("chat:42\0", "invalid_query"),
    ("CHAT:42", "topic_unknown"),
    ("chat:42 or 1=1", "invalid_query"),
    ("org:{id}x:1", "topic_unknown"),
    ("broken:1", "function_failed"),
    ("nothing", "topic_unknown"),
    ("chat:" + "4" * 10_000, "invalid_query"),
]


async def test_a_refused_topic_does_not_affect_others(
    guarded: Served, connection: Connection
) -> None:
    transports: tuple[Transport, ...] = ("ws", "sse")
    for transport in transports:
        async with (
            connect(guarded.url, token=token("ann"), transport=transport, backoff=quick) as hw,
            hw.topic("chat:42") as chat,
        ):
            batches = chat.__aiter__()
            for number, (name, code) in enumerate(NOT_LET_IN):
                with pytest.raises(HeadwaterError) as no:
                    async with hw.topic(name):
                        pass
                assert no.value.code == code, name
                assert "secret" not in str(no.value)
                await write_message(connection, 1, f"{transport} {number}")
                assert [op.key for op in await anext(batches)] == [(1,)]
            with pytest.raises(InvalidQuery):
                async with hw.topic("chat:42,org:1"):
                    pass
            assert hw.reconnects == 0
            await batches.aclose()


async def test_an_event_source_receives_which_topics_are_refused(
    guarded: Served, connection: Connection
) -> None:
    names = [name for name, _ in NOT_LET_IN]
    topics = ",".join(["chat:42", *names, "org:1"])
    source = EventSource(guarded.url, topics, authorization=f"Bearer {token('ann')}")
    async with following(source):
        await until(lambda: len(source.errors) == len(names) and len(source.views) == 2)
        assert source.errors == dict(NOT_LET_IN)
        assert set(source.views) == {"chat:42", "org:1"}
        await write_message(connection, 1, "hello")
        await until(lambda: source.content(1) == "hello")
        assert source.opened == 1
        assert source.last_id is not None


async def test_a_comma_makes_two_names(guarded: Served, connection: Connection) -> None:
    """The access to each is checked by itself."""
    source = EventSource(guarded.url, "chat:42,chat:1", authorization=f"Bearer {token('ann')}")
    async with following(source):
        await until(lambda: bool(source.errors) and bool(source.views))
        assert (source.errors, set(source.views)) == ({"chat:1": "forbidden"}, {"chat:42"})


async def test_streams_that_are_refused_as_a_whole(guarded: Served) -> None:
    auth = {"authorization": f"Bearer {token('ann')}"}
    async with httpx.AsyncClient(base_url=guarded.url, trust_env=False, headers=auth) as http:
        many = ",".join(f"org:{number}" for number in range(101))
        answer = await http.get("/v1/stream", params={"topics": many})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_query")
        assert "at most 100 topics" in answer.text
        answer = await http.get("/v1/stream?topics=org:1", headers={"last-event-id": "yesterday"})
        assert answer.status_code == 400
        answer = await http.get("/v1/stream?topics=org:1", headers={"authorization": ""})
        assert answer.status_code == 401


@pytest.mark.parametrize("transport", ["ws", "sse"])
async def test_a_revoked_right_ends_the_topic_and_no_other(
    guarded: Served, connection: Connection, transport: Any
) -> None:
    async with (
        connect(guarded.url, token=token("ann"), transport=transport, backoff=quick) as hw,
        hw.topic("chat:42") as chat,
        hw.topic("org:1") as org,
    ):
        await connection.execute("delete from members where name = 'ann'")
        with pytest.raises(Forbidden, match="you may not follow topic chat:42"):
            await anext(chat.__aiter__())
        batches = org.__aiter__()
        await connection.execute("select headwater.signal('org:1')")
        assert (await anext(batches)).pull
        await batches.aclose()


async def test_a_new_token_is_checked(guarded: Served, connection: Connection) -> None:
    """The same user, to whom the application now gives other rights."""
    source = EventSource(guarded.url, "chat:42,org:1", authorization=f"Bearer {token('ann')}")
    async with following(source):
        await until(lambda: len(source.views) == 2)
        await connection.execute("delete from members where name = 'ann'")
        async with httpx.AsyncClient(base_url=guarded.url, trust_env=False) as http:
            answer = await http.post(
                f"/v1/sessions/{source.session}/token", json={"token": token("ann")}
            )
            assert answer.status_code == 200
        await until(lambda: source.errors == {"chat:42": "forbidden"})


async def test_topics_come_and_go_on_an_open_session(
    gateway: Served, connection: Connection
) -> None:
    source = EventSource(gateway.url, "chat:42")
    async with following(source), httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        await until(lambda: "chat:42" in source.views)
        path = f"/v1/sessions/{source.session}/subscriptions"
        answer = await http.post(path, json={"id": "org:7", "topic": "org:7"})
        assert answer.status_code == 201
        assert answer.json()["view"] == source.views["org:7"]
        for body, status in [
            ({"id": "x", "topic": "chat:9"}, 403),
            ({"id": "x", "topic": "nothing"}, 404),
            ({"id": "x", "topic": "chat:x"}, 400),
            ({"id": "x", "topic": "chat:42", "overflow": "conflate"}, 400),
            ({"id": "x", "topic": "chat:42", "verify": True}, 400),
            ({"id": "x", "topic": "chat:42", "since": "yesterday"}, 400),
            ({"id": "x", "topic": "chat:42", "live": {"table": "messages"}}, 400),
            ({"id": "org:7", "topic": "chat:42"}, 400),
        ]:
            assert (await http.post(path, json=body)).status_code == status, body
        await connection.execute("select headwater.signal('org:7')")
        await until(lambda: source.pulls == 1)
        assert gateway.metric("headwater_subscriptions", kind="topic") == 2
        gone = await http.delete(f"{path}/{quote('chat:42')}")
        assert gone.status_code == 204
        await write_message(connection, 1, "unheard")
        await connection.execute("select headwater.signal('org:7')")
        await until(lambda: source.pulls == 2)
        assert source.rows == {}
        assert gateway.metric("headwater_subscriptions", kind="topic") == 1
        assert source.opened == 1


RULE = """
from headwater import Headwater, c

hw = Headwater()
hw.table("messages")
hw.topic("room:{chat_id}", table="messages")

@hw.topic("own:{chat_id}", table="messages")
async def own(ctx, chat_id: int) -> bool:
    return True

@hw.authorize
def rule(identity, request):
    return {"ann": True, "bob": c.chat_id == 1}.get(identity.user, False)
"""


async def test_without_an_access_function_the_authorize_hook_decides(
    url: str, connection: Connection, tmp_path: Path
) -> None:
    await open_chat(connection, tmp_path)
    (tmp_path / "ruled.py").write_text(RULE)
    with serving(url, tmp_path, program="ruled:hw", auth_secret=SECRET, **GENEROUS) as gateway:
        for user in ("ann", "bob", "eve"):
            async with connect(gateway.url, token=token(user), backoff=quick) as hw:
                async with hw.topic("own:1"):
                    pass
                if user == "ann":
                    async with hw.topic("room:1"):
                        pass
                    continue
                with pytest.raises(Forbidden):
                    async with hw.topic("room:1"):
                        pass


# ------------------------------------------------------------------------ many viewers


async def test_a_hundred_viewers_of_a_thousand_tokens_a_second(
    gateway: Served, connection: Connection, url: str
) -> None:
    """One query a flush, for any number of viewers; every viewer ends with the exact text, and none
    ever sees it shrink."""
    await write_message(connection, 7, "")
    scans = "select seq_scan + idx_scan from pg_stat_user_tables where relname = 'messages'"
    words = [f"{number} " for number in range(3_000)]
    async with AsyncExitStack() as stack:
        sources = [EventSource(gateway.url, "chat:42") for _ in range(50)]
        clients = []
        for _ in range(50):
            hw = await stack.enter_async_context(connect(gateway.url, backoff=quick))
            clients.append(Client(await stack.enter_async_context(hw.topic("chat:42"))))
        await stack.enter_async_context(following(*sources, *clients))
        await until(lambda: all(source.views for source in sources))
        asked_before = gateway.metric("headwater_questions_total", kind="topic")
        ((scans_before,),) = await rows(connection, scans)
        app = await stack.enter_async_context(Headwater(url))
        async with app.text_stream("messages", id=7, topic="chat:42") as out:
            for number, word in enumerate(words):
                out.append(word)
                if number % 10 == 9:
                    await asyncio.sleep(0.01)
        text = "".join(words)
        viewers = [*sources, *clients]
        await until(lambda: all(viewer.content(7) == text for viewer in viewers))
        assert [viewer.shrunk for viewer in viewers if viewer.shrunk] == []
        ((writings,),) = await rows(
            connection,
            "select count(*) from headwater.log where function_name = 'text_stream' and op = 'U'",
        )
        asked = gateway.metric("headwater_questions_total", kind="topic") - asked_before
        assert 20 < writings < 200
        assert 20 < asked <= writings
        assert max(viewer.batches for viewer in viewers) <= asked
        # As PostgreSQL counts it: the stream's own updates, and one scan for each query.

        async def counted() -> bool:
            await connection.execute("select pg_stat_force_next_flush()")
            ((scans_after,),) = await rows(connection, scans)
            return bool(writings + asked <= scans_after - scans_before <= writings + asked + 5)

        await until(counted)


# ------------------------------------------------------------------------ what survives


class MessageWriter:
    """Writes messages, each in a transaction with its signal, also while the database restarts."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.said: dict[int, str] = {}

    async def chat(self, until_: asyncio.Event) -> None:
        number = 0
        while not until_.is_set():
            with_connection = None
            try:
                with_connection = await connect_database(
                    self._url, purpose="writer", application_path=True
                )
                while not until_.is_set():
                    id, chat = number % 20, (42, 1)[number % 2]
                    content = self.said.get(id, "") + f"{number} "
                    await write_message(with_connection, id, content, chat)
                    self.said[id] = content
                    number += 1
                    await asyncio.sleep(0.002)
            except Exception:
                await asyncio.sleep(0.05)
            finally:
                if with_connection is not None:
                    await with_connection.close()


async def exact(connection: Connection, viewers: list[Any]) -> bool:
    found = await rows(connection, "select id, content from messages order by id")
    wanted = {("messages", id): content for id, content in found}
    return all({k: r["content"] for k, r in v.rows.items()} == wanted for v in viewers)


async def begin_viewers(
    stack: AsyncExitStack, urls: list[str], port_url: str
) -> list[Client | EventSource]:
    """Viewers of two topics each, of both kinds."""
    viewers: list[Client | EventSource] = [
        EventSource(port_url, "chat:42,chat:1") for _ in range(5)
    ]
    for number in range(6):
        transport: Any = ("ws", "sse")[number % 2]
        hw = await stack.enter_async_context(connect(urls, transport=transport, backoff=quick))
        both = Client(await stack.enter_async_context(hw.topic("chat:42")))
        other = Client(await stack.enter_async_context(hw.topic("chat:1")))
        other.rows, other.shrunk = both.rows, both.shrunk
        viewers += [both, other]
    await stack.enter_async_context(following(*viewers))
    await until(lambda: all(len(v.views) == 2 for v in viewers if isinstance(v, EventSource)))
    return viewers


async def chatting(stack: AsyncExitStack, url: str) -> asyncio.Event:
    stop = asyncio.Event()
    task = asyncio.create_task(MessageWriter(url).chat(stop))

    async def ended() -> None:
        stop.set()
        await task

    stack.push_async_callback(ended)
    return stop


async def test_the_listening_connection_is_killed(
    gateway: Served, connection: Connection, url: str
) -> None:
    async with AsyncExitStack() as stack:
        viewers = await begin_viewers(stack, [gateway.url], gateway.url)
        stop = await chatting(stack, url)
        for _ in range(10):
            await asyncio.sleep(0.1)
            await connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
                " and application_name in ('headwater topics', 'headwater listener')"
            )
        await asyncio.sleep(0.3)
        stop.set()
        await until(lambda: exact(connection, viewers))
        assert [viewer.shrunk for viewer in viewers if viewer.shrunk] == []


async def test_connections_that_are_cut(gateway: Served, connection: Connection, url: str) -> None:
    """At any byte: an EventSource must not get a position that one of its topics has not
    reached."""
    chance = random.Random(7)
    async with AsyncExitStack() as stack:
        cutter = await stack.enter_async_context(cutting(gateway.url))
        viewers = await begin_viewers(stack, [cutter.url], cutter.url)
        stop = await chatting(stack, url)
        for _ in range(30):
            await asyncio.sleep(0.1)
            cutter.cut_some(chance, 0.3)
        stop.set()
        await until(lambda: exact(connection, viewers))
        assert cutter.cuts > 30
        assert [viewer.shrunk for viewer in viewers if viewer.shrunk] == []
        assert sum(viewer.pulls for viewer in viewers if isinstance(viewer, EventSource)) == 0


BROWSER = """
const rows = {};
const source = new EventSource(process.argv[1]);
source.addEventListener("topic", event => {
  for (const op of JSON.parse(event.data).ops) {
    if (op.op == "upsert") rows[op.key[0]] = op.row.content; else delete rows[op.key[0]];
  }
  console.log(JSON.stringify({ rows }));
});
source.addEventListener("subscribed", () => console.log(JSON.stringify({ opened: true })));
setInterval(() => {}, 1000);  // an EventSource that waits does not keep Node alive
"""


async def test_the_event_source_of_node(gateway: Served, connection: Connection) -> None:
    """That of Node accepts a position without an event, and resumes all topics from it."""
    async with cutting(gateway.url) as cutter:
        process = await asyncio.create_subprocess_exec(
            node(), "--experimental-eventsource", "--no-warnings", "-e", BROWSER,
            f"{cutter.url}/v1/stream?topics=chat:42,chat:1",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        seen: list[dict[str, Any]] = []

        async def read() -> None:
            assert process.stdout is not None
            while line := await process.stdout.readline():
                seen.append(json.loads(line))

        reading = asyncio.create_task(read())
        try:
            await until(lambda: seen.count({"opened": True}) == 2)
            await write_message(connection, 1, "one", 1)
            await until(lambda: seen[-1].get("rows") == {"1": "one"})
            cutter.cut_some(random.Random(0), 1.1)
            await write_message(connection, 2, "two", 1)
            await write_message(connection, 3, "three", 42)
            await until(lambda: seen[-1].get("rows") == {"1": "one", "2": "two", "3": "three"})
        finally:
            process.kill()
            await process.wait()
            await reading


async def test_a_gateway_is_killed_and_another_started(
    gateway: Served, connection: Connection, url: str, tmp_path: Path
) -> None:
    """On the same port, so that an EventSource finds it; messages written meanwhile are not
    missed."""
    port = int(gateway.url.rpartition(":")[2])
    async with AsyncExitStack() as stack:
        viewers = await begin_viewers(stack, [gateway.url], gateway.url)
        stop = await chatting(stack, url)
        await asyncio.sleep(0.5)
        for times in (2, 3):
            gateway.kill()
            await asyncio.sleep(0.3)
            another = serving(url, tmp_path, program="chat:hw", port=port, **GENEROUS)
            gateway = await asyncio.to_thread(another.__enter__)  # messages are written meanwhile
            stack.push(another)
            sources = [v for v in viewers if isinstance(v, EventSource)]
            await until(lambda n=times, all_=sources: all(v.opened == n for v in all_))
            await asyncio.sleep(0.3)
        stop.set()
        await until(lambda: exact(connection, viewers))
        assert [viewer.shrunk for viewer in viewers if viewer.shrunk] == []
        assert sum(viewer.pulls for viewer in viewers) == 0


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL of its own, which the test restarts."""
    settings = FAST | {"synchronous_commit": "on"}
    with (
        passable_folder() as folder,
        EmbeddedPostgres(folder / "data", settings=settings) as server,
    ):
        yield server


@pytest.mark.parametrize("crash", [False, True], ids=["restarted", "crashed"])
async def test_postgresql_is_restarted(
    server: EmbeddedPostgres, tmp_path: Path, crash: bool
) -> None:
    connection = await connect_database(server.url, purpose="test", application_path=True)
    await schema.install(connection)
    await open_chat(connection, tmp_path)
    await connection.close()
    with serving(server.url, tmp_path, program="chat:hw", **GENEROUS) as gateway:
        async with AsyncExitStack() as stack:
            viewers = await begin_viewers(stack, [gateway.url], gateway.url)
            stop = await chatting(stack, server.url)
            await asyncio.sleep(0.5)
            await asyncio.to_thread(server.stop_now, "immediate" if crash else "fast")
            late = EventSource(gateway.url, "chat:42,chat:1")  # requests while the database is down
            await stack.enter_async_context(following(late))
            await until(lambda: late.opened > 0)
            await asyncio.to_thread(server.start)
            await until(lambda: len(late.views) == 2)
            await asyncio.sleep(0.5)
            stop.set()
            again = await connect_database(server.url, purpose="test", application_path=True)
            await until(lambda: exact(again, viewers))
            assert [viewer.shrunk for viewer in viewers if viewer.shrunk] == []
            assert late.errors == {}
            await again.close()
