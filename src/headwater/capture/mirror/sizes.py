"""Rows that PostgreSQL cannot take: a value, or the row as JSON in the log, has at most 1 GB.

Trying again would not help, so the source is refused with the name of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from psycopg import errors

from headwater import limits
from headwater.capture.source import RowChanges, SourceRow
from headwater.errors import SourceRefused


def is_large(changes: Sequence[RowChanges]) -> bool:
    """Whether they are one row that is larger than a part may be. Such a row is alone in its
    part."""
    if len(changes) != 1 or len(changes[0].after) + len(changes[0].before) > 2:
        return False
    rows = (*changes[0].after, *changes[0].before)
    return any(row_chars(row) > limits.SOURCE_PART_BYTES for row in rows)


def row_chars(row: SourceRow | None) -> int:
    """
    >>> row_chars(("1", None, "abc"))
    4
    """
    return sum(len(cell) for cell in row or () if isinstance(cell, str))


@contextmanager
def bounded(table: str, rows: Sequence[SourceRow | None]) -> Iterator[None]:
    """Write rows of a table, and wait for the answer."""
    longest = max(map(row_chars, rows), default=0)
    if longest > limits.SOURCE_ROW_CHARS_MAX:
        raise _refused(table, f"it has {longest} characters")
    try:
        yield
    except (errors.ProgramLimitExceeded, errors.InternalError_) as error:
        raise _refused(table, error.diag.message_primary or type(error).__name__) from None


def _refused(table: str, reason: str) -> SourceRefused:
    return SourceRefused(
        f"table {table}: a row is too large for PostgreSQL: {reason}",
        hint="Leave the column with the large value out (exclude), or make the value smaller at the"
        " source.",
    )
