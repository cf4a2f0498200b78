"""The Delta table `audit`: changes counted by day, user, table, operation, function and source.

Spark's tasks count each part of a batch as they write it, and write the counts as a file. These
files are committed with the offset of the batch, after the commit of the events. So a group can
have several lines. They are summed on reading, and folded into one line from time to time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from headwater.errors import InvalidQuery
from headwater.pipeline.files import FileLocation
from headwater.pipeline.lake import delta

if TYPE_CHECKING:
    from deltalake.transaction import AddAction
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

_UTC = pa.timestamp("us", tz="UTC")

AUDIT = pa.schema(
    [
        pa.field("day", pa.date32(), nullable=False),
        pa.field("user", pa.string()),
        pa.field("table", pa.string(), nullable=False),
        pa.field("operation", pa.string(), nullable=False),
        pa.field("function", pa.string()),
        pa.field("source", pa.string()),
        pa.field("changes", pa.int64(), nullable=False),
        pa.field("first_at", _UTC, nullable=False),
        pa.field("last_at", _UTC, nullable=False),
    ]
)
"""`user` and `function` are NULL for changes whose writer did not set them, `source` for changes
that did not come from a source."""

BY = ("day", "user", "table", "operation", "function", "source")
"""What changes can be counted by."""


# ------------------------------------------------------------------------ the contents of a batch

_GROUPS = (
    "relation", "shape", "schema_name", "table_name", "op", "user_id", "function_name", "source",
)  # fmt: skip

_TOTALS = {
    "changes": "sum",
    "first_at": "min",
    "last_at": "max",
    "first_xid": "min",
    "last_xid": "max",
}
"""How two counts of a group are added."""

CONTENTS = pa.schema(
    [
        pa.field("relation", pa.int64()),
        pa.field("shape", pa.int64()),
        pa.field("op", pa.string()),
        pa.field("changes", pa.int64()),
        pa.field("first_at", _UTC),
        pa.field("last_at", _UTC),
        pa.field("first_xid", pa.int64()),
        pa.field("last_xid", pa.int64()),
    ]
)
"""The contents of a batch: its changes counted by table, shape and operation, with the first and
last time and transaction."""


def counted(events: pa.RecordBatch | pa.Table) -> pa.Table:
    """Events counted by day, table, shape, operation and writer."""
    times, ids = events.column("committed_at"), events.column("xid")
    columns: dict[str, Any] = {name: events.column(name) for name in _GROUPS}
    columns |= {
        "day": pc.cast(times, pa.date32()),
        "changes": pa.repeat(pa.scalar(1, pa.int64()), events.num_rows),
        "first_at": times,
        "last_at": times,
        "first_xid": ids,
        "last_xid": ids,
    }
    return _totals(pa.table(columns), _COUNTED.names)


_COUNTED = pa.schema(
    [
        pa.field("day", pa.date32()),
        *(pa.field(n, pa.int64() if n in ("relation", "shape") else pa.string()) for n in _GROUPS),
    ]
)


def merged(counts: Iterable[pa.Table]) -> pa.Table:
    """The sum of counts that `counted` made."""
    totals = [field for field in CONTENTS if field.name in _TOTALS]
    return _totals(
        pa.concat_tables([pa.schema([*_COUNTED, *totals]).empty_table(), *counts]), _COUNTED.names
    )


def contents_of(counted: pa.Table) -> pa.Table:
    """The contents, from counts."""
    found = _totals(counted, [name for name in CONTENTS.names if name not in _TOTALS])
    return found.select(CONTENTS.names).cast(CONTENTS)


def _totals(rows: pa.Table, by: Sequence[str]) -> pa.Table:
    totals = [(name, how) for name, how in _TOTALS.items() if name in rows.column_names]
    found = rows.group_by(list(by), use_threads=False).aggregate(totals)
    names = {f"{name}_{how}": name for name, how in totals}
    return found.rename_columns([names.get(name, name) for name in found.column_names])


def rolled(counted: pa.Table) -> pa.Table:
    """The lines of `audit` for counts."""
    schema, table = counted.column("schema_name"), counted.column("table_name")
    label = pc.if_else(
        pc.equal(schema, "public"), table, pc.binary_join_element_wise(schema, table, ".")
    )
    named = {"user": "user_id", "operation": "op", "function": "function_name"}
    columns = {
        name: label if name == "table" else counted.column(named.get(name, name))
        for name in AUDIT.names
    }
    return _totals(pa.table(columns), BY).select(AUDIT.names).cast(AUDIT)


# ------------------------------------------------------------------------ in the lake


class AuditTable:
    """The open table, for the stream that appends to it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.table = delta.create(path, AUDIT, ["day"])

    def add(self, files: Sequence[AddAction], offset: str) -> None:
        """Add the counts of a batch, which tasks have written."""
        delta.commit(self.table, files, {delta.OFFSET: offset})

    def add_events(self, events: DataFrame, offset: str) -> None:
        """Count these events, and add the counts."""
        metadata = {delta.OFFSET: offset}
        delta.append_frame(self._path, roll_up(events), metadata=metadata, table=self.table)

    def rebuild(self, events: DataFrame, offset: str | None) -> None:
        """Count all events again, for a lake with events that were not counted, or with fewer than
        were counted. Days before the first event stay as they are: their events were removed."""
        counted = roll_up(events).toArrow().cast(AUDIT)
        self.table.update_incremental()
        held = pa.table(self.table.get_add_actions(flatten=True)).column("partition.day")
        first = pc.min(counted.column("day")).as_py()
        days = {*pc.unique(counted.column("day")).to_pylist()} | {
            day for day in held.to_pylist() if offset is None or (first and day >= first)
        }
        metadata = None if offset is None else {delta.OFFSET: offset}
        if days:
            delta.replace(self.table, self._path, counted, sorted(days), metadata=metadata)
        self.table.update_incremental()


