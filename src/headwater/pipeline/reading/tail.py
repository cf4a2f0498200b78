"""The tail: changes that are in the log of the database and not yet in the lake.

The lake is read at one version, which has an offset; the log from that offset to one fixed
position. So each change is in exactly one of the two, and repeated reads see the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headwater.model import Position
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.events import after_offset, event_frame
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Tail(msgspec.Struct, frozen=True):
    """The log after a version of the lake, up to a position. `has_rows` is False if there are no
    new changes: then it need not be read."""

    url: str
    version: int
    offset: Offset
    until: Position
    has_rows: bool


def look(path: str, url: str) -> Tail | None:
    """The log after the lake's events, as it is now; None if the lake has no offset. ResyncRequired
    if the log was trimmed after that offset."""
    table = delta.open_table(path)
    found = None if table is None else delta.offset_of(table)
    if table is None or found is None:
        return None
    offset = Offset.from_dict(msgspec.json.decode(found))
    planner = Planner(url, patience=0)
    try:
        planner.check(offset.position)
        until = planner.now()
        is_new = planner.has_changes(offset.position, until)
    finally:
        planner.close()
    return Tail(url, table.version(), offset, until, is_new)


def changes(spark: SparkSession, tail: Tail) -> DataFrame:
    """The changes of the tail, as rows of `events`."""
    source = spark.read.format("headwater").option("url", tail.url)
    bounded = source.option("since", str(tail.offset.position)).option("until", str(tail.until))
    return event_frame(after_offset(bounded.load(), tail.offset))
