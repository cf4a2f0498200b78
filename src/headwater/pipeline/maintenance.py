"""Looks after the Delta tables of a lake: joins small files, removes those that no longer belong.

Joining does not change what a table holds, nor which batches it knows. Removing spares what is
younger than the time to keep: readers of an older version, and writers under way, still need it.
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
from headwater.limits import LAKE_COMPACT_COMMITS
from headwater.pipeline import audit, delta
from headwater.pipeline.files import Place

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
    place = Place.of(root)
    for folder in _folders(place, ""):
        if place.exists(f"{folder}/_delta_log"):
            yield folder
            continue
        for below in _folders(place, folder):
            if place.exists(f"{below}/_delta_log"):
                yield below


def _folders(place: Place, name: str) -> Iterator[str]:
    start = place.below(name).rstrip("/")
    found = place.system.get_file_info(pafs.FileSelector(start, allow_not_found=True))
    for info in sorted(found, key=lambda info: info.path):
        base = PurePosixPath(info.path).name
        if info.type == pafs.FileType.Directory and not base.startswith(("_", ".")):
            yield f"{name}/{base}".lstrip("/")


AUDIT = "audit"
"""The table whose lines are folded where others' files are joined."""


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
    """Join the small files of a table whenever so many commits have been made. `before` is its
    version before the last one."""
    table.update_incremental()
    if before // LAKE_COMPACT_COMMITS != table.version() // LAKE_COMPACT_COMMITS:
        try:
            _join(table)
        except DeltaError as error:
            # Somebody else did it at the same time, or a disk is full: what is in the table is in.
            log.warning("The files of %s were not joined: %s", table.table_uri, error)
        table.update_incremental()


def _join(table: DeltaTable) -> None:
    names = [field.name for field in table.schema().fields]
    table.optimize.compact(
        writer_properties=delta.writer_properties(names), commit_properties=delta.carrying(table)
    )


def fold_when_due(table: DeltaTable, path: str) -> None:
    """Fold the roll-ups whenever so many commits have been made."""
    table.update_incremental()
    if table.version() % LAKE_COMPACT_COMMITS == 0:
        audit.fold(path)
        table.update_incremental()


def vacuum(root: str, keep: timedelta) -> Iterator[Vacuumed]:
    """Remove files that have belonged to no table for so long."""
    hours = int(keep.total_seconds() // 3600)
    if hours < 1:
        raise ConfigError(
            "lake_vacuum: files must be kept for an hour at least",
            hint="Readers of the lake and writers under way still use them. A week is usual.",
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
    """Remove what Spark wrote for batches that were never committed. Only for whoever holds the
    lake's lock."""
    Place.of(path).remove(delta.STAGE)
