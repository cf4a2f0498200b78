"""A subscribed topic. A slow reader gets all missed rows together, each row once in its current
state: the memory for it is bounded by the number of rows, not by the number of changes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence

from headwater.client.state.topic import Ops, TopicState, Waiting
from headwater.client.subscriptions.subscription import Subscription, SubscriptionOwner
from headwater.model import Row


class Topic(Subscription):
    """A subscribed topic.

    ```python
    async with hw.topic("chat:42") as chat:
        chat.fill("messages", await hw.query("messages", chat=42))
        async for ops in chat:
            show(chat.rows("messages"))
    ```
    """

    state: TopicState

    def __init__(self, owner: SubscriptionOwner, name: str) -> None:
        super().__init__(owner)
        self.name = name
        self.state = TopicState(name)
        self._first = Waiting()
        self._readers: dict[Waiting, None] = {}

    def _begin(self) -> None:
        self.state, self._first = TopicState(self.name), Waiting()
        super()._begin()

    @property
    def position(self) -> str | None:
        """The position that the received rows reach; None while it is unknown."""
        return self.state.position

    def rows(self, entity: str) -> list[Row]:
        """The rows of a table that the topic sent and that still exist, and those it was filled
        with, in the order in which they were first received."""
        return self.state.rows.of(entity)

    def fill(self, entity: str, rows: Iterable[Row], key: str | Sequence[str] = "id") -> None:
        """Pass the existing rows: at the start, or after a `pull`. Read them after the topic is
        followed. If the topic has sent a row since then, the topic's version is used. `key` is the
        primary key."""
        self.state.rows.fill(entity, rows, (key,) if isinstance(key, str) else key)

    async def __aiter__(self) -> AsyncGenerator[Ops, None]:
        """What the topic sends, from when it is followed. The first reader also gets what was
        received before it began to read."""
        async with self:
            waiting, self._first = self._first, Waiting()
            self._readers[waiting] = None
            try:
                while True:
                    while not waiting:
                        if not await self.waiting():
                            return
                    yield waiting.take()
            finally:
                del self._readers[waiting]

    def received(self, ops: Ops) -> None:
        for reader in self._readers or (self._first,):
            reader.add(ops)
        self.wake()
