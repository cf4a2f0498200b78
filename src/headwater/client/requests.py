"""What a client asks once: queries, mutations, waits and what it says on channels, from the
question to its answer.

Pure. A connection may be lost between the two. To ask for a query or a wait again is safe, and so
they are asked again on the next connection. A mutation is sent once: if it was sent and not
answered, nobody here knows whether it has happened, and that is its outcome; so it is with what is
said on a channel. Ids begin with a letter, so that they are never those of subscriptions.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from headwater.client.refusals import LOOK_FIRST, error_of
from headwater.errors import ConnectionFailed
from headwater.limits import CLIENT_CALL_ATTEMPTS_MAX
from headwater.protocol import (
    Answer,
    Ask,
    ClientMessage,
    Error,
    Mutate,
    Publish,
    ServerMessage,
    SetState,
    Wait,
)

Call: TypeAlias = Ask | Mutate | Wait | Publish | SetState


def id_of(call: Call) -> str:
    """The id that its answer has."""
    return (call.request or "") if isinstance(call, Publish | SetState) else call.id


class Settled(msgspec.Struct, frozen=True):
    """The call of that id is over."""

    id: str
    outcome: Answer | Exception


class Requests:
    """All calls of one client that are not over, over all its connections."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._attempts: dict[str, int] = {}
        self._number = 0

    def add(self, call: Call) -> Call:
        """Begin a call: the same under an id of its own, to be sent."""
        self._number += 1
        id = f"r{self._number}"
        field = "request" if isinstance(call, Publish | SetState) else "id"
        call = msgspec.structs.replace(call, **{field: id})
        self._calls[id] = call
        self._attempts[id] = 0
        return call

    def forget(self, id: str) -> None:
        """Nobody wants the answer. What was not sent yet will not be."""
        self._calls.pop(id, None)
        self._attempts.pop(id, None)

    def sending(self, message: ClientMessage) -> bool:
        """The message is about to be sent; False if it should not be any more."""
        if not isinstance(message, Call):
            return True
        id = id_of(message)
        if id not in self._calls:
            return False
        self._attempts[id] += 1
        return True

    def connected(self) -> list[Call]:
        """What to send on a new connection."""
        return list(self._calls.values())

    def receive(self, message: ServerMessage) -> Settled | None:
        """What a message settles."""
        match message:
            case Answer(id) if id in self._calls:
                self.forget(id)
                return Settled(id, message)
            case Error(id=str(id)) if id in self._calls:
                self.forget(id)
                return Settled(id, error_of(message))
        return None

    def lost(self) -> list[Settled]:
        """The connection is gone: the calls that cannot be asked again."""
        over = list[Settled]()
        for id, call in list(self._calls.items()):
            if isinstance(call, Mutate) and self._attempts[id]:
                over.append(Settled(id, _outcome_unknown(f"mutation {call.name!r}")))
            elif isinstance(call, Publish | SetState):
                # It names a subscription of that connection.
                over.append(Settled(id, _outcome_unknown("what was said on a channel")))
            elif self._attempts[id] >= CLIENT_CALL_ATTEMPTS_MAX:
                over.append(Settled(id, _too_often(call)))
        for settled in over:
            self.forget(settled.id)
        return over

    def over(self, error: Exception) -> list[Settled]:
        """There will be no other connection."""
        settled = [*self.lost(), *(Settled(id, error) for id in self._calls)]
        self._calls, self._attempts = {}, {}
        return settled


def _outcome_unknown(what: str) -> ConnectionFailed:
    error = ConnectionFailed(
        f"the connection was lost before {what} was answered",
        hint=LOOK_FIRST,
        code="outcome_unknown",
    )
    error.retryable = False
    return error


def _too_often(call: Ask | Mutate | Wait) -> ConnectionFailed:
    what = "wait_for" if isinstance(call, Wait) else f"query {call.name!r}"
    return ConnectionFailed(
        f"the connection was lost {CLIENT_CALL_ATTEMPTS_MAX} times before {what} was answered",
        hint="If the connection is lost each time it is asked, the gateway's log says why.",
    )