def fold(path: str) -> None:
    """Make one line of each group, for days that have several files. The offset of the table stays
    known."""
    table = DeltaTable(path)
    files = _scattered(table)
    if not files:
        return
    rows = pa.concat_tables(_lines(path, name, day) for day, name in files)
    folded = _totals(rows, BY).select(AUDIT.names).cast(AUDIT)
    properties = delta.carrying(table)
    metadata = None if properties is None else properties.custom_metadata
    try:
        days = sorted({day for day, _ in files})
        delta.replace(table, path, folded, days, metadata=metadata)
    except DeltaError as error:
        # Another commit came first. The next attempt folds them.
        log.warning("Could not fold the lines of the Delta table %s: %s", path, error)


def _scattered(table: DeltaTable) -> list[tuple[date, str]]:
    """The files of days that have several."""
    files = pa.table(table.get_add_actions(flatten=True))
    if not files.num_rows:
        return []
    days = files.column("partition.day").to_pylist()
    counts = Counter(days)
    names = files.column("path").to_pylist()
    return [each for each in zip(days, names, strict=True) if counts[each[0]] > 1]


def _lines(path: str, name: str, day: date) -> pa.Table:
    """A file of the table. Files are read one by one: a data set of hundreds is far slower. Those
    of an earlier release have no `source`."""
    place = FileLocation.of(path)
    with pq.ParquetFile(place.below(name), filesystem=place.system) as file:
        rows = file.read()
    if "source" not in rows.column_names:
        rows = rows.append_column("source", pa.nulls(rows.num_rows, pa.string()))
    days = pa.repeat(pa.scalar(day, pa.date32()), rows.num_rows)
    return rows.append_column("day", days).select(AUDIT.names).cast(AUDIT)


# ------------------------------------------------------------------------ with Spark


def roll_up(events: DataFrame) -> DataFrame:
    """The events counted by all columns of `BY`."""
    from pyspark.sql import functions as f

    label = f.when(f.col("schema_name") == "public", f.col("table_name")).otherwise(
        f.concat_ws(".", "schema_name", "table_name")
    )
    return (
        events.groupBy(
            f.to_date("committed_at").alias("day"),
            f.col("user_id").alias("user"),
            label.alias("table"),
            f.col("op").alias("operation"),
            f.col("function_name").alias("function"),
            f.col("source"),
        )
        .agg(
            f.count("*").alias("changes"),
            f.min("committed_at").alias("first_at"),
            f.max("committed_at").alias("last_at"),
        )
        .select(*AUDIT.names)
    )


def summary(rolled: DataFrame, by: Sequence[str]) -> DataFrame:
    """The counts by some of the columns in `BY`. InvalidQuery for any other column."""
    from pyspark.sql import functions as f

    for name in by:
        if name not in BY:
            raise InvalidQuery(
                f"changes cannot be counted by {name!r}", hint=f"Use: {', '.join(BY)}."
            )
    grouped = rolled.groupBy(*by).agg(
        f.sum("changes").alias("changes"),
        f.min("first_at").alias("first_at"),
        f.max("last_at").alias("last_at"),
    )
    return grouped.orderBy(*by) if by else grouped
