"""Which files are joined."""

from __future__ import annotations

import random
from datetime import date

import pytest

from headwater.pipeline.compaction.choice import (
    FILE_BYTES,
    FILES_MAX,
    joined_files,
    to_join,
)
from headwater.pipeline.lake.stored_files import StoredFile

TODAY, BEFORE = date(2026, 11, 18), date(2026, 11, 17)
KB, MB = 2**10, 2**20


def files(*sizes: int, day: date = TODAY) -> list[StoredFile]:
    return [StoredFile(f"{day}-{n}", size, 1, day) for n, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        (files(*[KB] * (FILES_MAX - 1)), 0),
        (files(*[KB] * FILES_MAX), FILES_MAX),
        (files(*[KB] * FILES_MAX, 5 * MB, 70 * MB), FILES_MAX),
        (files(*[5 * MB] * FILES_MAX, KB, 20 * MB, 70 * MB), FILES_MAX + 1),
        (files(*[20 * MB] * FILES_MAX, KB, 70 * MB), FILES_MAX + 1),
        (files(*[70 * MB] * 1000), 0),
        (files(KB, day=BEFORE), 0),
        (files(KB, KB, day=BEFORE), 2),
        (files(KB, 50 * MB, 70 * MB, day=BEFORE), 2),
    ],
)
def test_which_files_are_joined(given: list[StoredFile], joined: int) -> None:
    assert sum(map(len, to_join(given, TODAY))) == joined


def test_each_day_alone() -> None:
    found = list(to_join([*files(KB, KB, day=BEFORE), *files(KB, KB)], TODAY, all_days=True))
    assert [{file.day for file in each} for each in found] == [{BEFORE}, {TODAY}]


def test_a_day_needs_few_files_and_few_writes() -> None:
    """100,000 commits of random sizes: a day never has many files, and no row is written often.
    After the day nothing is left to do."""
    rng = random.Random(8)
    present: list[StoredFile] = []
    written = stored = 0
    for number in range(100_000):
        size = rng.choice((KB, 10 * KB, 100 * KB, 100 * KB, MB))
        present.append(StoredFile(str(number), size, 1, TODAY))
        stored += size
        if number % 20 == 0:
            written += _join(present, TODAY)
            assert len([file for file in present if file.size < 64 * MB]) < 3 * FILES_MAX + 20
    for _ in range(3):
        written += _join(present, date(2026, 11, 19))
    assert not list(to_join(present, date(2026, 11, 19)))
    assert len(present) < 2 * stored / FILE_BYTES
    assert written < 5 * stored


def _join(present: list[StoredFile], today: date) -> int:
    written = 0
    for chosen in to_join(list(present), today):
        total, count = sum(file.size for file in chosen), joined_files(chosen)
        gone = {file.path for file in chosen}
        present[:] = [file for file in present if file.path not in gone]
        name = chosen[0].path
        present += [StoredFile(f"{name}+{n}", total // count, 1, TODAY) for n in range(count)]
        written += total
    return written
