"""Presence, with a clock: which members are present, which are gone, and which are requested."""

from __future__ import annotations

import random
from collections import deque

import pytest

from headwater.channels.bus_messages import (
    BusMessage,
    Goodbye,
    Heartbeat,
    MembersChanged,
    MembersRequest,
    MembersSnapshot,
    PlacedMember,
)
from headwater.channels.presence import PresenceTable
from headwater.errors import LimitExceeded
from headwater.limits import CHANNEL_MEMBERS_MAX
from headwater.protocol import Member

PERIOD, TIMEOUT = 5.0, 15.0
ROOM = "room:1"


def gateway(id: str) -> PresenceTable:
    return PresenceTable(id, period=PERIOD, timeout=TIMEOUT)


def ids(presence: PresenceTable, channel: str = ROOM) -> set[str]:
    return {member.member for member in presence.members(channel)}


def joined(version: int, *members: str) -> MembersChanged:
    return MembersChanged(version, tuple(PlacedMember(ROOM, Member(each)) for each in members))


class TestOwn:
    def test_members_join_change_and_leave(self) -> None:
        a = gateway("a")
        assert a.join(ROOM, Member("m", "ann", 1)) == MembersChanged(
            1, (PlacedMember(ROOM, Member("m", "ann", 1)),)
        )
        a.join(ROOM, Member("m", "ann", 2))
        assert a.members(ROOM) == (Member("m", "ann", 2),)
        assert a.take(ROOM) == ((Member("m", "ann", 2),), ())
        assert a.leave(ROOM, "m") == MembersChanged(3, left=((ROOM, "m"),))
        assert (a.members(ROOM), a.take(ROOM), a.take(ROOM)) == ((), ((), ("m",)), ((), ()))
        assert a._channels == {}

    def test_a_member_that_joined_and_left_between_two_reads_is_not_sent(self) -> None:
        a = gateway("a")
        a.join(ROOM, Member("m"))
        a.join(ROOM, Member("n"))
        a.leave(ROOM, "m")
        assert a.take(ROOM) == ((Member("n"),), ())
        a.leave(ROOM, "n")
        a.join(ROOM, Member("n"))
        assert a.take(ROOM) == ((Member("n"),), ())
        a.leave(ROOM, "n")
        assert a.take(ROOM) == ((), ("n",))
        assert (a._changed, a._fresh) == ({}, {})

    def test_the_most_members(self) -> None:
        a = gateway("a")
        for number in range(CHANNEL_MEMBERS_MAX):
            a.join(ROOM, Member(str(number)))
        with pytest.raises(LimitExceeded, match="1,000 members"):
            a.join(ROOM, Member("one more"))
        a.join(ROOM, Member("7", state="another"))
        a.join("room:2", Member("one more"))

    def test_the_snapshot_of_our_members_is_sent_in_parts(self) -> None:
        a, b = gateway("a"), gateway("b")
        assert a.whole() == [MembersSnapshot(0, 1, 1)]
        for number in range(100):
            a.join(ROOM, Member(str(number), state="x" * 4000))
        parts = a.whole()
        assert len(parts) > 3
        for part in parts:
            b.receive("a", part, 0.0)
        assert b.members(ROOM) == a.members(ROOM)


