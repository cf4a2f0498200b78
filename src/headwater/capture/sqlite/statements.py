"""Names of SQLite, and the few things that must be read from the text of a statement.

`words` splits SQL into tokens without comments. It is enough to find the expressions and the
predicate of a unique index, which no PRAGMA gives, and the name of a savepoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_TOKEN = re.compile(
    r"""\s+ | --[^\n]*(?:\n|$) | /\*.*?(?:\*/|$)
    | (?P<word> "(?:[^"]|"")*" | '(?:[^']|'')*' | `(?:[^`]|``)*` | \[[^\]]*\]
      | [^\W\d][\w$]* | \d[\w.]* | . )""",
    re.VERBOSE | re.DOTALL,
)


def quoted(name: str) -> str:
    """
    >>> print(quoted('a "b" c'))
    "a ""b"" c"
    """
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def words(sql: str) -> list[str]:
    """The tokens of a statement.

    >>> words("select 'it''s' -- a comment")
    ['select', "'it''s'"]
    """
    return [found["word"] for found in _TOKEN.finditer(sql) if found["word"] is not None]


def unquoted(word: str) -> str:
    """The name that a token stands for.

    >>> unquoted('"a ""b"'), unquoted("[x y]"), unquoted("plain")
    ('a "b', 'x y', 'plain')
    """
    if word[:1] in ('"', "'", "`") and len(word) > 1:
        return word[1:-1].replace(word[0] * 2, word[0])
    return word[1:-1] if word[:1] == "[" else word


def index_parts(sql: str) -> tuple[list[str], str | None]:
    """The expressions of a CREATE INDEX statement, and its predicate.

    >>> index_parts("create unique index i on t (lower(a), b collate nocase desc) where c > 0")
    (['lower ( a )', 'b collate nocase'], 'c > 0')
    """
    tokens = words(sql)
    start = _first_parenthesis(tokens)
    parts: list[list[str]] = [[]]
    depth, end = 1, start + 1
    while depth:
        token = tokens[end]
        depth += {"(": 1, ")": -1}.get(token, 0)
        if depth == 1 and token == ",":
            parts.append([])
        elif depth:
            parts[-1].append(token)
        end += 1
    rest = tokens[end:]
    predicate = _joined(rest[1:]) if rest[:1] and rest[0].upper() == "WHERE" else None
    return [_joined(_without_direction(part)) for part in parts], predicate


def _first_parenthesis(tokens: list[str]) -> int:
    on = next(i for i, token in enumerate(tokens) if token.upper() == "ON")
    return tokens.index("(", on)


def _without_direction(part: list[str]) -> list[str]:
    return part[:-1] if part[-1].upper() in ("ASC", "DESC") else part


def _joined(tokens: Iterable[str]) -> str:
    """As SQL again. Operators of several characters stay together."""
    text = ""
    for token in tokens:
        glued = bool(text) and text[-1] in "<>=!|-." and token in "<>=|.-" and len(token) == 1
        glued = glued or token == "." or text.endswith(".")
        text += token if glued or not text else f" {token}"
    return text
