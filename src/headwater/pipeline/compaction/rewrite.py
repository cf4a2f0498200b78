"""Joins files of `events` to larger ones, ordered by table and within it by `seq`: the past of one
table is then in few files, and there in few parts of them.

What fits in a small part of the memory is read and ordered here; Spark's tasks do it for more. One
commit replaces the files; commits of the stream may come in between. It changes no row, no batch
and no offset. Readers of an older version still find the old files until vacuum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from headwater.errors import PipelineError
from headwater.pipeline.compaction.choice import joined_files, to_join
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.files import FileLocation
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.parquet import rows_of, write_batches
from headwater.pipeline.lake.stored_files import StoredFile, exchange, stored_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ORDER = ("relation", "seq")

_DRIVER_BYTES = 64 * 2**20
"""Bytes of rows that are ordered in this process. More are left to Spark's tasks."""


def join_small(
    path: str,
    spark: Callable[[], SparkSession],
    *,
    all_days: bool = False,
    is_stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Join the small files of `events` that are due. Returns how many files were replaced."""
    table = delta.open_table(path)
    if table is None:
        return 0
    replaced = 0
    for files in to_join(stored_files(table), datetime.now(UTC).date(), all_days=all_days):
        if is_stopping():
            break
        join(table, files, spark)
        replaced += len(files)
    return replaced


def join(table: DeltaTable, files: Sequence[StoredFile], spark: Callable[[], SparkSession]) -> None:
    """Replace files of one day by files with the same rows, in one commit."""
    written = _in_driver(table, files) or _in_tasks(table, files, spark())
    wanted, found = sum(file.rows for file in files), sum(map(rows_of, written))
    if found != wanted:
        _discard(table, written)
        raise PipelineError(
            f"{wanted} rows of the Delta table {table.table_uri} were to be joined, and {found}"
            " were written. Nothing was committed",
            hint="The lake must be in a folder or under a URL that the driver and all executors"
            " share.",
            retryable=True,
        )
    failpoint("joined")
    delta.check_written(table, written)
    _replace(table, files, written)
    failpoint("replaced")


def _replace(table: DeltaTable, files: Sequence[StoredFile], written: Sequence[AddAction]) -> None:
    try:
        exchange(table, files, written, "joined")
    except PipelineError:
        _discard(table, written)
        raise


def _discard(table: DeltaTable, written: Iterable[AddAction]) -> None:
    """Remove files that are not committed. One that the driver does not find is not an error: that
    nothing was committed is the error to report."""
    place = FileLocation.of(table.table_uri)
    for file in written:
        with suppress(OSError):
            place.system.delete_file(place.below(file.path))


# ------------------------------------------------------------------------ small


def _in_driver(table: DeltaTable, files: Sequence[StoredFile]) -> list[AddAction] | None:
    """The files joined in this process; None if they have too many bytes for it."""
    rows = _read(table, files)
    if rows is None:
        return None
    ordered = rows.sort_by([(name, "ascending") for name in _ORDER])
    return write_batches(table.table_uri, STORED_EVENTS, ordered.to_batches(), ["day"], blooms=True)


def _read(table: DeltaTable, files: Sequence[StoredFile]) -> pa.Table | None:
    place, parts, size = FileLocation.of(table.table_uri), [], 0
    for file in files:
        with pq.ParquetFile(place.below(file.path), filesystem=place.system) as source:
            for group in range(source.num_row_groups):
                # Before it is read: what the columns take without compression.
                if size + source.metadata.row_group(group).total_byte_size > _DRIVER_BYTES:
                    return None
                part = _complete(source.read_row_group(group), file)
                parts.append(part)
                size += part.nbytes
    return pa.concat_tables(parts) if parts else STORED_EVENTS.empty_table()


def _complete(rows: pa.Table, file: StoredFile) -> pa.Table:
    """Rows of a file with all columns: `day` is not in it, and an older file lacks others."""
    known = {"day": pa.scalar(file.day, pa.date32())}
    columns = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.column_names
        else pa.repeat(known.get(field.name, pa.scalar(None, field.type)), rows.num_rows)
        for field in STORED_EVENTS
    ]
    return pa.Table.from_arrays(columns, schema=STORED_EVENTS)


# ------------------------------------------------------------------------ large


class _Written(msgspec.Struct, frozen=True):
    """A file that a task wrote, as a row of the answer."""

    path: str
    size: int
    day: str
    modified: int
    stats: str


_WRITTEN = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("day", pa.string()),
        ("modified", pa.int64()),
        ("stats", pa.string()),
    ]
)


def _in_tasks(
    table: DeltaTable, files: Sequence[StoredFile], spark: SparkSession
) -> list[AddAction]:
    """The files joined by Spark's tasks: each orders and writes some of the tables."""
    from pyspark.sql.pandas.types import from_arrow_schema

    path = table.table_uri if "://" in table.table_uri else FileLocation.of(table.table_uri).base
    names = [f"{path}/{file.path}" for file in files]
    rows = spark.read.schema(from_arrow_schema(STORED_EVENTS)).option("basePath", path)
    ordered = (
        rows.parquet(*names)
        .repartitionByRange(joined_files(files), *_ORDER)
        .sortWithinPartitions(*_ORDER)
    )

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stored = (_stored(batch) for batch in batches)
        written = write_batches(path, STORED_EVENTS, stored, ["day"], blooms=True)
        yield pa.RecordBatch.from_pylist([_row(file) for file in written], _WRITTEN)

    answer = ordered.mapInArrow(write, from_arrow_schema(_WRITTEN)).toArrow().to_pylist()
    return [
        AddAction(row["path"], row["size"], {"day": row["day"]}, row["modified"], False,
                  row["stats"])
        for row in answer
    ]  # fmt: skip


def _stored(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [batch.column(field.name).cast(field.type) for field in STORED_EVENTS]
    return pa.RecordBatch.from_arrays(columns, schema=STORED_EVENTS)


def _row(file: AddAction) -> dict[str, Any]:
    day = file.partition_values["day"]
    assert day is not None
    return msgspec.structs.asdict(
        _Written(file.path, file.size, day, file.modification_time, file.stats)
    )
