"""The parts of a batch: a row for each slice of the log, and what Spark's tasks read by it.

The pipeline's streams read parts instead of changes (`emit=parts`). The source plans them once for
a batch; a task reads its slice from the server as Arrow, straight into the Python function that
needs the rows. So no change passes through the JVM unless a sink asks Spark for `changes`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from headwater.errors import HeadwaterError
from headwater.pipeline.stream.worker import EVENTS, LogSlice, read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTS = pa.schema(
    [
        pa.field("number", pa.int64(), nullable=False),
        pa.field("slice", pa.string(), nullable=False),
    ]
)
"""`number` counts the parts of a batch in the order of their changes, `slice` says as JSON what to
read."""


def part_row(number: int, part: LogSlice) -> pa.RecordBatch:
    """A part as a row of `PARTS`."""
    return pa.RecordBatch.from_pylist(
        [{"number": number, "slice": msgspec.json.encode(part).decode()}], PARTS
    )


def slices(parts: Iterable[pa.RecordBatch]) -> Iterator[LogSlice]:
    """The slices of parts, in a task."""
    freeze_modules()
    for batch in parts:
        for text in batch.column("slice").to_pylist():
            yield msgspec.json.decode(text, type=LogSlice)


@cache
def freeze_modules() -> None:
    """Take what this process has imported out of the search for garbage, once. Spark's workers
    search after each task, which takes longer than a small task."""
    gc.freeze()


def changes(parts: DataFrame) -> DataFrame:
    """The changes of the parts, in the schema `EVENTS`. The tasks read them when the result is
    executed, and again each time: persist it to read them once."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return parts.mapInArrow(_read, from_arrow_schema(EVENTS))


def _read(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for part in slices(parts):
        yield from rows_of(part)


def rows_of(part: LogSlice) -> Iterator[pa.RecordBatch]:
    """The changes of a slice, in a task."""
    with error_with_hint():
        yield from read(part)


@contextmanager
def error_with_hint() -> Iterator[None]:
    """Spark shows only the message of an error, so the hint is appended to it."""
    try:
        yield
    except HeadwaterError as error:
        if error.hint is not None:
            error.args = (f"{error}. {error.hint}",)
        raise
