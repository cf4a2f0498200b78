"""The state of a topic in a client: rows from the operations it receives and from queries."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headwater import limits
from headwater.client.session import (
    ClientSession,
    Event,
    Ready,
    Send,
    SubscriptionFailed,
    TopicUpdated,
)
from headwater.client.state.topic import Ops, TopicRows, TopicState, Waiting
from headwater.errors import ConfigError, Forbidden
from headwater.protocol import Error, Gap, Poke, Remove, Subscribe, Subscribed, TopicMessage, Upsert

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
P1, P2, P3, P4, P5 = (f"ab-{n}:{n}:" for n in range(1, 6))


def put(id: int, body: str) -> Upsert:
    return Upsert("messages", (id,), {"id": id, "body": body})


def gone(id: int) -> Remove:
    return Remove("messages", (id,))


def bodies(rows: TopicRows) -> dict[int, str]:
    return {row["id"]: row["body"] for row in rows.of("messages")}


def begun(session: ClientSession) -> TopicState:
    state = TopicState("chat:1")
    session.add(state)
    assert session.subscribe(state) == Subscribe("1", topic="chat:1")
    assert state.is_due
    assert session.receive(Subscribed("1", 5)) == [Ready(state)]
    assert not state.is_due
    return state


def test_messages_become_ops() -> None:
    session = ClientSession()
    state = begun(session)
    said: list[tuple[Any, list[Event]]] = [
        (TopicMessage(5, P1, AT, ()), []),
        (
            TopicMessage(5, P2, AT, (put(1, "a"),)),
            [TopicUpdated(state, Ops((put(1, "a"),), P2, AT))],
        ),
        (TopicMessage(6, P3, AT, (put(2, "b"),)), []),
        (Poke(5, P4, AT), [TopicUpdated(state, Ops((), P4, AT, pull=True))]),
        (Gap(5, P5, None, "resync"), [TopicUpdated(state, Ops((), P5, pull=True))]),
    ]
    for message, events in said:
        assert session.receive(message) == events
    assert state.position == P5
    assert bodies(state.rows) == {1: "a"}


def test_a_lost_connection_is_resumed_from_the_position() -> None:
    session = ClientSession()
    state = begun(session)
    session.receive(TopicMessage(5, P2, AT, (put(1, "a"),)))
    again = session.connected()
    assert again == [Send(Subscribe("2", topic="chat:1", since=P2))]
    assert session.receive(Subscribed("2", 9, resumed=True)) == [Ready(state)]


def test_two_on_the_same_topic_are_both_resumed() -> None:
    session = ClientSession()
    one, other = begun(session), TopicState("chat:1")
    session.add(other)
    session.subscribe(other)
    session.receive(Subscribed("2", -1))
    session.receive(TopicMessage(5, P2, AT, ()))
    session.receive(TopicMessage(-1, P3, AT, ()))
    assert session.connected() == [
        Send(Subscribe("3", topic="chat:1", since=P2, after=P3)),
        Send(Subscribe("4", topic="chat:1", since=P3)),
    ]
    assert (one.position, other.position) == (P2, P3)


def test_without_a_position_a_reconnect_must_pull() -> None:
    session = ClientSession()
    state = begun(session)
    assert session.connected() == [Send(Subscribe("2", topic="chat:1"))]
    updated = TopicUpdated(state, Ops((), None, pull=True))
    assert session.receive(Subscribed("2", 9)) == [Ready(state), updated]
    assert session.receive(TopicMessage(9, P1, AT, ())) == []


def test_a_refusal_ends_it() -> None:
    session = ClientSession()
    state = begun(session)
    (event,) = session.receive(Error("forbidden", "not for you", id="1"))
    assert isinstance(event, SubscriptionFailed)
    assert event.state is state
    assert isinstance(event.error, Forbidden)


def test_rows_are_folded() -> None:
    rows = TopicRows()
    rows.take([put(1, "a"), put(2, "b")])
    rows.take([put(1, "aa"), gone(2), gone(3)])
    rows.take([Upsert("chats", (1,), {"id": 1})])
    assert bodies(rows) == {1: "aa"}
    assert rows.of("chats") == [{"id": 1}]


def test_rows_that_were_sent_replace_rows_that_were_read() -> None:
    rows = TopicRows()
    rows.take([put(2, "newer"), gone(3), put(4, "new"), Upsert("chats", (1,), {"id": 1})])
    read = [{"id": id, "body": "read"} for id in (1, 2, 3)]
    rows.fill("messages", read, ("id",))
    assert bodies(rows) == {1: "read", 2: "newer", 4: "new"}
    assert [row["id"] for row in rows.of("messages")] == [1, 2, 4]
    assert rows.of("chats") == [{"id": 1}]


def test_after_a_gap_rows_that_were_read_replace_older_ones() -> None:
    rows = TopicRows()
    rows.fill("messages", [{"id": 1, "body": "old"}], ("id",))
    rows.take([put(2, "sent"), put(3, "sent")])
    rows.mark_stale()
    assert bodies(rows) == {1: "old", 2: "sent", 3: "sent"}
    rows.take([put(3, "sent after")])
    rows.fill("messages", [{"id": id, "body": "read"} for id in (2, 3)], ("id",))
    assert bodies(rows) == {2: "read", 3: "sent after"}


def test_a_key_that_rows_do_not_have() -> None:
    with pytest.raises(ConfigError, match="no column uuid"):
        TopicRows().fill("messages", [{"id": 1}], ("uuid",))


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLIENT_TOPIC_ROWS_MAX", 3)
    rows = TopicRows()
    rows.take([put(id, "a") for id in range(5)])
    assert list(bodies(rows)) == [2, 3, 4]


def test_rows_that_are_gone_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLIENT_TOPIC_ROWS_MAX", 5)
    rows = TopicRows()
    rows.take([put(id, "a") for id in range(3)])
    for id in range(10, 30):
        rows.take([put(id, "a"), Remove("messages", (id,))])
    assert list(bodies(rows)) == [0, 1, 2]


def test_a_reader_gets_each_row_once_and_the_latest() -> None:
    waiting = Waiting()
    assert not waiting
    waiting.add(Ops((put(1, "a"), put(2, "b")), P1, AT))
    waiting.add(Ops((put(1, "aa"),), P2))
    assert waiting.take() == Ops((put(2, "b"), put(1, "aa")), P2, AT)
    assert not waiting
    waiting.add(Ops((), P3, pull=True))
    assert waiting
    assert waiting.take() == Ops((), P3, AT, pull=True)


def test_waiting_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLIENT_TOPIC_ROWS_MAX", 3)
    waiting = Waiting()
    waiting.add(Ops(tuple(put(id, "a") for id in range(4)), P1, AT))
    assert waiting.take() == Ops((), P1, AT, pull=True)


def test_ops_are_iterated() -> None:
    ops = Ops((put(1, "a"), gone(2)), P1, AT)
    assert [*ops] == [put(1, "a"), gone(2)]
    assert (len(ops), bool(ops), bool(Ops((), P1)), bool(Ops((), P1, pull=True))) == (
        2, True, False, True,
    )  # fmt: skip
