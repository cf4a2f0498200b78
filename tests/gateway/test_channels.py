"""Channels across real gateways: messages, order and presence, also when clients, gateways and the
database stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from websockets.asyncio.client import connect as connect_socket

from headwater import connect, connect_sync
from headwater.capture.postgres import schema
from headwater.client.subscriptions.channels import Channel
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.embedded import EmbeddedPostgres
from headwater.errors import Forbidden, InvalidQuery, LimitExceeded, NotFound, Unavailable
from headwater.limits import CHANNEL_MESSAGE_BYTES_MAX
from headwater.testing.gateway_process import Served, serving
from tests.gateway.test_oracle import LENIENT, quick
from tests.support.applications.shop import until
from tests.support.databases import FAST, passable_folder

PROGRAM = """
    from headwater import Headwater, Refused

    hw = Headwater()
    hw.channel("room:{id}", history=20)
    hw.channel("wire:{id}", history=0, presence=False)
    banned = set()

    @hw.channel("club:{name}")
    async def club(ctx, name: str, action: str) -> bool:
        if action == "publish":
            return ctx.user == "ann"
        return ctx.user in await ctx.fetch_value("select members from clubs where name = %s", name)

    @hw.mutation
    async def announce(ctx, text: str, fail: bool = False) -> None:
        await hw.publish("room:1", {"news": text})
        if fail:
            raise Refused("not today")

    @hw.mutation
    async def shout(ctx, channel: str, size: int) -> None:
        await hw.publish(channel, "x" * size)
"""
SECRET = "a secret that is long enough for SHA-256 and more"
SETTINGS: dict[str, Any] = LENIENT | {
    "gateway_keepalive": "1 second",
    "gateway_presence_timeout": "3 seconds",
    "limits_publishes_per_second": 100_000,
}


def token(user: str) -> str:
    return jwt.encode({"sub": user, "exp": time.time() + 600}, SECRET, "HS256")


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "chat.py").write_text(textwrap.dedent(PROGRAM))
    return "chat:hw"


@pytest.fixture
def gateways(url: str, tmp_path: Path, program: str) -> Iterator[tuple[Served, Served]]:
    with (
        serving(url, tmp_path, program=program, **SETTINGS) as one,
        serving(url, tmp_path, program=program, **SETTINGS) as other,
    ):
        yield one, other


class Guest:
    """Follows a channel and stores the messages that it receives."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.received: list[Any] = []
        self.reading: asyncio.Task[None] | None = None

    async def read(self) -> None:
        async for message in self.channel:
            self.received.append(message)

    @property
    def data(self) -> list[Any]:
        return [message.data for message in self.received]

    @property
    def states(self) -> list[Any]:
        return sorted(member.state for member in self.channel.members)


