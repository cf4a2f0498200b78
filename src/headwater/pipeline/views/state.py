"""The rows of a table, stored in Spark: a join needs them for the tables that did not change.

Most rows are in a DataFrame in memory and on disk. The few rows that changed since are on the
driver, by key, and replace theirs. When these become many, both are merged into one DataFrame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa

from headwater.pipeline.lake.database_snapshot import DatabaseSnapshot
from headwater.pipeline.views import weighted
from headwater.pipeline.views.weighted import SourceTable, WeightedRowReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BUILD_ROWS = 50_000
"""Rows of a table that are read and aggregated at a time when a view is built."""

_VIEW_CHANGED_ROWS = 10_000
"""Changed rows of a joined table that are stored separately. With more, they are merged with the
others."""


KEY = "key of the row"
"""The column with the key as events have it."""


class JoinState:
    """The rows of a table after the last batch. Immutable: each batch makes a new one."""

    def __init__(
        self,
        spark: SparkSession,
        source: SourceTable,
        parts: Sequence[DataFrame],
        changed: Mapping[str, str | None] | None = None,
    ) -> None:
        self._spark = spark
        self._source = source
        self._reader = source.reader()
        self._base = reduce(lambda a, b: a.unionByName(b), parts) if parts else self._frame({})
        self._changed = dict(changed or {})

    @classmethod
    def read(
        cls, spark: SparkSession, now: DatabaseSnapshot, name: str, source: SourceTable
    ) -> JoinState:
        """From the database."""
        reader = source.reader()
        rows = now.rows(name, BUILD_ROWS)
        return cls(spark, source, [cls.part(spark, reader, *each) for each in rows])

    @staticmethod
    def part(
        spark: SparkSession, reader: WeightedRowReader, keys: Sequence[str], images: Sequence[str]
    ) -> DataFrame:
        """Rows with their keys, stored in Spark."""
        rows = _with_keys(reader, keys, images)
        return weighted.frame(spark, rows).localCheckpoint()

    @staticmethod
    def rows_of(frame: DataFrame) -> DataFrame:
        return frame.drop(KEY)

    def frame(self) -> DataFrame:
        """The rows, with the weight +1."""
        return self.rows_of(self._with_keys())

    def _with_keys(self) -> DataFrame:
        if not self._changed:
            return self._base
        return self._replaced(
            self._keys(self._changed),
            self._frame({k: v for k, v in self._changed.items() if v is not None}),
        )

    def _replaced(self, keys: DataFrame, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as f

        left = self._base.join(f.broadcast(keys), KEY, "left_anti")
        return left.select(*rows.columns).unionByName(rows)

    def _keys(self, keys: Mapping[str, object]) -> DataFrame:
        return weighted.frame(self._spark, pa.table({KEY: pa.array(list(keys), pa.string())}))

    def _frame(self, images: Mapping[str, str]) -> DataFrame:
        rows = _with_keys(self._reader, list(images), list(images.values()))
        return weighted.frame(self._spark, rows)

    # -------------------------------------------------------------------- folding

    def folded(self, changes: pa.Table) -> JoinState:
        """The state after changes, which are in the order of `seq`."""
        keys, images = changes.column("key").to_pylist(), changes.column("after").to_pylist()
        changed = self._changed | dict(zip(keys, images, strict=True))
        following = JoinState(self._spark, self._source, [self._base], changed)
        return following if len(changed) <= _VIEW_CHANGED_ROWS else following._one()

    def folded_by_spark(self, changes: DataFrame) -> JoinState:
        """The same, for more changes than the driver should hold."""
        from pyspark.sql import functions as f

        latest = changes.groupBy("key").agg(f.max_by("after", "seq").alias("after")).persist()
        try:
            one = self._one() if self._changed else self
            rows = _spread(latest.where("after is not null"), self._source)
            keys = latest.select(f.col("key").alias(KEY))
            base = one._base.join(keys, KEY, "left_anti").select(*rows.columns).unionByName(rows)
            return JoinState(self._spark, self._source, [base.localCheckpoint()])
        finally:
            latest.unpersist()

    def _one(self) -> JoinState:
        return JoinState(self._spark, self._source, [self._with_keys().localCheckpoint()])


def _with_keys(
    reader: WeightedRowReader, keys: Sequence[str], images: Sequence[str]
) -> pa.RecordBatch:
    rows = reader.rows(images, [1] * len(images))
    arrays = [*rows.columns, pa.array(keys, pa.string())]
    return pa.RecordBatch.from_arrays(arrays, schema=_schema(reader))


def _schema(reader: WeightedRowReader) -> pa.Schema:
    return reader.schema.append(pa.field(KEY, pa.string()))


def _spread(latest: DataFrame, source: SourceTable) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = source.reader()
        for batch in batches:
            keys, images = (batch.column(name).to_pylist() for name in ("key", "after"))
            yield _with_keys(reader, keys, images)

    made: DataFrame = latest.select("key", "after").mapInArrow(
        read, from_arrow_schema(_schema(source.reader()))
    )
    return made
