"""The program that Spark runs while an archive of its classes is made (`class_archive`).

It uses what the pipeline and requests about the lake use: Parquet written and read, Python's
workers, a grouping, a small streaming query, the Connect server.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from headwater.pipeline.spark import class_archive, connect_server
from headwater.pipeline.spark.session import spark_session


def main(folder: Path) -> None:
    class_archive.lower_priority()
    class_archive.end_with_parent()
    own = {"spark.driver.memory": "1g"} | connect_server.SETTINGS
    with connect_server.token_for_spark():
        spark = spark_session(folder, name="headwater warm", settings=own)
    with connect_server.started(spark), tempfile.TemporaryDirectory() as work:
        _batch(spark, f"{work}/rows")
        _stream(spark, f"{work}/rows", f"{work}/checkpoint")
    spark.stop()
    _end_java(spark)


def _batch(spark: SparkSession, path: str) -> None:
    rows = spark.range(1000).withColumn("key", f.concat_ws("-", f.lit("k"), f.col("id") % 10))
    rows.write.option("compression", "zstd").parquet(path)
    read = spark.read.schema("id long, key string").parquet(path)
    folded = read.groupBy("key").agg(f.max_by(f.struct("id"), "id").alias("row"))
    folded.mapInArrow(_same, folded.schema).filter("row.id > 5").orderBy("key").toArrow()


def _same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _stream(spark: SparkSession, path: str, checkpoint: str) -> None:
    rows = spark.readStream.schema("id long, key string").parquet(path)
    writer = rows.writeStream.foreachBatch(lambda batch, _: batch.toArrow())
    writer.option("checkpointLocation", checkpoint).trigger(
        availableNow=True
    ).start().awaitTermination()


def _end_java(spark: SparkSession) -> None:
    """Wait until Java has ended: only then is the archive written."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    process = gateway.proc
    process.stdin.close()
    process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