class Guests:
    """Clients of gateways, until the end of the test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack

    async def join(
        self, urls: str | list[str], name: str = "room:1", *, transport: Any = "ws", **options: Any
    ) -> Guest:
        who = options.pop("token", None)
        client = await self.stack.enter_async_context(
            connect(urls, token=who, transport=transport, backoff=quick)
        )
        guest = Guest(await self.stack.enter_async_context(client.channel(name, **options)))
        guest.reading = asyncio.create_task(guest.read())
        self.stack.callback(guest.reading.cancel)
        return guest

    async def join_whole(self, url: str) -> Guest:
        """Join until the gateway had an answer from the other gateway, which may be too busy at
        first."""
        while True:
            async with AsyncExitStack() as stack:
                guest = await Guests(stack).join(url)
                await anext(aiter(guest.channel.presence()))
                if not guest.channel.missed:
                    self.stack.push_async_exit(stack.pop_all())
                    return guest


@pytest.fixture
async def guests() -> AsyncIterator[Guests]:
    async with AsyncExitStack() as stack:
        yield Guests(stack)


# ------------------------------------------------------------------------ messages


@pytest.mark.parametrize("transport", ["ws", "sse"])
async def test_a_message_reaches_every_subscriber_at_every_gateway(
    gateways: tuple[Served, Served], guests: Guests, transport: Any
) -> None:
    one, other = gateways
    ann = await guests.join(one.url, transport=transport, state="ann")
    bob = await guests.join(other.url, transport=transport)
    elsewhere = await guests.join(other.url, "room:2")
    await ann.channel.publish({"text": "Zoë 😀 \u2028"})
    await bob.channel.publish([1, None])
    await until(lambda: len(ann.received) == len(bob.received) == 2)
    assert ann.data == bob.data == [{"text": "Zoë 😀 \u2028"}, [1, None]]
    assert [message.member for message in bob.received] == [ann.channel.member, None]
    assert [message.id for message in ann.received] == [message.id for message in bob.received]
    assert elsewhere.received == []


async def test_every_subscriber_receives_the_messages_in_one_order(
    gateways: tuple[Served, Served], guests: Guests
) -> None:
    one, other = gateways
    sse = await guests.join(one.url, "wire:1", transport="sse")
    speakers = [await guests.join(each.url, "wire:1") for each in (one, one, other)]
    listeners = [*speakers, sse]

    async def publish(number: int, guest: Guest) -> None:
        said = [guest.channel.publish([number, turn]) for turn in range(200)]
        await asyncio.gather(*said)

    await asyncio.gather(*(publish(n, guest) for n, guest in enumerate(speakers)))
    await until(lambda: all(len(each.received) == 600 for each in listeners))
    for number in range(3):
        mine = [turn for who, turn in sse.data if who == number]
        assert mine == list(range(200))
    assert all(each.data == sse.data for each in listeners)


async def test_a_client_that_does_not_read_misses_messages_and_then_continues(
    gateways: tuple[Served, Served], guests: Guests
) -> None:
    one, other = gateways
    ann = await guests.join(other.url)
    received = asyncio.Queue[Any]()
    async with connect_socket(f"ws{one.url[4:]}/v1/ws", max_queue=1, compression=None) as socket:
        request = {"type": "subscribe", "id": "c", "channel": {"name": "room:1"}}
        await socket.send(json.dumps(request))
        await until(lambda: one.metric("headwater_subscriptions", kind="channel") == 1)
        for number in range(200):
            await ann.channel.publish([number, "x" * 60_000])
        await until(lambda: one.metric("headwater_overflows_total", policy="drop") > 0)

        async def read() -> None:
            async for text in socket:
                received.put_nowait(json.loads(text))

        reading = asyncio.create_task(read())
        got, wholes = list[int](), 0
        while got[-1:] != [199]:
            message = await received.get()
            wholes += message["type"] == "presence" and message.get("whole", False)
            if message["type"] == "message":
                got.append(message["data"][0])
        reading.cancel()
    assert got == sorted(set(got))
    assert len(got) < 200
    assert wholes >= 2


async def test_a_large_message_comes_in_parts_and_one_that_is_too_large_does_not(
    gateways: tuple[Served, Served], guests: Guests
) -> None:
    one, other = gateways
    ann, bob = await guests.join(one.url), await guests.join(other.url)
    largest = "é" * ((CHANNEL_MESSAGE_BYTES_MAX - 2) // 2)
    await ann.channel.publish(largest)
    with pytest.raises(InvalidQuery, match="65,537 bytes as JSON; the limit is 65,536"):
        await ann.channel.publish("x" * (CHANNEL_MESSAGE_BYTES_MAX - 1))
    with pytest.raises(InvalidQuery, match="4,097 bytes"):
        async with connect(one.url) as hw, hw.channel("room:1", state="x" * 4095):
            pass
    await ann.channel.publish("behind it")
    await until(lambda: len(bob.received) == 2)
    assert bob.data == [largest, "behind it"]


async def test_a_new_subscriber_gets_stored_messages_also_at_another_gateway(
    gateways: tuple[Served, Served], guests: Guests
) -> None:
    one, other = gateways
    ann, bob = await guests.join(one.url), await guests.join(other.url)
    for number in range(30):
        await ann.channel.publish(number)
    # A gateway that has not received all of them yet has older ones stored.
    await until(lambda: bob.data[-1:] == [29])
    late = [await guests.join_whole(each.url) for each in (one, other)]
    await ann.channel.publish("news")
    await until(lambda: all(each.data[-1:] == ["news"] for each in late))
    assert all(each.data == [*range(10, 30), "news"] for each in late)


async def test_the_server_publishes_when_its_mutation_commits(
    gateways: tuple[Served, Served], guests: Guests
) -> None:
    one, other = gateways
    ann = await guests.join(other.url)
    async with connect(one.url) as hw:
        with pytest.raises(Exception, match="not today"):
            await hw.mutate("announce", text="never", fail=True)
        await hw.mutate("announce", text="first")
        await hw.mutate("shout", channel="room:1", size=50_000)
        with pytest.raises(NotFound, match="there is no channel 'nowhere'"):
            await hw.mutate("shout", channel="nowhere", size=1)
    await until(lambda: len(ann.received) == 2)
    assert ann.data == [{"news": "first"}, "x" * 50_000]
    assert (ann.received[0].user, ann.received[0].member) == (None, None)


async def test_too_many_messages_are_refused(url: str, tmp_path: Path, program: str) -> None:
    settings = SETTINGS | {"limits_publishes_per_second": 1}
    with serving(url, tmp_path, program=program, **settings) as gateway:
        for transport in ("ws", "sse"):
            async with (
                connect(gateway.url, transport=transport) as hw,
                hw.channel("room:1", state=0) as room,
            ):
                said = [room.publish(number) for number in range(30)]
                answers = await asyncio.gather(*said, return_exceptions=True)
                refused = [each for each in answers if each is not None]
                codes = {each.code for each in refused if isinstance(each, LimitExceeded)}
                assert codes == {"publish_rate"}
                assert answers[:2] == [None, None]
                with pytest.raises(LimitExceeded, match="1 messages and states a second"):
                    await asyncio.gather(*(room.set_state(state) for state in range(30)))


def test_the_blocking_client(url: str, tmp_path: Path, program: str) -> None:
    with (
        serving(url, tmp_path, program=program, **SETTINGS) as gateway,
        connect_sync(gateway.url) as hw,
        hw.channel("room:1", state="ann") as room,
        hw.channel("room:1") as other,
    ):
        room.publish("hello")
        assert next(iter(other)).data == "hello"
        room.set_state("away")
        for members in other.presence():
            if [member.state for member in members] == ["away"]:
                break
        assert room.member == other.members[0].member


# ------------------------------------------------------------------------ who may


async def test_access(url: str, connection: Connection, tmp_path: Path, program: str) -> None:
    await connection.execute("create table clubs (name text primary key, members text[])")
    await connection.execute("insert into clubs values ('chess', '{ann,bob}')")
    settings = SETTINGS | {"auth_secret": SECRET, "gateway_recheck": "1 second"}
    with serving(url, tmp_path, program=program, **settings) as gateway:
        async with AsyncExitStack() as stack:
            guests = Guests(stack)
            ann = await guests.join(gateway.url, "club:chess", token=token("ann"), state=1)
            bob = await guests.join(
                gateway.url, "club:chess", token=token("bob"), state=2, transport="sse"
            )
            async with connect(gateway.url, token=token("eve")) as hw:
                with pytest.raises(Forbidden, match="you may not join channel club:chess"):
                    async with hw.channel("club:chess"):
                        pass
                with pytest.raises(NotFound, match="there is no channel"):
                    async with hw.channel("club:chess:2"):
                        pass
                for name in ("club:chess,room:1", "room:1\n", "x" * 10_000, ""):
                    with pytest.raises(InvalidQuery, match=r"^channel: a name has"):
                        async with hw.channel(name):
                            pass
                async with hw.channel("room:1") as room:  # and nothing else was touched
                    await room.publish("hello")
            with pytest.raises(Forbidden, match="you may not publish on channel club:chess"):
                await bob.channel.publish("let me")
            await ann.channel.publish("welcome")
            await until(lambda: bob.data == ["welcome"])
            assert bob.received[0].user == "ann"
            assert [member.user for member in ann.channel.members] == ["ann", "bob"]
            # A member loses its access: the others see that it leaves.
            await connection.execute("update clubs set members = '{ann}'")
            assert bob.reading is not None
            with pytest.raises(Forbidden, match="you may not join"):
                await bob.reading
            await until(lambda: ann.states == [1])


async def test_invalid_requests_to_a_channel(
    gateways: tuple[Served, Served], guests: Guests
) -> None:
    gateway, _ = gateways
    ann = await guests.join(gateway.url)
    with pytest.raises(InvalidQuery, match="only a present member has a state"):
        await ann.channel.set_state("here")
    with pytest.raises(InvalidQuery, match="channel wire:1 has no presence"):
        await guests.join(gateway.url, "wire:1", present=True)
    async with (
        httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http,
        http.stream("GET", "/v1/stream") as stream,
    ):
        lines = stream.aiter_lines()
        session = await _session(lines)
        post = f"/v1/sessions/{session}"
        for wrong in ({"since": "1-1:1:"}, {"verify": True}, {"overflow": "pause"}):
            body = {"id": "c", "channel": {"name": "room:1"}} | wrong
            answer = await http.post(f"{post}/subscriptions", json=body)
            assert answer.status_code == 400, answer.text
        answer = await http.post(f"{post}/publish", json={"id": "c", "data": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            404,
            "subscription_unknown",
        )
        body = {"id": "c", "channel": {"name": "room:1", "present": True, "state": "raw"}}
        assert (await http.post(f"{post}/subscriptions", json=body)).status_code == 201
        answer = await http.post(f"{post}/publish", json={"id": "c", "data": {"raw": 1}})
        assert answer.status_code == 204
        answer = await http.post(f"{post}/state", json={"id": "c", "state": "cooked"})
        assert answer.status_code == 204
        await until(lambda: ann.data == [{"raw": 1}])
        await until(lambda: ann.states == ["cooked"])
    await until(lambda: ann.states == [])


async def _session(lines: AsyncIterator[str]) -> str:
    async for line in lines:
        if line.startswith("data: "):
            return str(httpx.Response(200, text=line[6:]).json()["session"])
    raise AssertionError("no hello")


# ------------------------------------------------------------------------ presence


async def test_members_join_and_leave(gateways: tuple[Served, Served], guests: Guests) -> None:
    one, other = gateways
    ann = await guests.join(one.url, state={"name": "Ann"})
    watcher = await guests.join(one.url)
    async with connect(other.url) as hw, hw.channel("room:1", state={"name": "Bob"}) as room:
        names = [{"name": "Ann"}, {"name": "Bob"}]
        await until(lambda: [member.state for member in room.members] == names)
        assert room.member in {member.member for member in room.members}
        await until(lambda: len(ann.channel.members) == 2)
        await room.set_state({"name": "Bob", "typing": True})
        typing = {"name": "Bob", "typing": True}
        for guest in (ann, watcher):
            await until(lambda guest=guest: typing in [m.state for m in guest.channel.members])
    await until(lambda: [m.state for m in watcher.channel.members] == [{"name": "Ann"}])
    assert watcher.channel.member is None
    assert one.metric("headwater_channel_members") == 1
    assert one.metric("headwater_channels") == 1
    assert one.metric("headwater_subscriptions", kind="channel") == 2
    assert one.metric("headwater_bus_up") == 1


CLIENT = """
    import asyncio, sys
    from headwater import connect

    async def main():
        async with connect(sys.argv[1], transport=sys.argv[2]) as hw:
            async with hw.channel("room:1", state="gone soon") as room:
                print("here", flush=True)
                await asyncio.sleep(1000)

    asyncio.run(main())
