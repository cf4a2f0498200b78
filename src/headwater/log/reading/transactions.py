"""Puts the rows of the log together into whole transactions. Pure.

Transactions are ordered by their last row. A transaction that changed a row after another one did
so after that one had committed, so this order is right for every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from headwater.limits import TRANSACTION_PART_CHANGES
from headwater.log.reading.rows import LogRow


class PendingTransactions:
    """Rows of transactions that may have more rows in later pages."""

    def __init__(self) -> None:
        self._rows: dict[int, list[LogRow]] = {}

    def add(self, rows: Iterable[LogRow]) -> None:
        """Rows in the order of `seq`."""
        for row in rows:
            mine = self._rows.pop(row.xid, [])
            mine.append(row)
            self._rows[row.xid] = mine

    def xids(self) -> list[int]:
        """In the order of each transaction's last row."""
        return list(self._rows)

    def xids_by_time(self) -> list[int]:
        """In the order of the times of each transaction's newest row."""
        return sorted(self._rows, key=self.newest)

    def newest(self, xid: int) -> datetime:
        """The time of the transaction's newest row."""
        return max(row.at for row in self._rows[xid])

    def take(self, xid: int) -> list[LogRow]:
        return self._rows.pop(xid)

    def take_ready(self, finished: list[int]) -> Iterator[tuple[int, list[LogRow], bool]]:
        """The finished transactions, whole; then parts of those that are too large for memory. One
        row of these stays, so that a last part follows."""
        for xid in finished:
            yield xid, self.take(xid), True
        for xid, rows in self._rows.items():
            if len(rows) > TRANSACTION_PART_CHANGES:
                self._rows[xid] = rows[-1:]
                yield xid, rows[:-1], False