class TestOthers:
    def test_steps_in_order(self) -> None:
        a = gateway("a")
        assert a.receive("b", joined(1, "m"), 0.0) == []
        assert a.receive("b", MembersChanged(2, left=((ROOM, "m"),)), 0.0) == []
        assert ids(a) == set()
        assert a.gateways == ("b",)

    def test_a_missed_step_requests_a_snapshot_once_per_period(self) -> None:
        a = gateway("a")
        a.receive("b", joined(1, "m1"), 0.0)
        a.take(ROOM)
        assert a.receive("b", joined(3, "m3"), 1.0) == [MembersRequest("b")]
        assert a.receive("b", joined(4, "m4"), 1.1) == []
        assert a.receive("b", Heartbeat(4), 2.0) == []
        assert a.receive("b", Heartbeat(4), 7.0) == [MembersRequest("b")]
        assert ids(a) == {"m1"}
        a.receive(
            "b",
            MembersSnapshot(4, 1, 1, tuple(PlacedMember(ROOM, Member(f"m{n}")) for n in (2, 3, 4))),
            7.1,
        )
        assert ids(a) == {"m2", "m3", "m4"}
        assert a.receive("b", Heartbeat(4), 8.0) == []
        assert set(a.take(ROOM)[1]) == {"m1"}

    def test_a_missed_part_of_a_snapshot_changes_nothing(self) -> None:
        a = gateway("a")
        a.receive("b", joined(1, "m1"), 0.0)
        a.receive("b", MembersSnapshot(2, 2, 2, (PlacedMember(ROOM, Member("m2")),)), 0.0)
        assert ids(a) == {"m1"}
        a.receive("b", MembersSnapshot(2, 1, 3), 0.0)
        a.receive("b", MembersSnapshot(2, 3, 3), 0.0)
        assert ids(a) == {"m1"}

    def test_a_new_gateway_without_members_is_not_asked(self) -> None:
        assert gateway("a").receive("b", Heartbeat(0), 0.0) == []

    def test_only_the_addressed_gateway_answers_a_request(self) -> None:
        a = gateway("a")
        a.join(ROOM, Member("m"))
        whole: list[BusMessage] = [MembersSnapshot(1, 1, 1, (PlacedMember(ROOM, Member("m")),))]
        assert a.receive("b", MembersRequest(), 0.0) == whole
        assert a.receive("b", MembersRequest("a"), 0.0) == whole
        assert a.receive("b", MembersRequest("c"), 0.0) == []

    def test_goodbye(self) -> None:
        a = gateway("a")
        a.receive("b", joined(1, "m"), 0.0)
        a.receive("b", Goodbye(), 0.0)
        assert (ids(a), a.gateways) == (set(), ())

    def test_an_equal_snapshot_is_no_change(self) -> None:
        a = gateway("a")
        a.receive("b", joined(1, "m"), 0.0)
        a.take(ROOM)
        a.receive("b", MembersSnapshot(1, 1, 1, (PlacedMember(ROOM, Member("m")),)), 0.0)
        assert a.changed() == ()

    def test_two_gateways_may_have_members_with_one_name(self) -> None:
        """Our gateways do not do that; but nothing may break."""
        a = gateway("a")
        a.receive("b", joined(1, "m"), 0.0)
        a.receive("c", joined(1, "m"), 0.0)
        a.receive("b", Goodbye(), 0.0)
        a.receive("c", Goodbye(), 0.0)
        assert ids(a) == set()


class TestSilence:
    def receives_its_own(self, presence: PresenceTable, *times: float) -> None:
        for time in times:
            presence.receive(presence.id, presence.beat(), time)

    def test_a_silent_gateway_is_gone_within_the_timeout(self) -> None:
        a = gateway("a")
        self.receives_its_own(a, 0.0)
        a.receive("b", joined(1, "m"), 0.1)
        self.receives_its_own(a, 5.0, 10.0)
        assert ids(a) == {"m"}
        a.take(ROOM)
        self.receives_its_own(a, 15.0)
        assert ids(a) == set()
        assert a.take(ROOM) == ((), ("m",))

    def test_a_gateway_that_sends_heartbeats_stays(self) -> None:
        a = gateway("a")
        a.receive("b", joined(1, "m"), 0.0)
        for turn in range(100):
            self.receives_its_own(a, turn * PERIOD)
            a.receive("b", Heartbeat(1), turn * PERIOD + 4.9)
        assert ids(a) == {"m"}

    def test_no_gateway_is_gone_while_the_bus_is_down(self) -> None:
        a = gateway("a")
        self.receives_its_own(a, 0.0, 5.0)
        a.receive("b", joined(1, "m"), 5.1)
        self.receives_its_own(a, 605.0)
        assert ids(a) == {"m"}
        a.receive("b", Heartbeat(1), 609.0)
        self.receives_its_own(a, 610.0, 615.0)
        assert ids(a) == {"m"}

    def test_a_gateway_that_died_while_the_bus_was_down_is_gone_soon_after(self) -> None:
        a = gateway("a")
        self.receives_its_own(a, 0.0, 5.0)
        a.receive("b", joined(1, "m"), 5.1)
        self.receives_its_own(a, 605.0, 610.0)
        assert ids(a) == set()

    def test_a_gateway_that_gets_no_message_of_its_own_removes_no_other(self) -> None:
        a = gateway("a")
        self.receives_its_own(a, 0.0)
        a.receive("b", joined(1, "m"), 0.0)
        a.receive("c", Heartbeat(0), 1000.0)
        assert ids(a) == {"m"}

    def test_a_gateway_that_was_removed_by_mistake_comes_back_with_its_members(self) -> None:
        a, b = gateway("a"), gateway("b")
        b.join(ROOM, Member("m"))
        a.receive("b", b.whole()[0], 0.0)
        self.receives_its_own(a, 0.0, 5.0, 10.0, 15.0)
        assert ids(a) == set()
        (request,) = a.receive("b", b.beat(), 20.0)
        (reply,) = b.receive("a", request, 20.0)
        a.receive("b", reply, 20.0)
        assert ids(a) == {"m"}