"""


@pytest.mark.parametrize("transport", ["ws", "sse"])
async def test_a_client_that_vanishes(
    gateways: tuple[Served, Served], guests: Guests, transport: str
) -> None:
    one, other = gateways
    ann = await guests.join(other.url, state="ann")
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), one.url, transport]
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(*command, stdout=pipe)
    assert client.stdout is not None
    assert await client.stdout.readline() == b"here\n"
    await until(lambda: ann.states == ["ann", "gone soon"])
    client.kill()
    await client.wait()
    await until(lambda: ann.states == ["ann"])


TCP_REPAIR = 19
"""A socket that is closed in this mode says nothing to the other side."""


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/ws"])
async def test_a_client_whose_machine_vanishes(
    gateways: tuple[Served, Served], guests: Guests, path: str
) -> None:
    """Its connection is not closed: it just does not answer any more."""
    if os.geteuid() != 0:
        pytest.skip("only root can have a connection vanish")
    one, other = gateways
    ann = await guests.join(other.url, state="ann")
    host, port = one.url.removeprefix("http://").split(":")
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    more = upgrade + key if path == "/v1/ws" else ""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode())
    said = b""
    while not (session := re.search(rb'"session":"([^"]+)"', said)):
        said += await reader.read(1000)
    request = {"id": "c", "channel": {"name": "room:1", "present": True, "state": "vanishes"}}
    async with httpx.AsyncClient(base_url=one.url, trust_env=False) as http:
        at = f"/v1/sessions/{session[1].decode()}/subscriptions"
        assert (await http.post(at, json=request)).status_code == 201
    await until(lambda: ann.states == ["ann", "vanishes"])
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    writer.transport.abort()
    await until(lambda: ann.states == ["ann"])


async def test_the_members_of_a_gateway_that_was_killed(
    gateways: tuple[Served, Served], guests: Guests
) -> None:
    one, other = gateways
    ann = await guests.join(other.url, state="ann")
    # They connect again, to the gateway that is left.
    movers = [await guests.join([one.url, other.url], state=f"moves {n}") for n in range(3)]
    await ann.channel.publish("before")
    await until(lambda: all(each.data == ["before"] for each in movers))
    await movers[0].channel.set_state("moves first")
    async with connect(one.url, backoff=quick) as hw, hw.channel("room:1", state="stays away"):
        await until(lambda: len(ann.states) == 5)
        one.kill()
    await ann.channel.publish("meanwhile")
    await until(lambda: ann.states == ["ann", "moves 1", "moves 2", "moves first"])
    # No member is there twice, and every guest has received every message once.
    assert len({member.member for member in ann.channel.members}) == 4
    await until(lambda: all(each.data == ["before", "meanwhile"] for each in movers))
    await movers[1].channel.publish("after")
    await until(lambda: all(each.data[2:] == ["after"] for each in [*movers, ann]))


async def test_a_gateway_that_stops_says_goodbye(
    url: str, tmp_path: Path, program: str, guests: Guests
) -> None:
    patient = SETTINGS | {"gateway_presence_timeout": "1 hour"}
    with (
        serving(url, tmp_path, program=program, **patient) as one,
        serving(url, tmp_path, program=program, **patient) as other,
    ):
        ann = await guests.join(other.url, state="ann")
        async with connect(one.url, backoff=quick) as hw, hw.channel("room:1", state="bob"):
            await until(lambda: ann.states == ["ann", "bob"])
            await asyncio.to_thread(one.stop)
        await until(lambda: ann.states == ["ann"])


async def test_a_gateway_that_was_suspended_comes_back(
    gateways: tuple[Served, Served], guests: Guests
) -> None:
    one, other = gateways
    ann = await guests.join(other.url, state="ann")
    bob = await guests.join(one.url, state="bob")
    await until(lambda: ann.states == bob.states == ["ann", "bob"])
    os.kill(one.process.pid, signal.SIGSTOP)
    try:
        await until(lambda: ann.states == ["ann"])
    finally:
        os.kill(one.process.pid, signal.SIGCONT)
    await until(lambda: ann.states == ["ann", "bob"])
    assert bob.states == ["ann", "bob"]


# ------------------------------------------------------------------------ the database


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL of its own, which the test restarts."""
    with passable_folder() as folder, EmbeddedPostgres(folder / "data", settings=FAST) as server:
        yield server


