"""The rows of a table, kept in Spark: what a join needs to know of the tables that did not change.

Most of them lie in a frame that is kept in memory and on disk; what few have changed since, by key,
lies beside it on the driver and takes the place of theirs. When that grows, both become one frame
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa

from headwater import limits
from headwater.pipeline.table_reading import Reading
from headwater.pipeline.views import weighted
from headwater.pipeline.views.weighted import Source, Weigher

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEY = "key of the row"
"""The key as events have it, beside a row's own columns."""


class TableState:
    """A table as a view last saw it. Nothing in it changes: what follows is another one."""

    def __init__(
        self,
        spark: SparkSession,
        source: Source,
        parts: Sequence[DataFrame],
        changed: Mapping[str, str | None] | None = None,
    ) -> None:
        self._spark = spark
        self._source = source
        self._weigher = source.reader()
        self._base = reduce(lambda a, b: a.unionByName(b), parts) if parts else self._frame({})
        self._changed = dict(changed or {})

    @classmethod
    def read(cls, spark: SparkSession, now: Reading, name: str, source: Source) -> TableState:
        """From the database."""
        weigher = source.reader()
        rows = now.rows(name, limits.VIEW_BUILD_ROWS)
        return cls(spark, source, [cls.part(spark, weigher, *each) for each in rows])

    @staticmethod
    def part(
        spark: SparkSession, weigher: Weigher, keys: Sequence[str], images: Sequence[str]
    ) -> DataFrame:
        """Rows with their keys, kept."""
        rows = _with_keys(weigher, keys, images)
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
        rows = _with_keys(self._weigher, list(images), list(images.values()))
        return weighted.frame(self._spark, rows)

    # -------------------------------------------------------------------- folding

    def folded(self, changes: pa.Table) -> TableState:
        """After changes in the order of `seq`."""
        keys, images = changes.column("key").to_pylist(), changes.column("after").to_pylist()
        changed = self._changed | dict(zip(keys, images, strict=True))
        following = TableState(self._spark, self._source, [self._base], changed)
        return following if len(changed) <= limits.VIEW_CHANGED_ROWS else following._one()

    def folded_by_spark(self, changes: DataFrame) -> TableState:
        """The same, for more than the driver should hold."""
        from pyspark.sql import functions as f

        latest = changes.groupBy("key").agg(f.max_by("after", "seq").alias("after")).persist()
        try:
            one = self._one() if self._changed else self
            rows = _spread(latest.where("after is not null"), self._source)
            keys = latest.select(f.col("key").alias(KEY))
            base = one._base.join(keys, KEY, "left_anti").select(*rows.columns).unionByName(rows)
            return TableState(self._spark, self._source, [base.localCheckpoint()])
        finally:
            latest.unpersist()

    def _one(self) -> TableState:
        return TableState(self._spark, self._source, [self._with_keys().localCheckpoint()])


def _with_keys(weigher: Weigher, keys: Sequence[str], images: Sequence[str]) -> pa.RecordBatch:
    rows = weigher.rows(images, [1] * len(images))
    arrays = [*rows.columns, pa.array(keys, pa.string())]
    return pa.RecordBatch.from_arrays(arrays, schema=_schema(weigher))


def _schema(weigher: Weigher) -> pa.Schema:
    return weigher.schema.append(pa.field(KEY, pa.string()))


def _spread(latest: DataFrame, source: Source) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        weigher = source.reader()
        for batch in batches:
            keys, images = (batch.column(name).to_pylist() for name in ("key", "after"))
            yield _with_keys(weigher, keys, images)

    made: DataFrame = latest.select("key", "after").mapInArrow(
        read, from_arrow_schema(_schema(source.reader()))
    )
    return made
