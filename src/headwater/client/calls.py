"""Waits for the answers to calls: queries, mutations, waits, messages to channels.

`requests` decides what happens to a call when the connection is lost; this module has the tasks
that wait. A mutation that is refused with a retryable error is repeated with its key, for a limited
time. At most `limits.CLIENT_CALLS_AT_ONCE` calls run at a time, further ones wait. A cancelled call
is forgotten.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable

from headwater.client.backoff import Backoff
from headwater.client.requests import Attempts, Call, Requests, Settled, id_of
from headwater.errors import HeadwaterError, TimedOut
from headwater.limits import CLIENT_CALLS_AT_ONCE
from headwater.protocol import Answer, ClientMessage, Mutate, ServerMessage

_CLIENT_REPEAT_SECONDS = 60.0
"""How long a mutation that is refused with a retryable error is repeated; then the error is
raised."""


class PendingCalls:
    """The calls of one client.

    `send` sends a message on the current connection, or does nothing while there is none; `check`
    raises if there will be none. The `clock` is that of `Requests`: the time of day, because
    `loop.time` stops while the machine sleeps.
    """

    def __init__(
        self,
        send: Callable[[ClientMessage], None],
        check: Callable[[], None],
        backoff: Callable[[], Backoff],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._send = send
        self._check = check
        self._new_backoff = backoff
        self._requests = Requests(clock)
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._room = asyncio.Semaphore(CLIENT_CALLS_AT_ONCE)

    @property
    def under_way(self) -> bool:
        """Whether any call waits for an answer."""
        return bool(self._waiting)

    async def ask(self, call: Call, attempts: Attempts | None = None) -> Answer:
        """Send a call and wait for its answer. Raises the error of the gateway. `attempts` are
        earlier attempts with the same key."""
        self._check()
        async with self._room:
            self._check()
            call = self._requests.add(call, attempts)
            id = id_of(call)
            answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._waiting[id] = answered
            self._send(call)
            try:
                return await answered
            finally:
                self._requests.forget(id)
                del self._waiting[id]

    async def ask_once(self, call: Mutate) -> Answer:
        """Send a mutation with a key and wait for its answer. It is repeated after retryable
        errors, for at most `_CLIENT_REPEAT_SECONDS`."""
        loop, backoff, attempts = asyncio.get_running_loop(), self._new_backoff(), Attempts()
        until = loop.time() + _CLIENT_REPEAT_SECONDS
        while True:
            try:
                return await self.ask(call, attempts)
            except HeadwaterError as error:
                asked = error.retry_after or 0.0
                pause = backoff.failed(random.random(), asked) if _is_temporary(error) else None
                if pause is None or loop.time() + pause > until:
                    if error.code == "outcome_unknown":
                        error.retryable = False  # A new call would have a new key.
                    raise
            await asyncio.sleep(pause)

    def sending(self, message: ClientMessage) -> bool:
        """The message is about to be sent; False if it must not be sent any more."""
        if settled := self._requests.too_late(message):
            self._settle([settled])
            return False
        return self._requests.sending(message)

    def connected(self) -> None:
        """There is a connection: send what is not answered."""
        for call in self._requests.connected():
            self._send(call)

    def received(self, message: ServerMessage) -> bool:
        """Handle a message. Returns whether it ended a call."""
        settled = self._requests.receive(message)
        self._settle([settled] if settled is not None else [])
        return settled is not None

    def lost(self) -> None:
        """The connection is lost."""
        self._settle(self._requests.lost())

    def over(self, error: Exception) -> None:
        """There will be no other connection."""
        self._settle(self._requests.over(error))

    def _settle(self, calls: Iterable[Settled]) -> None:
        for call in calls:
            answered = self._waiting[call.id]
            if answered.done():
                continue  # cancelled in this moment
            if isinstance(call.outcome, Answer):
                answered.set_result(call.outcome)
            else:
                answered.set_exception(call.outcome)


def _is_temporary(error: HeadwaterError) -> bool:
    """Whether a repetition may help. After a timeout it would take as long again."""
    return error.retryable and not isinstance(error, TimedOut)
