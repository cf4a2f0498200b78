"""Channels over a real bus: stored messages, members, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import psycopg
import pytest

from headwater import ConfigError, Forbidden, Headwater, InvalidQuery, LimitExceeded, NotFound
from headwater.capture.postgres import schema
from headwater.channels import bus as bus_module
from headwater.channels import registry as registry_module
from headwater.channels.bus import Bus
from headwater.channels.definitions import ChannelDefinition, Channels, message_json
from headwater.channels.registry import _CHANNEL_MESSAGE_FACTOR, ChannelListener, ChannelRegistry
from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.identity import Identity
from headwater.memory import Memory
from headwater.metrics import Metrics
from headwater.protocol import Frame, Member, Message, Presence
from tests.support.applications.shop import until
from tests.support.databases import database_url, run_statements
from tests.support.log_probe import rows

ROOM = ChannelDefinition("room:{id}", history=20)
QUIET = ChannelDefinition("quiet", history=0, presence=False)


class ChannelSubscriber:
    """Folds the messages that it is sent, as a client does."""

    def __init__(self) -> None:
        self.behind = False
        self.member: str | None = None
        self.views: list[int] = []
        self.ids: list[str] = []
        self.received: list[Any] = []
        self.members: dict[str, Member] = {}
        self.wholes = 0
        self.missed = 0
        self.error: HeadwaterError | None = None

    def failed(self, error: HeadwaterError) -> None:
        self.error = error

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None:
        self.views.append(view)

    def deliver(self, frame: Frame) -> None:
        if self.behind:
            return
        message = msgspec.json.decode(frame.json, type=Message | Presence)
        assert [message.view] == self.views[-1:]
        if isinstance(message, Message):
            self.ids.append(message.id)
            self.received.append(message.data)
            return
        self.missed += message.missed
        if message.whole:
            self.members, self.wholes = {}, self.wholes + 1
        self.members |= {member.member: member for member in message.joined}
        for id in message.left:
            del self.members[id]  # only members that were present leave

    @property
    def states(self) -> list[Any]:
        return sorted(member.state for member in self.members.values())


class GatewayChannels:
    """The channels of a gateway, with a bus of their own."""

    def __init__(self, url: str) -> None:
        numbers = itertools.count(1)
        self.memory = Memory(per_owner=100_000)
        self.metrics = Metrics()
        self.bus = Bus(url)
        self.registry = ChannelRegistry(
            self.bus,
            period=0.1,
            timeout=0.5,
            metrics=self.metrics,
            next_view=lambda: next(numbers),
            memory=self.memory,
        )

    async def follow(
        self, name: str = "room:1", **options: Any
    ) -> tuple[ChannelSubscriber, ChannelListener]:
        follower = ChannelSubscriber()
        definition = QUIET if name == "quiet" else ROOM
        return follower, await self.registry.enter(name, definition, follower, **options)

    async def publish(self, data: Any, name: str = "room:1") -> None:
        await self.registry.publish(name, message_json(data))

    async def crash(self) -> None:
        """Stop without a message to the other gateways."""
        tasks = [*self.registry._tasks, self.bus._sender]
        for task in tasks:
            assert task is not None
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # type: ignore[arg-type]
        await self.bus._disconnect()


@asynccontextmanager
async def running(url: str) -> AsyncIterator[GatewayChannels]:
    gateway = GatewayChannels(url)
    async with gateway.bus, gateway.registry:
        yield gateway


async def until_connected(*gateways: GatewayChannels) -> None:
    """Wait until each has received a message of every other."""
    await until(
        lambda: all(len(p.registry.presence.gateways) == len(gateways) - 1 for p in gateways)
    )


@pytest.fixture
async def gateways(url: str) -> AsyncIterator[list[GatewayChannels]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(running(url)) for _ in range(3)]
        await until_connected(*found)
        yield found


# ------------------------------------------------------------------------ messages


async def test_a_new_subscriber_during_traffic_gets_every_message_once(
    gateways: list[GatewayChannels],
) -> None:
    """Messages that another gateway stored and messages that arrive directly join without a gap."""
    first, _ = await gateways[0].follow()
    done = asyncio.Event()

    async def publish_repeatedly(gateway: GatewayChannels, who: int) -> None:
        for turn in itertools.count():
            await gateway.publish([who, turn])
            if done.is_set():
                return

    publishing = [
        asyncio.create_task(publish_repeatedly(gateway, who))
        for who, gateway in enumerate(gateways)
    ]
    await until(lambda: len(first.received) > 100)
    for turn in range(20):
        late, listener = await gateways[1 + turn % 2].follow()
        before = len(first.ids)
        await until(lambda b=before, late=late: len(first.ids) > b + 30 and len(late.ids) > 40)
        listener.close()
        begin = first.ids.index(late.ids[0])
        await until(lambda begin=begin, late=late: len(first.ids) >= begin + len(late.ids))
        assert first.ids[begin : begin + len(late.ids)] == late.ids
    done.set()
    await asyncio.gather(*publishing)


async def test_a_new_subscriber_is_notified_that_messages_may_be_missing(
    gateways: list[GatewayChannels], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only gateway that stores them does not answer."""
    monkeypatch.setattr(registry_module, "CHANNEL_RECALL_SECONDS", 0.05)
    first, _ = await gateways[0].follow()
    behind_it, _ = await gateways[1].follow("quiet")
    await gateways[0].publish("before")
    await gateways[0].publish("behind it", "quiet")
    await until(lambda: (first.received, behind_it.received) == (["before"], ["behind it"]))
    await gateways[0].crash()
    late, _ = await gateways[1].follow()
    assert (late.received, late.missed) == ([], 1)
    for number in range(20):
        await gateways[1].publish(number)
    await until(lambda: len(late.received) == 20)
    later, _ = await gateways[1].follow()
    assert (later.received, later.missed) == ([*range(20)], 0), "all stored messages"


