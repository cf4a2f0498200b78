"""The history of a row: its versions, one after the other.

A version is valid from the time of its transaction to the time of the next version. A version that
its own transaction replaced was never visible: its two times are the same. A changed key ends one
row and begins another. A row from before its first change is known by the before-image of that
change, or by the first snapshot that has it: a version with `op` `before` and an unknown beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from headwater.model import Column, Table
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.lake.moments import Moment, within
from headwater.pipeline.lake.schemas import ImageReader, arrow_schema, arrow_type, split
from headwater.pipeline.lake.snapshots import TableSnapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

_UTC = pa.timestamp("us", tz="UTC")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

VERSIONS = pa.schema(
    [
        pa.field("seq", pa.int64()),
        pa.field("xid", pa.int64()),
        pa.field("op", pa.string()),
        pa.field("valid_from", _UTC),
        pa.field("valid_to", _UTC),
        pa.field("user_id", pa.string()),
        pa.field("function_name", pa.string()),
        pa.field("trace_id", pa.string()),
        pa.field("before", pa.string()),
        pa.field("after", pa.string()),
        pa.field("shape", pa.int64()),
        pa.field("source", pa.string()),
        pa.field("source_position", pa.string()),
        pa.field("source_committed_at", _UTC),
        pa.field("changed", pa.list_(pa.field("element", pa.string()))),
    ]
)
"""A version; the row itself follows as `row`, NULL for a deleted row."""


def own(events: DataFrame, key: str) -> DataFrame:
    """The events of a table that concern one row."""
    from pyspark.sql import functions as f

    return events.filter((f.col("key") == key) | (f.col("op") == "truncate")).select(
        *(f.col(name) for name in ("relation", "seq", "xid", "op")),
        f.col("committed_at").alias("valid_from"),
        *(f.col(name) for name in VERSIONS.names[5:-1]),
    )


def versions(steps: DataFrame) -> DataFrame:
    """The versions of a row, from the events that concern it."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    in_order = Window.partitionBy("relation").orderBy("seq")
    alive = f.lag("op").over(in_order).isin("insert", "update", "before")
    # A truncate ends this row only if the row existed.
    real = steps.withColumn("alive", alive).filter((f.col("op") != "truncate") | f.col("alive"))
    lives = f.col("op").isin("insert", "update", "before")
    return real.withColumn("valid_to", f.when(lives, f.lead("valid_from").over(in_order))).drop(
        "relation", "alive"
    )


def beginning(steps: DataFrame, images: Iterable[tuple[TableSnapshot, str, int]]) -> DataFrame:
    """The steps, and before them the row before the first step, if it existed. `images` are
    those of the row in snapshots, the oldest first: snapshot, image, shape."""
    from pyspark.sql import functions as f

    spark = steps.sparkSession
    earliest = steps.orderBy("seq").limit(1).collect()
    first = earliest[0] if earliest else None
    if first is not None and first["before"] is not None:
        row = (first["relation"], first["before"], first["shape"])
    else:
        found = (
            each for each in images if first is None or not each[0].position.contains(first.xid)
        )
        snapshot, image, shape = next(found, (None, "", 0))
        if snapshot is None:
            return steps
        row = (snapshot.relation, image, shape)
    start = spark.createDataFrame([row], "relation long, after string, shape long").select(
        "*", f.lit(0).cast("long").alias("seq"), f.lit("before").alias("op")
    )
    return steps.unionByName(start, allowMissingColumns=True)


class KnownRow(NamedTuple):
    """A row at a moment: its image (None if it did not exist), and the shapes that the table had
    from the change that has the image to the moment."""

    image: str | None
    passed: tuple[int, ...]


