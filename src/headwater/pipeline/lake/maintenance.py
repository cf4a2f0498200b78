"""Upkeep of the Delta tables of a lake: compacts small files and removes unused ones.

Compaction changes neither the rows of a table nor the batch numbers it knows. Vacuum spares files
that are younger than the time to keep: readers of an older version and running writers need them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import PurePosixPath

import msgspec
import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from headwater.errors import ConfigError
from headwater.pipeline.files import FileLocation
from headwater.pipeline.lake import audit, delta
from headwater.pipeline.lake.parquet import writer_properties

_LAKE_COMPACT_COMMITS = 500
"""The small files of a Delta table are joined after this many commits."""


log = logging.getLogger(__name__)


class Compacted(msgspec.Struct, frozen=True):
    table: str
    files_before: int
    files_after: int


class Vacuumed(msgspec.Struct, frozen=True):
    table: str
    removed: int


def tables(root: str) -> Iterator[str]:
    """The paths of every Delta table in a lake, at most two folders deep, relative to its root."""
    place = FileLocation.of(root)
    for folder in _folders(place, ""):
        if place.exists(f"{folder}/_delta_log"):
            yield folder
            continue
        for below in _folders(place, folder):
            if place.exists(f"{below}/_delta_log"):
                yield below


def _folders(place: FileLocation, name: str) -> Iterator[str]:
    start = place.below(name).rstrip("/")
    found = place.system.get_file_info(pafs.FileSelector(start, allow_not_found=True))
    for info in sorted(found, key=lambda info: info.path):
        base = PurePosixPath(info.path).name
        if info.type == pafs.FileType.Directory and not base.startswith(("_", ".")):
            yield f"{name}/{base}".lstrip("/")


AUDIT = "audit"
"""The table whose lines are folded, while the files of other tables are joined."""


def compact(root: str) -> Iterator[Compacted]:
    """Join the small files of every table."""
    for name in tables(root):
        table = DeltaTable(f"{root}/{name}")
        before = len(table.file_uris())
        if name == AUDIT:
            audit.fold(f"{root}/{name}")
        else:
            _join(table)
        yield Compacted(name, before, len(DeltaTable(f"{root}/{name}").file_uris()))


def compact_when_due(table: DeltaTable, before: int) -> None:
    """Join the small files of a table after every LAKE_COMPACT_COMMITS commits. `before` is its
    version before the last commit."""
    table.update_incremental()
    if before // _LAKE_COMPACT_COMMITS != table.version() // _LAKE_COMPACT_COMMITS:
        try:
            _join(table)
        except DeltaError as error:
            # Another process did it at the same time, or the disk is full. No row is lost.
            log.warning("Could not compact the Delta table %s: %s", table.table_uri, error)
        table.update_incremental()


def _join(table: DeltaTable) -> None:
    names = [field.name for field in table.schema().fields]
    table.optimize.compact(
        writer_properties=writer_properties(names), commit_properties=delta.carrying(table)
    )


def fold_when_due(table: DeltaTable, path: str) -> None:
    """Fold the audit lines after every LAKE_COMPACT_COMMITS commits."""
    table.update_incremental()
    if table.version() % _LAKE_COMPACT_COMMITS == 0:
        audit.fold(path)
        table.update_incremental()


def vacuum(root: str, keep: timedelta) -> Iterator[Vacuumed]:
    """Remove files that have belonged to no table for the time `keep`."""
    hours = int(keep.total_seconds() // 3600)
    if hours < 1:
        raise ConfigError(
            "[lake] vacuum: files must be kept for an hour at least",
            hint="Readers of the lake and running writers may still use them. Usual is a week.",
        )
    for name in tables(root):
        table = DeltaTable(f"{root}/{name}")
        removed = table.vacuum(
            hours,
            dry_run=False,
            enforce_retention_duration=False,
            full=True,
            commit_properties=delta.carrying(table),
        )
        yield Vacuumed(name, len(removed))


def clean_stage(path: str) -> None:
    """Remove files that Spark staged for batches that were never committed. The caller holds the
    lake's lock."""
    FileLocation.of(path).remove(delta.STAGE)
