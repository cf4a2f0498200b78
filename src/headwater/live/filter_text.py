"""Conditions as people type them on a command line: `region = 7`, `note is null`.

One condition a text; several of them are all of them. Values are texts, which checking the filter
against its table turns into what the columns hold. JSON is taken too, for what this cannot say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from headwater.errors import InvalidQuery
from headwater.live.filter import And, Filter, from_json

_CONDITION = re.compile(
    r"""\s*(?P<column>"[^"]+"|[^\s"=<>!]+)\s*
        (?: (?P<compare>!=|<=|>=|<>|=|<|>)
          | (?P<word>not\s+in|not\s+i?like|in|i?like|between|is\s+not\s+null|is\s+null)\b )
        \s*(?P<value>.*?)\s*""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


def parse_conditions(texts: Iterable[str]) -> Filter:
    """All of the conditions. InvalidQuery names the one that cannot be read.

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
    """The value without the quotes that it may be put in."""
    value = value.strip()
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value
