"""Decides which tables need a snapshot, from the counts of their changes.

Pure: `snapshot_job` reports what happens and asks what is due. A table is read from the database
where it has no snapshot, and where its rows may have changed without changes in the log: after a
reset, after a schema change, and in another database. After many changes its snapshot is computed
from the events instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from headwater.pipeline.lake.snapshots import TableSnapshot

_LAKE_SNAPSHOT_SHARE = 0.5
"""But not before this share of its rows has changed, so that a large table is not written too
often."""


class BatchContent(msgspec.Struct, frozen=True):
    """The changes of one table in a batch, of one shape and one operation."""

    relation: int
    shape: int
    op: str
    changes: int
    first_xid: int
    last_xid: int


class CapturedShape(msgspec.Struct, frozen=True):
    """A table that is captured now, and its present shape."""

    relation: int
    shape: int


class SnapshotSchedule:
    """Which tables are due for a snapshot."""

    def __init__(self, events_max: int) -> None:
        self._events_max = events_max
        self._last: dict[int, TableSnapshot] = {}
        self._changes: Counter[int] = Counter()
        self._broken: set[int] = set()

    def add_snapshot(self, snapshot: TableSnapshot) -> None:
        """A snapshot was made."""
        self._last[snapshot.relation] = snapshot
        self._changes[snapshot.relation] = 0
        self._broken.discard(snapshot.relation)

    def require_read(self, relation: int) -> None:
        """The table must be read from the database."""
        self._broken.add(relation)

    def forget(self, relation: int) -> None:
        """The table is no longer captured."""
        self._broken.discard(relation)
        self._changes[relation] = 0

    def examine(self, tables: Iterable[CapturedShape], log_id: str) -> None:
        """Compare the last snapshots with the captured tables."""
        for table in tables:
            last = self._last.get(table.relation)
            if last is None or last.position.log != log_id or last.shape != table.shape:
                self._broken.add(table.relation)

    def observe(self, marks: Mapping[int, str]) -> list[int]:
        """Compare the captured tables with the catalog marks of their last snapshots. Returns those
        that are unaltered. Tables without a snapshot, and altered ones, must be read."""
        unaltered = []
        for relation, mark in marks.items():
            last = self._last.get(relation)
            if last is not None and last.mark == mark:
                unaltered.append(relation)
            elif last is None or last.mark is not None:
                self._broken.add(relation)
        return unaltered

    def add_changes(self, content: BatchContent) -> None:
        """Count the changes of a batch."""
        last = self._last.get(content.relation)
        if last is None:
            self._broken.add(content.relation)
            return
        contains = last.position.contains
        if contains(content.first_xid) and contains(content.last_xid):
            return
        self._changes[content.relation] += content.changes
        if content.op == "reset" or content.shape != last.shape:
            self._broken.add(content.relation)

    def to_read(self) -> list[int]:
        """Tables that must be read from the database."""
        return sorted(self._broken)

    def to_fold(self) -> list[int]:
        """Tables with enough changes that a snapshot should be computed from the events."""
        return sorted(
            relation
            for relation, changes in self._changes.items()
            if relation not in self._broken and changes >= self._bound(relation)
        )

    def _bound(self, relation: int) -> float:
        rows = self._last[relation].rows if relation in self._last else 0
        return max(self._events_max, rows * _LAKE_SNAPSHOT_SHARE, 1)

    def last_snapshots(self) -> list[TableSnapshot]:
        return list(self._last.values())
