"""Encodes the results of functions as JSON, by their declared types.

A value that does not fit its type, that is not possible in JSON, or that is too large is an error
with its path. NaN, infinities and bytes are not possible in JSON: they are written as text, as
PostgreSQL writes them.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import msgspec

from headwater.errors import ConfigError, ResultError
from headwater.limits import QUERY_RESULT_BYTES_MAX
from headwater.protocol import plain
from headwater.queries import types
from headwater.queries.arguments import path_and_reason

_encode = msgspec.json.Encoder(enc_hook=types.encode).encode


class Returns:
    """The declared type of a function's result; `Any` if there is none."""

    def __init__(self, function: str, type_: Any = Any) -> None:
        self.function = function
        self.type = type_
        if reason := types.unsupported_reason(type_):
            raise ConfigError(
                f"{function}: what it returns: {reason}",
                hint="Return types that JSON can hold, structs, dataclasses or pydantic models; "
                "or leave the annotation out.",
            )

    def convert(self, value: Any) -> Any:
        """The value as the declared type. ResultError if it does not fit."""
        if self.type is Any:
            return value
        try:
            return types.convert(value, self.type)
        except msgspec.ValidationError as error:
            path, reason = path_and_reason(error)
            raise ResultError(
                f"{self.function} returned what it does not declare: {path}: {reason}",
                hint="Correct the function's return type, or what it returns.",
            ) from None

    def encode(self, value: Any) -> bytes:
        """The value as JSON."""
        value = self.convert(value)
        try:
            encoded = _encode(_as_json_values(value) if _needs_care(value) else value)
        except (NotImplementedError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._cannot_be_sent(value, error) from error
        if len(encoded) > QUERY_RESULT_BYTES_MAX:
            raise ResultError(
                f"{self.function} returned {len(encoded):,} bytes;"
                f" at most {QUERY_RESULT_BYTES_MAX:,} are sent",
                code="result_too_large",
                hint="Select fewer columns, give it a limit, or page through it.",
            )
        return encoded

    def _cannot_be_sent(self, value: Any, error: Exception) -> ResultError:
        path, culprit = next(_culprits(value), ("$", value))
        reason = (
            str(error) if not isinstance(error, NotImplementedError) else "JSON cannot represent it"
        )
        if isinstance(error, RecursionError):
            reason = "nested too deeply"
        return ResultError(
            f"{self.function} returned what cannot be sent:"
            f" {path}: {type(culprit).__name__}: {reason}",
            hint="Cast it to text in SQL, or turn it into what JSON can hold.",
        )


_SAFE = {
    type(None), bool, int, str, Decimal, uuid.UUID,
    datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
}  # fmt: skip


def _needs_care(value: Any) -> bool:
    """Whether it may contain a value that JSON does not have. Most results do not, and this check
    takes a tenth of the time of `_as_json_values`."""
    parts: Iterable[Any]
    kind = type(value)
    if kind is dict:
        parts = value.values()
    elif kind is list or kind is tuple:
        parts = value
    elif isinstance(value, msgspec.Struct):
        parts = [getattr(value, name) for name in kind.__struct_fields__]
    else:
        return kind not in _SAFE and not (kind is float and math.isfinite(value))
    for part in parts:
        kind = type(part)
        if kind in _SAFE or (kind is float and math.isfinite(part)):
            continue
        if _needs_care(part):
            return True
    return False


_BUILTIN_TYPES = (
    bytes, bytearray, datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
    uuid.UUID, Decimal,
)  # fmt: skip


def _as_json_values(value: Any) -> Any:
    """The value, with texts for values that JSON does not have."""
    return _plain(msgspec.to_builtins(value, builtin_types=_BUILTIN_TYPES, enc_hook=types.encode))


def _plain(value: Any) -> Any:
    if type(value) is dict:
        return {name: _plain(each) for name, each in value.items()}
    if type(value) is list or type(value) is tuple:
        return [_plain(each) for each in value]
    if type(value) is float or type(value) is bytes:
        return plain(value)
    if type(value) is bytearray or type(value) is memoryview:
        return plain(bytes(value))
    return value


def _culprits(value: Any, path: str = "$", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The innermost parts of a value that cannot be encoded, and their paths."""
    if depth > 50 or _can_be_encoded(value):
        return
    found = False
    for step, each in _parts(value):
        for culprit in _culprits(each, path + step, depth + 1):
            found = True
            yield culprit
    if not found:
        yield path, value


def _can_be_encoded(value: Any) -> bool:
    try:
        _encode(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case Mapping():
            yield from ((f".{name}", each) for name, each in value.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"[{i}]", each) for i, each in enumerate(value))
        case msgspec.Struct():
            yield from ((f".{n}", getattr(value, n)) for n in type(value).__struct_fields__)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            yield from ((f".{name}", getattr(value, name)) for name in names)
