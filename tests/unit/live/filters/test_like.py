"""How much work a pattern is: counted, not timed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headwater import limits
from headwater.live.filters.compile import _LIKE_TEXT_CHARS_MAX, compile_filter
from headwater.live.filters.filter import c
from headwater.live.filters.like import _LIKE_STEPS_MAX, matcher
from headwater.live.needs import Undecided
from headwater.model import Column, Table
from tests.support.generators.sizes import first_seed, size

COLUMNS = (Column("id", "integer", "integer"), Column("t", "text", "text", "C"))
TABLE = Table(1, "s", "t", COLUMNS, ("id",))


class Counted(str):
    """A text that counts what is asked of it."""

    __slots__ = ("calls",)
    calls: int

    def find(self, *arguments: Any) -> int:
        self.calls += 1
        return super().find(*arguments)

    def startswith(self, *arguments: Any) -> bool:
        self.calls += 1
        return super().startswith(*arguments)


def steps(pattern: str, text: str) -> tuple[int, bool | None]:
    """How often the text was looked at, and the answer; None for one the database must give."""
    counted = Counted(text)
    counted.calls = 0
    try:
        answer: bool | None = matcher(pattern)(counted)
    except Undecided:
        answer = None
    return counted.calls, answer


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [
        ("%a" * 500, True),
        ("%a" * 499 + "%b%", False),
        ("_%" * 500, True),
        ("%" + "_" * 900 + "b%", False),
        ("a%" + "aab%" * 200, False),
    ],
)
def test_a_longer_text_is_not_looked_at_more_often(pattern: str, answer: bool) -> None:
    short, long = steps(pattern, "a" * 2_000), steps(pattern, "a" * 1_000_000)
    assert short == long
    assert long == (long[0], answer)
    assert long[0] <= 2 * len(pattern)


@pytest.mark.parametrize("pattern", ["%a_b%", "%" + "a_" * 499 + "b%", "%aa_ab%aa_b%"])
def test_beyond_a_number_of_places_the_database_decides(pattern: str) -> None:
    _, answer = steps(pattern, "a" * 1_000)
    assert answer is False or len(pattern) > 900
    calls, answer = steps(pattern, "a" * 1_000_000)
    assert answer is None
    assert calls <= 2 * _LIKE_STEPS_MAX


def test_no_generated_pattern_takes_more_steps() -> None:
    generator = random.Random(first_seed(1))
    for _ in range(size("pattern_steps", 60, large=5_000)):
        pieces = generator.choices(("a", "b", "aa", "ab", "_", "%", "a_a", "%a"), k=300)
        text = "".join(generator.choices(("a", "b", "aaaa", "ab"), k=20_000))
        calls, _ = steps("".join(pieces)[: limits.FILTER_PATTERN_CHARS_MAX], text)
        assert calls <= 2 * _LIKE_STEPS_MAX + 2 * limits.FILTER_PATTERN_CHARS_MAX


def test_the_patterns_of_a_filter_share_what_they_may_read_of_a_row() -> None:
    length = _LIKE_TEXT_CHARS_MAX // 2
    one = compile_filter(c.t.like("%b%b%"), TABLE)
    two = compile_filter(c.t.like("%b%b%") | c.t.ilike("%b%a%"), TABLE)
    assert one({"id": 1, "t": "a" * 2 * length}) is False
    assert two({"id": 1, "t": "a" * length}) is False
    with pytest.raises(Undecided):
        two({"id": 1, "t": "a" * (length + 1)})
    with pytest.raises(Undecided):
        one({"id": 1, "t": "a" * (2 * length + 1)})
    # A prefix costs the same for every text.
    assert compile_filter(c.t.like("b%"), TABLE)({"id": 1, "t": "a" * (2 * length + 1)}) is False
