"""Sessions: what a client that reads too slowly gets, and what it never gets."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any

import pytest

from headwater.errors import Forbidden, InvalidQuery, LimitExceeded, NotFound
from headwater.gateway.session import (
    ChannelSubscription,
    Session,
    SessionFeed,
    SessionLive,
    SessionQuery,
    SessionSubscription,
    error_message,
)
from headwater.hub.subscriptions.subscriber import Access
from headwater.identity import ANONYMOUS, Identity
from headwater.limits import SESSION_QUEUE_BYTES_MAX
from headwater.model import Enter, Leave, Position
from headwater.protocol import (
    Changes,
    Deltas,
    Failed,
    Frame,
    Gap,
    Message,
    Presence,
    ResetMessage,
    ResetReason,
    Result,
    Snapshot,
    Subscribed,
    type_of,
)

AT = datetime(2026, 1, 1, tzinfo=UTC)
KEY = ("id",)


class Client:
    """Records the frames that it is sent, as long as it reads."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.messages: list[Any] = []
        self.frames: list[Any] = []
        self.buffered = 0

    def send(self, frame: Frame) -> None:
        message = frame.message
        self.frames.append(frame)
        self.messages.append(message)
        name = type_of(message)
        self.got.append(f"{name} {frame.position}" if frame.position else name)

    def stops_reading(self) -> None:
        self.buffered = SESSION_QUEUE_BYTES_MAX + 1

    def reads_again(self) -> None:
        self.buffered = 0


class Reports:
    """Records what the session reports to its connection."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fell_behind(self, subscription: SessionSubscription) -> None:
        self.calls.append(f"{subscription.id} fell behind")

    def caught_up(self, subscription: SessionSubscription) -> None:
        self.calls.append(f"{subscription.id} caught up")

    def forgotten(self, subscription: SessionSubscription) -> None:
        self.calls.append(f"{subscription.id} forgotten")

    def room(self) -> Awaitable[None]:
        raise NotImplementedError


class Handle:
    """A fake of the hub's handle: answers as the hub does."""

    def __init__(self, subscription: SessionSubscription, position: str = "now") -> None:
        self.subscription = subscription
        self.position = position
        self.asked: list[str] = []

    def close(self) -> None:
        self.asked.append("close")

    def resync(self, reason: ResetReason) -> None:
        self.asked.append(f"resync {reason}")
        self.subscription.deliver(self.state(reason))

    def state(self, reason: ResetReason) -> Frame:
        return Frame(ResetMessage(self.subscription.view, self.position, reason))

    def settled(self, position: Position) -> Awaitable[None]:
        raise NotImplementedError

    def change_identity(self, identity: Identity) -> Awaitable[None]:
        raise NotImplementedError

    def reanchor(self, after: list[Any] | None) -> Awaitable[None]:
        raise NotImplementedError

    def change_access(self, access: Access) -> Awaitable[None]:
        raise NotImplementedError

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None:
        self.asked.append("resume")


class QueryHandle(Handle):
    """That of a reactive query."""

    def state(self, reason: ResetReason) -> Frame:
        return Frame(Result(self.subscription.view, self.position, 0))


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def session(client: Client, reports: Reports) -> Session:
    session = Session("s", ANONYMOUS, reports)
    session.attach(client)
    return session


def live(session: Session, id: str = "a", view: int = 1) -> tuple[SessionLive, Handle]:
    subscription = SessionLive(session, id)
    session.add(subscription)
    subscription.subscribed(view, key=KEY, resumed=False)
    subscription.deliver(Frame(Snapshot(view, "p0", ())))
    handle = Handle(subscription)
    subscription.opened(handle)
    return subscription, handle


def query(session: Session, id: str = "q", view: int = 5) -> tuple[SessionQuery, Handle]:
    subscription = SessionQuery(session, id)
    session.add(subscription)
    subscription.subscribed(view, key=(), resumed=False)
    subscription.deliver(result("p0"))
    handle = QueryHandle(subscription)
    subscription.opened(handle)
    return subscription, handle


def feed(session: Session, policy: Any, id: str = "f") -> tuple[SessionFeed, Handle]:
    subscription = SessionFeed(session, id, policy)
    session.add(subscription)
    subscription.subscribed(9, key=(), resumed=False)
    handle = Handle(subscription)
    subscription.opened(handle)
    return subscription, handle


