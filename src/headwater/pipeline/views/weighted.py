"""Changes as weighted rows: an added row has the weight +1, a removed row -1.

An insert is its row with +1, a delete with -1, an update both. The rows have the types of the
table, as `schemas` reads them. A column of the table with the name `weight` becomes `weight_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from headwater.model import Table
from headwater.pipeline.lake.schemas import ImageReader, arrow_schema
from headwater.pipeline.views.aggregates import WEIGHT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHANGES = ("seq", "xid", "relation", "shape", "op", "key", "before", "after")
"""The columns of a change that a view needs."""


def row_schema(table: Table) -> pa.Schema:
    """A row of the table, and its weight."""
    fields = [
        field.with_name(f"{WEIGHT}_") if field.name == WEIGHT else field
        for field in arrow_schema(table)
    ]
    return pa.schema([*fields, pa.field(WEIGHT, pa.int32(), nullable=False)])


class SourceTable(msgspec.Struct, frozen=True):
    """A table of a view, and the columns that the view's function uses. The other columns are NULL:
    to read them would take time, and could fail."""

    table: Table
    used: frozenset[str]

    def reader(self) -> WeightedRowReader:
        return WeightedRowReader(self)


class WeightedRowReader:
    """Makes rows of one table from images."""

    def __init__(self, source: SourceTable) -> None:
        table = source.table
        self.schema = row_schema(table)
        self._used = [name in source.used for name in self.schema.names[:-1]]
        columns = (c for c, used in zip(table.columns, self._used, strict=True) if used)
        self._reader = ImageReader(msgspec.structs.replace(table, columns=tuple(columns)))
        self._shape = table.id

    def rows(self, images: Sequence[str], weights: Sequence[int]) -> pa.RecordBatch:
        read = iter(self._reader.rows(images, [self._shape] * len(images)).flatten())
        arrays = [
            next(read) if used else pa.nulls(len(images), field.type)
            for used, field in zip(self._used, self.schema, strict=False)
        ]
        arrays.append(pa.array(weights, pa.int32()))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def changed(self, changes: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
        """The rows that changes added and removed."""
        went = [image for image in changes.column("before").to_pylist() if image is not None]
        came = [image for image in changes.column("after").to_pylist() if image is not None]
        return self.rows([*went, *came], [-1] * len(went) + [1] * len(came))


def spread(changes: DataFrame, source: SourceTable) -> DataFrame:
    """The same, with Spark's tasks."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = source.reader()
        for batch in batches:
            yield reader.changed(batch)

    made: DataFrame = changes.select("before", "after").mapInArrow(
        read, from_arrow_schema(row_schema(source.table))
    )
    return made


def frame(spark: SparkSession, rows: pa.RecordBatch | pa.Table) -> DataFrame:
    """Rows of the driver as a DataFrame in one partition, which is fastest for few rows."""
    from pyspark.sql.pandas.types import from_arrow_schema

    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    made: DataFrame = spark.createDataFrame(table, from_arrow_schema(table.schema))
    return made.coalesce(1)


def empty(spark: SparkSession, table: Table) -> DataFrame:
    """A DataFrame of the table without rows."""
    from pyspark.sql.pandas.types import from_arrow_schema

    rows: DataFrame = spark.createDataFrame([], from_arrow_schema(row_schema(table)))
    return rows
