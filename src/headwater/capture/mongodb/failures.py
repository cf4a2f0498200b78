"""Errors of the driver and the server, as ours: each with the reason and what to do.

What waiting may fix is `SourceUnavailable`; so is everything that the server says and we do not
know, because the next attempt shows it again. A password is removed from every message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from bson.errors import BSONError
from pymongo import errors

from headwater.capture.kinds import ENCODED
from headwater.errors import (
    ConfigError,
    PositionLost,
    SourceError,
    SourceRefused,
    SourceUnavailable,
)

VERSION_MIN = (6, 0)
"""The first with pre- and post-images, `create` events in change streams and, since 5.0, snapshot
reads outside a transaction. Older ones no longer get security fixes."""

STANDALONE_FIX = (
    "Change streams need a replica set; one server is enough. Start mongod with --replSet rs0 and"
    " run rs.initiate() once in mongosh."
)
RIGHTS_FIX = (
    'Give the user the role "read" on the database:'
    ' db.grantRolesToUser("USER", [{role: "read", db: "DATABASE"}])'
)
RESNAPSHOT = "Copy the tables again: headwater source resnapshot NAME"

_LOST = {260, 280, 286, 40585, 40615}
"""InvalidResumeToken, ChangeStreamFatalError, ChangeStreamHistoryLost, and what older ones say."""
_TOO_LARGE = {10334, 17420}
_REFUSED = {
    13: ("the user lacks a right", RIGHTS_FIX),
    18: ("the user name or the password is wrong", "Check the URL, and its authSource."),
    8000: ("the user name or the password is wrong", "Check the URL, and its authSource."),
    59: ("the server does not know a command", "Only MongoDB 6.0 and later are supported."),
    166: ("the server cannot read the collection this way", "Views cannot be captured."),
    40324: ("the server does not know a stage", "Only MongoDB 6.0 and later are supported."),
    40573: ("the server is not a member of a replica set", STANDALONE_FIX),
}


@contextmanager
def translated(url: str, doing: str) -> Iterator[None]:
    """Raise errors of the driver as ours; `doing` says what failed."""
    try:
        yield
    except (errors.PyMongoError, BSONError, OSError) as error:
        raise translate(error, url, doing) from error


def translate(error: Exception, url: str, doing: str) -> SourceError | ConfigError:
    """The error to raise instead."""
    text = f"{doing}: {without_password(_message(error), url)}"
    match error:
        case errors.OperationFailure():
            return _of_server(error, text, doing)
        case errors.InvalidURI():
            return ConfigError(text, hint=f"mongodb://USER:PASSWORD@HOST/DATABASE. {ENCODED}")
        case errors.ConfigurationError() if "wire version" in text:
            return SourceRefused(text, hint="Only MongoDB 6.0 and later are supported.")
        case errors.ConfigurationError() if "DNS" in text or "nodename" in text or "resol" in text:
            return SourceUnavailable(text, hint="Check the host in the URL.")
        case errors.ConfigurationError():
            return ConfigError(text, hint="Check the URL.")
        case errors.ConnectionFailure() | OSError():
            return SourceUnavailable(
                text, hint="Check the host and the port in the URL, and that the server runs."
            )
        case BSONError():
            return SourceRefused(text, hint="A document is not valid BSON: replace or remove it.")
    return SourceUnavailable(text)


def _of_server(error: errors.OperationFailure, text: str, doing: str) -> SourceError:
    code = error.code or 0
    if code in _LOST:
        return PositionLost(f"{text} (code {code})", hint=RESNAPSHOT)
    if code in _TOO_LARGE:
        return SourceRefused(
            f"{text} (code {code}): an event is larger than 16 MB",
            hint="MongoDB 6.0.9 and later split it. Upgrade, or leave large fields out (exclude).",
        )
    if code in _REFUSED:
        reason, fix = _REFUSED[code]
        return SourceRefused(f"{doing}: {reason} (code {code}: {_server_text(text)})", hint=fix)
    return SourceUnavailable(f"{text} (code {code})")


def _server_text(text: str) -> str:
    return text.split(": ", 1)[-1]


def _message(error: Exception) -> str:
    """Without the driver's description of the topology and of the reply."""
    if isinstance(error, errors.OperationFailure):
        return str((error.details or {}).get("errmsg") or error).split(", full error:")[0]
    return re.split(r", Timeout:|, Topology Description| \(configured timeouts", str(error))[0]


def without_password(text: str, url: str) -> str:
    """
    >>> without_password("cannot log in with s%40cret or s@cret", "mongodb://me:s%40cret@db/shop")
    'cannot log in with *** or ***'
    """
    location = urlsplit(url).netloc.rpartition("@")[0]
    password = location.partition(":")[2]
    for secret in (password, unquote(password)):
        if secret:
            text = text.replace(secret, "***")
    return text