class ChannelHandle(Handle):
    """That of a channel."""

    def state(self, reason: ResetReason) -> Frame:
        return Frame(Presence(self.subscription.view, whole=True))

    def recheck(self, identity: Identity) -> Awaitable[None]:
        raise NotImplementedError


def channel(session: Session, id: str = "c") -> tuple[ChannelSubscription, Handle]:
    subscription = ChannelSubscription(session, id)
    session.add(subscription)
    subscription.member = "m1"
    subscription.subscribed(7, key=(), resumed=False)
    handle = ChannelHandle(subscription)
    subscription.opened(handle)
    return subscription, handle


def said(number: int) -> Frame:
    return Frame(Message(7, f"g:{number}", number, AT))


def deltas(position: str, view: int = 1) -> Frame:
    return Frame(Deltas(view, position, AT, (Leave((1,), 0), Enter((2,), {"id": 2}, 0, (2,)))))


def result(position: str) -> Frame:
    return Frame(Result(5, position, [position]))


def failure(position: str) -> Frame:
    return Frame(Failed(5, position, "function_failed", f"at {position}"))


def changes(position: str) -> Frame:
    return Frame(Changes(9, position, ()))


class TestSending:
    def test_messages_before_the_connection_are_queued(self, client: Client) -> None:
        session = Session("s", ANONYMOUS, Reports())
        live(session)
        session.attach(client)
        assert client.got == ["subscribed", "snapshot p0"]

    def test_an_error_ends_a_subscription(
        self, session: Session, client: Client, reports: Reports
    ) -> None:
        subscription, _ = live(session)
        subscription.failed(Forbidden("no more"))
        assert client.got[-1] == "error"
        assert reports.calls == ["a forgotten"]
        assert not session.subscriptions


class TestALiveQueryThatFallsBehind:
    def test_gets_its_present_state_when_the_client_reads_again(
        self, session: Session, client: Client, reports: Reports
    ) -> None:
        subscription, handle = live(session)
        client.stops_reading()
        for position in ("p1", "p2", "p3"):
            subscription.deliver(deltas(position))
        assert reports.calls == ["a fell behind"]
        client.reads_again()
        session.drained()
        subscription.deliver(deltas("p4"))
        assert client.got == ["subscribed", "snapshot p0", "reset now", "deltas p4"]
        assert handle.asked == ["resync overflow"]

    def test_gets_no_delta_before_its_reset_even_when_there_is_room(
        self, session: Session, client: Client
    ) -> None:
        subscription, _ = live(session)
        client.stops_reading()
        subscription.deliver(deltas("p1"))
        client.reads_again()
        subscription.deliver(deltas("p2"))
        assert client.got == ["subscribed", "snapshot p0"]
        session.drained()
        assert client.got[2:] == ["reset now"]

    def test_sends_its_reset_later_when_the_queue_is_full(
        self, session: Session, client: Client
    ) -> None:
        subscription, _ = live(session)
        client.stops_reading()
        subscription.deliver(Frame(ResetMessage(1, "p1", "table")))
        client.reads_again()
        session.drained()
        assert client.got[2:] == ["reset now"]

    def test_falls_behind_again_while_it_recovers(
        self, session: Session, client: Client, reports: Reports
    ) -> None:
        """If the hub must read the state again, the reset comes later; the queue may be full."""
        subscription, handle = live(session)
        handle.resync = lambda reason: handle.asked.append("later")  # type: ignore[method-assign]
        client.stops_reading()
        subscription.deliver(deltas("p1"))
        client.reads_again()
        session.drained()
        client.stops_reading()
        subscription.deliver(Frame(ResetMessage(1, "p2", "overflow")))
        client.reads_again()
        session.drained()
        assert handle.asked == ["later", "later"]
        subscription.deliver(Frame(ResetMessage(1, "p3", "overflow")))
        assert client.got[2:] == ["reset p3"]

    def test_recovers_from_before_it_was_open(self, session: Session, client: Client) -> None:
        subscription = SessionLive(session, "a")
        session.add(subscription)
        client.stops_reading()
        subscription.subscribed(1, key=KEY, resumed=False)
        subscription.deliver(Frame(Snapshot(1, "p0", ())))
        client.reads_again()
        session.drained()
        subscription.opened(Handle(subscription))
        assert client.got == ["subscribed", "reset now"]

    def test_takes_no_part_of_a_result_without_the_one_before(
        self, session: Session, client: Client
    ) -> None:
        subscription, _ = live(session)
        first, second = (Frame(Snapshot(1, "p1", (), more)) for more in (True, False))
        second.is_step = True
        client.stops_reading()
        subscription.deliver(first)
        client.reads_again()
        subscription.deliver(second)
        assert client.got[2:] == []
        session.drained()
        assert client.got[2:] == ["reset now"]

    def test_others_wait_when_the_first_fills_the_queue(
        self, session: Session, client: Client
    ) -> None:
        one, _ = live(session, "a", 1)
        other, _ = live(session, "b", 2)
        client.stops_reading()
        one.deliver(deltas("p1"))
        other.deliver(deltas("p1", view=2))
        client.reads_again()
        send = client.send

        def fill(frame: Frame) -> None:
            send(frame)
            client.stops_reading()

        client.send = fill  # type: ignore[method-assign]
        session.drained()
        assert client.got[4:] == ["reset now"]
        assert session.is_behind
        client.reads_again()
        session.drained()
        assert client.got[4:] == ["reset now", "reset now"]
        assert not session.is_behind

    def test_a_snapshot_that_does_not_fit_comes_later(self, client: Client) -> None:
        session = Session("s", ANONYMOUS, Reports())
        session.attach(client)
        client.stops_reading()
        live(session)
        assert client.got == ["subscribed"]
        client.reads_again()
        session.drained()
        assert client.got == ["subscribed", "reset now"]


