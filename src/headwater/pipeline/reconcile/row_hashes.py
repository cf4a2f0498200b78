"""The hash of a row: the first 60 bits of the MD5 of its image, which PostgreSQL and Spark compute
equally from the same text. A row falls into the bucket that its hash names.

MD5, because PostgreSQL has no other function of such quality that Spark has too, and the images of
both sides are the same text. Rows that differ have the same hash by chance once in 2^60 pairs.
Hashes of a bucket are combined by exclusive or, which needs no wide numbers and does not depend on
the order; together with the count, a row that is there twice is found, too. Who can write rows
could construct a collision; this is a check against mistakes, not against such a person.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from headwater import limits
from headwater.pipeline.snapshots import reader
from headwater.pipeline.snapshots.chunks import Chunk
from headwater.pipeline.snapshots.reader import ChunkReader, ExportedSnapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROW_BYTES = 100
_BUCKET_ROWS = 16
_BUCKETS = (64, 65_536)

BUCKETS = pa.schema([("bucket", pa.int64()), ("rows", pa.int64()), ("hashes", pa.int64())])
HASHES = pa.schema([("key", pa.string()), ("hash", pa.int64())])


def bucket_count(size: int) -> int:
    """The number of buckets for a table of this many bytes, a power of two: few rows in each, so
    that few rows are compared by key.

    >>> bucket_count(0), bucket_count(100_000_000), bucket_count(2**40)
    (64, 65536, 65536)
    """
    wanted = size // _ROW_BYTES // _BUCKET_ROWS
    low, high = _BUCKETS
    return min(high, max(low, 1 << wanted.bit_length()))


# ------------------------------------------------------------------------ in PostgreSQL

_HASH = "('x0' || left(md5(convert_to(c.image, 'UTF8')), 15))::bit(64)::bigint"


def database_buckets(
    spark: SparkSession, exported: ExportedSnapshot, chunks: Sequence[Chunk], buckets: int
) -> DataFrame:
    """The rows of a table counted and hashed for each bucket, by the server. A bucket has a line
    for each chunk."""
    texts = [
        f"select h & {buckets - 1} as bucket, count(*) as rows, bit_xor(h) as hashes"
        f" from (select {_HASH} as h from ({chunk.statement}) c) h group by 1"
        for chunk in chunks
    ]
    return _answers(spark, exported, texts, BUCKETS)


def database_hashes(
    spark: SparkSession,
    exported: ExportedSnapshot,
    chunks: Sequence[Chunk],
    buckets: int,
    chosen: Collection[int],
) -> DataFrame:
    """The keys and hashes of the rows in some buckets."""
    where = ""
    if len(chosen) <= limits.RECONCILE_BUCKETS_LISTED_MAX:
        listed = ",".join(map(str, sorted(chosen)))
        where = f" where h.hash & {buckets - 1} = any('{{{listed}}}'::bigint[])"
    texts = [
        f"select h.key, h.hash from (select c.key, {_HASH} as hash from ({chunk.statement}) c) h"
        + where
        for chunk in chunks
    ]
    return _answers(spark, exported, texts, HASHES)


def _answers(
    spark: SparkSession, exported: ExportedSnapshot, texts: Sequence[str], schema: pa.Schema
) -> DataFrame:
    """The answers to statements, read by a few tasks."""
    from pyspark.sql.pandas.types import from_arrow_schema

    tasks = max(1, min(len(texts), limits.RECONCILE_READERS_MAX))
    seconds = limits.RECONCILE_STATEMENT_SECONDS

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with ChunkReader(exported, statement_seconds=seconds) as chunk_reader:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    for text in texts[number::tasks]:
                        for answer in chunk_reader.answer(text):
                            yield answer.cast(schema)

    return reader.numbered(spark, tasks).mapInArrow(read, from_arrow_schema(schema))


# ------------------------------------------------------------------------ in Spark


def image_hashes(rows: DataFrame) -> DataFrame:
    """The keys and hashes of rows with a `key` and an `image`."""
    from pyspark.sql import functions as f

    return rows.select(
        "key", f.expr("cast(conv(left(md5(image), 15), 16, 10) as bigint)").alias("hash")
    )


def lake_buckets(hashes: DataFrame, buckets: int) -> DataFrame:
    """The same lines as `database_buckets`."""
    from pyspark.sql import functions as f

    return hashes.groupBy(f.expr(f"hash & {buckets - 1}L").alias("bucket")).agg(
        f.count("*").alias("rows"), f.bit_xor("hash").alias("hashes")
    )


def in_buckets(hashes: DataFrame, buckets: int, chosen: Collection[int]) -> DataFrame:
    """The hashes that are in some buckets."""
    from pyspark.sql import functions as f

    if len(chosen) > limits.RECONCILE_BUCKETS_LISTED_MAX:
        return hashes
    return hashes.where(f.expr(f"hash & {buckets - 1}L").isin(sorted(chosen)))
