"""Channels as clients use them: which users may follow, publish, and set a state."""

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
from headwater.channels.registry import ChannelListener, ChannelRegistry
from headwater.errors import InvalidQuery, LimitExceeded, NotFound
from headwater.gateway.connection import GatewayConnection
from headwater.gateway.quotas import Quotas
from headwater.gateway.session import ChannelSubscription
from headwater.idempotency import Request, check_key
from headwater.identity import Identity
from headwater.limits import QUOTA_RETRY_SECONDS, SESSION_CHANNEL_SUBSCRIPTIONS_MAX
from headwater.protocol import ResetReason, Subscribe


class JoinedChannel:
    """A subscription that has joined a channel, and what its user may do there."""

    def __init__(
        self,
        channels: Channels,
        definition: ChannelDefinition,
        parameters: Mapping[str, str],
        listener: ChannelListener,
    ) -> None:
        self.listener = listener
        self._channels = channels
        self._definition = definition
        self._parameters = parameters
        self._publisher: Identity | None = None
        """The identity that was last allowed to publish."""
        self._order = asyncio.Lock()

    def close(self) -> None:
        self.listener.close()

    def resync(self, reason: ResetReason) -> None:
        self.listener.resync()

    async def recheck(self, identity: Identity) -> None:
        """Forbidden if the user may no longer follow the channel. The right to publish is checked
        at the next message."""
        await self._check(identity, "join")
        self._publisher = None

    async def publish(
        self, registry: ChannelRegistry, data: Any, identity: Identity, key: str | None
    ) -> None:
        text, name = message_json(data), self.listener.active.name
        request = None if key is None else Request.of(identity, key, name, text)
        # The messages of one client stay in order while they wait for the access function.
        async with self._order:
            if self._definition.takes_action and self._publisher is not identity:
                await self._check(identity, "publish")
                self._publisher = identity
            member = self.listener.member.member if self.listener.member is not None else None
            sent = registry.publish(name, text, user=identity.user, member=member, request=request)
        await sent

    async def _check(self, identity: Identity, action: Any) -> None:
        await self._channels.check(self._definition, self._parameters, identity, action)


class ChannelHandler:
    """The channels of a gateway. `registry` is None if the application declares no channel."""

    def __init__(
        self, channels: Channels, registry: ChannelRegistry | None, quotas: Quotas
    ) -> None:
        self._channels = channels
        self._registry = registry
        self._quotas = quotas

    async def open(
        self, connection: GatewayConnection, subscription: ChannelSubscription, message: Subscribe
    ) -> None:
        """Follow a channel, if the user is allowed to."""
        _check(message)
        call = message.channel
        assert call is not None
        _check_amplification(subscription)
        definition, parameters = self._channels.find(call.name)
        if call.present and not definition.presence:
            raise InvalidQuery(
                f"channel {call.name} has no presence", path="channel.present",
                hint="It is declared with presence=False.",
            )  # fmt: skip
        if call.state is not None and not call.present:
            raise InvalidQuery(
                "only a present member has a state", path="channel.state", hint=_BE_PRESENT
            )
        state, identity = check_state(call.state), connection.session.identity
        await self._channels.check(definition, parameters, identity, "join")
        assert self._registry is not None, "there is a registry if channels are declared"
        listener = await self._registry.enter(
            call.name,
            definition,
            subscription,
            user=identity.user,
            present=call.present,
            state=state,
            owner=connection.owner,
        )
        subscription.opened(JoinedChannel(self._channels, definition, parameters, listener))

    async def publish(
        self, connection: GatewayConnection, id: str, data: Any, key: str | None = None
    ) -> None:
        """Publish on the channel of a subscription; with an idempotency key, once. Returns when the
        message was delivered to all gateways."""
        joined = self._joined(connection, id)
        assert self._registry is not None
        key = None if key is None else check_key(key)
        await joined.publish(self._registry, data, connection.session.identity, key)

    def set_state(self, connection: GatewayConnection, id: str, state: Any) -> None:
        """Change the state that other members see."""
        joined = self._joined(connection, id)
        if joined.listener.member is None:
            raise InvalidQuery(
                "only a present member has a state",
                path="state",
                hint=_BE_PRESENT,
            )
        joined.listener.set_state(check_state(state))

    def _joined(self, connection: GatewayConnection, id: str) -> JoinedChannel:
        subscription = connection.session.subscriptions.get(id)
        handle = subscription.handle if isinstance(subscription, ChannelSubscription) else None
        if not isinstance(handle, JoinedChannel):
            raise NotFound(
                f"this session has no channel subscription {id!r:.100}",
                code="subscription_unknown",
                hint="Subscribe to the channel first. The subscription may have ended.",
            )
        self._quotas.publish(connection.session.id, time.monotonic())
        return handle


_BE_PRESENT = 'Subscribe with "present": true.'


def _check_amplification(subscription: ChannelSubscription) -> None:
    """Limit the subscriptions of a session to one channel: each message is sent to each of them, so
    one message would become many."""
    before = takewhile(
        lambda each: each is not subscription, subscription.session.subscriptions.values()
    )
    same = sum(
        isinstance(each, ChannelSubscription) and each.channel == subscription.channel
        for each in before
    )
    if same >= SESSION_CHANNEL_SUBSCRIPTIONS_MAX:
        raise LimitExceeded(
            f"this session has {SESSION_CHANNEL_SUBSCRIPTIONS_MAX} subscriptions to channel"
            f" {subscription.channel}, which is the limit",
            code="subscriptions_per_channel",
            hint="Subscribe once, and share the messages inside the client.",
            retry_after=QUOTA_RETRY_SECONDS,
        )


def _check(message: Subscribe) -> None:
    for name, position in (("since", message.since), ("after", message.after)):
        if position is not None:
            raise InvalidQuery("a channel has no positions", path=name, hint=f"Leave {name} out.")
    if message.overflow not in (None, "drop"):
        raise InvalidQuery(
            "expected drop: a channel drops messages that a slow client has no room for",
            hint="Leave overflow out.",
            path="overflow",
        )
    if message.verify:
        raise InvalidQuery(
            "messages of a channel carry no hash", path="verify", hint="Leave verify out."
        )
