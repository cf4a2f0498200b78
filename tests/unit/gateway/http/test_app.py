"""The HTTP status of every error."""

from __future__ import annotations

import pytest

from headwater.errors import (
    DatabaseError,
    FunctionFailed,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
    NotFound,
    Refused,
    ResultError,
    TimedOut,
    Unavailable,
)
from headwater.gateway.http.app import refusal


def outcome_unknown() -> Unavailable:
    error = Unavailable("lost while committing", code="outcome_unknown")
    error.retryable = False
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidQuery("x"), 400),
        (NotFound("x", code="query_unknown"), 404),
        (Refused("x", code="limit"), 422),
        (LimitExceeded("x", code="mutations_busy"), 429),
        (FunctionFailed("x"), 500),
        (ResultError("x"), 500),
        (outcome_unknown(), 500),
        (DatabaseError("x"), 503),
        (Unavailable("x"), 503),
        (TimedOut("x"), 504),
    ],
    ids=lambda value: getattr(value, "code", str(value)),
)
def test_statuses(error: HeadwaterError, status: int) -> None:
    assert refusal(error).status_code == status