async def test_a_subscriber_that_was_behind_gets_the_stored_messages(
    gateways: list[GatewayChannels],
) -> None:
    gateway = gateways[0]
    follower, listener = await gateway.follow(present=True, state="here")
    other, _ = await gateway.follow()
    for number in range(5):
        await gateway.publish(number)
    await until(lambda: len(follower.received) == 5)
    follower.behind = True
    for number in range(5, 40):
        await gateway.publish(number)
    _, guest = await gateway.follow(present=True, state="new")
    await until(lambda: len(other.received) == 40)
    follower.behind = False
    listener.resync()
    assert follower.received == [*range(5), *range(20, 40)]
    assert (follower.states, follower.wholes) == (["here", "new"], 2)
    assert follower.missed == 1
    listener.resync()
    assert (len(follower.received), follower.missed) == (25, 1)
    guest.close()


async def test_stored_messages_are_bounded_in_bytes(gateways: list[GatewayChannels]) -> None:
    first, _ = await gateways[0].follow()
    for number in range(10):
        await gateways[0].publish(str(number) * 60_000)
    await until(lambda: len(first.received) == 10)
    late, _ = await gateways[1].follow()
    assert [text[0] for text in late.received] == ["6", "7", "8", "9"]


async def test_a_channel_without_history_and_presence(gateways: list[GatewayChannels]) -> None:
    follower, _ = await gateways[0].follow("quiet")
    other, _ = await gateways[1].follow("quiet")
    await gateways[2].publish("psst", "quiet")
    await until(lambda: other.received == follower.received == ["psst"])
    late, _ = await gateways[2].follow("quiet")
    assert (late.received, late.members, late.wholes) == ([], {}, 1)


async def test_characters_that_the_database_encoding_lacks(server_url: str) -> None:
    run_statements(
        server_url, "create database latin encoding latin1 locale 'C' template template0"
    )
    try:
        url = database_url(server_url, "latin")
        async with await connect(url, purpose="test") as connection:
            await schema.install(connection)
        async with running(url) as one, running(url) as other:
            await until_connected(one, other)
            follower, _ = await other.follow()
            await one.follow(present=True, state="Zoë 中 😀")
            await one.publish("Zoë 中 😀")
            await until(lambda: follower.received == ["Zoë 中 😀"])
            assert follower.states == ["Zoë 中 😀"]
    finally:
        run_statements(server_url, "drop database latin with (force)")


