"""LIKE and ILIKE: the pattern taken apart, and the cheapest test that decides it.

LIKE compares characters and is exact in memory under every deterministic collation. ILIKE lowers
both sides as the column's collation does, and there memory knows less; see `fold_guard`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from headwater.model import Column

Wildcard = Literal["%", "_"]


class Token(NamedTuple):
    """A wildcard, or the literal text between wildcards."""

    literal: str
    wildcard: Wildcard | None = None


_ANY = Token("", "%")
_ONE = Token("", "_")


def tokens(pattern: str) -> list[Token]:
    """The pattern as literals and wildcards; `%%` is one wildcard.

    >>> [token.wildcard or token.literal for token in tokens(r"100\\%_a%%")]
    ['100%', '_', 'a', '%']
    """
    found: list[Token] = []
    literal = ""
    characters = iter(pattern)
    for character in characters:
        if character in "%_":
            if literal:
                found.append(Token(literal))
                literal = ""
            wildcard = _ANY if character == "%" else _ONE
            if wildcard is _ONE or found[-1:] != [_ANY]:
                found.append(wildcard)
        elif character == "\\":
            try:
                literal += next(characters)
            except StopIteration:
                raise ValueError("a pattern must not end with the escape character \\") from None
        else:
            literal += character
    return [*found, Token(literal)] if literal else found


def test_of(pattern: str) -> tuple[str, object]:
    """Python source over `{v}` with one constant `{k}`, and the constant. `{lower}` is where the
    text is to be lowered for ILIKE: no more of it than is looked at.

    >>> test_of("asset-%")
    ('{v}[:6]{lower} == {k}', 'asset-')
    """
    match [token.wildcard or token for token in tokens(pattern)]:
        case []:
            return "{v} == {k}", ""
        case [Token(text)]:
            return "{v}{lower} == {k}", text
        case ["%"]:
            return "{v} is not {k}", None
        case [Token(text), "%"]:
            return f"{{v}}[:{len(text)}]{{lower}} == {{k}}", text
        case ["%", Token(text)]:
            return "{v}{lower}.endswith({k})", text
        case ["%", Token(text), "%"]:
            return "{k} in {v}{lower}", text
    return "{k}({v}{lower}) is not None", _regex(pattern)


def _regex(pattern: str) -> Callable[[str], object]:
    """Each `%x` but the last becomes an atomic group: the first place where x fits is as good as
    any later one, so no pattern can make the match exponential."""
    segments = [""]
    for token in tokens(pattern):
        if token.wildcard == "%":
            segments.append("")
        else:
            segments[-1] += "." if token.wildcard else re.escape(token.literal)
    if len(segments) > 1:
        first, *middle, last = segments
        segments = [first, *(f"(?>.*?{segment})" for segment in middle), f".*{last}"]
    return re.compile("".join(segments), re.DOTALL).fullmatch


def prefix(pattern: str) -> str:
    """The literal text every match begins with.

    >>> prefix("asset-%7"), prefix("%x")
    ('asset-', '')
    """
    found = tokens(pattern)
    return found[0].literal if found else ""


# KELVIN SIGN and LATIN CAPITAL LETTER I WITH DOT ABOVE lower to ASCII letters, or do not, depending
# on who is asked; no other character outside ASCII does.
_LOWERS_TO_ASCII = re.compile("[\u212a\u0130]")


def fold_guard(column: Column, pattern: str) -> str | None:
    """Source of the condition on `{v}` under which memory folds case as the database does.

    None when it never can: a pattern with letters outside ASCII is the database's to judge. The
    condition calls `undecided()` rather than being false. Collations that order by code point fold
    ASCII alike and map nothing else onto ASCII but two characters; of other collations we only know
    ASCII, and not even the letter I, which is special in Turkish.
    """
    if not pattern.isascii():
        return None
    if column.collation == "C":
        return "({v}.isascii() or not lowers_to_ascii({v}) or undecided())"
    if "i" not in pattern.lower() or _speaks_no_turkish(column.collation):
        return "({v}.isascii() or undecided())"
    if "I" in pattern:
        return None
    return "({v}.isascii() and 'I' not in {v} or undecided())"


def _speaks_no_turkish(collation: str | None) -> bool:
    return collation is not None and collation[:3] not in ("def", "tr-", "tr_", "az-", "az_")


def lowers_to_ascii(value: str) -> bool:
    return _LOWERS_TO_ASCII.search(value) is not None
