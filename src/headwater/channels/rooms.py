"""The channels that somebody follows at this gateway: messages, who is there, what is remembered.

A message comes to everybody by the bus, to those at this gateway too: so all gateways tell the same
messages in the same order. Members of this gateway are known here first, and the others are told.
A room exists while somebody follows its channel here; the first who does gets what another gateway
remembers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headwater.channels.bus import Bus
from headwater.channels.definitions import ChannelDefinition, said
from headwater.channels.notes import Bye, Heard, Kept, Note, Recall, Recalled, Said, Who, Whole
from headwater.channels.presence import Presence
from headwater.errors import HeadwaterError, LimitExceeded
from headwater.idempotency import Request
from headwater.limits import (
    BUS_SECONDS,
    CHANNEL_HISTORY_BYTES_MAX,
    CHANNEL_KNOWN_SECONDS,
    CHANNEL_MESSAGE_FACTOR,
    CHANNEL_RECALL_SECONDS,
)
from headwater.memory import Holder, Memory
from headwater.protocol import Frame, Member, Message
from headwater.protocol import Presence as PresenceMessage

if TYPE_CHECKING:
    from headwater.metrics import Metrics


class Follower(Protocol):
    """One subscription of one session. None of these calls waits or raises."""

    behind: bool
    member: str | None

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None: ...

    def deliver(self, frame: Frame) -> None: ...

    def failed(self, error: HeadwaterError) -> None: ...


class _Remembered:
    """A message of a room."""

    __slots__ = ("frame", "id", "number", "said")

    def __init__(self, id: str, said: Said, view: int) -> None:
        self.id = id
        self.said = said
        self.frame = Frame(Message(view, id, said.data, said.at, said.user, said.member))
        self.number = 0
        """Its place among all that this room has told."""


class Room:
    """A channel that somebody follows here."""

    def __init__(self, name: str, definition: ChannelDefinition, view: int, memory: Memory) -> None:
        self.name = name
        self.holding = memory.open(self._shed)
        """Its history, and the users who follow it."""
        self.definition = definition
        self.view = view
        self.seats: dict[Seat, None] = {}
        self.entering = 0
        """How many are about to take a seat."""
        self.recalling: asyncio.Task[None] | None = None
        self.unanswered = False
        """Whether a gateway that may remember messages did not answer in time."""
        self.history: deque[_Remembered] = deque()
        self._bytes = 0
        self._number = 0

    def _shed(self, owner: Holder, error: LimitExceeded) -> None:
        """A user may not follow it: what it remembers takes too much memory."""
        for seat in [each for each in self.seats if each.owner == owner]:
            seat.end(error)

    def say(self, id: str, said: Said) -> None:
        """Remember a message, and tell it to everybody here."""
        message = _Remembered(id, said, self.view)
        self._remember(message)
        for seat in list(self.seats):
            seat.tell(message)

    def recalled(self, messages: Iterable[Kept]) -> None:
        """What others remember from before; what we have heard ourselves came after it."""
        assert not self.seats, "nobody was told anything yet"
        known = {message.id for message in self.history}
        before = [_Remembered(m.id, m.said, self.view) for m in messages if m.id not in known]
        after, self.history, self._bytes, self._number = self.history, deque(), 0, 0
        for message in (*before, *after):
            self._remember(message)

    @property
    def is_incomplete(self) -> bool:
        """Whether messages may be missing that a newcomer should get."""
        return self.unanswered and len(self.history) < self.definition.history

    @property
    def forgotten(self) -> int:
        """The number of the last message that is not remembered any more."""
        return self._number - len(self.history)

    def _remember(self, message: _Remembered) -> None:
        self._number += 1
        message.number = self._number
        self.history.append(message)
        self._bytes += message.frame.size
        most = self.definition.history
        while len(self.history) > most or self._bytes > CHANNEL_HISTORY_BYTES_MAX:
            self._bytes -= self.history.popleft().frame.size
        self.holding.resize(CHANNEL_MESSAGE_FACTOR * self._bytes)


class Seat:
    """A subscription's place in a room."""

    def __init__(
        self,
        rooms: Rooms,
        room: Room,
        follower: Follower,
        member: Member | None,
        owner: Holder = None,
    ) -> None:
        self.room = room
        self.member = member
        self.owner = owner
        """The user whose memory it takes."""
        self._rooms = rooms
        self._follower = follower
        self._told = 0
        self._missed = False

    def begin(self) -> None:
        """Tell the newcomer who is there and what was said last."""
        self._follower.subscribed(self.room.view, key=(), resumed=False)
        self._told = self.room.forgotten
        self.resync(missed=self.room.is_incomplete)

    def tell(self, message: _Remembered) -> None:
        self._follower.deliver(message.frame)
        if not self._follower.behind:
            self._told = message.number

    def deliver(self, frame: Frame) -> None:
        self._follower.deliver(frame)

    def resync(self, *, missed: bool = False) -> None:
        """Tell who is there, and what of the messages not told is still remembered; and whether
        others are not, or some never came here (`missed`)."""
        self._missed |= missed or self._told < self.room.forgotten
        self.deliver(self._rooms.present(self.room, missed=self._missed))
        if self._follower.behind:
            return  # it was not taken, and is told when there is room
        self._missed, self._told = False, max(self._told, self.room.forgotten)
        for message in list(self.room.history):
            if self._follower.behind:
                return
            if message.number > self._told:
                self.tell(message)

    def set_state(self, state: Any) -> None:
        """Have another state, and tell everybody."""
        assert self.member is not None, "only a member has a state"
        self.member = msgspec.structs.replace(self.member, state=state)
        self._rooms.join(self.room, self.member)

    def close(self) -> None:
        self._rooms.leave(self)

    def end(self, error: HeadwaterError) -> None:
        """It is over, for this reason."""
        self.close()
        self._follower.failed(error)


