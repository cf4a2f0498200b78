"""The versions of rows between two positions, computed by Spark.

Each change of a row ends the version before it and, unless it is a delete, begins another one. A
frame of steps has a row for each version (`_kind` version) and one for the end of the version that
the row had before the first of its changes (`_kind` end), typed by tasks. `_beyond` names columns
with values that their type cannot hold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from headwater.model import Position, Table
from headwater.pipeline.lake.moments import contained_sql, of_log_sql
from headwater.pipeline.reading import state
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.tables.columns import TypedColumn, schema_of
from headwater.pipeline.tables.eras import Changes, End
from headwater.pipeline.tables.layout import HISTORY, OPEN, Progress
from headwater.pipeline.tables.options import TableOptions
from headwater.pipeline.tables.values import RowReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KIND, BEYOND = "_kind", "_beyond"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Typing(msgspec.Struct, frozen=True):
    """How images of a table become rows. Sent to tasks."""

    table: Table
    columns: tuple[TypedColumn, ...]
    options: TableOptions
    snapshot: str

    @property
    def schema(self) -> pa.Schema:
        """Of steps."""
        extra = [pa.field(KIND, pa.string()), pa.field(BEYOND, pa.list_(pa.string()))]
        return pa.schema([*schema_of(HISTORY, self.columns), *extra]).remove_metadata()


def events(lake: Lake, known: Progress, until: Position) -> DataFrame:
    """The changes of a table up to a position that its typed tables lack."""
    here = known.position
    lacked = f"relation = {known.relation} and ({state.lacked(here)}) and xid < {until.xmax}"
    inside = f"{contained_sql(until)} and not {contained_sql(here)}"
    found = lake.events(among=lacked)
    return found.filter(f"relation = {known.relation} and {of_log_sql(here.log)} and {inside}")


def examined(found: DataFrame) -> Changes:
    """What the changes contain."""
    from pyspark.sql import functions as f

    is_row = f.col("op").isin("insert", "update", "delete")
    mark = f.struct(
        "op", "seq", "xid", f.unix_micros("committed_at").alias("at"), "user_id", "function_name",
        "trace_id",
    )  # fmt: skip
    grouped = found.groupBy("shape").agg(
        f.count_if(is_row).alias("count"),
        f.sum(f.coalesce(f.length("after"), f.lit(0))).alias("bytes"),
        f.unix_micros(f.max("committed_at")).alias("last"),
        f.min_by(mark, "seq").alias("first"),
        f.collect_list(f.when(f.col("op") == "truncate", mark)).alias("truncates"),
        f.min_by(f.when(f.col("op") == "reset", mark), f.when(f.col("op") == "reset", f.col("seq")))
        .alias("reset"),
    )  # fmt: skip
    rows = [row.asDict(recursive=True) for row in grouped.collect()]
    resets = [_end(row["reset"]) for row in rows if row["reset"] is not None]
    truncates = [_end(each) for row in rows for each in row["truncates"]]
    return Changes(
        sum(row["count"] for row in rows),
        sum(row["bytes"] for row in rows),
        max((_time(row["last"]) for row in rows), default=None),
        tuple((row["shape"], _altered(_end(row["first"]))) for row in rows),
        tuple(sorted(truncates, key=lambda end: end.seq or 0)),
        min(resets, key=lambda end: end.seq or 0, default=None),
    )


def _end(mark: dict[str, Any]) -> End:
    return End(**(mark | {"at": _time(mark["at"])}))


def _altered(end: End) -> End:
    return msgspec.structs.replace(end, op="altered")


def _time(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


# ------------------------------------------------------------------------ versions


def before(found: DataFrame, end: End | None) -> DataFrame:
    """The changes of an era up to its end: without those of the transaction that ends it."""
    if end is None or end.seq is None:
        return found
    return found.filter(f"seq < {end.seq} and xid <> {end.xid}")


def versions(
    found: DataFrame, typing: Typing, truncates: Sequence[End], end: End | None
) -> DataFrame:
    """The steps that these changes make. `end` is that of the era, if it ends."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.types import from_arrow_schema

    actor = ("user_id", "function_name", "trace_id")
    mark = f.struct("op", "seq", "xid", f.col("committed_at").alias("at"), *actor)
    in_order = Window.partitionBy("key").orderBy("seq")
    rows = found.filter("op in ('insert', 'update', 'delete')").select(
        "key",
        "after",
        mark.alias("own"),
        f.lead(mark).over(in_order).alias("next"),
        (f.row_number().over(in_order) == 1).alias("is_first"),
    )
    reader = _StepReader(typing, tuple(truncates), end)
    typed: DataFrame = rows.mapInArrow(reader.read, from_arrow_schema(typing.schema))
    return typed


