"""Decides what of a change a subscriber with a mandatory row filter may see.

A row that comes into its part of the table is an insert to it, a row that leaves is a delete, and a
row that was never there has not changed. Where memory cannot decide, it must not guess: `Undecided`
goes to the caller, who ends the feed rather than show too much.
"""

from __future__ import annotations

import msgspec

from headwater.live.filter import Filter
from headwater.live.filter_check import check
from headwater.live.filter_compile import Matches, compile_filter
from headwater.model import Change, Table


class FeedGuard:
    """A mandatory filter over a table's changes, whatever shape the table had."""

    def __init__(self, where: Filter, table: Table) -> None:
        self._where = where
        self._matches: dict[int, Matches] = {}
        self._matcher(table)

    def seen(self, change: Change) -> Change | None:
        """The change as its subscriber sees it; None if it sees nothing."""
        if change.before is None and change.after is None:
            return change
        matches = self._matches.get(change.table.id) or self._matcher(change.table)
        before = change.before if change.before is not None and matches(change.before) else None
        after = change.after if change.after is not None and matches(change.after) else None
        if before is change.before and after is change.after:
            return change
        if after is not None:
            return msgspec.structs.replace(change, op="insert", before=None)
        if before is not None:
            return msgspec.structs.replace(change, op="delete", after=None)
        return None

    def _matcher(self, table: Table) -> Matches:
        """Raises InvalidQuery where the filter does not fit the table."""
        matches = compile_filter(check(self._where, table), table)
        self._matches[table.id] = matches
        return matches
