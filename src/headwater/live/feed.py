"""A filter over the changes of a table, whatever shape the table had when they were made.

It answers two questions. Of a filter that a subscriber chose: does its feed carry the change? Of a
filter that a subscriber must not see past: what of the change may it see?
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
        """Whether the row matched before or matches after: a row that leaves the filter must be
        carried, or the reader would keep it. Changes of the whole table are carried. Where memory
        cannot decide, the change is carried: one too many does no harm."""
        if change.before is None and change.after is None:
            return True
        matches = self._matches.get(change.table.id) or self._compile(change.table)
        return _may_match(matches, change.after) or _may_match(matches, change.before)

    def seen(self, change: Change) -> Change | None:
        """The change as a subscriber behind the filter sees it; None if it sees nothing. A row that
        comes into its part of the table is an insert, a row that leaves is a delete. Where memory
        cannot decide, it must not guess: the caller gets Undecided and ends the feed."""
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