class _StepReader:
    """Makes steps from changes, in a task."""

    def __init__(self, typing: Typing, truncates: tuple[End, ...], end: End | None) -> None:
        self._typing = typing
        self._truncates = truncates
        self._numbers = [each.seq or 0 for each in truncates]
        self._end = None if end is None else msgspec.structs.asdict(end)

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = RowReader(self._typing.columns, self._typing.options)
        for batch in batches:
            images: list[str | None] = []
            own: list[dict[str, Any]] = []
            for row in batch.to_pylist():
                key = _key(self._typing, row["key"])
                if row["is_first"]:
                    images.append(None)
                    own.append({KIND: "end", "_key": key} | _ended(self._ending(0, row["own"])))
                if row["own"]["op"] != "delete":
                    images.append(row["after"])
                    own.append(self._version(key, row))
            yield _rows(self._typing, reader, images, own)

    def _version(self, key: str, row: dict[str, Any]) -> dict[str, Any]:
        mark = row["own"]
        return _begun(mark, key, self._typing.snapshot) | _ended(
            self._ending(mark["seq"], row["next"])
        )

    def _ending(self, seq: int, change: dict[str, Any] | None) -> dict[str, Any] | None:
        """What ends a version that began at `seq`: the next change of the row, or a truncate before
        it, or the end of the era."""
        place = bisect_right(self._numbers, seq)
        if place < len(self._numbers) and (change is None or self._numbers[place] < change["seq"]):
            return msgspec.structs.asdict(self._truncates[place])
        return change or self._end


def _begun(mark: dict[str, Any], key: str, snapshot: str) -> dict[str, Any]:
    return {
        KIND: "version",
        "_key": key,
        "_op": mark["op"],
        "_valid_from": mark["at"],
        "_seq": mark["seq"],
        "_xid": mark["xid"],
        "_user_id": mark["user_id"],
        "_function_name": mark["function_name"],
        "_trace_id": mark["trace_id"],
        "_snapshot": snapshot,
    }


def _ended(end: dict[str, Any] | None) -> dict[str, Any]:
    if end is None:
        return {OPEN: True}
    names = ("op", "seq", "xid", "user_id", "function_name", "trace_id")
    return {OPEN: False, "_valid_to": end["at"]} | {f"_end_{name}": end[name] for name in names}


def _key(typing: Typing, text: str) -> str:
    hidden = typing.options.hides_key_of(typing.table)
    return typing.options.hashed(text) if hidden else text


def _rows(
    typing: Typing, reader: RowReader, images: list[str | None], own: list[dict[str, Any]]
) -> pa.RecordBatch:
    arrays, beyond = reader.read(images)
    schema = typing.schema
    values = dict(zip((c.name for c in typing.columns), arrays, strict=True))
    values[BEYOND] = pa.array(beyond, schema.field(BEYOND).type)
    for field in schema:
        if field.name not in values:
            values[field.name] = pa.array([row.get(field.name) for row in own], field.type)
    return pa.RecordBatch.from_arrays([values[name] for name in schema.names], schema=schema)


def snapshot_rows(rows: DataFrame, at: datetime, typing: Typing) -> DataFrame:
    """The rows of a snapshot of that time as versions that begin an era."""
    from pyspark.sql.pandas.types import from_arrow_schema

    mark = {
        "op": "snapshot",
        "at": at,
        **dict.fromkeys(("seq", "xid", "user_id", "function_name", "trace_id")),
    }

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = RowReader(typing.columns, typing.options)
        for batch in batches:
            keys = batch.column("key").to_pylist()
            own = [_begun(mark, _key(typing, key), typing.snapshot) | {OPEN: True} for key in keys]
            yield _rows(typing, reader, batch.column("image").to_pylist(), own)

    images = rows.select("key", "image")
    typed: DataFrame = images.mapInArrow(read, from_arrow_schema(typing.schema))
    return typed


def unknown(
    lake: Lake, typing: Typing, snapshot: str, end: End | None, until: datetime
) -> DataFrame:
    """The version that says that the state between two eras, or before the first one, is not known.
    `snapshot` is where the era began that has ended."""
    from pyspark.sql.pandas.types import from_arrow_schema

    own: dict[str, Any] = {"_op": "unknown", "_end_op": "snapshot", "_valid_to": until, OPEN: False}
    if end is not None:
        own |= {"_valid_from": min(end.at, until), "_seq": end.seq, "_xid": end.xid}
        own |= {"_snapshot": snapshot}
    own |= {KIND: "version"}
    row = _rows(typing, RowReader(typing.columns, typing.options), [None], [own])
    return lake.spark.createDataFrame(
        pa.Table.from_batches([row]), from_arrow_schema(typing.schema)
    )
