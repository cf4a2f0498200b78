"""Moments: an instant or a position, and which transactions a moment contains.

A moment is a set of transactions. A position says exactly which ones, of its own log. An instant
contains the transactions that had committed by then. For rows of the log itself, the same rule is
in `headwater.log.between`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from headwater.model import Position

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn

Moment: TypeAlias = datetime | Position
"""An instant, or a position. An instant without a time zone is in UTC."""


def aware(when: Moment) -> Moment:
    """The moment with its time zone."""
    if isinstance(when, Position) or when.tzinfo is not None:
        return when
    return when.replace(tzinfo=UTC)


def contained(position: Position, xid: str = "xid") -> SparkColumn:
    """Whether a position contains a transaction."""
    from pyspark.sql import functions as f

    before_end = f.col(xid) < position.xmax
    if not position.xip:
        return before_end
    return before_end & ~f.col(xid).isin(list(position.xip))


def contained_arrow(position: Position, xid: Any) -> Any:
    """The same in Arrow, for an array or a field of transaction ids."""
    import pyarrow as pa
    import pyarrow.compute as pc

    running = pc.is_in(xid, pa.array(position.xip, pa.int64()))
    return pc.and_kleene(pc.less(xid, position.xmax), pc.invert(running))


def within(when: Moment) -> SparkColumn:
    """Whether the transaction of a change is in the moment."""
    from pyspark.sql import functions as f

    if isinstance(when, Position):
        return contained(when)
    return f.col("committed_at") <= f.lit(when)
