"""Writes chunks of tables as files of the lake, in Spark's tasks. The rows pass neither through the
driver nor through Java.

A task reads a chunk and writes it at once; what is in memory is bounded in bytes, whatever the size
of a row. The driver receives the files, and decides when they become part of the lake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
from deltalake.transaction import AddAction

from headwater import limits
from headwater.errors import HeadwaterError
from headwater.pipeline.lake.parquet import rows_of, write_batches
from headwater.pipeline.lake.snapshots import PARTITIONS, ROWS
from headwater.pipeline.snapshots.chunks import Chunk
from headwater.pipeline.snapshots.reader import ChunkReader, ExportedSnapshot, numbered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WRITTEN = pa.schema([("number", pa.int64()), ("files", pa.string()), ("error", pa.string())])


class WrittenChunk(msgspec.Struct, frozen=True):
    """The files of a chunk; or the error because of which there are none."""

    chunk: Chunk
    files: tuple[AddAction, ...]
    error: str = ""

    @property
    def rows(self) -> int:
        return sum(map(rows_of, self.files))


def write_chunks(
    spark: SparkSession,
    exported: ExportedSnapshot,
    chunks: Sequence[Chunk],
    path: str,
    snapshot: int,
) -> Iterator[WrittenChunk]:
    """Read the chunks, and write them for the table of rows at the path. An error of one chunk does
    not end the others."""
    from pyspark.sql.pandas.types import from_arrow_schema

    if not chunks:
        return
    tasks = min(len(chunks), limits.SNAPSHOT_READERS_MAX)
    write = task(exported, chunks, tasks, path, snapshot)
    found = numbered(spark, tasks).mapInArrow(write, from_arrow_schema(_WRITTEN)).toArrow()
    for row in found.to_pylist():
        files = msgspec.json.decode(row["files"], type=tuple[AddAction, ...])
        yield WrittenChunk(chunks[row["number"]], files, row["error"])


def task(
    exported: ExportedSnapshot, chunks: Sequence[Chunk], tasks: int, path: str, snapshot: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does: it gets its number, and takes every chunk whose turn it is."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with ChunkReader(exported) as reader:
            for batch in batches:
                for own in batch.column(0).to_pylist():
                    for number in range(own, len(chunks), tasks):
                        yield _row(number, *_written(reader, chunks[number], path, snapshot))

    return write


def _written(
    reader: ChunkReader, chunk: Chunk, path: str, snapshot: int
) -> tuple[list[AddAction], str]:
    rows = (_with_ids(batch, chunk.relation, snapshot) for batch in reader.rows(chunk))
    try:
        return write_batches(path, ROWS, rows, PARTITIONS, blooms=True), ""
    except HeadwaterError as error:
        return [], str(error) or type(error).__name__


def _with_ids(batch: pa.RecordBatch, relation: int, snapshot: int) -> pa.RecordBatch:
    ids = [pa.repeat(pa.scalar(each, pa.int64()), batch.num_rows) for each in (relation, snapshot)]
    return pa.RecordBatch.from_arrays([*ids, *batch.columns], schema=ROWS)


def _row(number: int, files: list[AddAction], error: str) -> pa.RecordBatch:
    values = [[number], [msgspec.json.encode(files).decode()], [error]]
    return pa.RecordBatch.from_arrays(
        [pa.array(value, field.type) for value, field in zip(values, _WRITTEN, strict=True)],
        schema=_WRITTEN,
    )
