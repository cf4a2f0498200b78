"""A session: one connection, its subscriptions, and the handling of a client that reads too slowly.

Pure: no await, no clock, no I/O; frames go to a sink that never blocks and reports how much it
still holds. The rule: a session holds at most `SESSION_QUEUE_BYTES_MAX` and one frame. A
subscription whose frame no longer fits *falls behind* and gets no more frames. When the client has
read what was queued, the subscription recovers by its policy: a live query with a reset to its
current state, a reactive query with its current result, a change feed with a gap or with the
changes from the log, a channel with its members and history. Other sessions are not affected.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

import msgspec

from headwater.errors import HeadwaterError, InvalidQuery, NotFound
from headwater.hub.subscriptions.subscriber import Access, Settling
from headwater.identity import Identity
from headwater.limits import SESSION_QUEUE_BYTES_MAX
from headwater.protocol import (
    Error,
    Failed,
    Frame,
    Gap,
    Overflow,
    ResetReason,
    ServerMessage,
    Subscribed,
    Unsubscribed,
)


class Outlet(Protocol):
    """Where frames go: the part of a sink that a session uses."""

    def send(self, frame: Frame) -> None: ...

    @property
    def buffered(self) -> int: ...


class SessionOwner(Protocol):
    """The connection of a session: the calls that a session makes."""

    def fell_behind(self, subscription: SessionSubscription) -> None: ...

    def caught_up(self, subscription: SessionSubscription) -> None: ...

    def forgotten(self, subscription: SessionSubscription) -> None: ...

    def room(self) -> Awaitable[None]: ...


class StateHandle(Protocol):
    """The hub's side of a subscription with a current state."""

    def close(self) -> None: ...

    def resync(self, reason: ResetReason) -> None: ...


class LiveHandle(StateHandle, Settling, Protocol):
    """The same about a live query."""

    def reanchor(self, after: list[Any] | None) -> Awaitable[None]: ...

    def change_access(self, access: Access) -> Awaitable[None]: ...


class QueryHandle(StateHandle, Settling, Protocol):
    """The same about a reactive query."""

    def change_identity(self, identity: Identity) -> Awaitable[None]: ...


