"""A filter over the changes of a table, in any shape that the table had.

There are two kinds of filters. One is chosen by the subscriber: `carries` decides whether its feed
gets a change. The other limits what the subscriber may see: `seen` returns the visible part of a
change.
"""

from __future__ import annotations

import msgspec

from headwater.live.filters.check import check
from headwater.live.filters.compile import Matches, compile_filter
from headwater.live.filters.filter import Filter
from headwater.live.needs import Undecided
from headwater.model import Change, Row, Table


class ChangeFilter:
    """Raises InvalidQuery where the filter does not fit the table."""

    def __init__(self, where: Filter, table: Table) -> None:
        self._where = where
        self._matches: dict[int, Matches] = {}
        self._compile(table)

    def carries(self, change: Change) -> bool:
        """Whether the row matched before or matches now: a reader must see that a row no longer
        matches. Changes of the whole table are always sent. If memory cannot decide, the change is
        sent: one too many does no harm."""
        if change.before is None and change.after is None:
            return True
        matches = self._matches.get(change.table.id) or self._compile(change.table)
        return _may_match(matches, change.after) or _may_match(matches, change.before)

    def seen(self, change: Change) -> Change | None:
        """The change as the subscriber may see it; None if it may not. A row that begins to match
        is an insert, a row that no longer matches is a delete. Raises Undecided if memory cannot
        decide; then the caller ends the feed."""
        if change.before is None and change.after is None:
            return change
        matches = self._matches.get(change.table.id) or self._compile(change.table)
        before = change.before if change.before is not None and matches(change.before) else None
        after = change.after if change.after is not None and matches(change.after) else None
        if before is change.before and after is change.after:
            return change
        if after is not None:
            return msgspec.structs.replace(change, op="insert", before=None)
        if before is not None:
            return msgspec.structs.replace(change, op="delete", after=None)
        return None

    def _compile(self, table: Table) -> Matches:
        matches = compile_filter(check(self._where, table), table)
        self._matches[table.id] = matches
        return matches


def _may_match(matches: Matches, row: Row | None) -> bool:
    try:
        return row is not None and matches(row)
    except Undecided:
        return True
