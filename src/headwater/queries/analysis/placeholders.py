"""Converts psycopg's placeholders (`%s`, `%(name)s`, `%%`) to those of the server (`$1`, `$2`, …).

So a statement is identified by the text that the server gets. Pure; each text is converted once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from headwater.errors import ConfigError

_STATEMENT_TEXTS_MAX = 1_000
"""Statements whose converted texts are cached. The one used longest ago is dropped first."""


# As in the driver, a percent sign at the end of a line stands for itself.
_PLACEHOLDER = re.compile(r"%(?:\(([^)]+)\)(.)|(.))")


class Converted(msgspec.Struct, frozen=True):
    """A text for the server. `names` are the parameters in the order of their numbers; for
    positional placeholders there are none, and `count` says how many."""

    sql: str
    names: tuple[str, ...] = ()
    count: int = 0


@lru_cache(maxsize=_STATEMENT_TEXTS_MAX)
def convert(sql: str) -> Converted:
    """The text with numbered parameters. A name that is used twice is one parameter.

    >>> convert("select %(a)s, %(b)s, %(a)s, '5 %%'")
    Converted(sql="select $1, $2, $1, '5 %'", names=('a', 'b'), count=2)
    """
    numbers: dict[str, int] = {}
    positional = 0

    def number(match: re.Match[str]) -> str:
        nonlocal positional
        name, format, other = match.groups()
        if other == "%":
            return "%"
        if name is None and other == "s":
            positional += 1
            return f"${positional}"
        if name is not None and format == "s":
            return f"${numbers.setdefault(name, len(numbers) + 1)}"
        raise ConfigError(
            f"{match[0]!r} is not a placeholder",
            hint="Placeholders are %s and %(name)s; a percent sign itself is written %%.",
        )

    text = _PLACEHOLDER.sub(number, sql)
    if positional and numbers:
        raise ConfigError(
            "a statement mixes %s with %(name)s", hint="Use one kind of placeholder in a statement."
        )
    return Converted(text, tuple(numbers), positional or len(numbers))


def placed(sql: str, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """The text for the server and its values in order. Without arguments the text is sent as it
    is.

    >>> placed("select %(b)s + %(a)s", (), {"a": 1, "b": 2})
    ('select $1 + $2', (2, 1))
    >>> placed("select 5 % 3", (), {})
    ('select 5 % 3', ())
    """
    if args and named:
        raise ConfigError(
            "a statement was given arguments by place and by name",
            hint='ctx.fetch("… %s", 5) or ctx.fetch("… %(region)s", region=5)',
        )
    if not args and not named:
        return sql, ()
    converted = convert(sql)
    if args:
        if converted.names or converted.count != len(args):
            raise ConfigError(
                f"the statement has {_described(converted)}, and {len(args)} were given by place",
                hint="Give one argument for each %s.",
            )
        return converted.sql, tuple(args)
    missing = [name for name in converted.names if name not in named]
    if missing or (converted.count and not converted.names):
        raise ConfigError(
            f"the statement has {_described(converted)}; given by name: {', '.join(named)}",
            hint="Give an argument for each %(name)s, under its name.",
        )
    return converted.sql, tuple(named[name] for name in converted.names)


def _described(converted: Converted) -> str:
    if converted.names:
        return "the placeholders " + ", ".join(f"%({name})s" for name in converted.names)
    return f"{converted.count} placeholders %s"
