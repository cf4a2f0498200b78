"""Which Delta tables of a lake are compacted, and how: files of `events` are ordered by table, the
counts of `audit` are added up, and the files of other tables are joined as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
from deltalake import DeltaTable

from headwater.pipeline.compaction import choice, rewrite
from headwater.pipeline.lake import audit, delta, maintenance
from headwater.pipeline.lake.parquet import writer_properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS, AUDIT = "events", "audit"

_LISTS = ("snapshots/list", "shapes", "gaps", "drift")
"""Small tables to which rows are added one by one."""

JOINED = (EVENTS, AUDIT, *_LISTS)
"""What is joined while a pipeline runs."""


class Joined(msgspec.Struct, frozen=True):
    """A table of which this many files were replaced."""

    table: str
    files: int


class Compacted(msgspec.Struct, frozen=True):
    table: str
    files_before: int
    files_after: int


def join_due(
    root: str, spark: Callable[[], SparkSession], is_stopping: Callable[[], bool]
) -> Iterator[Joined]:
    """Join the files of tables that have many small ones. `spark` is called for large ones."""
    events = rewrite.join_small(f"{root}/{EVENTS}", spark, is_stopping=is_stopping)
    if events:
        yield Joined(EVENTS, events)
    for name in (AUDIT, *_LISTS):
        table = delta.open_table(f"{root}/{name}")
        if table is None or is_stopping():
            continue
        before = len(table.file_uris())
        if before < choice.FILES_MAX + len(table.partitions()):
            continue
        _join(root, name)
        table.update_incremental()
        yield Joined(name, before - len(table.file_uris()))


def compact(root: str, spark: Callable[[], SparkSession]) -> Iterator[Compacted]:
    """Join the small files of every table, also where there are few."""
    for name in maintenance.tables(root):
        before = len(DeltaTable(f"{root}/{name}").file_uris())
        if name == EVENTS:
            rewrite.join_small(f"{root}/{name}", spark, all_days=True)
        else:
            _join(root, name)
        yield Compacted(name, before, len(DeltaTable(f"{root}/{name}").file_uris()))


def _join(root: str, name: str) -> None:
    path = f"{root}/{name}"
    if name == AUDIT:
        audit.fold(path)
        return
    table = DeltaTable(path)
    is_typed = name.startswith(f"{maintenance.TYPED}/")
    names = [] if is_typed else [field.name for field in table.schema().fields]
    table.optimize.compact(
        writer_properties=writer_properties(names), commit_properties=delta.carrying(table)
    )
