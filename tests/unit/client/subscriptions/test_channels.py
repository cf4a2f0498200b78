"""A message on a channel is repeated after a lost connection, while the gateway stores its key."""

from __future__ import annotations

import asyncio

import pytest

from headwater.client.backoff import Backoff
from headwater.client.calls import PendingCalls
from headwater.client.requests import Attempts
from headwater.client.subscriptions.channels import Channel
from headwater.client.subscriptions.subscription import Feed, Live, Subscription
from headwater.errors import HeadwaterError
from headwater.limits import CLIENT_PUBLISH_SECONDS
from headwater.protocol import (
    Answer,
    ChannelCall,
    ClientMessage,
    Error,
    Presence,
    Publish,
    SetState,
    Subscribed,
)


class Line:
    """A connection without a gateway."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.sent: list[Publish] = []
        self.calls = PendingCalls(self._send, lambda: None, Backoff, lambda: self.now)

    def _send(self, message: ClientMessage) -> None:
        if self.calls.sending(message) and isinstance(message, Publish):
            self.sent.append(message)

    async def send_to_channel(
        self, message: Publish | SetState, attempts: Attempts | None = None
    ) -> None:
        await self.calls.ask(message, attempts)

    def begin(self, subscription: Subscription) -> None:
        self._follow(subscription, "1")

    def lose(self, subscription: Subscription) -> None:
        self.calls.lost()
        self._follow(subscription, "2")

    def _follow(self, subscription: Subscription, id: str) -> None:
        assert isinstance(subscription, Channel)
        subscription.state.subscribe(id)
        subscription.state.subscribed(Subscribed(id, 1))
        subscription.state.gather(Presence(1, whole=True))
        subscription.ready(Backoff())

    def end(self, subscription: Subscription) -> None:
        pass

    def resume(self, feed: Feed) -> None:
        pass

    async def reanchor(self, live: Live, after: object) -> None:
        pass


@pytest.mark.parametrize(
    ("seconds", "is_repeated"),
    [(CLIENT_PUBLISH_SECONDS - 1, True), (CLIENT_PUBLISH_SECONDS, False)],
)
async def test_a_message_that_was_sent_long_ago_is_not_repeated(
    seconds: float, is_repeated: bool
) -> None:
    line = Line()
    async with Channel(line, ChannelCall("room:1")) as room, asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(_published(room))
        while not line.sent:  # noqa: ASYNC110
            await asyncio.sleep(0)
        line.now += seconds
        line.lose(room)
        while len(line.sent) == 1 and not publishing.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert line.calls.received(Answer(line.sent[-1].request or "", "")) == is_repeated
        assert await publishing == (None if is_repeated else "outcome_unknown")
        assert len(line.sent) == 1 + is_repeated
    assert len({message.idempotency_key for message in line.sent}) == 1


@pytest.mark.parametrize(("lost", "code"), [(True, "outcome_unknown"), (False, "forbidden")])
async def test_a_refused_repetition_does_not_say_how_the_first_ended(lost: bool, code: str) -> None:
    line = Line()
    async with Channel(line, ChannelCall("room:1")) as room, asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(_published(room))
        while len(line.sent) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if lost:
            line.lose(room)
        while len(line.sent) < 1 + lost:  # noqa: ASYNC110
            await asyncio.sleep(0)
        line.calls.received(Error("forbidden", "not any more", id=line.sent[-1].request))
        assert await publishing == code


async def _published(room: Channel) -> str | None:
    """The code of the error that it ended with."""
    try:
        await room.publish("hello")
    except HeadwaterError as error:
        return error.code
    return None
