"""What a statement in the binary log does to tables: DDL, and writes that were logged as
statements.

May name a table that did not change, and must never miss one that did. Statements are tokenised,
not parsed: names and the first words decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

Act = Literal["alter", "create", "drop", "truncate", "drop_schema", "write"]


class Effect(NamedTuple):
    """`shape` says that columns may have changed, `rows` that rows may have, without changes in the
    log. An empty table of `write` is any table: `names` has the names in the statement."""

    act: Act
    schema: str
    table: str
    shape: bool = False
    rows: bool = False
    names: frozenset[str] = frozenset()


_TOKEN = re.compile(
    r"""/\*(?:!|M!)\d*|\*/|/\*(?!!|M!).*?\*/|\#[^\n]*|--\s[^\n]*"""
    r"""|`(?:[^`]|``)*`|"(?:[^"\\]|\\.|"")*"|'(?:[^'\\]|\\.|'')*'|[\w$\u0080-\U0010ffff]+|\S""",
    re.DOTALL,
)
_WRITES = frozenset(("INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD", "WITH"))
_KEYS = frozenset((
    "INDEX", "KEY", "CONSTRAINT", "FOREIGN", "UNIQUE", "PRIMARY", "FULLTEXT", "SPATIAL", "CHECK",
))  # fmt: skip


def effects(schema: str, statement: str) -> list[Effect]:
    """Of a statement that ran with this default schema.

    >>> effects("shop", "RENAME TABLE `a` TO `b`")[0][:3]
    ('drop', 'shop', 'a')
    """
    return list(_Words(schema, statement).effects())


