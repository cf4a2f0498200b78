"""Names such as `chat:42`, and patterns such as `chat:{id}` that they match.

A `{name}` stands for one or more characters other than `:`, `,` and control characters. So a value
of a client or a row can never change another part of the name. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from headwater.errors import ConfigError, InvalidQuery
from headwater.limits import TOPIC_CHARS_MAX, TOPIC_VALUE_CHARS_MAX

_CONTROL = "\x00-\x1f\x7f-\x9f\u2028\u2029"
_VALUE = f"[^:,{_CONTROL}]{{1,{TOPIC_VALUE_CHARS_MAX}}}"
_PLACE = re.compile(r"\{([^{}]*)\}")
_FORBIDDEN = re.compile(f"[,{_CONTROL}\ud800-\udfff]")
_FIXED = re.compile(r"[A-Za-z0-9_.:/@#-]*")


def check_name(name: str, *, path: str = "topic") -> None:
    """InvalidQuery for a text that cannot be the name of a topic or channel."""
    if not name or len(name) > TOPIC_CHARS_MAX:
        raise InvalidQuery(
            f"a name has 1 to {TOPIC_CHARS_MAX} characters, not {len(name):,}", path=path
        )
    if found := _FORBIDDEN.search(name):
        raise InvalidQuery(
            f"a name has neither commas nor control characters, and {name!r:.100} has one"
            f" at {found.start()}",
            path=path,
        )


class Pattern:
    """A pattern, ready to be matched and filled in.

    >>> chat = Pattern("chat:{id}")
    >>> chat.match("chat:42"), chat.match("chat:42:7"), chat.fill({"id": 42})
    ({'id': '42'}, None, 'chat:42')
    """

    __slots__ = ("_fixed", "_regex", "names", "skeleton", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._fixed, self.names = _split(text)
        """The texts between the parameters: one more than there are parameters."""
        self.skeleton = "{}".join(self._fixed)
        """Equal for patterns that match the same names."""
        places = (f"({_VALUE})" if at else "" for at in range(len(self._fixed)))
        self._regex = re.compile(
            "".join(
                place + re.escape(fixed) for place, fixed in zip(places, self._fixed, strict=True)
            )
        )

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"

    def match(self, name: str) -> dict[str, str] | None:
        """The parameters of a name; None if the pattern does not match it."""
        found = self._regex.fullmatch(name)
        return None if found is None else dict(zip(self.names, found.groups(), strict=True))

    def fill(self, values: Mapping[str, Any]) -> str | None:
        """The name with these values; None if one of them is not valid in a name."""
        parts = [self._fixed[0]]
        for name, fixed in zip(self.names, self._fixed[1:], strict=True):
            value = written(values.get(name))
            if value is None:
                return None
            parts += (value, fixed)
        filled = "".join(parts)
        return filled if self._regex.fullmatch(filled) and len(filled) <= TOPIC_CHARS_MAX else None


def written(value: Any) -> str | None:
    """A column's value as text in a name; None for null and for values that are not plain.

    >>> written(7), written(True), written(None), written([7])
    ('7', 'true', None, None)
    """
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int() | float() | Decimal() | UUID():
            return str(value)
        case datetime() | date() | time():
            return value.isoformat()
    return None


def _split(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fixed parts and the names between them. ConfigError for an invalid pattern."""
    parts = _PLACE.split(text)
    fixed, names = tuple(parts[0::2]), tuple(parts[1::2])
    if not text or len(text) > TOPIC_CHARS_MAX or not all(map(_FIXED.fullmatch, fixed)):
        raise _no_pattern(text, "it has characters other than letters, digits and _ . : / @ # -")
    if any(not name.isidentifier() for name in names):
        raise _no_pattern(text, "a parameter has a name such as {id}")
    if len(set(names)) < len(names):
        raise _no_pattern(text, "it has two parameters of the same name")
    if any(":" not in between for between in fixed[1:-1]):
        raise _no_pattern(text, "two parameters must have a colon between them")
    return fixed, names


def _no_pattern(text: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{text!r:.100} is not a valid pattern: {reason}", hint='Write one as "chat:{id}".'
    )
