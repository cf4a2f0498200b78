"""Waits for the answers to what is asked once: queries, mutations, waits, what is said on channels.

`requests` knows what becomes of a call when the connection is lost; this knows who waits for it. A
mutation that is refused for now is repeated with its key, for a while. At most
`limits.CLIENT_CALLS_AT_ONCE` are under way, further ones wait for one to be answered. Who is
cancelled is forgotten.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

from headwater.client.backoff import Backoff
from headwater.client.requests import Call, Requests, Settled, id_of, outcome_unknown
from headwater.errors import (
    Forbidden,
    FunctionFailed,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
    Refused,
    ResultError,
    TimedOut,
)
from headwater.limits import CLIENT_CALLS_AT_ONCE, CLIENT_REPEAT_SECONDS
from headwater.protocol import Answer, ClientMessage, Mutate, ServerMessage


class Calls:
    """The calls of one client.

    `send` hands a message to the present connection, or does nothing while there is none; `check`
    raises if there will be none.
    """

    def __init__(
        self,
        send: Callable[[ClientMessage], None],
        check: Callable[[], None],
        backoff: Callable[[], Backoff],
    ) -> None:
        self._send = send
        self._check = check
        self._new_backoff = backoff
        self._requests = Requests()
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._room = asyncio.Semaphore(CLIENT_CALLS_AT_ONCE)

    @property
    def under_way(self) -> bool:
        """Whether anybody waits for an answer."""
        return bool(self._waiting)

    async def ask(self, call: Call) -> Answer:
        """Have it answered. Raises what the gateway refused it with."""
        self._check()
        async with self._room:
            self._check()
            call = self._requests.add(call)
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
        """Have a mutation answered that the gateway runs once by its key: repeated while it is
        refused for now, for at most `limits.CLIENT_REPEAT_SECONDS`."""
        loop, backoff = asyncio.get_running_loop(), self._new_backoff()
        until, unknown = loop.time() + CLIENT_REPEAT_SECONDS, False
        while True:
            try:
                return await self.ask(call)
            except HeadwaterError as error:
                unknown = unknown or error.code == "outcome_unknown"
                asked = error.retry_after if isinstance(error, LimitExceeded) else 0.0
                pause = backoff.failed(random.random(), asked) if _is_passing(error) else None
                if pause is None or loop.time() + pause > until:
                    if unknown and not isinstance(error, _SETTLED):
                        raise outcome_unknown(f"mutation {call.name!r}") from error
                    raise
            await asyncio.sleep(pause)

    def sending(self, message: ClientMessage) -> bool:
        """The message is about to be sent; False if it should not be any more."""
        return self._requests.sending(message)

    def connected(self) -> None:
        """There is a connection: ask what is not answered."""
        for call in self._requests.connected():
            self._send(call)

    def received(self, message: ServerMessage) -> bool:
        """Whether the message was the end of a call."""
        settled = self._requests.receive(message)
        self._settle([settled] if settled is not None else [])
        return settled is not None

    def lost(self) -> None:
        """The connection is gone."""
        self._settle(self._requests.lost())

    def over(self, error: Exception) -> None:
        """There will be no other."""
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


def _is_passing(error: HeadwaterError) -> bool:
    """Whether a repetition may help. One that took too long would take as long again."""
    return error.retryable and not isinstance(error, TimedOut)


_SETTLED = (Forbidden, FunctionFailed, InvalidQuery, Refused, ResultError, TimedOut)
"""Refusals of a repetition that was run, so no attempt before it has succeeded."""
