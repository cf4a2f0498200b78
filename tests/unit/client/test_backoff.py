"""Pauses double up to a bound, are shortened by chance, and end."""

from __future__ import annotations

from headwater.client.backoff import Backoff


def test_pauses_double_until_it_gives_up() -> None:
    backoff = Backoff()
    pauses = [backoff.failed(chance=1.0) for _ in range(10)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30, None]


def test_chance_shortens_a_pause_by_up_to_half() -> None:
    assert Backoff().failed(chance=0.0) == 0.5
    assert Backoff().failed(chance=0.5) == 0.75


def test_the_server_may_ask_for_more() -> None:
    backoff = Backoff()
    assert backoff.failed(chance=1.0, at_least=60) == 60
    assert backoff.failed(chance=1.0, at_least=0.1) == 2


def test_any_received_message_resets_the_backoff() -> None:
    backoff = Backoff(failures_max=3)
    assert [backoff.failed(1.0), backoff.failed(1.0)] == [1, 2]
    backoff.succeeded()
    assert [backoff.failed(1.0), backoff.failed(1.0), backoff.failed(1.0)] == [1, 2, None]