async def test_a_restarted_database(
    server: EmbeddedPostgres, tmp_path: Path, program: str, guests: Guests
) -> None:
    connection = await connect_database(server.url, purpose="test", application_path=True)
    await schema.install(connection)
    await connection.close()
    with (
        serving(server.url, tmp_path, program=program, **SETTINGS) as one,
        serving(server.url, tmp_path, program=program, **SETTINGS) as other,
    ):
        ann = await guests.join(one.url, state="ann")
        bob = await guests.join(other.url, state="bob")
        async with connect(other.url) as hw, hw.channel("room:1", state="leaves meanwhile"):
            await until(lambda: len(ann.states) == len(bob.states) == 3)
            await ann.channel.publish("before")
            await asyncio.to_thread(server.stop_now, "fast")
            with pytest.raises(Unavailable, match="did not deliver this"):
                await ann.channel.publish("lost")
        # Members that come and go meanwhile are known at their own gateway.
        await until(lambda: bob.states == ["ann", "bob"])
        await bob.channel.set_state("bob, back")
        # Members of gateways that cannot be reached are not gone.
        await asyncio.sleep(4)
        assert ann.states == ["ann", "bob", "leaves meanwhile"]
        await asyncio.to_thread(server.start)
        await until(lambda: ann.states == bob.states == ["ann", "bob, back"])
        await ann.channel.publish("after")
        await bob.channel.publish("indeed")
        await until(lambda: len(ann.received) == len(bob.received) == 3)
        assert ann.data == bob.data == ["before", "after", "indeed"]