# ------------------------------------------------------------------------ several together


class Bus:
    """Gateways that receive each other's messages in one order, with random delays. Some messages
    are lost for some gateways, and gateways stop and start."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.born = 0
        self.alive: dict[str, PresenceTable] = {}
        self.inbox: dict[str, deque[tuple[str, BusMessage]]] = {}
        self.truth: dict[str, dict[tuple[str, str], Member]] = {}
        self.loss = 0.0
        for _ in range(3):
            self.start()

    def start(self) -> None:
        self.born += 1
        id = f"g{self.born}"
        self.alive[id] = gateway(id)
        self.inbox[id], self.truth[id] = deque(), {}
        self.send(id, MembersRequest())
        self.send(id, self.alive[id].beat())

    def kill(self, id: str, *, politely: bool) -> None:
        if politely:
            self.send(id, Goodbye())
        for of_gateway in (self.alive, self.inbox, self.truth):
            del of_gateway[id]

    def send(self, sender: str, message: BusMessage) -> None:
        for id, inbox in self.inbox.items():
            if id == sender or self.chance.random() >= self.loss:
                inbox.append((sender, message))

    def deliver(self, id: str, count: int) -> None:
        for _ in range(min(count, len(self.inbox[id]))):
            sender, message = self.inbox[id].popleft()
            for reply in self.alive[id].receive(sender, message, self.now):
                self.send(id, reply)

    def period(self) -> None:
        self.now += PERIOD
        for id, presence in list(self.alive.items()):
            self.send(id, presence.beat())

    def step(self) -> None:
        chance, id = self.chance, self.chance.choice(list(self.alive))
        presence, truth = self.alive[id], self.truth[id]
        match chance.randrange(12):
            case 0 | 1 | 2 | 3:
                channel = chance.choice(("room:1", "room:2"))
                known = [member for name, member in truth if name == channel]
                name = (
                    chance.choice(known)
                    if known and chance.random() < 0.3
                    else f"{id}-{self.now}-{chance.random()}"
                )
                truth[channel, name] = member = Member(name, "ann", chance.randrange(9))
                self.send(id, presence.join(channel, member))
            case 4 | 5 if truth:
                channel, name = chance.choice(list(truth))
                del truth[channel, name]
                self.send(id, presence.leave(channel, name))
            case 6 if len(self.alive) > 1:
                self.kill(id, politely=chance.random() < 0.3)
            case 7 if len(self.alive) < 5:
                self.start()
            case 8:
                self.period()
            case _:
                self.deliver(id, chance.randrange(20))

    def settle(self) -> None:
        """Nothing is lost any more, and time passes."""
        self.loss = 0.0
        for _ in range(8):
            self.period()
            while any(self.inbox.values()):
                for id in self.alive:
                    self.deliver(id, 1000)


@pytest.mark.parametrize("seed", range(60))
def test_gateways_end_with_the_same_members(seed: int) -> None:
    bus = Bus(random.Random(seed))
    bus.loss = (0.0, 0.05, 0.5)[seed % 3]
    views: dict[str, dict[str, dict[str, Member]]] = {}
    for _ in range(400):
        bus.step()
        fold(bus, views)
    bus.settle()
    fold(bus, views)
    truth = {key: member for each in bus.truth.values() for key, member in each.items()}
    for id, presence in bus.alive.items():
        assert set(presence.gateways) == set(bus.alive) - {id}
        for channel in ("room:1", "room:2"):
            expected = {name: m for (at, name), m in truth.items() if at == channel}
            assert {m.member: m for m in presence.members(channel)} == expected
            # What clients fold from the changes is the same.
            assert views[id].get(channel, {}) == expected


def fold(bus: Bus, views: dict[str, dict[str, dict[str, Member]]]) -> None:
    for id, presence in bus.alive.items():
        for channel in presence.changed():
            joined, left = presence.take(channel)
            seen = views.setdefault(id, {}).setdefault(channel, {})
            seen |= {member.member: member for member in joined}
            for name in left:
                del seen[name]  # only members that were present leave
    for id in bus.alive:
        views.setdefault(id, {})