class TestAFeedThatFallsBehind:
    def test_drop_announces_what_is_missing(self, session: Session, client: Client) -> None:
        subscription, _ = feed(session, "drop")
        subscription.deliver(changes("p1"))
        client.stops_reading()
        subscription.deliver(changes("p2"))
        subscription.deliver(changes("p3"))
        client.reads_again()
        session.drained()
        subscription.deliver(changes("p4"))
        assert client.got == ["subscribed", "changes p1", "gap p3", "changes p4"]

    def test_pause_asks_the_hub_to_resume_later(self, session: Session, client: Client) -> None:
        subscription, handle = feed(session, "pause")
        client.stops_reading()
        subscription.deliver(changes("p1"))
        assert handle.asked == ["pause"]
        client.reads_again()
        session.drained()
        assert handle.asked == ["pause", "resume"]
        subscription.deliver(changes("p1"))
        assert client.got == ["subscribed", "changes p1"]

    @pytest.mark.parametrize("policy", ["pause", "drop"])
    def test_a_gap_needs_no_room(self, session: Session, client: Client, policy: Any) -> None:
        subscription, handle = feed(session, policy)
        subscription.deliver(changes("p1"))
        client.stops_reading()
        subscription.deliver(Frame(Gap(9, "p3", "p1", "resync")))
        assert client.got[1:] == ["changes p1", "gap p3"]
        assert handle.asked == []
        subscription.deliver(changes("p4"))
        client.reads_again()
        session.drained()
        assert client.got[3:] == ([] if policy == "pause" else ["gap p4"])


