"""Moments: an instant or a position, and which transactions a moment contains.

A moment is a set of transactions. A position says exactly which ones, of its own log. An instant
contains the transactions that had committed by then. For rows of the log itself, the same rule is
in `headwater.log.between`.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

from headwater.model import Position

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn

Moment: TypeAlias = datetime | Position
"""An instant, or a position. An instant without a time zone is in UTC."""


def parse_moment(text: str) -> Moment:
    """A moment as people write it. A time without an offset is UTC. ValueError for another text.

    >>> parse_moment("2026-11-15 10:00")
    datetime.datetime(2026, 11, 15, 10, 0, tzinfo=datetime.timezone.utc)
    >>> parse_moment("yesterday")
    Traceback (most recent call last):
    ...
    ValueError: 'yesterday' is neither a time nor a position
    """
    with suppress(ValueError):
        return Position.parse(text)
    with suppress(ValueError):
        return aware(datetime.fromisoformat(text.strip()))
    raise ValueError(f"{text!r:.100} is neither a time nor a position")


def aware(when: Moment) -> Moment:
    """The moment in UTC."""
    return when if isinstance(when, Position) else in_utc(when)


def in_utc(at: datetime) -> datetime:
    """The time in UTC; the first or the last one that Python knows instead of one beyond.

    >>> in_utc(datetime.fromisoformat("9999-12-31T23:59:59-05:00")).isoformat()
    '9999-12-31T23:59:59.999999+00:00'
    """
    if at.tzinfo is None:
        return at.replace(tzinfo=UTC)
    try:
        return at.astimezone(UTC)
    except OverflowError:
        end = datetime.min if at.year == datetime.min.year else datetime.max
        return end.replace(tzinfo=UTC)


def shifted(at: datetime, by: timedelta) -> datetime:
    """The time earlier or later; itself at the ends of what Python knows."""
    with suppress(OverflowError):
        return at + by
    return at


def contained_sql(position: Position, xid: str = "xid") -> str:
    """Whether a position contains a transaction, in SQL that every engine of the lake reads.

    >>> contained_sql(Position("a", 5, 9, (5, 7)))
    '(xid < 9 and xid not in (5, 7))'
    """
    running = f" and {xid} not in ({', '.join(map(str, position.xip))})" if position.xip else ""
    return f"({xid} < {position.xmax}{running})"


def within_sql(when: Moment) -> str:
    """Whether the transaction of a change is in the moment, in the same SQL."""
    if isinstance(when, Position):
        return contained_sql(when)
    return f"(committed_at <= '{instant(when)}')"


def of_log_sql(log: str) -> str:
    """Whether a change is of this log, in the same SQL."""
    return f"(position like '{log}-%')"


_SQL_TIMES = datetime(1700, 1, 1, tzinfo=UTC), datetime(2262, 1, 1, tzinfo=UTC)
"""DataFusion computes with nanoseconds, which end soon after. No transaction is older or later."""


def instant(at: datetime) -> str:
    """A time as SQL reads it, to the microsecond; one before or after every transaction as another
    one that is.

    >>> instant(datetime.max), instant(datetime(2026, 11, 15, 10))
    ('2262-01-01T00:00:00Z', '2026-11-15T10:00:00Z')
    """
    first, last = _SQL_TIMES
    at = min(max(in_utc(at), first), last)
    return at.isoformat().replace("+00:00", "Z")


def contained(position: Position, xid: str = "xid") -> SparkColumn:
    """Whether a position contains a transaction, in Spark."""
    from pyspark.sql import functions as f

    return f.expr(contained_sql(position, xid))