class _Words:
    def __init__(self, schema: str, statement: str) -> None:
        self._schema = schema
        self._tokens = list(_tokens(statement))
        self._place = 0

    # Reading.

    def _peek(self) -> str:
        return self._tokens[self._place].upper() if self._place < len(self._tokens) else ""

    def _skip(self, *words: str) -> bool:
        """Pass over any of these words; whether there was one."""
        found = False
        while self._peek() in words and self._peek():
            self._place += 1
            found = True
        return found

    def _name(self) -> tuple[str, str]:
        first = self._identifier()
        if self._skip("."):
            return first, self._identifier()
        return self._schema, first

    def _identifier(self) -> str:
        token = self._tokens[self._place] if self._place < len(self._tokens) else ""
        self._place += 1
        return unquoted(token)

    # Statements.

    def effects(self) -> Iterator[Effect]:
        if self._peek() == "SET" and [t.upper() for t in self._tokens[1:2]] == ["STATEMENT"]:
            words = [token.upper() for token in self._tokens]
            self._place = words.index("FOR") + 1 if "FOR" in words else len(words)
        first = self._peek()
        self._place += 1
        if first in _WRITES:
            names = frozenset(unquoted(token) for token in self._tokens)
            yield Effect("write", self._schema, "", names=names)
        elif first == "TRUNCATE":
            self._skip("TABLE")
            yield Effect("truncate", *self._name())
        elif first == "RENAME" and self._skip("TABLE", "TABLES"):
            yield from self._renames()
        elif first == "DROP":
            yield from self._drop()
        elif first == "CREATE":
            yield from self._create()
        elif first == "ALTER":
            start = self._place
            self._skip("ONLINE", "OFFLINE", "IGNORE")
            ignores = "IGNORE" in [t.upper() for t in self._tokens[start : self._place]]
            if self._skip("TABLE"):
                yield from self._alter(ignores)

    def _drop(self) -> Iterator[Effect]:
        if self._skip("DATABASE", "SCHEMA"):
            self._skip("IF", "EXISTS")
            yield Effect("drop_schema", self._identifier(), "")
        elif self._skip("TABLE", "TABLES"):
            self._skip("IF", "EXISTS")
            yield Effect("drop", *self._name())
            while self._skip(","):
                yield Effect("drop", *self._name())

    def _create(self) -> Iterator[Effect]:
        replaces = self._skip("OR", "REPLACE")
        if replaces and self._skip("DATABASE", "SCHEMA"):
            yield Effect("drop_schema", self._identifier(), "")
        elif self._skip("TABLE"):
            if_not_exists = self._skip("IF", "NOT", "EXISTS")
            name = self._name()
            if replaces:
                yield Effect("drop", *name)
            yield Effect("create", *name, shape=not if_not_exists, rows=not if_not_exists)

    def _renames(self) -> Iterator[Effect]:
        while True:
            self._skip("IF", "EXISTS")
            old = self._name()
            while self._peek() not in ("TO", ""):
                self._place += 1
            self._skip("TO")
            yield Effect("drop", *old)
            yield Effect("create", *self._name(), shape=True, rows=True)
            if not self._skip(","):
                return

    def _alter(self, ignores: bool) -> Iterator[Effect]:
        """With IGNORE, rows that a new unique index or constraint refuses are deleted."""
        self._skip("IF", "EXISTS")
        name = self._name()
        shape = rows = ignores
        target: tuple[str, str] | None = None
        for start in self._clauses():
            self._place = start
            word = self._peek()
            self._place += 1
            if word == "RENAME" and self._peek() not in ("COLUMN", "INDEX", "KEY"):
                self._skip("TO", "AS", "=")
                target = self._name()
            changes = _clause(word, self._peek())
            shape, rows = shape or changes[0], rows or changes[1]
            if word == "EXCHANGE":
                yield from self._exchanged()
            elif word == "CONVERT" and self._peek() in ("PARTITION", "TABLE"):
                yield from self._converted(made=self._peek() == "PARTITION")
        yield Effect("alter", *name, shape=shape, rows=rows)
        if target is not None:
            yield Effect("drop", *name)
            yield Effect("create", *target, shape=True, rows=True)

    def _exchanged(self) -> Iterator[Effect]:
        while self._peek() not in ("TABLE", ""):
            self._place += 1
        self._skip("TABLE")
        yield Effect("alter", *self._name(), shape=True, rows=True)

    def _converted(self, made: bool) -> Iterator[Effect]:
        """MariaDB: a partition becomes a table, or a table a partition."""
        while self._peek() not in ("TABLE", ""):
            self._place += 1
        self._skip("TABLE")
        other = self._name()
        yield Effect("create", *other, shape=True, rows=True) if made else Effect("drop", *other)

    def _clauses(self) -> list[int]:
        """Where the parts of ALTER TABLE begin: after the name, and after each comma outside of
        parentheses."""
        starts, depth = [self._place], 0
        for i in range(self._place, len(self._tokens)):
            token = self._tokens[i]
            depth += (token == "(") - (token == ")")
            if token == "," and depth == 0:
                starts.append(i + 1)
        return starts


def _clause(word: str, following: str) -> tuple[bool, bool]:
    """Whether a part of ALTER TABLE may change columns, and rows."""
    if word in ("MODIFY", "CHANGE", "CONVERT", "DISCARD", "IMPORT", "EXCHANGE", "TRUNCATE"):
        return True, True
    if word == "RENAME":
        return following == "COLUMN", following == "COLUMN"
    if word == "ADD":
        added = following not in _KEYS and following != "PARTITION"
        return added, added
    if word == "DROP":
        return following not in _KEYS, following == "PARTITION"
    return word == "SYSTEM", False


def _tokens(statement: str) -> Iterator[str]:
    """Without comments; what a server of this kind executes inside of comments stays."""
    for match in _TOKEN.finditer(statement):
        token = match[0]
        if token.startswith(("#", "-- ", "--\n", "--\t")) or token == "*/":
            continue
        if token.startswith("/*"):
            continue
        yield token


def unquoted(token: str) -> str:
    if len(token) >= 2 and token[0] in "`\"'" and token[-1] == token[0]:
        return token[1:-1].replace(token[0] * 2, token[0])
    return token
