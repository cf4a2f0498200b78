"""The members of every channel, as one gateway knows them.

Pure: messages in, messages out; the caller passes the time. Each gateway owns its members and
counts their changes. A gateway that missed a change sees that by the count and requests all members
again. Every gateway sends a `Heartbeat` each period. A gateway that is silent for too long is gone,
and so are its members.

Silence counts only while the bus works. A gateway knows that it works when it receives its own
heartbeats: they move the clock here, each by a bounded time. So neither a database outage nor a
paused process makes other gateways look gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from headwater.channels.bus_messages import (
    BusMessage,
    Goodbye,
    Heartbeat,
    MembersChanged,
    MembersRequest,
    MembersSnapshot,
    PlacedMember,
)
from headwater.errors import LimitExceeded
from headwater.limits import CHANNEL_MEMBERS_MAX
from headwater.protocol import Member

_BUS_WHOLE_BYTES = 64 * 1024
"""Bytes of members in one part, when a gateway sends all of its members."""


_BEATS_LATE = 1.5
"""One own heartbeat moves the clock by at most this many periods."""


class _Gateway:
    """What is known about one gateway."""

    def __init__(self, last_seen: float = 0.0) -> None:
        self.version = 0
        self.members: dict[tuple[str, str], Member] = {}
        self.last_seen = last_seen
        self.requested_at = -math.inf
        self.parts: list[tuple[PlacedMember, ...]] = []


class PresenceTable:
    """The members of all gateways, and what changed since the last `take`."""

    def __init__(self, id: str, *, period: float, timeout: float) -> None:
        """`timeout` seconds after a gateway has died its members are gone, at the latest."""
        self.id = id
        self._period = period
        self._silence = timeout - period
        self._own = _Gateway()
        self._others: dict[str, _Gateway] = {}
        self._channels: dict[str, dict[str, Member]] = {}
        self._changed: dict[str, dict[str, Member | None]] = {}
        self._fresh: dict[str, set[str]] = {}  # changed members that were absent at the last `take`
        self._clock = 0.0
        self._echo: float | None = None

    # -------------------------------------------------------------------- what is known

    def members(self, channel: str) -> tuple[Member, ...]:
        return tuple(self._channels.get(channel, {}).values())

    @property
    def gateways(self) -> tuple[str, ...]:
        """The ids of the other gateways that are alive."""
        return tuple(self._others)

    @property
    def own(self) -> int:
        """How many members this gateway has."""
        return len(self._own.members)

    def changed(self) -> tuple[str, ...]:
        """The channels whose members changed."""
        return tuple(self._changed)

    def take(self, channel: str) -> tuple[tuple[Member, ...], tuple[str, ...]]:
        """The members that joined or changed their state since the last call, and those that
        left."""
        changes = self._changed.pop(channel, {})
        self._fresh.pop(channel, None)
        joined = tuple(member for member in changes.values() if member is not None)
        return joined, tuple(id for id, member in changes.items() if member is None)

    # -------------------------------------------------------------------- our own

    def join(self, channel: str, member: Member) -> MembersChanged:
        """A member of this gateway joins or changes its state; the message for other gateways."""
        present = self._channels.get(channel, {})
        if member.member not in present and len(present) >= CHANNEL_MEMBERS_MAX:
            raise LimitExceeded(
                f"channel {channel} has {CHANNEL_MEMBERS_MAX:,} members, which is the limit",
                hint="Subscribe without present, or use several channels.",
                code="members_per_channel",
            )
        self._own.version += 1
        self._put(self._own, channel, member)
        return MembersChanged(self._own.version, joined=(PlacedMember(channel, member),))

    def leave(self, channel: str, member: str) -> MembersChanged:
        """A member of this gateway leaves; the message for other gateways."""
        self._own.version += 1
        self._drop(self._own, channel, member)
        return MembersChanged(self._own.version, left=((channel, member),))

    def beat(self) -> Heartbeat:
        return Heartbeat(self._own.version)

    def whole(self) -> list[MembersSnapshot]:
        """All members of this gateway, in parts."""
        parts = list(_portions(self._own))
        return [
            MembersSnapshot(self._own.version, i, len(parts), part)
            for i, part in enumerate(parts, 1)
        ]

    # -------------------------------------------------------------------- the others

    def receive(self, sender: str, message: BusMessage, now: float) -> list[BusMessage]:
        """Apply a message of a gateway; the messages to answer with."""
        if sender == self.id:
            if isinstance(message, Heartbeat):
                self._tick(now)
            return []
        match message:
            case MembersRequest(to) if to in (None, self.id):
                return list(self.whole())
            case Goodbye():
                self._gone(sender)
            case Heartbeat(version):
                return self._compare(sender, version, now)
            case MembersChanged(version):
                self._step(self._gateway(sender), message)
                return self._compare(sender, version, now)
            case MembersSnapshot():
                self._replace(self._gateway(sender), message)
        return []

    def _gateway(self, sender: str) -> _Gateway:
        gateway = self._others.get(sender)
        if gateway is None:
            gateway = self._others[sender] = _Gateway()
        gateway.last_seen = self._clock
        return gateway

    def _compare(self, sender: str, version: int, now: float) -> list[BusMessage]:
        """Request all members of a gateway if the version differs; once a period, to let it
        answer."""
        gateway = self._gateway(sender)
        if gateway.version == version or now - gateway.requested_at < self._period:
            return []
        gateway.requested_at = now
        return [MembersRequest(sender)]

    def _step(self, gateway: _Gateway, step: MembersChanged) -> None:
        if step.version != gateway.version + 1:
            return
        gateway.version = step.version
        for placed in step.joined:
            self._put(gateway, placed.channel, placed.member)
        for channel, member in step.left:
            self._drop(gateway, channel, member)

    def _replace(self, gateway: _Gateway, whole: MembersSnapshot) -> None:
        if whole.part == 1:
            gateway.parts = []
        if whole.part != len(gateway.parts) + 1:
            gateway.parts = []  # A part was missed. The next heartbeat makes us request all again.
            return
        gateway.parts.append(whole.members)
        if whole.part < whole.parts:
            return
        placed = {(p.channel, p.member.member): p.member for part in gateway.parts for p in part}
        gateway.parts, gateway.version = [], whole.version
        for channel, id in gateway.members.keys() - placed.keys():
            self._drop(gateway, channel, id)
        for (channel, id), member in placed.items():
            if gateway.members.get((channel, id)) != member:
                self._put(gateway, channel, member)

    def _tick(self, now: float) -> None:
        if self._echo is not None:
            self._clock += min(now - self._echo, _BEATS_LATE * self._period)
        self._echo = now
        for id, gateway in list(self._others.items()):
            if self._clock - gateway.last_seen > self._silence:
                self._gone(id)

    def _gone(self, id: str) -> None:
        if gateway := self._others.pop(id, None):
            for channel, member in list(gateway.members):
                self._drop(gateway, channel, member)

    # -------------------------------------------------------------------- one member

    def _put(self, gateway: _Gateway, channel: str, member: Member) -> None:
        id = member.member
        gateway.members[channel, id] = member
        present, changes = self._channels.setdefault(channel, {}), self._changed.get(channel, {})
        if id not in present and id not in changes:
            self._fresh.setdefault(channel, set()).add(id)
        present[id] = member
        self._changed.setdefault(channel, {})[id] = member

    def _drop(self, gateway: _Gateway, channel: str, member: str) -> None:
        if gateway.members.pop((channel, member), None) is None:
            return
        present = self._channels.get(channel, {})
        present.pop(member, None)
        if not present:
            self._channels.pop(channel, None)
        if member in self._fresh.get(channel, ()):
            # A member that came and left since the last `take` is not reported.
            self._fresh[channel].discard(member)
            del self._changed[channel][member]
        else:
            self._changed.setdefault(channel, {})[member] = None


def _portions(gateway: _Gateway) -> Iterator[tuple[PlacedMember, ...]]:
    """Its members in portions of bounded size; one empty portion if there are none."""
    portion, size = list[PlacedMember](), 0
    for (channel, _), member in gateway.members.items():
        placed = PlacedMember(channel, member)
        portion.append(placed)
        size += len(msgspec.json.encode(placed))
        if size > _BUS_WHOLE_BYTES:
            yield tuple(portion)
            portion, size = [], 0
    if portion or not gateway.members:
        yield tuple(portion)
