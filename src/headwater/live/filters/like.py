"""LIKE and ILIKE: parses a pattern, and finds the cheapest test for it.

LIKE compares characters, and memory is exact under every deterministic collation. ILIKE lowers both
sides as the column's collation does, and memory cannot always do that; see `fold_guard`.

A test reads the text once. Between two `%` the first match is as good as any later one, and
`str.find` finds a literal in linear time. A part with a `_` between literals may need many
attempts: they are counted, and after `_LIKE_STEPS_MAX` the database decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from headwater.live.needs import Undecided
from headwater.model import Column

_LIKE_STEPS_MAX = 20_000
"""Attempts to match a pattern with a `_` between literals. After that, the database decides."""


Wildcard = Literal["%", "_"]


class Token(NamedTuple):
    """A wildcard, or the literal text between wildcards."""

    literal: str
    wildcard: Wildcard | None = None


_ANY = Token("", "%")
_ONE = Token("", "_")
_PART = re.compile(r"%+|_|\\(.?)|[^%_\\]+", re.DOTALL)


def tokens(pattern: str) -> list[Token]:
    """The pattern as literals and wildcards; `%%` is one wildcard.

    >>> [token.wildcard or token.literal for token in tokens(r"100\\%_a%%")]
    ['100%', '_', 'a', '%']
    """
    found: list[Token] = []
    literal: list[str] = []
    for part in _PART.finditer(pattern):
        text = part[0]
        if text[0] in "%_":
            if literal:
                found.append(Token("".join(literal)))
                literal.clear()
            found.append(_ANY if text[0] == "%" else _ONE)
        elif text == "\\":
            raise ValueError("a pattern must not end with the escape character \\")
        else:
            literal.append(text if part[1] is None else part[1])
    return [*found, Token("".join(literal))] if literal else found


def test_of(pattern: str) -> tuple[str, object]:
    """Python source over `{v}` with one constant `{k}`, and the constant. `{lower}` marks the part
    of the text to be lowered for ILIKE: only the part that is compared.

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
    return "{k}({v}{lower})", matcher(pattern)


def reads_whole_text(template: str) -> bool:
    """Whether such a test takes longer for a longer text."""
    return not template.startswith("{v}[:") and template not in ("{v} == {k}", "{v} is not {k}")


class Segment:
    """The part between two `%`: literals at fixed places."""

    __slots__ = ("_anchor", "_others", "_place", "length")

    def __init__(self, parts: list[Token]) -> None:
        literals: list[tuple[int, str]] = []
        self.length = 0
        for part in parts:
            if part.literal:
                literals.append((self.length, part.literal))
            self.length += len(part.literal) or 1
        # The longest literal is searched first: it occurs at the fewest places.
        literals.sort(key=lambda each: -len(each[1]))
        self._place, self._anchor = literals[0] if literals else (0, "")
        self._others = literals[1:]

    def fits(self, text: str, at: int) -> bool:
        """Whether the text has the literals, if the segment begins at this character."""
        return text.startswith(self._anchor, at + self._place) and all(
            text.startswith(literal, at + place) for place, literal in self._others
        )

    def find(self, text: str, start: int, end: int, steps: int) -> tuple[int, int]:
        """The first place between start and end, or -1; and how many steps are left then."""
        if not self._anchor:
            return (start if start + self.length <= end else -1), steps
        behind = self.length - self._place - len(self._anchor)
        at = text.find(self._anchor, start + self._place, end - behind)
        if not self._others:
            return (at - self._place if at >= 0 else -1), steps
        # A long anchor costs `str.find` some time before it begins.
        cost = 1 + len(self._anchor) // 64
        while at >= 0:
            steps -= cost
            for place, literal in self._others:
                steps -= 1
                if not text.startswith(literal, at - self._place + place):
                    break
            else:
                return at - self._place, steps
            if steps < 0:
                raise Undecided
            at = text.find(self._anchor, at + 1, end - behind)
        return -1, steps


def matcher(pattern: str) -> Callable[[str], bool]:
    """The function that decides whether a text matches. It raises Undecided after
    `_LIKE_STEPS_MAX` attempts.

    >>> matches = matcher("a_c%e%")
    >>> matches("abcde"), matches("abde")
    (True, False)
    """
    parts: list[list[Token]] = [[]]
    for token in tokens(pattern):
        if token.wildcard == "%":
            parts.append([])
        else:
            parts[-1].append(token)
    first, *middle = map(Segment, parts)
    if not middle:
        return lambda text: len(text) == first.length and first.fits(text, 0)
    last = middle.pop()
    shortest = first.length + sum(each.length for each in middle) + last.length

    def matches(text: str) -> bool:
        end = len(text) - last.length
        if len(text) < shortest or not (first.fits(text, 0) and last.fits(text, end)):
            return False
        at, steps = first.length, _LIKE_STEPS_MAX
        for segment in middle:
            at, steps = segment.find(text, at, end, steps - 1)
            if at < 0:
                return False
            at += segment.length
        return True

    return matches


def prefix(pattern: str) -> str:
    """The literal text every match begins with.

    >>> prefix("asset-%7"), prefix("%x")
    ('asset-', '')
    """
    found = tokens(pattern)
    return found[0].literal if found else ""


# KELVIN SIGN and LATIN CAPITAL LETTER I WITH DOT ABOVE lower to ASCII letters in some libraries and
# not in others. No other character outside ASCII does.
_LOWERS_TO_ASCII = re.compile("[\u212a\u0130]")


def fold_guard(column: Column, pattern: str) -> str | None:
    """Source of the condition on `{v}` under which memory folds case as the database does.

    None if it never does: for a pattern with letters outside ASCII, the database decides. The
    condition calls `undecided()` instead of being false. Collations that order by code point fold
    ASCII in the same way, and map only two other characters to ASCII. Of other collations we only
    know ASCII without the letter I, which is special in Turkish.
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
