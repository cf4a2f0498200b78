"""Conditions as text on a command line: `region = 7`, `note is null`.

Each text is one condition, and all of them must be true. Values are texts; checking the filter
against its table converts them to the types of the columns. JSON is also accepted, for filters that
this form cannot express. `in_words` writes a whole filter as in SQL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from headwater.errors import InvalidQuery
from headwater.live.filters.filter import (
    And,
    Compare,
    Filter,
    In,
    IsNull,
    Like,
    Not,
    Or,
    from_json,
)

_CONDITION = re.compile(
    r"""\s*(?P<column>"[^"]+"|[^\s"=<>!]+)\s*
        (?: (?P<compare>!=|<=|>=|<>|=|<|>)
          | (?P<word>not\s+in|not\s+i?like|in|i?like|between|is\s+not\s+null|is\s+null)\b )
        \s*(?P<value>.*?)\s*""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


def parse_conditions(texts: Iterable[str]) -> Filter:
    """All of the conditions as one filter. InvalidQuery names the condition that is not valid.

    >>> parse_conditions(["region = 7", "status in open, held"])  # doctest: +NORMALIZE_WHITESPACE
    And(parts=(Compare(column='region', operator='=', value='7'),
               In(column='status', values=('open', 'held'))))
    """
    return And(tuple(_parse(text) for text in texts))


def _parse(text: str) -> Filter:
    if text.lstrip().startswith(("[", "{")):
        return _from_json_text(text)
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise InvalidQuery(
            f"{text!r:.200} is not a condition",
            hint="Write COLUMN OPERATOR VALUE: region = 7, status in open,held, note is null.",
        )
    column, value = match["column"].strip('"'), match["value"]
    operator = match["compare"] or " ".join(match["word"].lower().split())
    operator = "!=" if operator == "<>" else operator
    if operator.startswith("is "):
        return from_json([column, operator] if not value else [column, operator, value], path=text)
    if operator in ("in", "not in", "between"):
        return from_json([column, operator, [_bare(each) for each in value.split(",")]], path=text)
    return from_json([column, operator, _bare(value)], path=text)


def _from_json_text(text: str) -> Filter:
    try:
        return from_json(msgspec.json.decode(text))
    except msgspec.DecodeError as error:
        raise InvalidQuery(f"{text!r:.200} is not JSON: {error}") from None


def _bare(value: str) -> str:
    """The value without its quotes, if it has any."""
    value = value.strip()
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def in_words(where: Filter) -> str:
    """The filter for people to read.

    >>> from headwater.live.filters.filter import c
    >>> in_words((c.region == 7) & (c.status.not_in("open", None) | ~(c.note.like("a%"))))
    "region = 7 and (status not in ('open', null) or not note like 'a%')"
    """
    match where:
        case And(parts):
            return " and ".join(_within(part) for part in parts) or "true"
        case Or(parts):
            return " or ".join(_within(part) for part in parts) or "false"
        case Not(In(column, values)):
            return f"{column} not in {_values(values)}"
        case Not(IsNull(column)):
            return f"{column} is not null"
        case Not(part):
            return f"not {_within(part)}"
        case Compare(column, operator, value):
            return f"{column} {operator} {_value(value)}"
        case In(column, values):
            return f"{column} in {_values(values)}"
        case Like(column, pattern, fold):
            return f"{column} {'ilike' if fold else 'like'} {_value(pattern)}"
        case IsNull(column):
            return f"{column} is null"


def _within(part: Filter) -> str:
    grouped = isinstance(part, And | Or) and len(part.parts) > 1
    return f"({in_words(part)})" if grouped else in_words(part)


def _values(values: Any) -> str:
    """The values as a list. A placeholder for unknown values prints itself."""
    if not isinstance(values, tuple):
        return str(values)
    return f"({', '.join(map(_value, values))})"


def _value(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return "'" + value.replace("'", "''") + "'"
    return str(value)