async def test_messages_beyond_the_queue_of_the_bus(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "BUS_QUEUE_BYTES_MAX", 100_000)
    async with running(url) as gateway:
        follower, _ = await gateway.follow()
        sent = [gateway.registry.publish("room:1", message_json("x" * 50_000)) for _ in range(2)]
        with pytest.raises(LimitExceeded, match="too many bytes wait") as caught:
            gateway.registry.publish("room:1", message_json(1))
        assert caught.value.code == "bus_busy"
        await asyncio.gather(*sent)
        await gateway.publish("there is room again")
        await until(lambda: len(follower.received) == 3)


# ------------------------------------------------------------------------ presence


@pytest.mark.parametrize("seed", range(4))
async def test_every_subscriber_ends_with_the_same_members(url: str, seed: int) -> None:
    """Members come, go and change at random; gateways crash and others start; connections are cut.
    In the end every subscriber sees exactly the members that are present."""
    chance = random.Random(seed)
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(running(url)) for _ in range(3)]
        listeners: dict[GatewayChannels, list[tuple[ChannelSubscriber, ChannelListener]]] = {
            gateway: [] for gateway in gateways
        }
        cutter = await psycopg.AsyncConnection.connect(url, autocommit=True)
        stack.push_async_callback(cutter.close)
        for turn in range(150):
            gateway = chance.choice(gateways)
            match chance.randrange(10):
                case 0 | 1 | 2 | 3:
                    name = chance.choice(("room:1", "room:2"))
                    present = chance.random() < 0.7
                    listeners[gateway].append(
                        await gateway.follow(name, present=present, state=turn)
                    )
                case 4 | 5 | 6 if listeners[gateway]:
                    _, listener = listeners[gateway].pop(chance.randrange(len(listeners[gateway])))
                    listener.close()
                case 7 if listeners[gateway]:
                    _, listener = chance.choice(listeners[gateway])
                    if listener.member is not None:
                        listener.set_state(turn)
                case 8 if chance.random() < 0.2:
                    await gateway.crash()
                    gateways.remove(gateway)
                    del listeners[gateway]
                    gateways.append(await stack.enter_async_context(running(url)))
                    listeners[gateways[-1]] = []
                case 9 if chance.random() < 0.3:
                    await cutter.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity"
                        " where datname = current_database()"
                        " and application_name like 'headwater bus%' and random() < 0.5"
                    )
        every_listener = [(f, s) for gateway in gateways for f, s in listeners[gateway]]

        def is_right() -> bool:
            for name in ("room:1", "room:2"):
                here = [s.member for _, s in every_listener if s.active.name == name and s.member]
                truth = {member.member: member for member in here}
                for follower, listener in every_listener:
                    if listener.active.name == name and follower.members != truth:
                        return False
                if any(
                    {m.member: m for m in p.registry.presence.members(name)} != truth
                    for p in gateways
                ):
                    return False
            return True

        await until(is_right)
        for _, listener in every_listener:
            listener.close()
        await until(lambda: not any(p.registry.presence._channels for p in gateways))
        assert not any(gateway.registry._channels for gateway in gateways)
        await until(lambda: not any(gateway.registry.presence.changed() for gateway in gateways))


async def test_channels_that_end_leave_nothing_behind(gateways: list[GatewayChannels]) -> None:
    gateway = gateways[0]
    for turn in range(100):
        opening = asyncio.create_task(gateway.follow(f"room:{turn % 7}", present=True))
        await asyncio.sleep(0)
        if turn % 3 == 0:
            opening.cancel()
        for outcome in await asyncio.gather(opening, return_exceptions=True):
            if isinstance(outcome, tuple):
                outcome[1].close()
                outcome[1].close()
    assert (gateway.registry._channels, gateway.registry._history_replies) == ({}, {})
    assert gateway.registry.presence.own == 0
    await until(lambda: not any(each.registry.presence._channels for each in gateways))
    assert gateway.metrics.channels._value.get() == 0
    assert gateway.metrics.channel_members._value.get() == 0


# ------------------------------------------------------------------------ declaring


