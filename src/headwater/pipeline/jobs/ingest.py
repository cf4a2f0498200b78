"""Writes the parts of a batch to the lake with Spark's tasks.

A task reads its slice of the log as Arrow, writes the events and their roll-up as Parquet, and
returns the files and the contents of the slice. So the driver sees neither rows nor files, only
their names: it commits them. Files of a task that failed are removed by that task, or by vacuum if
it was killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.lake import audit
from headwater.pipeline.lake.events import STORED_EVENTS, event_rows
from headwater.pipeline.lake.parquet import write_batches, write_files
from headwater.pipeline.stream.parts import rows_of, slices
from headwater.pipeline.stream.worker import LogSlice

if TYPE_CHECKING:
    from deltalake.transaction import AddAction
    from pyspark.sql import DataFrame

_RESULTS = pa.schema(
    [pa.field("folder", pa.string()), pa.field("file", pa.string()), *audit.CONTENTS]
)
"""What tasks return: files, each with the folder of its table, and the contents of slices."""


class WrittenParts(msgspec.Struct, frozen=True):
    """A batch that is written and not yet committed."""

    events: list[AddAction]
    audit: list[AddAction]
    contents: pa.Table


class Target(msgspec.Struct, frozen=True):
    """Where tasks write: the paths of the tables."""

    events: str
    audit: str


def write_parts(parts: DataFrame, target: Target) -> WrittenParts:
    """Write the events of the parts, and their roll-up."""
    from pyspark.sql.pandas.types import from_arrow_schema

    results = parts.mapInArrow(partial(_write, target=target), from_arrow_schema(_RESULTS))
    # A few rows for each task. To group them in Spark would need a shuffle: a third of a small job.
    found = results.toArrow()
    is_file = pc.is_valid(found["file"])
    files: dict[str, list[AddAction]] = {"events": [], "audit": []}
    for row in found.filter(is_file).select(["folder", "file"]).to_pylist():
        files[row["folder"]].append(_action(row["file"]))
    contents = audit.contents_of(found.filter(pc.invert(is_file)))
    return WrittenParts(files["events"], files["audit"], contents)


def _write(parts: Iterator[pa.RecordBatch], *, target: Target) -> Iterator[pa.RecordBatch]:
    """Runs in a task."""
    for part in slices(parts):
        counts: list[pa.Table] = []
        files = write_batches(target.events, STORED_EVENTS, _counted(part, counts), ["day"])
        failpoint("part")
        counted = audit.merged(counts)
        lines = write_files(target.audit, audit.rolled(counted), ["day"])
        named = [("events", each) for each in files] + [("audit", each) for each in lines]
        yield from _results(named, audit.contents_of(counted))


def _counted(part: LogSlice, counts: list[pa.Table]) -> Iterator[pa.RecordBatch]:
    """The events of a slice, counted as they pass."""
    for batch in rows_of(part):
        events = event_rows(batch)
        counts.append(audit.counted(events))
        yield events


def _results(files: list[tuple[str, AddAction]], contents: pa.Table) -> Iterator[pa.RecordBatch]:
    named = pa.table(
        {
            "folder": pa.array([folder for folder, _ in files], pa.string()),
            "file": pa.array([_text(file) for _, file in files], pa.string()),
        }
    )
    for found in (named, contents):
        columns = [
            found[field.name] if field.name in found.column_names
            else pa.nulls(found.num_rows, field.type)
            for field in _RESULTS
        ]  # fmt: skip
        yield from pa.table(columns, schema=_RESULTS).to_batches()


def _text(file: AddAction) -> str:
    return json.dumps(
        [file.path, file.size, file.partition_values, file.modification_time, file.stats]
    )


def _action(text: str) -> AddAction:
    from deltalake.transaction import AddAction

    path, size, values, modified, stats = json.loads(text)
    return AddAction(path, size, values, modified, True, stats)
