"""Upkeep of the Delta tables of a lake: lists them, and removes files that none of them uses.

Vacuum spares files that are younger than the time to keep: readers of an older version and running
writers need them. `headwater.pipeline.compaction` joins small files.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import PurePosixPath

import msgspec
import pyarrow.fs as pafs

from headwater.errors import ConfigError
from headwater.pipeline.files import FileLocation
from headwater.pipeline.lake import delta


class Vacuumed(msgspec.Struct, frozen=True):
    table: str
    removed: int


TYPED = "tables"
"""The folder of typed tables, which are two folders deeper than the others. Their columns may have
any names and types."""


def tables(root: str) -> Iterator[str]:
    """The paths of every Delta table in a lake, relative to its root."""
    place = FileLocation.of(root)
    for folder in _folders(place, ""):
        yield from _below(place, folder, 3 if folder == TYPED else 1)


def _below(place: FileLocation, folder: str, depth: int) -> Iterator[str]:
    """The tables in a folder, at most this many folders deep."""
    if place.exists(f"{folder}/_delta_log"):
        yield folder
    elif depth:
        for each in _folders(place, folder):
            yield from _below(place, each, depth - 1)


def _folders(place: FileLocation, name: str) -> Iterator[str]:
    start = place.below(name).rstrip("/")
    found = place.system.get_file_info(pafs.FileSelector(start, allow_not_found=True))
    for info in sorted(found, key=lambda info: info.path):
        base = PurePosixPath(info.path).name
        if info.type == pafs.FileType.Directory and not base.startswith(("_", ".")):
            yield f"{name}/{base}".lstrip("/")


def vacuum(root: str, keep: timedelta) -> Iterator[Vacuumed]:
    """Remove files that have belonged to no table for the time `keep`."""
    for name in tables(root):
        yield vacuum_table(root, name, keep)


def vacuum_table(root: str, name: str, keep: timedelta) -> Vacuumed:
    """The same for one table; without effect if it does not exist any more."""
    hours = int(keep.total_seconds() // 3600)
    if hours < 1:
        raise ConfigError(
            "[lake] vacuum: files must be kept for an hour at least",
            hint="Readers of the lake and running writers may still use them. Usual is a week.",
        )
    table = delta.open_table(f"{root}/{name}")
    if table is None:
        return Vacuumed(name, 0)
    removed = table.vacuum(
        hours,
        dry_run=False,
        enforce_retention_duration=False,
        full=True,
        commit_properties=delta.carrying(table),
    )
    return Vacuumed(name, len(removed))


def clean_stage(path: str) -> None:
    """Remove files that Spark staged for batches that were never committed. The caller holds the
    lake's lock."""
    FileLocation.of(path).remove(delta.STAGE)
