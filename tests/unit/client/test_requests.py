"""What is asked once is answered once, whatever becomes of the connection in between."""

from __future__ import annotations

import pytest

from headwater.client.requests import Requests, Settled
from headwater.errors import ConnectionFailed, Refused
from headwater.limits import CLIENT_CALL_ATTEMPTS_MAX
from headwater.protocol import Answer, Ask, Error, Mutate, Unsubscribe, Wait

ASK, MUTATE, WAIT = Ask("", "orders", {"region": 7}), Mutate("", "place"), Wait("", "ab-5:5:")
POSITION = "ab-9:9:"


def test_ids_are_fresh_and_no_subscriptions() -> None:
    requests = Requests()
    assert requests.add(ASK) == Ask("r1", "orders", {"region": 7})
    assert requests.add(MUTATE).id == "r2"


def test_an_answer_and_a_refusal() -> None:
    requests = Requests()
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
def test_what_is_about_others(message: Error) -> None:
    requests = Requests()
    requests.add(ASK)
    assert requests.receive(message) is None


def test_after_a_lost_connection_a_mutation_is_not_sent_again() -> None:
    requests = Requests()
    sent = [requests.add(call) for call in (ASK, MUTATE, WAIT)]
    assert all(map(requests.sending, sent))
    (lost,) = requests.lost()
    assert lost.id == sent[1].id
    assert isinstance(lost.outcome, ConnectionFailed)
    assert (lost.outcome.code, lost.outcome.retryable) == ("outcome_unknown", False)
    assert requests.connected() == [sent[0], sent[2]]


def test_a_mutation_that_was_not_sent_is_sent_on_the_next_connection() -> None:
    requests = Requests()
    mutation = requests.add(MUTATE)
    assert requests.lost() == []
    assert requests.connected() == [mutation]


def test_what_is_forgotten_is_not_sent() -> None:
    requests = Requests()
    mutation = requests.add(MUTATE)
    requests.forget(mutation.id)
    assert not requests.sending(mutation)
    assert requests.sending(Unsubscribe("1"))
    assert requests.receive(Answer(mutation.id, POSITION)) is None


def test_a_query_that_costs_the_connection_each_time_is_given_up() -> None:
    requests = Requests()
    call = requests.add(ASK)
    for _ in range(CLIENT_CALL_ATTEMPTS_MAX - 1):
        assert requests.sending(call)
        assert requests.lost() == []
    requests.sending(call)
    (lost,) = requests.lost()
    assert isinstance(lost.outcome, ConnectionFailed)
    assert requests.connected() == []


def test_the_end() -> None:
    requests = Requests()
    sent, waiting = requests.add(MUTATE), requests.add(ASK)
    requests.sending(sent)
    error = ConnectionFailed("closed")
    unknown, failed = requests.over(error)
    assert (unknown.id, getattr(unknown.outcome, "code", "")) == (sent.id, "outcome_unknown")
    assert failed == Settled(waiting.id, error)
    assert requests.connected() == []
