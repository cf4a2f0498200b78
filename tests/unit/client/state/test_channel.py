"""The state of a channel in a client: its members, and every message once."""

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
from tests.unit.client.test_session import AT, SessionDriver

CALL = ChannelCall("room:1", True, {"name": "Ann"})


def said(number: int, view: int = 5) -> Message:
    return Message(view, f"g:{number}", number, AT, "ann", "m1")


def test_members_come_change_and_go() -> None:
    room = ChannelState(CALL)
    driver = SessionDriver(room)
    assert driver.subscribes == [Subscribe("1", channel=CALL)]
    assert driver.receive(Subscribed("1", 5, member="m1")) == [Ready(room)]
    assert (room.member, driver.session.is_due(room)) == ("m1", True)
    assert driver.receive(Presence(5, (Member("m1"), Member("m2")), whole=True)) == [
        PresenceChanged(room)
    ]
    assert not driver.session.is_due(room)
    driver.receive(Presence(5, (Member("m2", state=1), Member("m3")), ("m1", "unknown")))
    assert room.members == {"m2": Member("m2", state=1), "m3": Member("m3")}
    driver.receive(Presence(5, (Member("m4"),), whole=True))
    assert list(room.members) == ["m4"]
    assert driver.receive(Presence(6, whole=True)) == []


def test_after_a_lost_connection_no_message_comes_twice() -> None:
    room = ChannelState(CALL)
    driver = SessionDriver(room)
    driver.receive(Subscribed("1", 5))
    driver.receive(Presence(5, whole=True))
    expected = ChannelMessage(1, AT, "ann", "m1", "g:1")
    assert driver.receive(said(1)) == [MessageReceived(room, expected)]
    room.call = ChannelCall("room:1", True, "another state")
    assert driver.session.connected() == [Send(Subscribe("2", channel=room.call))]
    assert driver.session.is_due(room)
    driver.receive(Subscribed("2", 8))
    driver.receive(Presence(8, whole=True))
    driver.receive(said(1, 8))
    events = driver.receive(said(2, 8))
    assert [event.message.data for event in events if isinstance(event, MessageReceived)] == [2]


def test_the_ids_of_delivered_messages_are_bounded() -> None:
    room = ChannelState(CALL)
    for number in range(3 * CHANNEL_HISTORY_MAX):
        assert room.receive(said(number))
    assert len(room._delivered) == 2 * CHANNEL_HISTORY_MAX
    assert room.receive(said(2 * CHANNEL_HISTORY_MAX)) is None


def test_refused() -> None:
    room = ChannelState(CALL)
    driver = SessionDriver(room)
    (failed,) = driver.receive(Error("forbidden", "not you", id="1"))
    assert isinstance(failed, SubscriptionFailed)
    assert isinstance(failed.error, Forbidden)
