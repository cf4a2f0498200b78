"""`Channel`: a subscribed channel.

At most `limits.CLIENT_MESSAGES_MAX` messages wait for a reader. A reader that falls behind misses
the oldest ones, because readers never delay publishers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from headwater import limits
from headwater.client.requests import Attempts
from headwater.client.state.channel import ChannelMessage, ChannelState
from headwater.client.subscriptions.subscription import Subscription, SubscriptionOwner
from headwater.errors import ConfigError, ConnectionFailed, HeadwaterError, NotFound
from headwater.idempotency import check_key, new_key
from headwater.protocol import ChannelCall, Member, Publish, SetState


class Channel(Subscription):
    """A subscribed channel.

    ```python
    async with hw.channel("room:1", state={"name": "Ann"}) as room:
        await room.publish({"text": "hello"})
        async for message in room: ...
    ```
    """

    state: ChannelState

    def __init__(self, owner: SubscriptionOwner, call: ChannelCall) -> None:
        super().__init__(owner)
        self.dropped = 0
        """How many messages were dropped because the reader fell behind."""
        self._call = call
        self._waiting: deque[ChannelMessage] = deque()
        self._version = 0
        self.state = ChannelState(call)

    def _begin(self) -> None:
        self.state = ChannelState(self._call)
        self._waiting.clear()
        super()._begin()

    @property
    def members(self) -> tuple[Member, ...]:
        """The current members, each with its state."""
        return tuple(self.state.members.values())

    @property
    def member(self) -> str | None:
        """The id of this client among the members; None if it is not a member."""
        return self.state.member

    @property
    def missed(self) -> int:
        """How often messages may have been lost since the subscription began."""
        return self.state.missed

    async def __aiter__(self) -> AsyncGenerator[ChannelMessage, None]:
        """The messages in the channel's history, then every new message."""
        async with self:
            while True:
                while not self._waiting:
                    if not await self.waiting():
                        return
                yield self._waiting.popleft()

    async def presence(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """The members, now and after every change. A slow reader gets the latest list only."""
        async with self:
            seen = -1
            while True:
                while self._version == seen:
                    if not await self.waiting():
                        return
                seen = self._version
                yield self.members

    async def publish(self, data: Any, *, idempotency_key: str | None = None) -> None:
        """Send a message to all followers of the channel, once. Returns when it was delivered to
        all gateways. After a lost connection it is sent again; the gateway recognizes the
        repetition by its key, which may be your own. If no gateway can be reached within
        `limits.CLIENT_PUBLISH_SECONDS`, ConnectionFailed with the code `outcome_unknown` is
        raised."""
        key = new_key() if idempotency_key is None else check_key(idempotency_key)
        attempts, lost = Attempts(), None
        for _ in range(limits.CLIENT_MUTATION_ATTEMPTS_MAX):
            await self._begun(lost)
            message = Publish(self.state.wire_id, data, idempotency_key=key)
            try:
                return await self._owner.send_to_channel(message, attempts)
            except ConnectionFailed as error:
                if attempts.too_late:
                    raise
                lost = error
                await self._followed_again(message.id, lost)
            except HeadwaterError as error:
                # It was sent on a new connection, with the id that the channel had on the old one.
                if isinstance(error, NotFound) and message.id != self.state.wire_id:
                    continue
                if lost is not None and attempts.in_doubt:
                    raise lost from error
                raise
        raise lost or ConnectionFailed(
            "the connection was lost each time the message was published"
        )

    async def set_state(self, state: Any) -> None:
        """Change the state that other members see."""
        await self._begun()
        before, self.state.call = self.state.call, ChannelCall(self.state.name, True, state)
        try:
            await self._owner.send_to_channel(SetState(self.state.wire_id, state))
        except ConnectionFailed:
            await self._begun()  # the next connection subscribes with this state
        except HeadwaterError:
            self.state.call = before
            raise

    async def _followed_again(self, before: str, lost: ConnectionFailed) -> None:
        """Wait until the channel is followed on another connection; raises `lost` if there is
        none."""
        try:
            while self.state.wire_id == before and await self.waiting():
                pass
        except HeadwaterError as error:
            raise lost from error

    async def _begun(self, lost: ConnectionFailed | None = None) -> None:
        """Wait until the channel is followed, also after a lost connection."""
        while self.state.is_due and await self.waiting():
            pass
        if self._over and lost is not None:
            raise lost
        if self._over:
            raise ConfigError(
                "the channel is not open",
                hint="Use `async with hw.channel(…) as room: await room.publish(…)`.",
            )

    def received(self, message: ChannelMessage) -> None:
        self._waiting.append(message)
        if len(self._waiting) > limits.CLIENT_MESSAGES_MAX:
            self._waiting.popleft()
            self.dropped += 1
        self.wake()

    def gathered(self) -> None:
        self._version += 1
        self.wake()