class Rooms:
    """Every room of a gateway. Use as an async context manager, inside that of its bus."""

    def __init__(
        self,
        bus: Bus,
        *,
        period: float,
        timeout: float,
        metrics: Metrics,
        next_view: Callable[[], int],
        memory: Memory | None = None,
    ) -> None:
        """`period` and `timeout` in seconds are those of `Presence`; views have numbers that are
        nobody else's."""
        self.presence = Presence(bus.id, period=period, timeout=timeout)
        self._bus = bus
        self._period = period
        self._metrics = metrics
        self._next_view = next_view
        self._memory = memory or Memory()
        self._rooms: dict[str, Room] = {}
        self._recalls: dict[tuple[str, str], asyncio.Future[tuple[Kept, ...]]] = {}
        self._telling: asyncio.Future[None] | None = None
        """All of our members, on their way to the others."""
        self._flush: asyncio.Handle | None = None
        self._hearing = asyncio.Event()
        self._hearing_since: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Rooms:
        listening = self._bus.listen(self._heard, self._connected, self._metrics)
        self._tasks = [asyncio.create_task(listening), asyncio.create_task(self._beat())]
        # Whoever follows a channel from the first moment on is to hear what is said from then on.
        try:
            async with asyncio.timeout(BUS_SECONDS):
                await self._hearing.wait()
        except TimeoutError:
            pass
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._bus.tell(Bye())
        if self._flush is not None:
            self._flush.cancel()
        recalling = [room.recalling for room in self._rooms.values() if room.recalling is not None]
        for task in (*self._tasks, *recalling):
            task.cancel()
        await asyncio.gather(*self._tasks, *recalling, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            self._bus.tell(self.presence.beat())

    # -------------------------------------------------------------------- following

    async def enter(
        self,
        name: str,
        definition: ChannelDefinition,
        follower: Follower,
        *,
        user: str | None = None,
        present: bool = False,
        state: Any = None,
        owner: Holder = None,
    ) -> Seat:
        """Follow a channel; with `present`, as a member with a state. LimitExceeded if there are
        too many."""
        room = self._room(name, definition)
        room.entering += 1
        try:
            if room.recalling is not None:
                await asyncio.shield(room.recalling)
            member = Member(secrets.token_hex(8), user, state) if present else None
            if member is not None:
                self.join(room, member)
            self._tell_changes(room)
            seat = Seat(self, room, follower, member, owner)
            room.seats[seat] = None
            room.holding.join(owner)
        finally:
            room.entering -= 1
            self._close_if_empty(room)
        follower.member = member.member if member is not None else None
        seat.begin()
        return seat

    def _room(self, name: str, definition: ChannelDefinition) -> Room:
        room = self._rooms.get(name)
        if room is None:
            room = self._rooms[name] = Room(name, definition, self._next_view(), self._memory)
            self._metrics.channels.set(len(self._rooms))
            if definition.history and (self.presence.gateways or self._until_known() > 0):
                room.recalling = asyncio.create_task(self._recall(room))
        return room

    def _close_if_empty(self, room: Room) -> None:
        if room.seats or room.entering or self._rooms.get(room.name) is not room:
            return
        del self._rooms[room.name]
        room.holding.close()
        self._metrics.channels.set(len(self._rooms))
        if room.recalling is not None:
            room.recalling.cancel()

    def leave(self, seat: Seat) -> None:
        """Nobody listens there any more."""
        room = seat.room
        if room.seats.pop(seat, self) is self:
            return
        room.holding.leave(seat.owner)
        if seat.member is not None:
            self._bus.tell(self.presence.leave(room.name, seat.member.member))
            self._changed()
        self._close_if_empty(room)

    # -------------------------------------------------------------------- members

    def join(self, room: Room, member: Member) -> None:
        self._bus.tell(self.presence.join(room.name, member))
        self._changed()

    def present(self, room: Room, *, missed: bool) -> Frame:
        """Who is there, all of them; nobody where that is not told."""
        members = self.presence.members(room.name) if room.definition.presence else ()
        return Frame(PresenceMessage(room.view, members, whole=True, missed=missed))

    def _changed(self) -> None:
        """Somebody came or went; whoever does so at the same time is told together."""
        self._metrics.channel_members.set(self.presence.own)
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._tell_all_changes)

    def _tell_all_changes(self) -> None:
        self._flush = None
        for name in self.presence.changed():
            if room := self._rooms.get(name):
                self._tell_changes(room)
            else:
                self.presence.take(name)

    def _tell_changes(self, room: Room) -> None:
        joined, left = self.presence.take(room.name)
        if not (joined or left) or not room.definition.presence:
            return
        frame = Frame(PresenceMessage(room.view, joined, left))
        for seat in list(room.seats):
            seat.deliver(frame)

    # -------------------------------------------------------------------- messages

    def say(
        self,
        name: str,
        data: msgspec.Raw,
        *,
        user: str | None = None,
        member: str | None = None,
        request: Request | None = None,
    ) -> asyncio.Future[None]:
        """Say something on a channel, behind what was said before; a `request` once. The future is
        Unavailable if the database did not pass it on."""
        return self._bus.send(said(name, data, user=user, member=member), request)

    def _connected(self) -> None:
        if self._hearing.is_set():
            self._missed()
        else:
            self._hearing_since = time.monotonic()
        self._hearing.set()
        self._bus.tell(Who())
        self._bus.tell(self.presence.beat())

    def _missed(self) -> None:
        """Others may have spoken while we did not hear them."""
        for room in self._rooms.values():
            self._tell_changes(room)
            for seat in list(room.seats):
                seat.resync(missed=True)

    def _heard(self, heard: Heard) -> None:
        match heard.note:
            case Said(channel) as message:
                if room := self._rooms.get(channel):
                    self._tell_changes(room)  # who speaks is known to be there
                    self._metrics.channel_messages.inc()
                    room.say(heard.id, message)
            case Recall(channel, to) if to == self._bus.id:
                self._bus.tell(self._remembered(channel, heard.sender))
            case Recalled(channel, to, messages) if to == self._bus.id:
                waiting = self._recalls.get((heard.sender, channel))
                if waiting is not None and not waiting.done():
                    waiting.set_result(messages)
            case Recall() | Recalled():
                pass
            case note:
                self._reply(self.presence.hear(heard.sender, note, time.monotonic()))
                self._changed()

    def _reply(self, notes: list[Note]) -> None:
        for note in notes:
            if isinstance(note, Whole):
                if self._telling is not None and not self._telling.done():
                    continue  # those who ask now hear what is about to be told
                if note.part == note.parts:
                    self._telling = self._bus.tell(note)
                    continue
            self._bus.tell(note)

    # -------------------------------------------------------------------- remembering

    def _remembered(self, channel: str, to: str) -> Recalled:
        room = self._rooms.get(channel)
        history = room.history if room is not None else ()
        return Recalled(channel, to, tuple(Kept(each.id, each.said) for each in history))

    def _until_known(self) -> float:
        """Seconds until the other gateways had time to say that they are there."""
        if self._hearing_since is None:
            return CHANNEL_KNOWN_SECONDS
        return self._hearing_since + CHANNEL_KNOWN_SECONDS - time.monotonic()

    async def _recall(self, room: Room) -> None:
        """Ask one gateway after the other, until one remembers something."""
        unanswered = False
        try:
            if not self.presence.gateways:
                await asyncio.sleep(self._until_known())
            for other in self.presence.gateways:
                messages = await self._ask(other, room.name)
                if messages:
                    room.recalled(messages)
                    return
                unanswered |= messages is None
            room.unanswered = unanswered
        finally:
            room.recalling = None

    async def _ask(self, other: str, channel: str) -> tuple[Kept, ...] | None:
        """What another gateway remembers; None if it does not answer in time."""
        answer: asyncio.Future[tuple[Kept, ...]] = asyncio.get_running_loop().create_future()
        self._recalls[other, channel] = answer
        try:
            self._bus.tell(Recall(channel, other))
            async with asyncio.timeout(CHANNEL_RECALL_SECONDS):
                return await answer
        except TimeoutError:
            return None  # it has just died, or the bus is away
        finally:
            if self._recalls.get((other, channel)) is answer:
                del self._recalls[other, channel]
