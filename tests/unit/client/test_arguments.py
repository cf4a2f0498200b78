"""What programs pass is checked before anything is sent."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from headwater.client.arguments import call_arguments, position_of
from headwater.errors import InvalidQuery, LimitExceeded
from headwater.limits import REQUEST_BYTES_MAX


def test_arguments_become_what_json_can_hold() -> None:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert call_arguments(None, {"at": at, "amount": Decimal("1.50"), "ids": {1}}) == {
        "at": "2026-01-31T12:00:00Z",
        "amount": "1.50",
        "ids": [1],
    }


def test_an_argument_that_cannot_be_sent() -> None:
    with pytest.raises(InvalidQuery, match="args"):
        call_arguments(None, {"what": object()})


def test_an_argument_given_twice() -> None:
    with pytest.raises(InvalidQuery, match=r"args\.region: .* twice"):
        call_arguments({"region": 1}, {"region": 2})


def test_arguments_that_are_too_large_for_one_request() -> None:
    with pytest.raises(LimitExceeded) as caught:
        call_arguments({"text": "x" * REQUEST_BYTES_MAX}, {})
    assert (caught.value.code, caught.value.retryable) == ("too_large", False)


def test_an_invalid_position() -> None:
    with pytest.raises(InvalidQuery, match="after: 'yesterday' is not a position"):
        position_of("yesterday", "after")
