"""The rows of tables as DataFrames: changes with weights, and rows as they are.

An added row has the weight +1, a removed row -1: an insert is its row with +1, a delete with -1, an
update both. Functions that do not add weighted rows get their tables without that column. The rows
have the types of the table, as `schemas` reads them. With weights, a column of the table with the
name `weight` becomes `weight_`.

Everything here is read by Spark's tasks, from images to typed columns, when it is executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model import Table
from headwater.pipeline.lake.schemas import ImageReader, arrow_schema
from headwater.pipeline.stream import parts as log_parts
from headwater.pipeline.views.aggregates import WEIGHT
from headwater.pipeline.views.plans import SOURCE
from headwater.pipeline.views.storage.groups import key_texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VALUES = pa.schema(
    [
        pa.field("parameter", pa.string(), nullable=False),
        pa.field("column", pa.string(), nullable=False),
        pa.field("value", pa.string()),
    ]
)
"""A value of a column of a changed row."""


class SourceTable(msgspec.Struct, frozen=True):
    """A table of a view, and the columns that the view's function uses. The other columns are NULL:
    to read them would take time, and could fail."""

    table: Table
    used: frozenset[str]
    has_weight: bool = True

    @property
    def schema(self) -> pa.Schema:
        """A row of the table, and its weight."""
        rows = arrow_schema(self.table)
        if not self.has_weight:
            return rows
        fields = [
            field.with_name(f"{WEIGHT}_") if field.name == WEIGHT else field for field in rows
        ]
        return pa.schema([*fields, pa.field(WEIGHT, pa.int32(), nullable=False)])

    def empty(self, spark: SparkSession, parameter: str) -> DataFrame:
        """A DataFrame without rows, which is found again in a plan."""
        from pyspark.sql.pandas.types import from_arrow_schema

        rows = spark.createDataFrame([], from_arrow_schema(self.schema))
        return rows.alias(f"{SOURCE}{parameter}")

    def reader(self) -> RowReader:
        return RowReader(self)


class RowReader:
    """Makes rows of one table from images."""

    def __init__(self, source: SourceTable) -> None:
        table = source.table
        self.schema = source.schema
        self._has_weight = source.has_weight
        self._used = [column.name in source.used for column in table.columns]
        columns = (c for c, used in zip(table.columns, self._used, strict=True) if used)
        self._reader = ImageReader(msgspec.structs.replace(table, columns=tuple(columns)))
        self._shape = table.id

    def rows(self, images: Sequence[str], weights: Sequence[int]) -> pa.RecordBatch:
        read = iter(self._reader.rows(images, [self._shape] * len(images)).flatten())
        arrays = [
            next(read) if used else pa.nulls(len(images), field.type)
            for used, field in zip(self._used, self.schema, strict=False)
        ]
        if self._has_weight:
            arrays.append(pa.array(weights, pa.int32()))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def changed(self, changes: pa.RecordBatch, sign: int = 1) -> pa.RecordBatch:
        """The rows that changes added and removed."""
        went = [image for image in changes.column("before").to_pylist() if image is not None]
        came = [image for image in changes.column("after").to_pylist() if image is not None]
        return self.rows([*went, *came], [-sign] * len(went) + [sign] * len(came))


def changed(parts: DataFrame, source: SourceTable, *, sign: int = 1) -> DataFrame:
    """The rows of a table that were added and removed by the changes of parts. With the sign -1,
    what takes them back."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = source.reader()
        for changes in _changes(batches, [source.table.oid]):
            yield reader.changed(changes, sign)

    made: DataFrame = parts.mapInArrow(read, from_arrow_schema(source.schema))
    return made


def present(images: DataFrame, source: SourceTable) -> DataFrame:
    """The rows of a table from their images, with the weight +1."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = source.reader()
        for batch in batches:
            yield reader.rows(batch.column("image").to_pylist(), [1] * batch.num_rows)

    made: DataFrame = images.mapInArrow(read, from_arrow_schema(source.schema))
    return made


def changed_values(
    parts: DataFrame, sources: Mapping[str, SourceTable], columns: Mapping[str, Iterable[str]]
) -> DataFrame:
    """The different values of columns in changed rows, before and after (`VALUES`)."""
    from pyspark.sql.pandas.types import from_arrow_schema

    wanted = {
        name: (SourceTable(sources[name].table, frozenset(each), False), sorted(each))
        for name, each in columns.items()
    }

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        readers = {name: (source.reader(), each) for name, (source, each) in wanted.items()}
        relations = [source.table.oid for source, _ in wanted.values()]
        for changes in _changes(batches, relations):
            for name, (reader, each) in readers.items():
                own = changes.filter(
                    pc.equal(changes.column("relation"), wanted[name][0].table.oid)
                )
                if own.num_rows:
                    rows = reader.changed(own)
                    for column in each:
                        yield _values(name, column, rows.column(column))

    made: DataFrame = parts.mapInArrow(read, from_arrow_schema(VALUES))
    return made.distinct()


def column_values(rows: DataFrame, parameter: str, columns: Iterable[str]) -> DataFrame:
    """The different values of columns of rows (`VALUES`)."""
    from pyspark.sql.pandas.types import from_arrow_schema

    names = sorted(columns)
    quoted = ["`" + name.replace("`", "``") + "`" for name in names]

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for at, name in enumerate(names):
                yield _values(parameter, name, batch.column(at))

    made: DataFrame = rows.select(*quoted).mapInArrow(read, from_arrow_schema(VALUES))
    return made.distinct()


def _values(parameter: str, column: str, values: pa.Array) -> pa.RecordBatch:
    found = pa.array(list(dict.fromkeys(key_texts(values))), pa.string())
    names = [pa.repeat(pa.scalar(name), len(found)) for name in (parameter, column)]
    return pa.RecordBatch.from_arrays([*names, found], schema=VALUES)


def _changes(parts: Iterator[pa.RecordBatch], relations: list[int]) -> Iterator[pa.RecordBatch]:
    """The changes of some tables, in a task."""
    for part in log_parts.slices(parts):
        own = msgspec.structs.replace(part, relations=tuple(dict.fromkeys(relations)))
        yield from log_parts.rows_of(own)


def parts_frame(spark: SparkSession, parts: Sequence[Any]) -> DataFrame:
    """Slices of the log as a DataFrame of parts, one in each partition."""
    from pyspark.sql.pandas.types import from_arrow_schema

    rows = pa.Table.from_batches(
        [log_parts.part_row(number, part) for number, part in enumerate(parts)], log_parts.PARTS
    )
    made: DataFrame = spark.createDataFrame(rows, from_arrow_schema(log_parts.PARTS))
    return made.coalesce(1) if len(parts) == 1 else made.repartition(len(parts), "number")
