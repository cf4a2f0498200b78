"""What the log has and the lake has not yet: its recent end, read from the database.

The lake is taken in one version, together with how far that goes; the log from there to one fixed
position. So each change is in one of the two, and every read of the two together has the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headwater.model import Position
from headwater.pipeline import delta
from headwater.pipeline.offsets import Offset
from headwater.pipeline.planning import Planner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Tail(msgspec.Struct, frozen=True):
    """The log behind a version of the lake, up to a position. `has_rows` is False where nothing is
    new: then nobody needs to read it."""

    url: str
    version: int
    offset: Offset
    until: Position
    has_rows: bool


def look(path: str, url: str) -> Tail | None:
    """The log behind the lake's events, as it is now; None where the lake does not say how far it
    goes. ResyncRequired where the log no longer reaches back to that."""
    table = delta.open_table(path)
    told = None if table is None else delta.offset_of(table)
    if table is None or told is None:
        return None
    offset = Offset.from_dict(msgspec.json.decode(told))
    planner = Planner(url, patience=0)
    try:
        planner.check(offset.position)
        until = planner.now()
        is_new = planner.has_news(offset.position, until)
    finally:
        planner.close()
    return Tail(url, table.version(), offset, until, is_new)


def changes(spark: SparkSession, tail: Tail) -> DataFrame:
    """The changes of the tail, as the lake would hold them."""
    from headwater.pipeline.events import beyond, stored

    source = spark.read.format("headwater").option("url", tail.url)
    bounded = source.option("since", str(tail.offset.position)).option("until", str(tail.until))
    return stored(beyond(bounded.load(), tail.offset))
