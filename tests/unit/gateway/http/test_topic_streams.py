"""A stream of several topics sends one position to resume from, and only when every topic has
reached it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import UTC, datetime

import pytest

from headwater.errors import Forbidden, InvalidQuery
from headwater.gateway.http.topic_streams import TopicMarks, topic_names
from headwater.gateway.session import Session, SessionSubscription, SessionTopic
from headwater.hub.subscriptions.subscriber import Access
from headwater.identity import ANONYMOUS
from headwater.limits import SESSION_QUEUE_BYTES_MAX
from headwater.model import Position
from headwater.protocol import Frame, Gap, Hello, Keepalive, Mark, Remove, TopicMessage

AT = datetime(2026, 1, 1, tzinfo=UTC)


class Stream:
    """What an EventSource receives: `a 3` of topic a, and positions as `id: 3`."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.buffered = 0

    def send(self, frame: Frame) -> None:
        match frame.message:
            case _ if isinstance(frame, Mark):
                self.got.append(frame.event.decode().strip())
            case TopicMessage(view, position) | Gap(view, position):
                self.got.append(f"{'_ab'[view]} {position}")


class Reports:
    def fell_behind(self, subscription: SessionSubscription) -> None: ...
    def caught_up(self, subscription: SessionSubscription) -> None: ...
    def forgotten(self, subscription: SessionSubscription) -> None: ...
    def room(self) -> Awaitable[None]:
        raise NotImplementedError


class Handle:
    """A topic in the hub."""

    def __init__(self) -> None:
        self.is_live = True
        self.access = Access()

    def close(self) -> None: ...

    def pause(self) -> None:
        self.is_live = False

    def resume(self) -> None: ...

    async def settled(self, position: Position) -> None: ...


class Source:
    """Topics a and b on one stream."""

    def __init__(self) -> None:
        self.session = Session("s", ANONYMOUS, Reports())
        self.stream = Stream()
        self.session.attach(self.stream)
        self.marks = TopicMarks(self.session, ["a", "b"])
        self.handles: dict[str, Handle] = {}

    def open(self, name: str, position: str) -> SessionTopic:
        subscription = SessionTopic(self.session, name, "pause", name)
        self.session.add(subscription)
        subscription.subscribed("_ab".index(name), key=(), resumed=False)
        self.send(name, position)
        self.handles[name] = Handle()
        subscription.opened(self.handles[name])
        self.marks.decided(name)
        return subscription

    def send(self, name: str, position: str) -> None:
        ops = (Remove("t", (1,)),)
        frame = Frame(TopicMessage("_ab".index(name), position, AT, ops))
        subscription = self.session.subscriptions.get(name)
        if subscription is not None:
            subscription.deliver(frame)

    async def received(self) -> list[str]:
        for _ in range(3):
            await asyncio.sleep(0)
        got, self.stream.got = self.stream.got, []
        return got


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.gateway.http.topic_streams._STREAM_MARK_SECONDS", 0.0)


@pytest.fixture
async def source() -> Source:
    source = Source()
    source.open("a", "1")
    source.open("b", "1")
    assert await source.received() == ["a 1", "b 1", "id: 1"]
    return source


async def test_no_position_before_all_have_begun() -> None:
    source = Source()
    source.open("a", "1")
    assert await source.received() == ["a 1"]
    source.send("a", "2")
    assert await source.received() == ["a 2"]
    source.open("b", "2")
    assert await source.received() == ["b 2", "id: 2"]


async def test_a_refused_topic_does_not_hold_the_position() -> None:
    source = Source()
    source.open("a", "1")
    assert await source.received() == ["a 1"]
    source.marks.decided("b")
    assert await source.received() == ["id: 1"]


async def test_a_position_is_sent_when_every_topic_has_the_flush(source: Source) -> None:
    source.send("a", "2")
    source.send("b", "2")
    assert await source.received() == ["a 2", "b 2", "id: 2"]
    source.send("b", "3")
    assert await source.received() == ["b 3", "id: 3"]


async def test_marks_are_not_sent_more_often_than_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwater.gateway.http.topic_streams._STREAM_MARK_SECONDS", 3600.0)
    source = Source()
    source.open("a", "1")
    source.open("b", "1")
    assert await source.received() == ["a 1", "b 1", "id: 1"]
    for position in ("2", "3", "4"):
        source.send("a", position)
        assert await source.received() == [f"a {position}"]


async def test_a_topic_that_catches_up_holds_the_position(source: Source) -> None:
    source.handles["b"].is_live = False
    source.send("a", "2")
    assert await source.received() == ["a 2"]
    source.handles["b"].is_live = True
    source.send("b", "3")
    assert await source.received() == ["b 3", "id: 3"]


async def test_a_topic_with_unsent_messages_holds_the_position(source: Source) -> None:
    source.stream.buffered = SESSION_QUEUE_BYTES_MAX + 1
    source.send("b", "2")
    source.stream.buffered = 0
    source.send("a", "2")
    assert await source.received() == ["a 2"]
    source.session.drained()
    assert await source.received() == []
    source.handles["b"].is_live = True
    source.send("b", "3")
    assert await source.received() == ["b 3", "id: 3"]


async def test_a_topic_that_has_ended_does_not_hold_the_position(source: Source) -> None:
    source.handles["b"].is_live = False
    source.session.subscriptions["b"].failed(Forbidden("no longer"))
    source.send("a", "2")
    assert await source.received() == ["a 2", "id: 2"]
    source.session.subscriptions["a"].failed(Forbidden("no longer"))
    source.send("a", "3")
    assert await source.received() == []


async def test_a_gap_counts_as_sent(source: Source) -> None:
    source.session.subscriptions["a"].deliver(Frame(Gap(1, "5", None, "resync")))
    assert await source.received() == ["a 5", "id: 5"]


def test_events_of_a_marked_stream_have_no_id() -> None:
    frame = Frame(Gap(1, "5", None, "resync"))
    assert b"id: 5" in frame.sse
    assert b"id:" not in frame.event
    assert frame.event == frame.sse.replace(b"id: 5\n", b"")
    assert frame.event_chunk.endswith(frame.event + b"\r\n")
    assert Mark("5").event == b"id: 5\n\n"
    assert Frame(Keepalive()).event == Frame(Keepalive()).sse
    hello = Frame(Hello("s", 1, 15.0))
    assert hello.event == hello.sse


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, []),
        ("", []),
        (",,", []),
        ("a", ["a"]),
        ("a,b,a, c ", ["a", "b", "c"]),
        ("a\n,\tb", ["a\n", "\tb"]),
    ],
)
def test_names_of_topics(text: str | None, names: list[str]) -> None:
    assert topic_names(text) == names


def test_too_many_topics() -> None:
    with pytest.raises(InvalidQuery, match="at most 100 topics, got 101"):
        topic_names(",".join(map(str, range(101))))
