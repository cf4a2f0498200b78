"""The check that the log reaches back to a position, with invented answers of the database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headwater.errors import ResyncRequired
from headwater.log import marks, reach
from headwater.log.marks import Stamp
from headwater.model import Position

STAMP = Stamp.of(8, 1, datetime(2026, 1, 1, tzinfo=UTC))
PRESENT = ("a", "20:22:20", 5)
SAME = ([STAMP.xid], [STAMP.seq], [STAMP.at], None, None)
OTHER = ([STAMP.xid], [STAMP.seq], [STAMP.at + 1], None, None)

plain = Position("a", 9, 12, (9, 11))
marked = marks.marked(plain, [(False, *STAMP)])


def check(position: Position, *answers: tuple[Any, ...], is_known: bool = False) -> list[str]:
    """The statements asked, with these answers to them."""
    left, asked = list(answers), []

    def ask(statement: str, values: dict[str, Any]) -> tuple[Any, ...]:
        asked.append(statement)
        return left.pop(0)

    reach.check_blocking(ask, position, "Begin again.", lambda: is_known)
    assert not left
    return asked


def test_a_position_that_the_log_reaches_back_to() -> None:
    assert check(plain, PRESENT) == [reach.PRESENT]
    assert check(marked, PRESENT, SAME) == [reach.PRESENT, marks.COVERED]
    assert check(marked, PRESENT, is_known=True) == [reach.PRESENT]


@pytest.mark.parametrize(
    ("position", "answers", "reason"),
    [
        (plain, [("b", "20:22:20", 5)], "another log"),
        (plain, [("a", "9:10:9", 5)], "ahead of the database"),
        (plain, [("a", "10:22:10", 5)], "ahead of the database"),
        (plain, [("a", "20:22:20", 10)], "trimmed past"),
        (marked, [PRESENT, OTHER, (5,)], "no longer has"),
        (marked, [PRESENT, OTHER, (6,), PRESENT, OTHER, (5,)], "no longer has"),
        (marked, [PRESENT, OTHER, (10,), ("a", "20:22:20", 10)], "trimmed past"),
    ],
)
def test_refused(position: Position, answers: list[tuple[Any, ...]], reason: str) -> None:
    with pytest.raises(ResyncRequired, match=reason) as error:
        check(position, *answers)
    assert "Begin again." in str(error.value.hint)


def test_the_log_is_trimmed_between_two_questions() -> None:
    """The rows of the mark are missing for that reason, and the whole check is repeated."""
    later = ("a", "20:22:20", 6)
    assert len(check(marked, PRESENT, OTHER, (6,), later, SAME)) == 5
