"""The walks of docs/design/006-a-walk.md name functions that exist, and are short."""

from __future__ import annotations

import pytest

from tests.support.walk import Walk, walks

WALKS = walks()
FILES_MAX = {
    "A change, from INSERT to the browser": 30,
    "The same change, to the lake": 15,
    "The same change, to a streaming view": 15,
    "A subscription, from the call to its first rows": 20,
}
"""A change that makes a walk longer is looked at twice."""


def test_the_walks_are_there() -> None:
    assert [walk.title for walk in WALKS] == list(FILES_MAX)


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.title)
def test_every_function_exists(walk: Walk) -> None:
    assert [each for each in walk.passed if not each.file.is_file() or not each.exists] == []


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.title)
def test_the_number_of_files(walk: Walk) -> None:
    assert walk.files == len({each.file for each in walk.passed})
    assert walk.files <= FILES_MAX[walk.title]