def access(ctx: Any, id: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda hw: hw.channel("room {id}"), "is not a valid pattern"),
        (lambda hw: hw.channel("room:{id}", history=1001), "0 to 1,000 messages, not 1,001"),
        (lambda hw: hw.channel("room:{id}", history=-1), "0 to 1,000 messages"),
        (lambda hw: hw.channel("room:{name}", access=access), "takes id, and the pattern has name"),
        (lambda hw: hw.channel("room", access=access), "the pattern has no parameters"),
        (lambda hw: hw.channel("room:{id}", access=access)(access), "an access function already"),
        (lambda hw: [hw.channel("a:{id}"), hw.channel("a:{name}")], "matches the same names"),
    ],
)
def test_invalid_declarations_of_channels(declare: Callable[[Headwater], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        declare(Headwater("postgresql://nowhere"))


async def test_access_functions_receive_the_action() -> None:
    asked = list[tuple[str, dict[str, Any]]]()

    class AccessRunner:
        async def run(self, query: Any, arguments: Any, identity: Identity) -> Any:
            asked.append((query.label, dict(arguments.values)))
            return arguments.values.get("action") != "publish"

    def may(ctx: Any, id: int, action: str) -> bool:
        raise NotImplementedError

    channels = Channels()
    channels.add(ChannelDefinition("room:{id}", access=may))
    channels.add(ChannelDefinition("hall:{id}", access=access))
    channels.add(ChannelDefinition("open"))
    channels.start(AccessRunner())
    for name in ("room:7", "hall:7", "open"):
        await channels.check(*channels.find(name), Identity(), "join")
    with pytest.raises(Forbidden, match="you may not publish on channel room:7"):
        await channels.check(*channels.find("room:7"), Identity(), "publish")
    assert asked == [
        ("channel room:{id}", {"id": 7, "action": "join"}),
        ("channel hall:{id}", {"id": 7}),
        ("channel room:{id}", {"id": 7, "action": "publish"}),
    ]
    with pytest.raises(InvalidQuery, match=r"channel\.id: expected int"):
        await channels.check(*channels.find("room:x"), Identity(), "join")


# ------------------------------------------------------------------------ from a program


async def test_a_program_without_a_gateway_publishes(url: str, connection: Connection) -> None:
    hw = Headwater(url)
    hw.channel("room:{id}")
    with pytest.raises(ConfigError, match="while Headwater is not running"):
        await hw.publish("room:1", 1)
    async with running(url) as gateway:
        follower, _ = await gateway.follow()
        async with hw:
            with pytest.raises(ConfigError, match="declared too late"):
                hw.channel("other")
            with pytest.raises(NotFound, match="there is no channel 'else'"):
                await hw.publish("else", 1)
            with pytest.raises(InvalidQuery, match="cannot be sent as JSON"):
                await hw.publish("room:1", object())
            with pytest.raises(InvalidQuery, match="cannot be sent as JSON"):
                await hw.publish("room:1", "\ud800")
            await hw.publish("room:1", {"at": 1})
            await until(lambda: follower.received == [{"at": 1}])


async def test_without_channels_there_is_no_bus(url: str, connection: Connection) -> None:
    hw = Headwater(url)
    hw.asgi()
    buses = (
        "select application_name from pg_stat_activity"
        " where datname = current_database() and application_name like 'headwater bus%'"
    )
    async with hw:
        assert await rows(connection, buses) == []
        with pytest.raises(NotFound, match="there is no channel 'room:1'") as caught:
            hw.channels.find("room:1")
        assert caught.value.code == "channel_unknown"


async def test_stored_messages_count_for_their_subscribers(url: str) -> None:
    async with running(url) as gateway:
        memory = gateway.memory
        ann, listener = await gateway.follow(owner="ann")
        other, _ = await gateway.follow("room:2", owner="ann")
        bob, _ = await gateway.follow(owner="bob")
        for number in range(30):
            await gateway.publish(number)
        await until(lambda: len(bob.received) == 30)
        remembered = sum(message.frame.size for message in listener.active.history)
        assert len(listener.active.history) == 20
        assert memory.total == memory.of("bob") == _CHANNEL_MESSAGE_FACTOR * remembered
        # The stored messages of another channel are too much for one of the two.
        for _ in range(2):
            await gateway.publish("x" * 12_000, "room:2")
        await until(lambda: len(other.received) == 2)
        memory.enforce()
        assert isinstance(other.error, LimitExceeded)
        assert other.error.code == "bytes_per_user"
        assert (ann.error, bob.error) == (None, None)
        assert memory.of("ann") == memory.total == _CHANNEL_MESSAGE_FACTOR * remembered
        listener.close()
        assert memory.of("ann") == 0
        assert memory.total == memory.of("bob") > 0
