"""A replica: the rows of a live query, followed by folding its deltas.

Pure, and strict: a delta that does not fit the rows raises `Diverged`, because a guess would hide
the fault. It is the specification for clients in other languages: apply the deltas of a batch one
after the other; every index refers to the rows at that time. A batch may have the `result_hash`
that it leads to; two results have the same hash if they encode to the same JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

from headwater.errors import Diverged
from headwater.model import (
    Cursor,
    Delta,
    Enter,
    Key,
    Leave,
    Match,
    Move,
    Reset,
    Row,
    Unmatch,
    Update,
)  # fmt: skip
from headwater.protocol import result_hash

__all__ = ["Replica", "result_hash"]


class Replica:
    """The rows of one live query as its subscriber sees them."""

    __slots__ = ("_cursors", "_keys", "_rows")

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._rows: dict[Key, Row] = {}
        self._cursors: dict[Key, Cursor] = {}

    @property
    def keys(self) -> list[Key]:
        """The keys in the order of the query; ordered by key for a streamed query."""
        return list(self._keys) if self._keys else sorted(self._rows)

    @property
    def rows(self) -> list[Row]:
        return [self._rows[key] for key in self.keys]

    def row(self, key: Key) -> Row | None:
        return self._rows.get(key)

    def cursor(self, key: Key) -> Cursor:
        """The place of a row in the order, for paging or for moving a window."""
        return self._cursors[key]

    def apply(self, deltas: Iterable[Delta], expected_hash: int | None = None) -> None:
        """Apply a batch. Raises Diverged if it does not fit, or leads to another hash."""
        for delta in deltas:
            self._fold(delta)
        if expected_hash is not None and expected_hash != self.hash():
            raise Diverged("the result's hash differs from the server's", hint=_HINT)

    def hash(self) -> int:
        return result_hash((key, self._rows[key]) for key in self.keys)

    def _fold(self, delta: Delta) -> None:
        match delta:
            case Reset(rows):
                self._keys = []
                self._rows = {}
                self._cursors = {}
                for enter in rows:
                    self._fold(enter)
            case Enter(key, row, index, cursor):
                self._require(key not in self._rows and index <= len(self._keys), delta)
                self._keys.insert(index, key)
                self._rows[key] = row
                self._cursors[key] = cursor
            case Leave(key, index):
                self._take(key, index, delta)
                del self._rows[key]
                del self._cursors[key]
            case Move(key, row, source, index, cursor):
                self._take(key, source, delta)
                self._require(index <= len(self._keys), delta)
                self._keys.insert(index, key)
                self._rows[key] = row
                self._cursors[key] = cursor
            case Update(key, row, index, cursor):
                self._require(key in self._rows, delta)
                self._rows[key] = row
                if index is not None and cursor is not None:
                    self._require(self._keys[index : index + 1] == [key], delta)
                    self._cursors[key] = cursor
            case Match(key, row):
                self._require(key not in self._rows, delta)
                self._rows[key] = row
            case Unmatch(key):
                self._require(key in self._rows, delta)
                del self._rows[key]
            case _:
                assert_never(delta)

    def _take(self, key: Key, index: int, delta: Delta) -> None:
        self._require(self._keys[index : index + 1] == [key], delta)
        del self._keys[index]

    def _require(self, holds: bool, delta: Any) -> None:
        if not holds:
            raise Diverged(f"{delta!r:.200} does not fit the replica", hint=_HINT)


_HINT = "Subscribe again: the new snapshot replaces what the replica holds."
