"""Compares one table with its state in the lake, both at the same position.

Count and hashes of each bucket are computed by the server in chunks, and by Spark over the state in
the lake. Only rows of buckets that differ are compared by key. The driver has the buckets, and at
most `limits.RECONCILE_KEYS_MAX` keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater import limits
from headwater.pipeline.reconcile import row_hashes
from headwater.pipeline.snapshots.chunks import Chunk
from headwater.pipeline.snapshots.reader import ExportedSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

DriftKind = Literal["missing", "extra", "different"]


class DriftKey(msgspec.Struct, frozen=True):
    """A row that differs: it is `missing` in the lake, `extra` there, or `different`."""

    key: str
    kind: DriftKind


class Comparison(msgspec.Struct, frozen=True):
    """A table compared: its rows in the database and in the lake, and the rows that differ. Some of
    their keys are listed."""

    rows: int
    lake_rows: int
    missing: int = 0
    extra: int = 0
    different: int = 0
    keys: tuple[DriftKey, ...] = ()

    @property
    def is_equal(self) -> bool:
        return not (self.missing or self.extra or self.different)


def compare(
    spark: SparkSession, exported: ExportedSnapshot, chunks: Sequence[Chunk], state: DataFrame
) -> Comparison:
    """Compare the rows of chunks with the state of the table in the lake (`key`, `image`)."""
    buckets = row_hashes.bucket_count(sum(chunk.bytes for chunk in chunks))
    with _stored(row_hashes.image_hashes(state)) as hashes:
        sums = _sums(
            row_hashes.database_buckets(spark, exported, chunks, buckets),
            row_hashes.lake_buckets(hashes, buckets),
        )
        rows, lake_rows = (pc.sum(sums.column(name)).as_py() or 0 for name in ("rows", "lake_rows"))
        chosen = _differing(sums)
        if not chosen:
            return Comparison(rows, lake_rows)
        differences = _differences(
            row_hashes.database_hashes(spark, exported, chunks, buckets, chosen),
            row_hashes.in_buckets(hashes, buckets, chosen),
        )
        with _stored(differences) as found:
            return Comparison(rows, lake_rows, **_counts(found), keys=_keys(found))


@contextmanager
def _stored(frame: DataFrame) -> Iterator[DataFrame]:
    """A frame that is computed once, and then read by several jobs. Spark moves what is too large
    for the memory to disk."""
    stored = frame.persist()
    try:
        yield stored
    finally:
        stored.unpersist()


def _sums(database: DataFrame, lake: DataFrame) -> pa.Table:
    """The buckets of both sides, with their rows. `hashes` is 0 where both have the same rows."""
    from pyspark.sql import functions as f

    both = database.withColumn("lake_rows", f.lit(0).cast("long")).unionByName(
        lake.withColumnRenamed("rows", "lake_rows").withColumn("rows", f.lit(0).cast("long"))
    )
    return (
        both.groupBy("bucket")
        .agg(
            f.sum("rows").alias("rows"),
            f.sum("lake_rows").alias("lake_rows"),
            f.bit_xor("hashes").alias("hashes"),
        )
        .toArrow()
    )


def _differing(sums: pa.Table) -> list[int]:
    differs = pc.or_(
        pc.not_equal(sums.column("hashes"), 0),
        pc.not_equal(sums.column("rows"), sums.column("lake_rows")),
    )
    found: list[int] = sums.filter(differs).column("bucket").to_pylist()
    return found


def _differences(database: DataFrame, lake: DataFrame) -> DataFrame:
    """The keys whose rows differ, and how."""
    from pyspark.sql import functions as f

    here = database.withColumnRenamed("hash", "here")
    joined = here.join(lake.withColumnRenamed("hash", "there"), "key", "full_outer")
    kind = (
        f.when(f.col("there").isNull(), "missing")
        .when(f.col("here").isNull(), "extra")
        .otherwise("different")
    )
    return joined.where(~f.col("here").eqNullSafe(f.col("there"))).select("key", kind.alias("kind"))


def _counts(found: DataFrame) -> dict[str, int]:
    return {row["kind"]: row["count"] for row in found.groupBy("kind").count().collect()}


def _keys(found: DataFrame) -> tuple[DriftKey, ...]:
    rows = found.limit(limits.RECONCILE_KEYS_MAX).toArrow().to_pylist()
    return msgspec.convert(sorted(rows, key=lambda row: row["key"]), tuple[DriftKey, ...])