class TestAQueryThatFallsBehind:
    def test_gets_its_present_result_when_the_client_reads_again(
        self, session: Session, client: Client, reports: Reports
    ) -> None:
        subscription, handle = query(session)
        client.stops_reading()
        for position in ("p1", "p2"):
            subscription.deliver(result(position))
        client.reads_again()
        session.drained()
        subscription.deliver(result("p3"))
        assert client.got == ["subscribed", "result p0", "result now", "result p3"]
        assert handle.asked == ["resync overflow"]
        assert reports.calls == ["q fell behind", "q caught up"]

    def test_a_later_result_that_fits_catches_up(self, session: Session, client: Client) -> None:
        subscription, _ = query(session)
        client.stops_reading()
        subscription.deliver(result("p1"))
        client.reads_again()
        subscription.deliver(result("p2"))
        assert not subscription.behind
        assert client.got[2:] == ["result p2"]

    def test_a_failure_does_not_catch_up(self, session: Session, client: Client) -> None:
        subscription, handle = query(session)
        client.stops_reading()
        subscription.deliver(result("p1"))
        client.reads_again()
        subscription.deliver(failure("p2"))
        # Its position is not what the client is complete up to, and no id to resume from.
        assert client.got[2:] == ["failed"]
        assert subscription.behind
        session.drained()
        assert client.got[3:] == ["result now"]
        assert handle.asked == ["resync overflow"]

    def test_the_failure_is_the_present_state_while_the_query_fails(
        self, session: Session, client: Client, reports: Reports
    ) -> None:
        subscription, handle = query(session)
        handle.state = lambda reason: failure("p2")  # type: ignore[method-assign]
        client.stops_reading()
        subscription.deliver(result("p1"))
        subscription.deliver(failure("p2"))
        assert subscription.has_unsent
        client.reads_again()
        session.drained()
        assert client.got[2:] == ["failed"]
        # It has everything that there is; but it could not apply deltas.
        assert (subscription.behind, subscription.has_unsent) == (True, False)
        assert reports.calls[-1] == "q caught up"
        subscription.deliver(deltas("p3", view=5))
        subscription.deliver(result("p4"))
        assert client.got[3:] == ["result p4"]

    def test_of_many_failures_the_last_waits(
        self, session: Session, client: Client, reports: Reports
    ) -> None:
        subscription, _ = query(session)
        client.stops_reading()
        for position in ("p1", "p2", "p3"):
            subscription.deliver(failure(position))
        assert client.got[2:] == []
        assert reports.calls == ["q fell behind"]
        client.reads_again()
        session.drained()
        assert client.got[2:] == ["result now", "failed"]
        assert client.messages[-1].message == "at p3"

    def test_a_failure_that_is_over_is_not_sent(self, session: Session, client: Client) -> None:
        subscription, _ = query(session)
        client.stops_reading()
        subscription.deliver(failure("p1"))
        subscription.deliver(result("p2"))
        client.reads_again()
        session.drained()
        assert client.got[2:] == ["result now"]

    def test_a_failure_does_not_make_it_fall_behind_again(
        self, session: Session, client: Client
    ) -> None:
        """A result that fills the queue by itself was sent again and again."""
        subscription, handle = query(session)
        client.stops_reading()
        subscription.deliver(failure("p1"))
        client.reads_again()
        send = client.send

        def fill(frame: Frame) -> None:
            send(frame)
            client.stops_reading()

        client.send = fill  # type: ignore[method-assign]
        session.drained()
        assert client.got[2:] == ["result now", "failed"]
        assert not session.is_behind
        assert handle.asked == ["resync overflow"]

    def test_a_result_that_must_be_read_again_comes_later(
        self, session: Session, client: Client
    ) -> None:
        subscription, handle = query(session)
        handle.resync = lambda reason: handle.asked.append("later")  # type: ignore[method-assign]
        client.stops_reading()
        subscription.deliver(result("p1"))
        subscription.deliver(failure("p2"))
        client.reads_again()
        session.drained()
        assert client.got[2:] == []
        subscription.deliver(result("p3"))
        assert client.got[2:] == ["result p3"]

    def test_a_second_subscription_has_frames_of_its_own(
        self, session: Session, client: Client
    ) -> None:
        query(session, "a")
        other, _ = query(session, "b")
        other.deliver(failure("p1"))
        assert [m.view for m in client.messages] == [5, 5, -1, -1, -1]

    def test_nothing_is_sent_after_unsubscribing(self, session: Session, client: Client) -> None:
        subscription, _ = query(session)
        session.remove("q")
        subscription.deliver(failure("p1"))
        assert client.got[2:] == ["unsubscribed"]


class TestTheSameViewTwice:
    """Each has a number of its own: a message to one is not for the other."""

    def views(self, client: Client) -> list[tuple[str, int]]:
        return [(type_of(m), m.view) for m in client.messages if hasattr(m, "view")]

    def test_the_second_subscription_has_frames_of_its_own(
        self, session: Session, client: Client
    ) -> None:
        one, _ = live(session, "a")
        other, _ = live(session, "b")
        frame = deltas("p1")
        one.deliver(frame)
        other.deliver(frame)
        assert self.views(client) == [
            ("subscribed", 1), ("snapshot", 1),
            ("subscribed", -1), ("snapshot", -1),
            ("deltas", 1), ("deltas", -1),
        ]  # fmt: skip

    def test_a_number_is_free_again_when_its_subscription_ends(
        self, session: Session, client: Client
    ) -> None:
        _, handle = live(session, "a")
        live(session, "b")
        session.remove("a")
        assert handle.asked == ["close"]
        live(session, "c")
        live(session, "d")
        numbers = [view for name, view in self.views(client) if name == "subscribed"]
        assert numbers == [1, -1, 1, -2]

    def test_a_second_that_resumes_gets_what_it_missed(
        self, session: Session, client: Client
    ) -> None:
        live(session, "a")
        other = SessionLive(session, "b")
        session.add(other)
        other.subscribed(1, key=KEY, resumed=True)
        other.deliver(deltas("p1"))
        assert self.views(client)[2:] == [("subscribed", -1), ("deltas", -1)]

    def test_a_feed_that_catches_up(self, session: Session, client: Client) -> None:
        feed(session, "pause", id="a")
        other, _ = feed(session, "drop", id="b")
        other.deliver(changes("p1"))
        client.stops_reading()
        other.deliver(changes("p2"))
        client.reads_again()
        session.drained()
        assert self.views(client)[1:] == [("subscribed", -1), ("changes", -1), ("gap", -1)]


