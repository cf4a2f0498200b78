"""An error from a gateway becomes an exception that a program can catch."""

from __future__ import annotations

import re

import pytest

from headwater.client.errors import error_in_body, error_of, error_of_close, error_of_mutation
from headwater.errors import (
    ConnectionFailed,
    Forbidden,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
    NotFound,
    Refused,
    TimedOut,
    Unauthorized,
    Unavailable,
)
from headwater.protocol import Error
from tests.support.paths import ROOT

CODES: list[tuple[str, int, type[HeadwaterError]]] = [
    ("invalid_query", 0, InvalidQuery),
    ("forbidden", 0, Forbidden),
    ("limit", 0, LimitExceeded),
    ("unavailable", 0, Unavailable),
    ("connection", 0, ConnectionFailed),
    ("token_expired", 0, Unauthorized),
    ("stopping", 0, Unavailable),
    ("something_new", 401, Unauthorized),
    ("something_new", 429, LimitExceeded),
    ("something_new", 404, NotFound),
    ("something_new", 422, Refused),
    ("timed_out", 504, TimedOut),
    ("outcome_unknown", 500, ConnectionFailed),
    ("slow_query", 0, Unavailable),
    ("views", 0, LimitExceeded),
    ("internal", 0, HeadwaterError),
    ("something_new", 418, HeadwaterError),
    ("something_new", 0, HeadwaterError),
]


@pytest.mark.parametrize(("code", "status", "kind"), CODES)
def test_the_class_of_each_error(code: str, status: int, kind: type[HeadwaterError]) -> None:
    error = error_of(Error(code, "where: no", hint="Do.", retryable=True), status)
    assert type(error) is kind
    assert (error.code, str(error), error.hint, error.retryable) == (code, "where: no", "Do.", True)


def test_an_unknown_code_is_an_error_of_the_application() -> None:
    error = error_of(Error("sold_out", "none is left", hint="Wait.", id="r1"))
    assert type(error) is Refused
    assert (error.code, error.hint, error.retryable) == ("sold_out", "Wait.", False)
    assert type(error_of(Error("internal", "a fault", id="r1"))) is HeadwaterError


def test_every_code_of_ours_is_known() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    codes = re.findall(r"^\| `([a-z_]+)` \| (?:[0-9]{3}|–|yes|no) \|", page, re.M)
    assert {"rate", "conflict", "stopping"} <= set(codes)
    for code in codes:
        assert type(error_of(Error(code, "no", id="r1"))) is not Refused, code


def test_when_to_try_again() -> None:
    error = error_of(Error("too_many", "full", retryable=True, retry_after_secs=7.5))
    assert isinstance(error, LimitExceeded)
    assert error.retry_after == 7.5


def test_a_body() -> None:
    body = b'{"error": {"code": "limit", "message": "full", "retry_after_secs": 2, "new": 1}}'
    assert error_in_body(429, body) == Error("limit", "full", retry_after_secs=2)


@pytest.mark.parametrize(("status", "retryable"), [(502, True), (500, True), (404, False)])
def test_a_page_of_a_proxy(status: int, retryable: bool) -> None:
    error = error_in_body(status, b"<html>")
    assert error.retryable is retryable
    assert str(status) in error.message


@pytest.mark.parametrize(
    ("status", "body", "code", "retryable"),
    [
        (502, b"<html>", "outcome_unknown", True),
        (504, b"", "outcome_unknown", True),
        (403, b"<html>", "forbidden", False),
        (503, b'{"error": {"code": "unavailable", "message": "starting"}}', "unavailable", False),
    ],
)
def test_an_error_of_a_proxy_leaves_the_outcome_of_a_mutation_unknown(
    status: int, body: bytes, code: str, retryable: bool
) -> None:
    error = error_of_mutation(status, body)
    assert (error.code, error.retryable) == (code, retryable)


@pytest.mark.parametrize(
    ("code", "kind"), [(4401, Unauthorized), (4429, LimitExceeded), (1012, Unavailable)]
)
def test_close_codes(code: int, kind: type[HeadwaterError]) -> None:
    assert type(error_of_close(code, "")) is kind


def test_a_plain_close_says_nothing() -> None:
    assert error_of_close(1000, "") is None
