"""The state of a channel in a client: its members, which of them is this client, and the ids of
recent messages.

Pure. After a lost connection the gateway sends its history again; messages that were delivered
before are recognized by their id.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from headwater.limits import CHANNEL_HISTORY_MAX
from headwater.protocol import ChannelCall, Member, Message, Presence, Subscribe, Subscribed


class ChannelMessage(msgspec.Struct, frozen=True):
    """A message on a channel."""

    data: Any
    at: datetime
    user: str | None
    """The user who published it; None for the server."""
    member: str | None
    """The member who published it; None for the server and for users who are not present."""
    id: str


class ChannelState:
    """A channel as the client knows it."""

    def __init__(self, call: ChannelCall) -> None:
        self.name = call.name
        self.call = call
        """The request for the next connection."""
        self.wire_id = ""
        self.view: int | None = None
        self.member: str | None = None
        self.members: dict[str, Member] = {}
        self.missed = 0
        """How often messages may have been lost: with a connection, or as the gateway reported."""
        self._waiting = True
        self._delivered: dict[str, None] = {}

    @property
    def is_due(self) -> bool:
        """It was requested, and the members are not known yet."""
        return self.view is None or self._waiting

    def subscribe(self, wire_id: str) -> Subscribe:
        self.missed += not self.is_due
        self.wire_id, self.view, self._waiting = wire_id, None, True
        return Subscribe(wire_id, channel=self.call)

    def subscribed(self, message: Subscribed) -> None:
        self.view, self.member = message.view, message.member

    def receive(self, message: Message) -> ChannelMessage | None:
        """A message that was not delivered before."""
        if message.id in self._delivered:
            return None
        self._delivered[message.id] = None
        while len(self._delivered) > 2 * CHANNEL_HISTORY_MAX:
            del self._delivered[next(iter(self._delivered))]
        return ChannelMessage(message.data, message.at, message.user, message.member, message.id)

    def gather(self, message: Presence) -> None:
        self.missed += message.missed
        if message.whole:
            self.members, self._waiting = {}, False
        self.members |= {member.member: member for member in message.joined}
        for id in message.left:
            self.members.pop(id, None)
