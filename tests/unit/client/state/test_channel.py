"""Channels as a client follows them: who is there, and every message once."""

from __future__ import annotations

from headwater.client.session import (
    MessageReceived,
    PresenceChanged,
    Ready,
    Send,
    SubscriptionFailed,
)
from headwater.client.state.channel import ChannelMessage, ChannelState
from headwater.errors import Forbidden
from headwater.limits import CHANNEL_HISTORY_MAX
from headwater.protocol import (
    ChannelCall,
    Error,
    Member,
    Message,
    Presence,
    Subscribe,
    Subscribed,
)
from tests.unit.client.test_session import AT, TopicUpdated

CALL = ChannelCall("room:1", True, {"name": "Ann"})


def said(number: int, view: int = 5) -> Message:
    return Message(view, f"g:{number}", number, AT, "ann", "m1")


def test_members_come_change_and_go() -> None:
    room = ChannelState(CALL)
    told = TopicUpdated(room)
    assert told.subscribe_count == [Subscribe("1", channel=CALL)]
    assert told.tell(Subscribed("1", 5, member="m1")) == [Ready(room)]
    assert (room.member, told.session.is_due(room)) == ("m1", True)
    assert told.tell(Presence(5, (Member("m1"), Member("m2")), whole=True)) == [
        PresenceChanged(room)
    ]
    assert not told.session.is_due(room)
    told.tell(Presence(5, (Member("m2", state=1), Member("m3")), ("m1", "nobody")))
    assert room.members == {"m2": Member("m2", state=1), "m3": Member("m3")}
    told.tell(Presence(5, (Member("m4"),), whole=True))
    assert list(room.members) == ["m4"]
    assert told.tell(Presence(6, whole=True)) == []


def test_after_a_lost_connection_no_message_comes_twice() -> None:
    room = ChannelState(CALL)
    told = TopicUpdated(room)
    told.tell(Subscribed("1", 5))
    told.tell(Presence(5, whole=True))
    expected = ChannelMessage(1, AT, "ann", "m1", "g:1")
    assert told.tell(said(1)) == [MessageReceived(room, expected)]
    room.call = ChannelCall("room:1", True, "another state")
    assert told.session.connected() == [Send(Subscribe("2", channel=room.call))]
    assert told.session.is_due(room)
    told.tell(Subscribed("2", 8))
    told.tell(Presence(8, whole=True))
    told.tell(said(1, 8))
    events = told.tell(said(2, 8))
    assert [event.message.data for event in events if isinstance(event, MessageReceived)] == [2]


def test_what_was_delivered_is_not_remembered_for_ever() -> None:
    room = ChannelState(CALL)
    for number in range(3 * CHANNEL_HISTORY_MAX):
        assert room.receive(said(number))
    assert len(room._delivered) == 2 * CHANNEL_HISTORY_MAX
    assert room.receive(said(2 * CHANNEL_HISTORY_MAX)) is None


def test_refused() -> None:
    room = ChannelState(CALL)
    told = TopicUpdated(room)
    (failed,) = told.tell(Error("forbidden", "not you", id="1"))
    assert isinstance(failed, SubscriptionFailed)
    assert isinstance(failed.error, Forbidden)
