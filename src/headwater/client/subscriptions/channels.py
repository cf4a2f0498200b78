"""What a program holds of a channel: `Channel`.

Messages wait for their reader, at most `limits.CLIENT_MESSAGES_MAX` of them: a reader that falls
behind misses the oldest, because readers never hold up publishers.
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
    """A channel that is followed.

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
        """How many messages were missed because their reader fell behind."""
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
        """Who is there now, each with a state of its own."""
        return tuple(self.state.members.values())

    @property
    def member(self) -> str | None:
        """Which of the members this is; None if it is not one."""
        return self.state.member

    @property
    def missed(self) -> int:
        """How often messages may have been lost on the way here, since it is followed."""
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
        """Who is there, and again when that has changed. A slow reader skips to the latest."""
        async with self:
            seen = -1
            while True:
                while self._version == seen:
                    if not await self.waiting():
                        return
                seen = self._version
                yield self.members

    async def publish(self, data: Any, *, idempotency_key: str | None = None) -> None:
        """Send a message to all followers of the channel, once. Returns when it was passed on to
        all gateways. After a lost connection it is repeated; the gateway recognizes the repetition
        by its key, which may be your own. If no gateway can be reached any more, or not within
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
                # It was sent on a new connection, under the name that the channel had before.
                if isinstance(error, NotFound) and message.id != self.state.wire_id:
                    continue
                if lost is not None and attempts.in_doubt:
                    raise lost from error
                raise
        raise lost or ConnectionFailed("the connection was lost each time this was published")

    async def set_state(self, state: Any) -> None:
        """Change the state that other members see."""
        await self._begun()
        before, self.state.call = self.state.call, ChannelCall(self.state.name, True, state)
        try:
            await self._owner.send_to_channel(SetState(self.state.wire_id, state))
        except ConnectionFailed:
            await self._begun()  # on the next connection it is there with this state
        except HeadwaterError:
            self.state.call = before
            raise

    async def _followed_again(self, before: str, lost: ConnectionFailed) -> None:
        """Wait until it is followed on another connection; raises that it was lost if there is
        none."""
        try:
            while self.state.wire_id == before and await self.waiting():
                pass
        except HeadwaterError as error:
            raise lost from error

    async def _begun(self, lost: ConnectionFailed | None = None) -> None:
        """Wait until it is followed, after a lost connection again."""
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