class FeedHandle(Settling, Protocol):
    """The hub's side of a change feed."""

    def close(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class TopicHandle(FeedHandle, Protocol):
    """The same about a topic."""

    access: Access

    @property
    def is_live(self) -> bool: ...


class ChannelHandle(StateHandle, Protocol):
    """The same about a channel."""

    def recheck(self, identity: Identity) -> Awaitable[None]: ...


class SessionSubscription:
    """One subscription of a session: a `Subscriber` for the hub.

    If a session subscribes to the same view again, that subscription gets its own view number, and
    frames with that number. With a shared number each would also get frames that only the other
    needs: a result read at another position, or what a feed missed.
    """

    __slots__ = (
        "_alone", "_position", "_skipped", "behind", "digest", "give_up", "handle", "id",
        "lost", "over", "session", "view",
    )  # fmt: skip

    member: str | None = None
    """The id of this member of the channel."""

    def __init__(self, session: Session, id: str) -> None:
        self.session = session
        self.id = id
        self.view = 0
        self.behind = False
        self.handle: StateHandle | FeedHandle | None = None
        self.over = False
        """Whether it has ended, possibly before it was open. Then nothing more is sent."""
        self.lost = False
        """Whether the client named a position that the database does not have; reported once."""
        self.give_up: Callable[[], object] | None = None
        """Cancels its opening, while there is no handle to close."""
        self.digest: int | None = None
        """The digest of the request that opened it, if that request may be repeated."""
        self._alone = True
        self._position: str | None = None
        self._skipped: str | None = None

    @property
    def has_unsent(self) -> bool:
        """Whether messages for the client are not sent yet."""
        return self.behind

    # -------------------------------------------------------------------- called by the hub

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None:
        if self.over:
            return
        self.session.change_view(self, view)
        self._alone = self.view == view and self._is_resumed
        lost, self.lost = self.lost, False
        self.session.send(Subscribed(self.id, self.view, resumed, key, self.member, lost))

    def deliver(self, frame: Frame) -> None:
        # Thousands of times for one change of a popular query: few calls, nothing looked up twice.
        outlet = self.session.outlet
        if self.over or self.behind or outlet.buffered > SESSION_QUEUE_BYTES_MAX:
            self._deliver_late(frame)
        elif self._alone:
            self._position = frame.position
            outlet.send(frame)
        else:
            self._deliver_alone(frame)

    def _deliver_late(self, frame: Frame) -> None:
        if self.over:
            return
        if (self.behind and frame.is_step) or self.session.is_full:
            self._miss(frame)
        else:
            self.catch_up()
            self._deliver_alone(frame)

    def _deliver_alone(self, frame: Frame) -> None:
        self._position = frame.position
        if not self._alone:
            frame = self._framed(frame.message)
        self.session.outlet.send(frame)

    def _framed(self, message: ServerMessage) -> Frame:
        """The message as its client gets it."""
        frame = Frame(msgspec.structs.replace(message, view=self.view))
        if not self._is_resumed:
            frame.has_id = False
        return frame

    @property
    def _is_resumed(self) -> bool:
        """Whether its positions are those that the stream is resumed from."""
        return self.session.resumed in (None, self.id)

    def failed(self, error: HeadwaterError) -> None:
        if self.over:
            return
        self.session.forget(self)
        self.session.send(error_message(error, id=self.id))

    def room(self) -> Awaitable[None]:
        return self.session.room()

    # -------------------------------------------------------------------- called by the session

    def close(self) -> None:
        """End the subscription at the hub."""
        if self.handle is not None:
            self.handle.close()
        elif self.give_up is not None:
            self.give_up()

    def recover(self) -> None:
        """There is room again: send what brings the client up to date."""

    def _miss(self, frame: Frame) -> None:
        self._skipped = frame.position
        # A recovering subscription may not fit either, and waits again.
        if not (self.behind and frame.is_step):
            self._fall_behind()

    def _fall_behind(self) -> None:
        self.behind = True
        self.session.fell_behind(self)

    def catch_up(self) -> None:
        """The current state was sent, or it continues from its position."""
        if self.behind:
            self.behind = False
            self.session.caught_up(self)


class StateSubscription(SessionSubscription):
    """A subscription with a current state. If it falls behind, it waits for room and then gets that
    state."""

    __slots__ = ("_recovers",)
    handle: StateHandle | None
    policy: Overflow = "conflate"

    def __init__(self, session: Session, id: str) -> None:
        super().__init__(session, id)
        self._recovers = False

    def _begin(self, handle: StateHandle) -> None:
        if self.over:
            handle.close()
        elif self._recovers and self.behind:
            self.recover()

    def recover(self) -> None:
        if self.handle is not None:
            self.handle.resync("overflow")
        self._recovers = self.handle is None


class SessionLive(StateSubscription):
    """A live query."""

    __slots__ = ()
    handle: LiveHandle | None
    kind = "live"

    def opened(self, handle: LiveHandle) -> None:
        self.handle = handle
        self._begin(handle)


class SessionQuery(StateSubscription):
    """A reactive query. A failure does not replace its state: the client still has the last result,
    and a subscription that is behind is still behind."""

    __slots__ = ("_failing", "_failure", "identity")
    handle: QueryHandle | None
    kind = "query"

    def __init__(self, session: Session, id: str) -> None:
        super().__init__(session, id)
        self.identity = session.identity
        """The identity it is executed as: first, that of the session when it was requested."""
        self._failure: Frame | None = None
        """The last failure, to be sent when there is room."""
        self._failing = False
        """Whether the last message to the client was a failure."""

    @property
    def has_unsent(self) -> bool:
        return self.behind and not self._failing

    def opened(self, handle: QueryHandle) -> None:
        self.handle = handle
        self._begin(handle)

    def deliver(self, frame: Frame) -> None:
        if not isinstance(frame.message, Failed):
            self._failure, self._failing = None, False
            super().deliver(frame)
        elif self.over:
            return
        elif self.session.is_full:
            # A query may fail at every change: of the failures that wait, only the last is sent.
            self._failure = frame
            self._fall_behind()
        else:
            self._send_failure(frame)

    def _send_failure(self, frame: Frame) -> None:
        self._failing = True
        self._deliver_alone(frame)
        self.session.caught_up(self)

    def recover(self) -> None:
        failure, self._failure = self._failure, None
        super().recover()
        # The hub may have sent it just now, or will after its next attempt.
        if failure is not None and not (self.behind or self._failing):
            self._send_failure(failure)


class SessionFeed(SessionSubscription):
    """A change feed. If it falls behind, it gets a gap message (`drop`) or the changes later
    (`pause`)."""

    __slots__ = ("policy",)
    handle: FeedHandle | None
    kind = "changes"

    def __init__(self, session: Session, id: str, policy: Overflow) -> None:
        super().__init__(session, id)
        self.policy = policy

    def opened(self, handle: FeedHandle) -> None:
        self.handle = handle
        if self.over:
            handle.close()
        elif self.behind and self.policy == "pause":
            handle.pause()

    def deliver(self, frame: Frame) -> None:
        if isinstance(frame.message, Gap) and not self.over:
            # It is small, and the only message about what is missing: it is sent even without room.
            self.session.outlet.send(self._framed(frame.message))
            self._position, self._skipped = frame.position, None
        else:
            super().deliver(frame)

    def recover(self) -> None:
        self.catch_up()
        if self.policy == "pause":
            if self.handle is not None:
                self.handle.resume()
        elif self._skipped is not None:
            gap = Gap(self.view, self._skipped, self._position, "overflow")
            self.session.outlet.send(self._framed(gap))
            self._position, self._skipped = self._skipped, None

    def _miss(self, frame: Frame) -> None:
        first = not self.behind
        super()._miss(frame)
        if first and self.policy == "pause" and self.handle is not None:
            self.handle.pause()


class SessionTopic(SessionFeed):
    """A topic. If it falls behind, it gets a gap message (`drop`), or each missed row later, as the
    row is then (`pause`)."""

    __slots__ = ("topic",)
    handle: TopicHandle | None
    kind = "topic"

    def __init__(self, session: Session, id: str, policy: Overflow, topic: str) -> None:
        super().__init__(session, id, policy)
        self.topic = topic

    @property
    def is_complete(self) -> bool:
        """Whether the client has been sent everything up to the last flush."""
        return not self.behind and self.handle is not None and self.handle.is_live

    def deliver(self, frame: Frame) -> None:
        super().deliver(frame)
        on_sent = self.session.on_sent
        if on_sent is not None and frame.position and not self.over:
            on_sent(frame.position)


class ChannelSubscription(SessionSubscription):
    """A channel. If it falls behind, it misses messages; then it gets the members, and the messages
    that are still in the history."""

    __slots__ = ("channel", "member")
    handle: ChannelHandle | None
    kind = "channel"
    policy: Overflow = "drop"

    def __init__(self, session: Session, id: str, channel: str = "") -> None:
        super().__init__(session, id)
        self.channel = channel
        self.member = None

    def opened(self, handle: ChannelHandle) -> None:
        self.handle = handle
        if self.over:
            handle.close()

    def recover(self) -> None:
        self.catch_up()
        if self.handle is not None:
            self.handle.resync("overflow")


AnySubscription: TypeAlias = (
    SessionLive | SessionQuery | SessionFeed | SessionTopic | ChannelSubscription
)


class Session:
    """One connection. It exists before its outlet does: messages wait until then."""

    __slots__ = (
        "_alias",
        "_behind",
        "_owner",
        "_views",
        "id",
        "identity",
        "on_sent",
        "outlet",
        "resumed",
        "subscriptions",
    )  # fmt: skip

    def __init__(self, id: str, identity: Identity, owner: SessionOwner) -> None:
        self.id = id
        self.identity = identity
        self._owner = owner
        self.subscriptions: dict[str, AnySubscription] = {}
        self.outlet: Outlet = _Waiting()
        self.on_sent: Callable[[str], None] | None = None
        """Called with the position of a topic whenever one of its messages was sent."""
        self.resumed: str | None = None
        """The subscription that a stream began with, which its `Last-Event-ID` resumes. Events of
        other subscriptions have no `id`, because their positions are not those of this one."""
        self._views: set[int] = set()
        self._alias = 0
        self._behind: dict[SessionSubscription, None] = {}

    # -------------------------------------------------------------------- what goes out

    def attach(self, outlet: Outlet) -> None:
        """The connection is open; messages that waited are sent first."""
        waiting, self.outlet = self.outlet, outlet
        assert isinstance(waiting, _Waiting)
        for frame in waiting.frames:
            outlet.send(frame)

    def send(self, message: ServerMessage) -> None:
        """Send a small message, even if the queue is full: it must not get lost."""
        self.outlet.send(Frame(message))

    @property
    def buffered(self) -> int:
        return self.outlet.buffered

    @property
    def is_full(self) -> bool:
        return self.outlet.buffered > SESSION_QUEUE_BYTES_MAX

    # -------------------------------------------------------------------- falling behind

    @property
    def is_behind(self) -> bool:
        return bool(self._behind)

    def fell_behind(self, subscription: SessionSubscription) -> None:
        if subscription not in self._behind:
            self._behind[subscription] = None
            self._owner.fell_behind(subscription)

    def caught_up(self, subscription: SessionSubscription) -> None:
        self._owner.caught_up(subscription)

    def room(self) -> Awaitable[None]:
        return self._owner.room()

    def drained(self) -> None:
        """The client has caught up: let those that fell behind recover, for as long as they fit."""
        for subscription in list(self._behind):
            if self.is_full:
                return
            del self._behind[subscription]
            subscription.recover()

    # -------------------------------------------------------------------- subscriptions

    def add(self, subscription: AnySubscription) -> None:
        if subscription.id in self.subscriptions:
            raise InvalidQuery(
                f"this session has a subscription {subscription.id!r} already",
                path="id",
                hint="Choose another id, or end that one first.",
            )
        self.subscriptions[subscription.id] = subscription

    def remove(self, id: str) -> None:
        """End a subscription at the client's request."""
        subscription = self.find(id)
        if id == self.resumed:
            self.resumed = ""  # a later subscription with this id is another one
        self.forget(subscription)
        subscription.close()
        self.send(Unsubscribed(id))

    def find(self, id: str) -> AnySubscription:
        """The subscription of that id; NotFound where there is none."""
        subscription = self.subscriptions.get(id)
        if subscription is None:
            raise NotFound(
                f"this session has no subscription {id!r:.100}",
                code="subscription_unknown",
                hint="The subscription may have ended already.",
            )
        return subscription

    def forget(self, subscription: SessionSubscription) -> None:
        """The subscription has ended."""
        if self.subscriptions.get(subscription.id) is not subscription:
            return
        del self.subscriptions[subscription.id]
        subscription.over = True
        self._behind.pop(subscription, None)
        self._views.discard(subscription.view)
        self._owner.forgotten(subscription)

    def change_view(self, subscription: SessionSubscription, view: int) -> None:
        """The subscription gets the frames of another view, or of its first. The client knows the
        view by the same number, or by a negative one if it uses that number already."""
        self._views.discard(subscription.view)
        self._behind.pop(subscription, None)
        subscription.catch_up()
        if view in self._views:
            self._alias -= 1
            view = self._alias
        subscription.view = view
        self._views.add(view)

    def close(self) -> None:
        """The connection is gone."""
        for subscription in list(self.subscriptions.values()):
            self.forget(subscription)
            subscription.close()


class _Waiting:
    """Holds frames until there is a sink."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.buffered = 0

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.buffered += frame.size


def error_message(error: HeadwaterError, *, id: str | None = None) -> Error:
    """An error as clients read it."""
    return Error(
        code=error.code,
        message=str(error),
        hint=error.hint,
        retryable=error.retryable,
        id=id,
        retry_after_secs=error.retry_after,
    )
