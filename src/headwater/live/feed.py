"""Decides which changes a filtered change feed carries: those whose row was in it or is in it.

A row that leaves the filter is carried, or whoever follows would keep it for ever; so are changes
of the whole table. Where memory cannot decide, the change is carried: rather one too many.
"""

from __future__ import annotations

from headwater.live.filter import Filter
from headwater.live.filter_check import check
from headwater.live.filter_compile import Matches, compile_filter
from headwater.live.needs import Undecided
from headwater.model import Change, Row, Table


class FeedFilter:
    """A filter over a table's changes, whatever shape the table had when they were made."""

    def __init__(self, where: Filter, table: Table) -> None:
        self._where = where
        self._matches: dict[int, Matches] = {}
        self._matcher(table)

    def carries(self, change: Change) -> bool:
        if change.before is None and change.after is None:
            return True
        matches = self._matches.get(change.table.id) or self._matcher(change.table)
        return _may_match(matches, change.after) or _may_match(matches, change.before)

    def _matcher(self, table: Table) -> Matches:
        """Raises InvalidQuery where the filter does not fit the table."""
        matches = compile_filter(check(self._where, table), table)
        self._matches[table.id] = matches
        return matches


def _may_match(matches: Matches, row: Row | None) -> bool:
    try:
        return row is not None and matches(row)
    except Undecided:
        return True
