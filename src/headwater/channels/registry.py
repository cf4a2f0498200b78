"""The channels that have subscribers at this gateway: their messages, members and history.

Every message goes through the bus, also to the subscribers of the gateway it came from. So all
gateways send the same messages in the same order. A change of members is applied at this gateway
first and then sent to the others. An `ActiveChannel` exists while it has subscribers here. Its
first subscriber gets the history from another gateway.
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
from headwater.channels.bus_messages import (
    BusMessage,
    Goodbye,
    HistoryReply,
    HistoryRequest,
    MembersRequest,
    MembersSnapshot,
    Published,
    Received,
    StoredMessage,
)
from headwater.channels.definitions import ChannelDefinition, published
from headwater.channels.presence import PresenceTable
from headwater.errors import HeadwaterError, LimitExceeded
from headwater.idempotency import Request
from headwater.limits import (
    BUS_SECONDS,
    CHANNEL_HISTORY_BYTES_MAX,
    CHANNEL_RECALL_SECONDS,
)
from headwater.memory import Holder, Memory
from headwater.protocol import Frame, Member, Message
from headwater.protocol import Presence as PresenceMessage

if TYPE_CHECKING:
    from headwater.metrics import Metrics

_CHANNEL_MESSAGE_FACTOR = 4
"""A message in the history of a channel counts as this many times its size in `[limits]
bytes_per_user`: as it was received, and in the forms in which it is sent."""

_CHANNEL_KNOWN_SECONDS = 0.5
"""After its start, a gateway waits this long for the heartbeats of others, which may have the
history of a channel."""


class ChannelSubscriber(Protocol):
    """One subscription of one session. None of these calls waits or raises."""

    behind: bool
    member: str | None

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None: ...

    def deliver(self, frame: Frame) -> None: ...

    def failed(self, error: HeadwaterError) -> None: ...


class _HistoryEntry:
    """A message in the history of a channel."""

    __slots__ = ("frame", "id", "number", "published")

    def __init__(self, id: str, published: Published, view: int) -> None:
        self.id = id
        self.published = published
        self.frame = Frame(
            Message(view, id, published.data, published.at, published.user, published.member)
        )
        self.number = 0
        """Counts the messages of this channel here."""


class ActiveChannel:
    """A channel with subscribers at this gateway."""

    def __init__(self, name: str, definition: ChannelDefinition, view: int, memory: Memory) -> None:
        self.name = name
        self.holding = memory.open(self._shed)
        """The memory of its history, charged to the users that follow it."""
        self.definition = definition
        self.view = view
        self.listeners: dict[ChannelListener, None] = {}
        self.entering = 0
        """How many subscribers are about to be added."""
        self.loading_history: asyncio.Task[None] | None = None
        self.unanswered = False
        """Whether a gateway that may have the history did not answer in time."""
        self.history: deque[_HistoryEntry] = deque()
        self._bytes = 0
        self._number = 0

    def _shed(self, owner: Holder, error: LimitExceeded) -> None:
        """End the subscriptions of a user: the history takes more memory than the user may use."""
        for listener in [each for each in self.listeners if each.owner == owner]:
            listener.end(error)

    def publish(self, id: str, published: Published) -> None:
        """Add a message to the history, and send it to all listeners."""
        message = _HistoryEntry(id, published, self.view)
        self._remember(message)
        for listener in list(self.listeners):
            listener.send(message)

    def add_history(self, messages: Iterable[StoredMessage]) -> None:
        """Add the history of another gateway before the messages that were received here."""
        assert not self.listeners, "nothing was sent to a listener yet"
        known = {message.id for message in self.history}
        before = [
            _HistoryEntry(m.id, m.published, self.view) for m in messages if m.id not in known
        ]
        after, self.history, self._bytes, self._number = self.history, deque(), 0, 0
        for message in (*before, *after):
            self._remember(message)

    @property
    def is_incomplete(self) -> bool:
        """Whether messages may be missing that a new subscriber should get."""
        return self.unanswered and len(self.history) < self.definition.history

    @property
    def dropped_up_to(self) -> int:
        """The number of the last message that is no longer in the history."""
        return self._number - len(self.history)

    def _remember(self, message: _HistoryEntry) -> None:
        self._number += 1
        message.number = self._number
        self.history.append(message)
        self._bytes += message.frame.size
        most = self.definition.history
        while len(self.history) > most or self._bytes > CHANNEL_HISTORY_BYTES_MAX:
            self._bytes -= self.history.popleft().frame.size
        self.holding.resize(_CHANNEL_MESSAGE_FACTOR * self._bytes)


class ChannelListener:
    """One subscription to an active channel."""

    def __init__(
        self,
        registry: ChannelRegistry,
        active: ActiveChannel,
        subscriber: ChannelSubscriber,
        member: Member | None,
        owner: Holder = None,
    ) -> None:
        self.active = active
        self.member = member
        self.owner = owner
        """The user that its memory is charged to."""
        self._channels = registry
        self._subscriber = subscriber
        self._sent_up_to = 0
        self._missed = False

    def begin(self) -> None:
        """Send the members and the history to a new subscriber."""
        self._subscriber.subscribed(self.active.view, key=(), resumed=False)
        self._sent_up_to = self.active.dropped_up_to
        self.resync(missed=self.active.is_incomplete)

    def send(self, message: _HistoryEntry) -> None:
        self._subscriber.deliver(message.frame)
        if not self._subscriber.behind:
            self._sent_up_to = message.number

    def deliver(self, frame: Frame) -> None:
        self._subscriber.deliver(frame)

    def resync(self, *, missed: bool = False) -> None:
        """Send the members, and the messages of the history that were not sent yet. `missed` says
        that messages are lost: they left the history, or never arrived at this gateway."""
        self._missed |= missed or self._sent_up_to < self.active.dropped_up_to
        self.deliver(self._channels.present(self.active, missed=self._missed))
        if self._subscriber.behind:
            return  # the subscriber is behind and gets it later
        self._missed, self._sent_up_to = False, max(self._sent_up_to, self.active.dropped_up_to)
        for message in list(self.active.history):
            if self._subscriber.behind:
                return
            if message.number > self._sent_up_to:
                self.send(message)

    def set_state(self, state: Any) -> None:
        """Change the state of the member, and send it to the others."""
        assert self.member is not None, "only a member has a state"
        self.member = msgspec.structs.replace(self.member, state=state)
        self._channels.join(self.active, self.member)

    def close(self) -> None:
        self._channels.leave(self)

    def end(self, error: HeadwaterError) -> None:
        """End the subscription with this error."""
        self.close()
        self._subscriber.failed(error)


class ChannelRegistry:
    """All active channels of a gateway. Use as an async context manager, inside that of its bus."""

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
        """`period` and `timeout` in seconds are those of `PresenceTable`; `next_view` returns
        unused view numbers."""
        self.presence = PresenceTable(bus.id, period=period, timeout=timeout)
        self._bus = bus
        self._period = period
        self._metrics = metrics
        self._next_view = next_view
        self._memory = memory or Memory()
        self._channels: dict[str, ActiveChannel] = {}
        self._history_replies: dict[tuple[str, str], asyncio.Future[tuple[StoredMessage, ...]]] = {}
        self._snapshot_sending: asyncio.Future[None] | None = None
        """The members of this gateway, while they are being sent to the others."""
        self._flush: asyncio.Handle | None = None
        self._listening = asyncio.Event()
        self._listening_since: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ChannelRegistry:
        listening = self._bus.listen(self._receive, self._connected, self._metrics)
        self._tasks = [asyncio.create_task(listening), asyncio.create_task(self._beat())]
        # The first subscribers must not miss messages, so wait until the bus listens.
        try:
            async with asyncio.timeout(BUS_SECONDS):
                await self._listening.wait()
        except TimeoutError:
            pass
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._bus.post(Goodbye())
        if self._flush is not None:
            self._flush.cancel()
        loading_history = [
            active.loading_history
            for active in self._channels.values()
            if active.loading_history is not None
        ]
        for task in (*self._tasks, *loading_history):
            task.cancel()
        await asyncio.gather(*self._tasks, *loading_history, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            self._bus.post(self.presence.beat())

    # -------------------------------------------------------------------- following

    async def enter(
        self,
        name: str,
        definition: ChannelDefinition,
        subscriber: ChannelSubscriber,
        *,
        user: str | None = None,
        present: bool = False,
        state: Any = None,
        owner: Holder = None,
    ) -> ChannelListener:
        """Follow a channel; with `present`, as a member with a state. LimitExceeded if there are
        too many."""
        active = self._activate(name, definition)
        active.entering += 1
        try:
            if active.loading_history is not None:
                await asyncio.shield(active.loading_history)
            member = Member(secrets.token_hex(8), user, state) if present else None
            if member is not None:
                self.join(active, member)
            self._send_changes(active)
            listener = ChannelListener(self, active, subscriber, member, owner)
            active.listeners[listener] = None
            active.holding.join(owner)
        finally:
            active.entering -= 1
            self._close_if_empty(active)
        subscriber.member = member.member if member is not None else None
        listener.begin()
        return listener

    def _activate(self, name: str, definition: ChannelDefinition) -> ActiveChannel:
        active = self._channels.get(name)
        if active is None:
            active = self._channels[name] = ActiveChannel(
                name, definition, self._next_view(), self._memory
            )
            self._metrics.channels.set(len(self._channels))
            if definition.history and (self.presence.gateways or self._until_gateways_known() > 0):
                active.loading_history = asyncio.create_task(self._load_history(active))
        return active

    def _close_if_empty(self, active: ActiveChannel) -> None:
        if active.listeners or active.entering or self._channels.get(active.name) is not active:
            return
        del self._channels[active.name]
        active.holding.close()
        self._metrics.channels.set(len(self._channels))
        if active.loading_history is not None:
            active.loading_history.cancel()

    def leave(self, listener: ChannelListener) -> None:
        """Remove a listener."""
        active = listener.active
        if active.listeners.pop(listener, self) is self:
            return
        active.holding.leave(listener.owner)
        if listener.member is not None:
            self._bus.post(self.presence.leave(active.name, listener.member.member))
            self._changed()
        self._close_if_empty(active)

    # -------------------------------------------------------------------- members

    def join(self, active: ActiveChannel, member: Member) -> None:
        self._bus.post(self.presence.join(active.name, member))
        self._changed()

    def present(self, active: ActiveChannel, *, missed: bool) -> Frame:
        """All members; none for a channel without presence."""
        members = self.presence.members(active.name) if active.definition.presence else ()
        return Frame(PresenceMessage(active.view, members, whole=True, missed=missed))

    def _changed(self) -> None:
        """Members changed. Changes of the same moment are sent together."""
        self._metrics.channel_members.set(self.presence.own)
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._send_all_changes)

    def _send_all_changes(self) -> None:
        self._flush = None
        for name in self.presence.changed():
            if active := self._channels.get(name):
                self._send_changes(active)
            else:
                self.presence.take(name)

    def _send_changes(self, active: ActiveChannel) -> None:
        joined, left = self.presence.take(active.name)
        if not (joined or left) or not active.definition.presence:
            return
        frame = Frame(PresenceMessage(active.view, joined, left))
        for listener in list(active.listeners):
            listener.deliver(frame)

    # -------------------------------------------------------------------- messages

    def publish(
        self,
        name: str,
        data: msgspec.Raw,
        *,
        user: str | None = None,
        member: str | None = None,
        request: Request | None = None,
    ) -> asyncio.Future[None]:
        """Publish on a channel, in order; a `request` only once. The future is Unavailable if the
        database did not deliver the message."""
        return self._bus.send(published(name, data, user=user, member=member), request)

    def _connected(self) -> None:
        if self._listening.is_set():
            self._missed()
        else:
            self._listening_since = time.monotonic()
        self._listening.set()
        self._bus.post(MembersRequest())
        self._bus.post(self.presence.beat())

    def _missed(self) -> None:
        """Messages of other gateways may have been missed."""
        for active in self._channels.values():
            self._send_changes(active)
            for listener in list(active.listeners):
                listener.resync(missed=True)

    def _receive(self, received: Received) -> None:
        match received.message:
            case Published(channel) as message:
                if active := self._channels.get(channel):
                    self._send_changes(active)  # the members must know the publisher first
                    self._metrics.channel_messages.inc()
                    active.publish(received.id, message)
            case HistoryRequest(channel, to) if to == self._bus.id:
                self._bus.post(self._history_reply(channel, received.sender))
            case HistoryReply(channel, to, messages) if to == self._bus.id:
                waiting = self._history_replies.get((received.sender, channel))
                if waiting is not None and not waiting.done():
                    waiting.set_result(messages)
            case HistoryRequest() | HistoryReply():
                pass
            case message:
                self._reply(self.presence.receive(received.sender, message, time.monotonic()))
                self._changed()

    def _reply(self, messages: list[BusMessage]) -> None:
        for message in messages:
            if isinstance(message, MembersSnapshot):
                if self._snapshot_sending is not None and not self._snapshot_sending.done():
                    continue  # the snapshot that is being sent answers this request too
                if message.part == message.parts:
                    self._snapshot_sending = self._bus.post(message)
                    continue
            self._bus.post(message)

    # -------------------------------------------------------------------- history

    def _history_reply(self, channel: str, to: str) -> HistoryReply:
        active = self._channels.get(channel)
        history = active.history if active is not None else ()
        return HistoryReply(
            channel, to, tuple(StoredMessage(each.id, each.published) for each in history)
        )

    def _until_gateways_known(self) -> float:
        """Seconds until every other gateway had time to announce itself."""
        if self._listening_since is None:
            return _CHANNEL_KNOWN_SECONDS
        return self._listening_since + _CHANNEL_KNOWN_SECONDS - time.monotonic()

    async def _load_history(self, active: ActiveChannel) -> None:
        """Ask one gateway after the other, until one has a history."""
        unanswered = False
        try:
            if not self.presence.gateways:
                await asyncio.sleep(self._until_gateways_known())
            for other in self.presence.gateways:
                messages = await self._request_history(other, active.name)
                if messages:
                    active.add_history(messages)
                    return
                unanswered |= messages is None
            active.unanswered = unanswered
        finally:
            active.loading_history = None

    async def _request_history(self, other: str, channel: str) -> tuple[StoredMessage, ...] | None:
        """The history at another gateway; None if it does not answer in time."""
        answer: asyncio.Future[tuple[StoredMessage, ...]] = (
            asyncio.get_running_loop().create_future()
        )
        self._history_replies[other, channel] = answer
        try:
            self._bus.post(HistoryRequest(channel, other))
            async with asyncio.timeout(CHANNEL_RECALL_SECONDS):
                return await answer
        except TimeoutError:
            return None  # the gateway has died, or the bus is down
        finally:
            if self._history_replies.get((other, channel)) is answer:
                del self._history_replies[other, channel]
