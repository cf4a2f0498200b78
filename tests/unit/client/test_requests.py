"""A request gets one answer, also when the connection is lost in between."""

from __future__ import annotations

import msgspec
import pytest

from headwater.client.requests import Attempts, Requests, Settled, id_of
from headwater.errors import ConnectionFailed, HeadwaterError, Refused
from headwater.limits import (
    CLIENT_CALL_ATTEMPTS_MAX,
    CLIENT_MUTATION_ATTEMPTS_MAX,
    CLIENT_MUTATION_SECONDS,
    CLIENT_PUBLISH_SECONDS,
    PUBLISH_KEY_SECONDS,
    REQUEST_SECONDS_MIN,
)
from headwater.protocol import Answer, Ask, Error, Mutate, Publish, Unsubscribe, Wait

ASK, WAIT = Ask("", "orders", {"region": 7}), Wait("", "ab-5:5:")
MUTATE = Mutate("", "place", {}, "a-key")
PUBLISH = Publish("c1", "hello", idempotency_key="a-key")
POSITION = "ab-9:9:"


class Clock:
    """Stands still until it is set."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_ids_are_fresh_and_no_subscriptions() -> None:
    requests = Requests(Clock())
    assert requests.add(ASK) == Ask("r1", "orders", {"region": 7})
    assert requests.add(MUTATE).id == "r2"


def test_an_answer_and_a_refusal() -> None:
    requests = Requests(Clock())
    first, second = requests.add(ASK), requests.add(MUTATE)
    answer = Answer(first.id, POSITION, [1])
    assert requests.receive(answer) == Settled(first.id, answer)
    assert requests.receive(answer) is None
    settled = requests.receive(Error("sold_out", "none is left", id=second.id))
    assert settled is not None
    assert isinstance(settled.outcome, Refused)
    assert settled.outcome.code == "sold_out"
    assert requests.connected() == []


@pytest.mark.parametrize("message", [Error("limit", "no"), Error("limit", "no", id="1")])
def test_messages_for_other_requests_are_ignored(message: Error) -> None:
    requests = Requests(Clock())
    requests.add(ASK)
    assert requests.receive(message) is None


def test_after_a_lost_connection_repeatable_requests_are_sent_again() -> None:
    requests = Requests(Clock())
    sent = [requests.add(call) for call in (ASK, MUTATE, WAIT, Mutate("", "no key"))]
    assert all(map(requests.sending, sent))
    (lost,) = requests.lost()
    assert lost.id == id_of(sent[3])
    assert isinstance(lost.outcome, ConnectionFailed)
    assert (lost.outcome.code, lost.outcome.retryable) == ("outcome_unknown", False)
    assert requests.connected() == sent[:3]


REFUSALS = [
    # A refusal before the key is looked up does not say how the first attempt ended.
    (Error("rate", "too often", retryable=True, retry_after_secs=1), "outcome_unknown", True),
    (Error("stopping", "in a moment", retryable=True), "outcome_unknown", True),
    (Error("still_running", "wait", retryable=True), "outcome_unknown", True),
    (Error("token_expired", "too late"), "outcome_unknown", False),
    (Error("mutation_unknown", "a new release"), "outcome_unknown", False),
    (Error("invalid_query", "args: a new release"), "outcome_unknown", False),
    (Error("forbidden", "no role of that name"), "outcome_unknown", False),
    (Error("internal", "a fault"), "outcome_unknown", False),
    # A refusal by the mutation itself says that no attempt has succeeded.
    (Error("sold_out", "none is left"), "sold_out", False),
    (Error("function_failed", "under 7"), "function_failed", False),
    (Error("conflict", "others write", retryable=True), "conflict", True),
    (Error("timed_out", "too slow", retryable=True), "timed_out", True),
    (Error("result_not_stored", "too large"), "result_not_stored", False),
    (Error("idempotency_key_reused", "for another"), "idempotency_key_reused", False),
]


@pytest.mark.parametrize(("refusal", "code", "retryable"), REFUSALS)
def test_a_repetition_that_is_refused(refusal: Error, code: str, retryable: bool) -> None:
    for attempts in (1, 2):
        requests = Requests(Clock())
        call = requests.add(MUTATE)
        requests.sending(call)
        if attempts == 2:
            assert requests.lost() == []
            requests.sending(call)
        settled = requests.receive(msgspec.structs.replace(refusal, id=id_of(call)))
        assert settled is not None
        assert isinstance(settled.outcome, HeadwaterError)
        in_doubt = attempts == 2 or refusal.code == "still_running"
        expected = (code, retryable) if in_doubt else (refusal.code, refusal.retryable)
        assert (settled.outcome.code, settled.outcome.retryable) == expected


def test_a_mutation_that_was_not_sent_is_sent_on_the_next_connection() -> None:
    requests = Requests(Clock())
    mutation = requests.add(MUTATE)
    assert requests.lost() == []
    assert requests.connected() == [mutation]


def test_a_forgotten_request_is_not_sent() -> None:
    requests = Requests(Clock())
    mutation = requests.add(MUTATE)
    requests.forget(mutation.id)
    assert not requests.sending(mutation)
    assert requests.sending(Unsubscribe("1"))
    assert requests.receive(Answer(mutation.id, POSITION)) is None


@pytest.mark.parametrize(
    ("call", "most", "code"),
    [
        (ASK, CLIENT_CALL_ATTEMPTS_MAX, "connection"),
        (MUTATE, CLIENT_MUTATION_ATTEMPTS_MAX, "outcome_unknown"),
    ],
)
def test_a_call_that_breaks_every_connection_is_given_up(
    call: Ask | Mutate, most: int, code: str
) -> None:
    requests = Requests(Clock())
    sent = requests.add(call)
    for _ in range(most - 1):
        assert requests.sending(sent)
        assert requests.lost() == []
    requests.sending(sent)
    (lost,) = requests.lost()
    assert isinstance(lost.outcome, ConnectionFailed)
    assert lost.outcome.code == code
    assert requests.connected() == []


def test_closing_fails_every_open_request() -> None:
    requests = Requests(Clock())
    sent, waiting = requests.add(MUTATE), requests.add(ASK)
    requests.sending(sent)
    error = ConnectionFailed("closed")
    unknown, failed = requests.over(error)
    assert (unknown.id, getattr(unknown.outcome, "code", "")) == (sent.id, "outcome_unknown")
    assert failed == Settled(waiting.id, error)
    assert requests.connected() == []


# ------------------------------------------------------------------------ while keys are stored


@pytest.mark.parametrize(
    ("call", "most"), [(MUTATE, CLIENT_MUTATION_SECONDS), (PUBLISH, CLIENT_PUBLISH_SECONDS)]
)
def test_a_request_that_was_sent_long_ago_is_not_repeated(
    call: Mutate | Publish, most: float
) -> None:
    for seconds in (most - 1, most):
        clock, attempts = Clock(), Attempts()
        requests = Requests(clock)
        first = requests.add(call, attempts)
        assert requests.too_late(first) is None
        assert requests.sending(first)
        requests.lost()
        requests.forget(id_of(first))  # a channel asks under another id, as after a refusal
        clock.now += seconds
        again = requests.add(call, attempts)
        settled = requests.too_late(again)
        if seconds < most:
            assert settled is None
            continue
        assert settled is not None
        assert isinstance(settled.outcome, ConnectionFailed)
        assert (settled.outcome.code, settled.outcome.retryable) == ("outcome_unknown", False)
        assert attempts.too_late
        assert not requests.sending(again)


def test_a_request_that_was_not_sent_or_was_refused_may_be_sent_at_any_time() -> None:
    clock, attempts = Clock(), Attempts()
    requests = Requests(clock)
    mutation = requests.add(MUTATE, attempts)
    requests.lost()
    clock.now += 2 * CLIENT_MUTATION_SECONDS
    assert requests.too_late(mutation) is None
    requests.sending(mutation)
    requests.receive(Error("rate", "too often", retryable=True, id=id_of(mutation)))
    clock.now += 2 * CLIENT_MUTATION_SECONDS
    assert requests.too_late(requests.add(MUTATE, attempts)) is None


def test_gateways_store_keys_longer_than_clients_repeat() -> None:
    assert REQUEST_SECONDS_MIN >= 2 * CLIENT_MUTATION_SECONDS
    assert PUBLISH_KEY_SECONDS >= 2 * CLIENT_PUBLISH_SECONDS
