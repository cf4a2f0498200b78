"""Delta tables through delta-rs: appended to exactly once, read by Spark's own Parquet reader.

Spark needs no jar for this. A batch is committed together with its number (`app_id`, `batch_id`),
so one that is replayed after a crash is found to be in already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import TableNotFoundError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def create(path: str, schema: pa.Schema, partition_by: Sequence[str] = ()) -> DeltaTable:
    """The table at the path, made if there is none."""
    return DeltaTable.create(path, schema, mode="ignore", partition_by=list(partition_by))


def open_table(path: str) -> DeltaTable | None:
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        return None


def append(
    path: str, rows: pa.Table, *, app_id: str, batch_id: int, metadata: dict[str, Any] | None = None
) -> bool:
    """Append a batch; False if it was in already."""
    table = DeltaTable(path)
    done = table.transaction_version(app_id)
    if done is not None and done >= batch_id:
        return False
    properties = CommitProperties(
        app_transactions=[Transaction(app_id, batch_id)], custom_metadata=metadata
    )
    write_deltalake(table, rows, mode="append", commit_properties=properties)
    return True


def read(
    spark: SparkSession, path: str, schema: Any, filters: Sequence[tuple[str, str, Any]] = ()
) -> DataFrame:
    """The rows of the table, as of its latest version. `filters` leave out partitions."""
    table = DeltaTable(path)
    files = table.file_uris(list(filters) or None)
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).option("basePath", path).parquet(*files)