def row_at(events: DataFrame, key: str, when: Moment, missed: Sequence[LakeGap]) -> KnownRow | None:
    """A row at a moment from its own changes: the last change up to the moment has it as `after`,
    else the first change after the moment has it as `before`. `events` are those of its table. None
    where neither helps: the row never changed, or there is a reset or a gap in between."""
    from pyspark.sql import functions as f

    every = events.select(
        *("key", "op", "seq", "shape", "before", "after"),
        f.unix_micros("committed_at").alias("at"),
        f.element_at(f.split("position", "-"), 1).alias("log"),
        within(when).alias("inside"),
    )
    relevant = every.filter((f.col("key") == key) | f.col("op").isin("truncate", "reset"))
    backwards = [f.desc("at"), f.desc("seq")]
    last = relevant.filter("inside").orderBy(*backwards).first()
    first = relevant.filter("not inside").orderBy("at", "seq").first()
    by_then = every.filter("inside")
    if last is not None and last["op"] != "reset" and _reaches(last, when, missed):
        own = f.col("log") == last["log"]
        if by_then.filter(~own & (f.col("at") >= last["at"])).isEmpty():
            later = by_then.filter(own & (f.col("seq") >= last["seq"]))
            return KnownRow(last["after"], _in_order(later, last["shape"]))
    if first is None or first["op"] in ("reset", "truncate") or not _reaches(first, when, missed):
        return None
    present = by_then.orderBy(*backwards).first()
    if present is None or (present["log"], present["shape"]) != (first["log"], first["shape"]):
        return None  # it was not captured yet, or altered or restored in between
    return KnownRow(first["before"], (first["shape"],))


def _reaches(change: Row, when: Moment, missed: Sequence[LakeGap]) -> bool:
    """Whether the lake has everything between a change and a moment."""
    at = _EPOCH + timedelta(microseconds=change["at"])
    return all(
        (gap.is_after(when) and at >= gap.until_at) or (gap.is_before(when) and at <= gap.since_at)
        for gap in missed
    )


def _in_order(changes: DataFrame, first: int) -> tuple[int, ...]:
    """The shapes of changes in order, beginning with `first`."""
    from pyspark.sql import functions as f

    rows = changes.groupBy("shape").agg(f.max("seq").alias("last")).orderBy("last").collect()
    return (first, *(row["shape"] for row in rows if row["shape"] != first))


def combined(tables: Sequence[Table]) -> Table:
    """A table with the columns of all its shapes, which are given with the latest last. A column
    whose type changed is read as text."""
    columns: dict[str, Column] = {}
    for table in reversed(tables):
        for column in table.columns:
            known = columns.setdefault(column.name, column)
            if arrow_type(known) != arrow_type(column):
                columns[column.name] = Column(column.name, "text", "text", "C")
    last = tables[-1]
    return Table(last.id, last.schema, last.name, tuple(columns.values()), last.key, last.oid)


def with_rows(found: DataFrame, table: Table) -> DataFrame:
    """The versions with their rows in the table's types, and the columns that changed."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = VERSIONS.append(pa.field("row", pa.struct(list(arrow_schema(table)))))

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = ImageReader(table)
        for batch in batches:
            rows = batch.to_pydict()
            row = reader.rows(rows["after"], rows["shape"])
            names = [
                changed(before, after)
                for before, after in zip(rows["before"], rows["after"], strict=True)
            ]
            arrays = [batch.column(name).cast(schema.field(name).type) for name in plain]
            yield pa.RecordBatch.from_arrays(
                [*arrays, pa.array(names, schema.field("changed").type), row], schema=schema
            )

    plain = [name for name in VERSIONS.names if name != "changed"]
    return found.select(*plain).mapInArrow(read, from_arrow_schema(schema)).orderBy("seq")


def changed(before: str | None, after: str | None) -> list[str] | None:
    """The columns of an update whose values differ; None for other operations.

    >>> changed('{"id":1,"amount":2.50}', '{"id":1,"amount":2.5}')
    ['amount']
    """
    if before is None or after is None:
        return None
    old = split(before)
    return [name for name, text in split(after).items() if old.get(name) != text]


def difference(before: str | None, after: str | None) -> list[tuple[str, str | None, str | None]]:
    """For people: column, old and new value as JSON, of those that differ."""
    old, new = split(before or "{}"), split(after or "{}")
    names = reduce(lambda seen, name: {**seen, name: None}, [*new, *old], dict[str, None]())
    return [(n, old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)]