class TestAStreamThatBeganWithASubscription:
    """Its `Last-Event-ID` resumes that subscription; positions of others do not count."""

    @pytest.fixture
    def session(self, session: Session) -> Session:
        session.resumed = "a"
        return session

    def ids(self, client: Client) -> list[tuple[int, bool]]:
        """By view, whether its events have an id."""
        return [
            (frame.message.view, b"\nid: p" in frame.sse)
            for frame in client.frames
            if frame.position is not None
        ]

    def test_events_of_others_have_no_id(self, session: Session, client: Client) -> None:
        one, _ = live(session, "a")
        other, _ = live(session, "b", view=2)
        followed, _ = feed(session, "drop")
        for subscription, frame in (
            (one, deltas("p1")), (other, deltas("p2", view=2)), (followed, changes("p3")),
        ):  # fmt: skip
            subscription.deliver(frame)
        client.stops_reading()
        followed.deliver(changes("p4"))
        client.reads_again()
        session.drained()
        assert self.ids(client) == [
            (1, True), (2, False), (1, True), (2, False), (9, False), (9, False),
        ]  # fmt: skip

    def test_a_later_subscription_with_that_id_has_no_event_ids(
        self, session: Session, client: Client
    ) -> None:
        live(session, "a")
        session.remove("a")
        live(session, "a", view=3)
        assert self.ids(client) == [(1, True), (3, False)]


def test_an_id_is_used_once(session: Session) -> None:
    live(session, "a")
    with pytest.raises(InvalidQuery, match="already"):
        session.add(SessionLive(session, "a"))


def test_an_unknown_subscription_cannot_be_removed(session: Session) -> None:
    with pytest.raises(NotFound) as refused:
        session.remove("a")
    assert refused.value.code == "subscription_unknown"


def test_closing_a_session_closes_its_subscriptions_in_the_hub(
    session: Session, reports: Reports
) -> None:
    _, handle = live(session)
    session.close()
    assert handle.asked == ["close"]
    assert reports.calls == ["a forgotten"]


def test_an_error_says_when_to_try_again() -> None:
    message = error_message(LimitExceeded("too many", code="rate", retry_after=2.5), id="a")
    assert (message.code, message.retryable, message.retry_after_secs) == ("rate", True, 2.5)


class TestChannels:
    def test_the_client_receives_its_member_id(self, session: Session, client: Client) -> None:
        channel(session)
        assert client.messages == [Subscribed("c", 7, member="m1")]

    def test_a_slow_client_misses_messages_and_then_gets_the_present_state(
        self, session: Session, client: Client, reports: Reports
    ) -> None:
        subscription, handle = channel(session)
        subscription.deliver(said(1))
        client.stops_reading()
        for number in (2, 3):
            subscription.deliver(said(number))
        subscription.deliver(Frame(Presence(7, left=("m2",))))
        client.reads_again()
        # A subscription that missed a message gets no later one that depends on it.
        subscription.deliver(said(4))
        assert client.got == ["subscribed", "message"]
        session.drained()
        subscription.deliver(said(5))
        assert handle.asked == ["resync overflow"]
        assert client.got[2:] == ["presence", "message"]
        assert reports.calls == ["c fell behind", "c caught up"]

    def test_a_client_that_is_slow_again_at_once(self, session: Session, client: Client) -> None:
        subscription, handle = channel(session)
        client.stops_reading()
        subscription.deliver(said(1))
        client.reads_again()
        client.send = lambda frame: client.stops_reading()  # type: ignore[method-assign]
        session.drained()
        subscription.deliver(said(2))
        assert subscription.behind
        client.reads_again()
        session.drained()
        assert handle.asked == ["resync overflow", "resync overflow"]

    def test_a_channel_removed_before_it_is_open_is_closed(self, session: Session) -> None:
        subscription = ChannelSubscription(session, "c")
        session.add(subscription)
        session.remove("c")
        handle = ChannelHandle(subscription)
        subscription.opened(handle)
        assert handle.asked == ["close"]
