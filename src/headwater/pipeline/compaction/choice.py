"""Decides which files of a Delta table to join, from their days and sizes. Pure.

Files of one day are joined once there are many of about the same size. Small files are so joined
to larger ones, and those to full ones: each row is written only a few times, however large the day
becomes. Of a day that is over, all files that are not full are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date

from headwater.pipeline.lake.stored_files import StoredFile

_SIZES = ((16 * 2**20, 64 * 2**20), (2**20, 16 * 2**20), (0, 2**20))
"""Files between two of these sizes count as about the same size. The largest come first."""

SMALL_BYTES = _SIZES[-1][1]
"""The size of the smallest files, as a stream writes them."""

FILE_BYTES = 128 * 2**20
"""Files are joined to files of about this size."""

_FULL_BYTES = _SIZES[0][1]
"""A file of this size is not joined with others."""

FILES_MAX = 50
"""Files of about the same size that a day has before they are joined."""


def to_join(
    files: Iterable[StoredFile], today: date, *, all_days: bool = False
) -> Iterator[list[StoredFile]]:
    """The files to join, a list for each day. With `all_days`, each day counts as over."""
    days: dict[date | None, list[StoredFile]] = {}
    for file in files:
        if file.size < _FULL_BYTES:
            days.setdefault(file.day, []).append(file)
    for day, small in days.items():
        is_over = all_days or (day is not None and day < today)
        chosen = _of_past(small) if is_over else _of_today(small)
        if chosen:
            yield chosen


def _of_past(small: list[StoredFile]) -> list[StoredFile]:
    """All of them, unless that would hardly make them fewer."""
    return small if len(small) > 2 * joined_files(small) - 1 else []


def _of_today(small: list[StoredFile]) -> list[StoredFile]:
    """The files of the largest size of which there are too many, and all smaller ones."""
    for low, high in _SIZES:
        if sum(low <= file.size < high for file in small) >= FILES_MAX:
            return [file for file in small if file.size < high]
    return []


def joined_files(files: Iterable[StoredFile]) -> int:
    """How many files these are joined to.

    >>> joined_files([StoredFile("a", 100, 1, None), StoredFile("b", FILE_BYTES, 1, None)])
    2
    """
    return max(1, -(-sum(file.size for file in files) // FILE_BYTES))
