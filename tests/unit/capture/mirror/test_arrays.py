"""Arrays as text: what PostgreSQL reads must be what was written."""

from __future__ import annotations

import random

import pytest
from psycopg.adapt import Transformer
from psycopg.pq import Format

from headwater.capture.mirror.arrays import array_text
from headwater.errors import SourceRefused

_TEXT_ARRAY = 1009
"""The oid of text[]."""

WORDS = ["", "a", "NULL", "null", '"', "\\", '\\"', "{a,b}", ",", " ", "ü€😀", "\n\t", "'", "\x01"]


def test_no_values_are_an_empty_array() -> None:
    assert array_text([]) == "{}"


def test_null_is_not_the_word() -> None:
    assert array_text([None, "NULL", None]) == '{NULL,"NULL",NULL}'


@pytest.mark.parametrize("seed", range(20))
def test_the_driver_reads_what_was_written(seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.choice([None, *WORDS]) for _ in range(chance.randint(1, 30))]
    read = Transformer().get_loader(_TEXT_ARRAY, Format.TEXT).load
    assert read(array_text(values).encode()) == values


def test_a_value_with_nul_is_refused() -> None:
    for values in (["a\0b"], ["a", "\0", None]):
        with pytest.raises(SourceRefused, match="NUL"):
            array_text(values)
