"""A chunk of a copy that waits for the tail of changes.

The rows of a chunk are as they were at some moment between its two positions. Until the tail has
passed the second one, changes of its keys are applied to the rows in memory. Then the rows are as
the tail left them, and can be written over what the target has. Rows in memory are lost in a crash,
and read again: so only rows that the same chunk would contain again are changed there.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.capture.mirror.runs import (
    Delete,
    Insert,
    Recopy,
    Rekey,
    Run,
    Truncate,
    Update,
    merge,
)
from headwater.capture.source import UNCHANGED, Chunk, SourceKey, SourceRow


class PendingChunk:
    """The rows of one chunk by their keys."""

    def __init__(self, chunk: Chunk, key: Sequence[int]) -> None:
        self.high, self.last = chunk.high, chunk.last
        self._key = tuple(key)
        self.rows: dict[SourceKey, SourceRow] = {self.key_of(row): row for row in chunk.rows}

    def key_of(self, row: SourceRow) -> SourceKey:
        return tuple([row[i] for i in self._key])  # type: ignore[misc]

    def absorb(self, run: Run) -> Run | None:
        """Apply what concerns rows in memory; returns what is left for the target. Deletes always
        concern both: the target may have an earlier version of the row."""
        match run:
            case Insert(rows):
                left = self._merge(rows)
                return Insert(left) if left else None
            case Update(rows, columns):
                left = self._merge(rows)
                return Update(left, columns) if left else None
            case Delete(keys):
                for key in keys:
                    self.rows.pop(key, None)
                return run
            case Truncate():
                self.rows.clear()
                return run
            case Rekey(key, row):
                return self._rekey(key, row)
            case Recopy():
                return run

    def _merge(self, rows: Sequence[SourceRow]) -> list[SourceRow]:
        """Returns the rows that are not in memory."""
        left = []
        for row in rows:
            key = self.key_of(row)
            if key in self.rows:
                self.rows[key] = merge(self.rows[key], row)
            else:
                left.append(row)
        return left

    def _rekey(self, key: SourceKey, row: SourceRow) -> Run | None:
        """Either key may also be in the target. If the new key is here, the chunk was read after
        this change: an earlier row of that key would have been removed before. If only the old key
        is here, it may be that of a later row, whose values must not be taken for this one."""
        new = self.key_of(row)
        if new == key and key in self.rows:
            self.rows[key] = merge(self.rows[key], row)
            return None
        had = self.rows.pop(key, None) is not None
        if new in self.rows:
            self.rows[new] = merge(self.rows[new], row)
            return Delete([key])
        return Recopy() if had and UNCHANGED in row else Rekey(key, row)
