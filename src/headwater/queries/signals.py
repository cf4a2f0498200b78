"""Sends signals: inside a mutation in its transaction, otherwise in one of their own.

A signal is a row of the log, written by `headwater.signal` in the database, which also checks the
topic's name. Its rows are sent when its transaction commits, and never if it does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from headwater.errors import ConfigError

SIGNAL = "select headwater.signal(%s, %s::pg_catalog.text[])"


def ids_of(keys: Iterable[Any]) -> list[str]:
    """Keys in the form of signals: one value as its text, several as a JSON array.

    >>> ids_of([7, "b", (7, "b")])
    ['7', 'b', '[7,"b"]']
    """
    if isinstance(keys, str | bytes):
        raise ConfigError("the ids of a signal are a text", hint='Give a list: ["42"].')
    return [_id_of(key) for key in keys]


def _id_of(key: Any) -> str:
    match key:
        case list() | tuple():
            return msgspec.json.encode(key).decode()
        case bool():
            return "true" if key else "false"
        case str() | int() | float() | Decimal() | UUID():
            return str(key)
        case datetime() | date() | time():
            return key.isoformat()
        case bytes():
            return "\\x" + key.hex()
    raise ConfigError(
        f"{type(key).__name__} cannot be a key in a signal",
        hint="Give the primary keys of rows; those of several columns as tuples.",
    )
