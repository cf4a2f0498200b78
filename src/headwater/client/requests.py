"""The calls of a client: queries, mutations, waits and messages to channels, from the request to
its answer.

Pure. A connection may be lost between the two. Queries and waits can be repeated safely, so they
are sent again on the next connection. So can a mutation with an idempotency key: it runs once,
however often it is sent, as long as the gateway stores its key. If there is no connection in that
time, the outcome of a mutation that was sent is unknown, which is an error. A message to a channel
names a subscription of its connection, so the channel itself repeats it. Ids begin with a letter,
so that they differ from the ids of subscriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from headwater.client.errors import CHECK_FIRST, error_of
from headwater.errors import (
    ConnectionFailed,
    FunctionFailed,
    HeadwaterError,
    Refused,
    ResultError,
    TimedOut,
)
from headwater.limits import (
    CLIENT_CALL_ATTEMPTS_MAX,
    CLIENT_MUTATION_ATTEMPTS_MAX,
    CLIENT_MUTATION_SECONDS,
    CLIENT_PUBLISH_SECONDS,
)
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


class Attempts(msgspec.Struct):
    """The attempts at one call, which all have the same key."""

    since: float | None = None
    """When it was first sent."""
    in_doubt: bool = False
    """Whether an attempt may have succeeded: it was not answered, or still runs."""
    too_late: bool = False
    """Whether it is not repeated any more, because the gateway may have forgotten its key."""


class Settled(msgspec.Struct, frozen=True):
    """The call with that id has ended."""

    id: str
    outcome: Answer | Exception


class Requests:
    """All unfinished calls of one client, on all its connections.

    The `clock` counts seconds, also while the machine sleeps.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: dict[str, Call] = {}
        self._sent: dict[str, int] = {}
        self._attempts: dict[str, Attempts] = {}
        self._number = 0

    def add(self, call: Call, attempts: Attempts | None = None) -> Call:
        """Begin a call: returns it with a new id, to be sent. `attempts` are earlier attempts with
        the same key."""
        self._number += 1
        id = f"r{self._number}"
        field = "request" if isinstance(call, Publish | SetState) else "id"
        call = msgspec.structs.replace(call, **{field: id})
        self._calls[id] = call
        self._sent[id] = 0
        self._attempts[id] = Attempts() if attempts is None else attempts
        return call

    def forget(self, id: str) -> None:
        """The caller no longer waits for the answer. A call that was not sent yet is dropped."""
        self._calls.pop(id, None)
        self._sent.pop(id, None)
        self._attempts.pop(id, None)

    def sending(self, message: ClientMessage) -> bool:
        """The message is about to be sent; False if it must not be sent any more."""
        if not isinstance(message, Call):
            return True
        id = id_of(message)
        if id not in self._calls:
            return False
        self._sent[id] += 1
        if self._attempts[id].since is None:
            self._attempts[id].since = self._clock()
        return True

    def too_late(self, message: ClientMessage) -> Settled | None:
        """The error of a call that must not be repeated, because the gateway may have forgotten its
        key and would execute it again."""
        if not isinstance(message, Mutate | Publish) or id_of(message) not in self._calls:
            return None
        id, attempts = id_of(message), self._attempts[id_of(message)]
        most = CLIENT_MUTATION_SECONDS if isinstance(message, Mutate) else CLIENT_PUBLISH_SECONDS
        if not attempts.in_doubt or attempts.since is None or self._clock() - attempts.since < most:
            return None
        attempts.too_late = True
        (settled,) = self._end({id: outcome_unknown(_name(message))})
        return settled

    def connected(self) -> list[Call]:
        """What to send on a new connection."""
        return list(self._calls.values())

    def receive(self, message: ServerMessage) -> Settled | None:
        """The call that a message ends, if any."""
        match message:
            case Answer(id) if id in self._calls:
                self.forget(id)
                return Settled(id, message)
            case Error(id=str(id)) if id in self._calls:
                outcome = self._refused(id, error_of(message))
                self.forget(id)
                return Settled(id, outcome)
        return None

    def _refused(self, id: str, error: HeadwaterError) -> HeadwaterError:
        """The outcome of a refused call. If a repetition was refused before its key was looked up,
        an earlier attempt may have succeeded."""
        call, attempts = self._calls[id], self._attempts[id]
        attempts.in_doubt |= error.code in ("outcome_unknown", "still_running")
        if error.code == "outcome_unknown":
            return error
        if isinstance(call, Mutate) and attempts.in_doubt and not _was_run(error):
            return outcome_unknown(_name(call), error)
        return error

    def lost(self) -> list[Settled]:
        """The connection is lost. Returns the calls that cannot be repeated."""
        for id, sent in self._sent.items():
            self._attempts[id].in_doubt |= sent > 0
        return self._end({id: self._loss(id) for id in self._calls})

    def _loss(self, id: str) -> HeadwaterError | None:
        """The error of a call after a lost connection; None if the call is repeated on the next."""
        call, sent = self._calls[id], self._sent[id]
        if isinstance(call, Publish | SetState):
            return outcome_unknown(_name(call))
        if not isinstance(call, Mutate):
            return _too_often(call) if sent >= CLIENT_CALL_ATTEMPTS_MAX else None
        most = CLIENT_MUTATION_ATTEMPTS_MAX if call.idempotency_key is not None else 1
        return outcome_unknown(_name(call)) if sent >= most else None

    def over(self, error: Exception) -> list[Settled]:
        """There will be no other connection. Returns all calls."""
        return self._end({id: self._last(id, error) for id in self._calls})

    def _last(self, id: str, error: Exception) -> Exception:
        call = self._calls[id]
        if isinstance(call, Mutate) and not (self._sent[id] or self._attempts[id].in_doubt):
            return error
        return self._loss(id) or (
            outcome_unknown(_name(call)) if isinstance(call, Mutate) else error
        )

    def _end(self, outcomes: Mapping[str, Exception | None]) -> list[Settled]:
        over = [Settled(id, outcome) for id, outcome in outcomes.items() if outcome is not None]
        for settled in over:
            self.forget(settled.id)
        return over


def _was_run(error: HeadwaterError) -> bool:
    """Whether the error came after the key of a mutation was looked up: then no earlier attempt has
    succeeded. Arguments and rights are checked before that, and another release of the application
    may check them differently."""
    kinds = (FunctionFailed, Refused, ResultError, TimedOut)
    return isinstance(error, kinds) or error.code in ("conflict", "idempotency_key_reused")


def _name(call: Call) -> str:
    return f"mutation {call.name!r}" if isinstance(call, Mutate) else "the message on a channel"


def outcome_unknown(what: str, refusal: HeadwaterError | None = None) -> ConnectionFailed:
    """The error of a call that was sent and not answered. It is retryable if the `refusal` of its
    last repetition is."""
    if refusal is None:
        text = f"the connection was lost before {what} was answered"
    else:
        text = f"it is unknown whether {what} was executed; a repetition was refused: {refusal}"
    error = ConnectionFailed(text, hint=CHECK_FIRST, code="outcome_unknown")
    error.retryable = refusal is not None and refusal.retryable
    error.retry_after = None if refusal is None else refusal.retry_after
    return error


def _too_often(call: Ask | Wait) -> ConnectionFailed:
    what = "wait_for" if isinstance(call, Wait) else f"query {call.name!r}"
    return ConnectionFailed(
        f"the connection was lost {CLIENT_CALL_ATTEMPTS_MAX} times before {what} was answered",
        hint="The gateway's log may have the reason.",
    )
