"""Waits for the answers to what is asked once: queries, mutations, waits, what is said on channels.

`requests` knows what becomes of a call when the connection is lost; this keeps who waits for it. At
most `limits.CLIENT_CALLS_AT_ONCE` are under way, further ones wait for one to be answered. Who is
cancelled is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from headwater.client.requests import Call, Requests, Settled, id_of
from headwater.limits import CLIENT_CALLS_AT_ONCE
from headwater.protocol import Answer, ClientMessage, ServerMessage


class Calls:
    """The calls of one client.

    `send` hands a message to the present connection, or does nothing while there is none; `check`
    raises if there will be none.
    """

    def __init__(self, send: Callable[[ClientMessage], None], check: Callable[[], None]) -> None:
        self._send = send
        self._check = check
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
