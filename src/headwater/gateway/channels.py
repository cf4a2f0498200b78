"""Channels as clients use them: who may follow one, publish on it, and have a state there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from headwater.channels.definitions import (
    ChannelDefinition,
    Channels,
    check_state,
    message_json,
)
from headwater.channels.rooms import Rooms, Seat
from headwater.errors import InvalidQuery, LimitExceeded, NotFound
from headwater.gateway.connection import Connection
from headwater.gateway.quotas import Quotas
from headwater.gateway.session import ChannelSubscription
from headwater.idempotency import Request, check_key
from headwater.identity import Identity
from headwater.limits import QUOTA_RETRY_SECONDS, SESSION_CHANNEL_SUBSCRIPTIONS_MAX
from headwater.protocol import ResetReason, Subscribe


class ChannelGuest:
    """A subscription's seat, and what its user may do there."""

    def __init__(
        self,
        channels: Channels,
        definition: ChannelDefinition,
        places: Mapping[str, str],
        seat: Seat,
    ) -> None:
        self.seat = seat
        self._channels = channels
        self._definition = definition
        self._places = places
        self._publisher: Identity | None = None
        """Who was found to be allowed to publish."""
        self._order = asyncio.Lock()

    def close(self) -> None:
        self.seat.close()

    def resync(self, reason: ResetReason) -> None:
        self.seat.resync()

    async def recheck(self, identity: Identity) -> None:
        """Forbidden if the user may no longer be here. Whether it may publish is asked when it
        does so next."""
        await self._check(identity, "join")
        self._publisher = None

    async def publish(self, rooms: Rooms, data: Any, identity: Identity, key: str | None) -> None:
        text, name = message_json(data), self.seat.room.name
        request = None if key is None else Request.of(identity, key, name, text)
        # Those of one client that wait for the access function keep their order.
        async with self._order:
            if self._definition.asks_action and self._publisher is not identity:
                await self._check(identity, "publish")
                self._publisher = identity
            member = self.seat.member.member if self.seat.member is not None else None
            sent = rooms.say(name, text, user=identity.user, member=member, request=request)
        await sent

    async def _check(self, identity: Identity, action: Any) -> None:
        await self._channels.check(self._definition, self._places, identity, action)


class ChannelDesk:
    """The channels of a gateway; `rooms` is None where none are declared."""

    def __init__(self, channels: Channels, rooms: Rooms | None, quotas: Quotas) -> None:
        self._channels = channels
        self._rooms = rooms
        self._quotas = quotas

    async def open(
        self, connection: Connection, subscription: ChannelSubscription, wish: Subscribe
    ) -> None:
        """Follow a channel, if the user may."""
        _check(wish)
        call = wish.channel
        assert call is not None
        _check_amplification(subscription)
        definition, places = self._channels.find(call.name)
        if call.present and not definition.presence:
            raise InvalidQuery(
                f"nobody is present on channel {call.name}", path="channel.present",
                hint="It is declared with presence=False.",
            )  # fmt: skip
        if call.state is not None and not call.present:
            raise InvalidQuery("only who is present has a state", path="channel.state")
        state, identity = check_state(call.state), connection.session.identity
        await self._channels.check(definition, places, identity, "join")
        assert self._rooms is not None, "there are rooms where channels are declared"
        seat = await self._rooms.enter(
            call.name,
            definition,
            subscription,
            user=identity.user,
            present=call.present,
            state=state,
            owner=connection.owner,
        )
        subscription.opened(ChannelGuest(self._channels, definition, places, seat))

    async def publish(
        self, connection: Connection, id: str, data: Any, key: str | None = None
    ) -> None:
        """Say something on the channel of a subscription; with an idempotency key, once. Returns
        when it was passed on."""
        guest = self._guest(connection, id)
        assert self._rooms is not None
        key = None if key is None else check_key(key)
        await guest.publish(self._rooms, data, connection.session.identity, key)

    def set_state(self, connection: Connection, id: str, state: Any) -> None:
        """Change the state that others see."""
        guest = self._guest(connection, id)
        if guest.seat.member is None:
            raise InvalidQuery(
                "only who is present has a state",
                path="state",
                hint='Subscribe with "present": true.',
            )
        guest.seat.set_state(check_state(state))

    def _guest(self, connection: Connection, id: str) -> ChannelGuest:
        subscription = connection.session.subscriptions.get(id)
        handle = subscription.handle if isinstance(subscription, ChannelSubscription) else None
        if not isinstance(handle, ChannelGuest):
            raise NotFound(
                f"this session follows no channel as {id!r:.100}", code="subscription_unknown"
            )
        self._quotas.publish(connection.session.id, time.monotonic())
        return handle


def _check_amplification(subscription: ChannelSubscription) -> None:
    """Each subscription is sent each message: many to one channel turn a little that comes in into
    much that goes out."""
    before = takewhile(
        lambda each: each is not subscription, subscription.session.subscriptions.values()
    )
    same = sum(
        isinstance(each, ChannelSubscription) and each.channel == subscription.channel
        for each in before
    )
    if same >= SESSION_CHANNEL_SUBSCRIPTIONS_MAX:
        raise LimitExceeded(
            f"this session follows channel {subscription.channel}"
            f" {SESSION_CHANNEL_SUBSCRIPTIONS_MAX} times, which is the most",
            code="subscriptions_per_channel",
            hint="Follow it once, and share what comes of it in the client.",
            retry_after=QUOTA_RETRY_SECONDS,
        )


def _check(wish: Subscribe) -> None:
    for name, position in (("since", wish.since), ("after", wish.after)):
        if position is not None:
            raise InvalidQuery("a channel has no positions", path=name)
    if wish.overflow not in (None, "drop"):
        raise InvalidQuery("what a slow client of a channel misses is dropped", path="overflow")
    if wish.verify:
        raise InvalidQuery("messages of a channel carry no hash", path="verify")
