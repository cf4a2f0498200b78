"""The first request above each limit is refused, and nothing stays in memory for clients that hold
nothing."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import LimitExceeded
from headwater.gateway import quotas as module
from headwater.gateway.quotas import Lease, Quotas, Rate
from headwater.limits import RATE_BURST_SECONDS
from headwater.settings.groups import LimitSettings

HERE = "192.0.2.7"


def code(caught: pytest.ExceptionInfo[LimitExceeded]) -> str:
    assert caught.value.retryable
    assert caught.value.retry_after > 0
    assert caught.value.hint is not None
    return caught.value.code


def ask(quotas: Quotas, user: str, now: float, times: int) -> None:
    for _ in range(times):
        quotas.request(user, HERE, now)


def test_the_ninth_session_of_a_user() -> None:
    quotas = Quotas(LimitSettings())
    leases = [quotas.session("ann", f"192.0.2.{number}") for number in range(8)]
    with pytest.raises(LimitExceeded, match="this user has 8 sessions open") as caught:
        quotas.session("ann", HERE)
    assert code(caught) == "sessions_per_user"
    quotas.session("bob", HERE)
    leases[0].close()
    quotas.session("ann", HERE)


def test_the_33rd_session_of_an_address() -> None:
    quotas = Quotas(LimitSettings())
    leases = [quotas.session(None, HERE) for _ in range(32)]
    with pytest.raises(LimitExceeded, match="this address has 32 sessions open") as caught:
        quotas.session(None, HERE)
    assert code(caught) == "sessions_per_ip"
    quotas.session(None, "192.0.2.8")
    leases[31].close()
    quotas.session(None, HERE)


def test_users_of_one_address_are_not_counted_for_it() -> None:
    quotas = Quotas(LimitSettings(sessions_per_ip=1, requests_per_second=1))
    for number in range(100):
        quotas.session(f"user {number}", HERE)
        quotas.request(f"user {number}", HERE, 0.0)
    quotas.session(None, HERE)
    quotas.check_address(HERE, 0.0)
    for _ in range(2):
        quotas.request(None, HERE, 0.0)
    with pytest.raises(LimitExceeded) as caught:
        quotas.check_address(HERE, 0.0)
    assert code(caught) == "rate"
    quotas.check_address(HERE, 1.0)
    quotas.request("ann", HERE, 0.0)


def test_addresses_of_one_ipv6_network_are_one() -> None:
    quotas = Quotas(LimitSettings(sessions_per_ip=2))
    quotas.session(None, "2001:db8::1")
    quotas.session(None, "2001:db8::ffff:2")
    with pytest.raises(LimitExceeded):
        quotas.session(None, "2001:db8::3")
    quotas.session(None, "2001:db8:0:1::1")


def test_the_501st_subscription() -> None:
    quotas = Quotas(LimitSettings())
    for user, address in [("ann", HERE), (None, HERE)]:
        leases = [quotas.subscription(user, address) for _ in range(500)]
        with pytest.raises(LimitExceeded, match="has 500 subscriptions open") as caught:
            quotas.subscription(user, address)
        assert code(caught) == "subscriptions_per_user"
        leases[0].close()
        quotas.subscription(user, address)


def test_a_user_named_like_an_address_is_not_that_address() -> None:
    quotas = Quotas(LimitSettings(subscriptions_per_user=1))
    quotas.subscription(None, HERE)
    quotas.subscription(HERE, HERE)


def test_a_refused_session_is_not_counted() -> None:
    quotas = Quotas(LimitSettings(sessions_per_user=1, sessions_per_ip=2))
    quotas.session("ann", HERE)
    for _ in range(5):
        with pytest.raises(LimitExceeded):
            quotas.session("ann", HERE)
    quotas.session("bob", HERE)


def test_a_lease_is_given_back_once() -> None:
    quotas = Quotas(LimitSettings(sessions_per_user=2))
    open_one, closed = quotas.session("ann", HERE), quotas.session("ann", HERE)
    for _ in range(3):
        closed.close()
    with quotas.session("ann", HERE), pytest.raises(LimitExceeded):
        quotas.session("ann", HERE)
    open_one.close()
    assert quotas.entries == 0


def test_nothing_is_stored_for_clients_that_have_gone() -> None:
    quotas = Quotas(LimitSettings(requests_per_second=10))
    for number in range(10_000):
        user, address = f"user {number}", f"10.0.{number // 250}.{number % 250}"
        now = number / 100
        quotas.request(user, address, now)
        with quotas.session(user, address), quotas.subscription(user, address):
            pass
        with pytest.raises(LimitExceeded):
            ask(quotas, user, now, 100)
    assert quotas.entries <= 100 * RATE_BURST_SECONDS + 1


@given(st.lists(st.tuples(st.sampled_from(["ann", "bob", None]), st.booleans()), max_size=60))
def test_the_count_is_right_after_any_sequence(steps: list[tuple[str | None, bool]]) -> None:
    """After any sequence of opening and closing, the count is right, and in the end it is 0."""
    quotas, held = (
        Quotas(LimitSettings(sessions_per_user=3, sessions_per_ip=5)),
        list[tuple[str | None, Lease]](),
    )
    for user, opens in steps:
        mine = sum(name == user for name, _ in held)
        if not opens and held:
            held.pop(0)[1].close()
        elif mine < (5 if user is None else 3):
            held.append((user, quotas.session(user, HERE)))
        else:
            with pytest.raises(LimitExceeded):
                quotas.session(user, HERE)
    with ExitStack() as stack:
        for _, lease in held:
            stack.enter_context(lease)
    assert quotas.entries == 0


# ------------------------------------------------------------------------ rate


def taken(rate: Rate, now: float, owner: str = "ann") -> int:
    """How many can be taken at once."""
    count = 0
    while rate.take(("user", owner), now) == 0:
        count += 1
    return count


def test_a_burst_and_then_the_rate() -> None:
    rate = Rate(10)
    assert taken(rate, 100.0) == 10 * RATE_BURST_SECONDS
    assert taken(rate, 100.0, "bob") == 10 * RATE_BURST_SECONDS
    assert taken(rate, 100.05) == 0
    assert taken(rate, 100.1) == 1
    assert taken(rate, 101.1) == 10
    assert taken(rate, 200.0) == 10 * RATE_BURST_SECONDS


def test_a_heavy_request_counts_as_many_and_never_as_more_than_a_burst() -> None:
    quotas = Quotas(LimitSettings(requests_per_second=10))
    quotas.request("ann", "::1", 0.0, weight=15)
    for _ in range(5):
        quotas.request("ann", "::1", 0.0)
    with pytest.raises(LimitExceeded):
        quotas.request("ann", "::1", 0.0)
    with pytest.raises(LimitExceeded):
        quotas.request("ann", "::1", 1.0, weight=15)
    quotas.request("ann", "::1", 2.0, weight=1_000_000)
    with pytest.raises(LimitExceeded):
        quotas.request("ann", "::1", 3.9, weight=1_000_000)
    quotas.request("ann", "::1", 4.0, weight=1_000_000)


def test_a_refusal_says_when_there_will_be_more() -> None:
    quotas = Quotas(LimitSettings(requests_per_second=10))
    with pytest.raises(LimitExceeded) as caught:
        ask(quotas, "ann", 50.0, 1_000)
    assert code(caught) == "rate"
    assert caught.value.retry_after == pytest.approx(0.1)
    quotas.request("ann", HERE, 50.0 + caught.value.retry_after)
    quotas.request(None, HERE, 50.0)


@pytest.mark.parametrize("per_second", [0.1, 1])
def test_a_slow_rate_lets_one_through(per_second: float) -> None:
    rate = Rate(per_second)
    assert taken(rate, 0.0) >= 1
    assert taken(rate, 0.0) == 0
    assert taken(rate, 1 / per_second) >= 1


def test_more_owners_than_can_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RATE_OWNERS_MAX", 100)
    rate = Rate(10)
    for number in range(1_000):
        assert taken(rate, 0.0, str(number)) == 20
        assert len(rate) <= 100
    assert taken(rate, 0.0, "999") == 0


def test_messages_of_a_session_that_come_too_fast() -> None:
    quotas = Quotas(LimitSettings(publishes_per_second=5))
    for _ in range(10):
        quotas.publish("s1", 0.0)
    with pytest.raises(LimitExceeded, match="more than 5 messages and states a second") as caught:
        quotas.publish("s1", 0.0)
    assert code(caught) == "publish_rate"
    quotas.publish("s2", 0.0)
    quotas.publish("s1", 0.2)
    quotas.request("ann", HERE, 1000.0)
    quotas.publish("s3", 1000.0)
    assert quotas.entries == 2
