"""Errors of the driver as ours: which they are, what they say, and no password."""

from __future__ import annotations

from typing import Any

import pytest
from bson.errors import InvalidBSON
from pymongo import errors

from headwater.capture.mongodb.failures import translate, translated, without_password
from headwater.errors import ConfigError, PositionLost, SourceRefused, SourceUnavailable

URL = "mongodb://me:p%40ss@db.example:27017/shop"


def failure(code: int) -> errors.OperationFailure:
    return errors.OperationFailure("it failed", code, {"errmsg": "it failed", "code": code})


@pytest.mark.parametrize(
    ("error", "kind", "hint"),
    [
        (failure(286), PositionLost, "resnapshot"),
        (failure(280), PositionLost, "resnapshot"),
        (failure(260), PositionLost, "resnapshot"),
        (failure(40573), SourceRefused, "rs.initiate()"),
        (failure(13), SourceRefused, "grantRolesToUser"),
        (failure(18), SourceRefused, "authSource"),
        (failure(8000), SourceRefused, "authSource"),
        (failure(10334), SourceRefused, "exclude"),
        (failure(40324), SourceRefused, "6.0"),
        (failure(11600), SourceUnavailable, None),
        (
            errors.ServerSelectionTimeoutError("db: Name or service not known"),
            SourceUnavailable,
            "host",
        ),
        (errors.AutoReconnect("connection closed"), SourceUnavailable, "host"),
        (OSError("broken"), SourceUnavailable, "host"),
        (errors.InvalidURI("no"), ConfigError, "mongodb://"),
        (errors.ConfigurationError("reports wire version 5"), SourceRefused, "6.0"),
        (errors.ConfigurationError("The DNS query name does not exist"), SourceUnavailable, "host"),
        (errors.ConfigurationError("unknown option"), ConfigError, "URL"),
        (InvalidBSON("broken"), SourceRefused, "document"),
        (errors.CursorNotFound("gone", 43), SourceUnavailable, None),
    ],
)
def test_what_an_error_becomes(error: Exception, kind: Any, hint: str | None) -> None:
    found = translate(error, URL, "reading")
    assert type(found) is kind
    assert str(found).startswith("reading: ")
    assert (found.hint is None) if hint is None else (hint in (found.hint or ""))


def test_a_message_has_neither_password_nor_topology() -> None:
    error = errors.AutoReconnect("p@ss p%40ss, Timeout: 30s, Topology Description: <...>")
    with pytest.raises(SourceUnavailable) as caught, translated(URL, "reading"):
        raise error
    assert str(caught.value) == "reading: *** ***"


def test_a_url_without_a_password() -> None:
    assert without_password("as it is", "mongodb://db/shop") == "as it is"
    assert without_password("as it is", "mongodb://me@db/shop") == "as it is"
