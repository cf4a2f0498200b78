"""The Delta table `audit`: changes counted by day, user, table, operation, function and source.

The driver counts each batch once, from its rows or its Parquet files. The counts are appended in a
commit of their own with the number of the batch, after the commit of the events. A repeated batch
is found to be counted already; after a crash between the two commits it is counted when it is
repeated. So a group can have several lines. They are summed on reading, and folded into one line
from time to time.
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

NEEDED = (
    "relation", "shape", "schema_name", "table_name", "op", "user_id", "function_name",
    "source", "xid", "committed_at",
)  # fmt: skip
"""The columns of events that are counted."""

_GROUPS = NEEDED[:8]
_TOTALS = {
    "changes": ("changes", "sum"),
    "first_at": ("first_at", "min"),
    "last_at": ("last_at", "max"),
    "first_xid": ("first_xid", "min"),
    "last_xid": ("last_xid", "max"),
}


def counted(parts: Iterable[pa.Table]) -> pa.Table:
    """The contents of a batch, given in parts: its changes counted by day, table, shape, operation
    and writer, with the first and last time and transaction."""
    found = [_counted(part.select(list(NEEDED))) for part in parts]
    if not found:
        return _counted(pa.table({name: pa.array([], _type(name)) for name in NEEDED}))
    return found[0] if len(found) == 1 else _totals(pa.concat_tables(found), ("day", *_GROUPS))


def _type(name: str) -> pa.DataType:
    if name == "committed_at":
        return _UTC
    return pa.int64() if name in ("relation", "shape", "xid") else pa.string()


def _counted(rows: pa.Table) -> pa.Table:
    times, ids = rows.column("committed_at"), rows.column("xid")
    columns: dict[str, Any] = {name: rows.column(name) for name in _GROUPS}
    columns |= {
        "day": pc.cast(times, pa.date32()),
        "changes": pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows),
        "first_at": times,
        "last_at": times,
        "first_xid": ids,
        "last_xid": ids,
    }
    return _totals(pa.table(columns), ("day", *_GROUPS))


def _totals(rows: pa.Table, by: Sequence[str]) -> pa.Table:
    totals = {name: each for name, each in _TOTALS.items() if name in rows.column_names}
    found = rows.group_by(list(by), use_threads=False).aggregate(list(totals.values()))
    names = {f"{name}_{how}": name for name, how in totals.values()}
    return found.rename_columns([names.get(name, name) for name in found.column_names])


def rolled(contents: pa.Table) -> pa.Table:
    """The lines of `audit` for the contents of a batch."""
    schema, table = contents.column("schema_name"), contents.column("table_name")
    label = pc.if_else(
        pc.equal(schema, "public"), table, pc.binary_join_element_wise(schema, table, ".")
    )
    named = {"user": "user_id", "operation": "op", "function": "function_name"}
    columns = {
        name: label if name == "table" else contents.column(named.get(name, name))
        for name in AUDIT.names
    }
    return _totals(pa.table(columns), BY).select(AUDIT.names).cast(AUDIT)


# ------------------------------------------------------------------------ in the lake


class AuditTable:
    """The open table, for the stream that appends to it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.table = delta.create(path, AUDIT, ["day"])

    def holds(self, app_id: str, batch_id: int) -> bool:
        return delta.holds(self.table, app_id, batch_id)

    def add(self, contents: pa.Table, *, app_id: str, batch_id: int, offset: str) -> bool:
        """Add the counts of a batch; False if the table has them already."""
        return delta.append(
            self._path,
            rolled(contents),
            app_id=app_id,
            batch_id=batch_id,
            metadata={delta.OFFSET: offset},
            table=self.table,
        )

    def rebuild(
        self, events: DataFrame, *, app: tuple[str, int] | None, offset: str | None
    ) -> None:
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
            delta.replace(self.table, self._path, counted, sorted(days), app=app, metadata=metadata)
        self.table.update_incremental()


def fold(path: str) -> None:
    """Make one line of each group, for days that have several files. The numbers of the batches in
    the table stay known."""
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
