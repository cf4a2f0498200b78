"""Who is on which channel, as one gateway knows it.

Pure: notes in, notes out, and the time is told. Each gateway decides about its own members and
counts their changes, so that others see when they have missed one and ask for all. In every period
a gateway says that it is there (`Beat`); one that is not heard is gone, and so are its members.

Silence counts only while the bus works, which a gateway knows from hearing itself: the clock here
moves with its own beats, and at most so far for each. So neither a database that is away, nor a
process that was stopped for a while, makes others look gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from headwater.channels.notes import Beat, Bye, Note, Placed, Step, Who, Whole
from headwater.errors import LimitExceeded
from headwater.limits import BUS_WHOLE_BYTES, CHANNEL_MEMBERS_MAX
from headwater.protocol import Member

_BEATS_LATE = 1.5
"""A beat of one's own moves the clock by so many periods at most."""


class _Gateway:
    """What is known of one gateway."""

    def __init__(self, heard: float = 0.0) -> None:
        self.version = 0
        self.members: dict[tuple[str, str], Member] = {}
        self.heard = heard
        self.asked = -math.inf
        self.parts: list[tuple[Placed, ...]] = []


class Presence:
    """The members of all gateways. What changed since the last `take` is kept for it."""

    def __init__(self, id: str, *, period: float, timeout: float) -> None:
        """`timeout` seconds after a gateway has died its members are gone, at the latest."""
        self.id = id
        self._period = period
        self._silence = timeout - period
        self._own = _Gateway()
        self._others: dict[str, _Gateway] = {}
        self._channels: dict[str, dict[str, Member]] = {}
        self._changed: dict[str, dict[str, Member | None]] = {}
        self._fresh: dict[str, set[str]] = {}  # of those, who was not there at the last `take`
        self._clock = 0.0
        self._echo: float | None = None

    # -------------------------------------------------------------------- what is known

    def members(self, channel: str) -> tuple[Member, ...]:
        return tuple(self._channels.get(channel, {}).values())

    @property
    def gateways(self) -> tuple[str, ...]:
        """The others that are there."""
        return tuple(self._others)

    @property
    def own(self) -> int:
        """How many members are this gateway's."""
        return len(self._own.members)

    def changed(self) -> tuple[str, ...]:
        """The channels on which somebody came, left or has another state."""
        return tuple(self._changed)

    def take(self, channel: str) -> tuple[tuple[Member, ...], tuple[str, ...]]:
        """Who came or has another state since the last time, and who left."""
        changes = self._changed.pop(channel, {})
        self._fresh.pop(channel, None)
        joined = tuple(member for member in changes.values() if member is not None)
        return joined, tuple(id for id, member in changes.items() if member is None)

    # -------------------------------------------------------------------- our own

    def join(self, channel: str, member: Member) -> Step:
        """One of ours comes, or has another state; what to tell the others."""
        present = self._channels.get(channel, {})
        if member.member not in present and len(present) >= CHANNEL_MEMBERS_MAX:
            raise LimitExceeded(
                f"channel {channel} has {CHANNEL_MEMBERS_MAX:,} members, which is the most",
                hint="Follow it without being present, or use several channels.",
                code="members_per_channel",
            )
        self._own.version += 1
        self._put(self._own, channel, member)
        return Step(self._own.version, joined=(Placed(channel, member),))

    def leave(self, channel: str, member: str) -> Step:
        """One of ours goes."""
        self._own.version += 1
        self._drop(self._own, channel, member)
        return Step(self._own.version, left=((channel, member),))

    def beat(self) -> Beat:
        return Beat(self._own.version)

    def whole(self) -> list[Whole]:
        """All of ours, in parts."""
        parts = list(_portions(self._own))
        return [Whole(self._own.version, i, len(parts), part) for i, part in enumerate(parts, 1)]

    # -------------------------------------------------------------------- the others

    def hear(self, sender: str, note: Note, now: float) -> list[Note]:
        """Take in what a gateway says; what to say to that."""
        if sender == self.id:
            if isinstance(note, Beat):
                self._tick(now)
            return []
        match note:
            case Who(to) if to in (None, self.id):
                return list(self.whole())
            case Bye():
                self._gone(sender)
            case Beat(version):
                return self._compare(sender, version, now)
            case Step(version):
                self._step(self._known(sender), note)
                return self._compare(sender, version, now)
            case Whole():
                self._replace(self._known(sender), note)
        return []

    def _known(self, sender: str) -> _Gateway:
        gateway = self._others.get(sender)
        if gateway is None:
            gateway = self._others[sender] = _Gateway()
        gateway.heard = self._clock
        return gateway

    def _compare(self, sender: str, version: int, now: float) -> list[Note]:
        """Ask for all if we have not what it has; not again before that can be answered."""
        gateway = self._known(sender)
        if gateway.version == version or now - gateway.asked < self._period:
            return []
        gateway.asked = now
        return [Who(sender)]

    def _step(self, gateway: _Gateway, step: Step) -> None:
        if step.version != gateway.version + 1:
            return
        gateway.version = step.version
        for placed in step.joined:
            self._put(gateway, placed.channel, placed.member)
        for channel, member in step.left:
            self._drop(gateway, channel, member)

    def _replace(self, gateway: _Gateway, whole: Whole) -> None:
        if whole.part == 1:
            gateway.parts = []
        if whole.part != len(gateway.parts) + 1:
            gateway.parts = []  # One was missed; the next beat has us ask again.
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
            if self._clock - gateway.heard > self._silence:
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
            # Who came and went meanwhile was never there.
            self._fresh[channel].discard(member)
            del self._changed[channel][member]
        else:
            self._changed.setdefault(channel, {})[member] = None


def _portions(gateway: _Gateway) -> Iterator[tuple[Placed, ...]]:
    """Its members in portions that are no larger than they need be; at least one, if empty."""
    portion, size = list[Placed](), 0
    for (channel, _), member in gateway.members.items():
        placed = Placed(channel, member)
        portion.append(placed)
        size += len(msgspec.json.encode(placed))
        if size > BUS_WHOLE_BYTES:
            yield tuple(portion)
            portion, size = [], 0
    if portion or not gateway.members:
        yield tuple(portion)