async def test_a_listener_that_is_killed(
    url: str, connection: Connection, gateways: tuple[Served, Served], guests: Guests
) -> None:
    one, other = gateways
    ann = await guests.join(one.url, state="ann")
    bob = await guests.join(other.url, state="bob")
    for _ in range(3):
        await connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name like 'headwater bus%'"
        )
        turn = time.monotonic()
        await ann.channel.set_state(f"ann {turn}")
        await until(lambda turn=turn: bob.states == [f"ann {turn}", "bob"])
    await until(lambda: one.metric("headwater_bus_up") == other.metric("headwater_bus_up") == 1)
    await until(lambda: min(ann.channel.missed, bob.channel.missed) >= 1)
    await ann.channel.publish("again")
    await until(lambda: bob.data == ["again"])


async def test_messages_of_other_roles_on_the_bus(
    connection: Connection, gateways: tuple[Served, Served], guests: Guests
) -> None:
    """Every role may listen and notify; gateways ignore messages that no gateway has signed."""
    one, other = gateways
    ann, bob = await guests.join(one.url, state=1), await guests.join(other.url, state=2)
    await connection.execute('listen "headwater:bus"')
    await ann.channel.publish("hello")
    await until(lambda: bob.data == ["hello"])
    async for notice in connection.notifies(timeout=20):
        if '"said"' in notice.payload:
            break
    _, signature, _, sender, number, *_ = notice.payload.split(" ")
    forged = f'1 {sender} {int(number) + 1_000_000} 1 1 {{"note":"bye"}}'
    for payload in ("", "hello", "1 x 1 1 1 {}", forged, f"2 {signature} {forged}", notice.payload):
        await connection.execute("select pg_notify('headwater:bus', %s)", (payload,))
    await ann.channel.publish("still here")
    await until(lambda: bob.data == ["hello", "still here"])
    assert bob.states == [1, 2]
    assert one.metric("headwater_bus_refused_total") == 5
    assert "Traceback" not in one.log.read_text()
