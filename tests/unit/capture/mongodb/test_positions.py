"""Positions: their texts, and which contains which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.capture.mongodb.positions import Position, token_time
from headwater.errors import PositionLost, SourceRefused

EVENT = "826553F100000000032B042C0100296E5A100400000000000000000000000000000000" + "04"
LATER = "826553F100000000032B042C01002B026E5A1004000000000000000000000000000000" + "0104"
IDLE = "826553F100000000032B0429296E1404"
"""The time at which EVENT and LATER happened, before both."""
TIME = (0x6553F100, 3)


@given(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    st.one_of(st.none(), st.binary(min_size=9).map(lambda data: data.hex().upper())),
    st.booleans(),
)
def test_a_text_is_read_again(time: tuple[int, int], token: str | None, complete: bool) -> None:
    position = Position(time, token, None if token is None else "00FF", complete)
    assert Position.parse(str(position)) == position


def test_a_token_comes_back_as_it_was() -> None:
    token = {"_data": EVENT, "_typeBits": b"\x01\xfe"}
    assert Position.parse(str(Position.of_token(token, complete=True))).resume_token() == token


@pytest.mark.parametrize("text", ["", "5", "5.x", "0/16B3748", "5.1:XYZ", "mysql-bin.000001:4"])
def test_a_position_of_another_source_is_lost(text: str) -> None:
    with pytest.raises(PositionLost, match="not a position of a MongoDB source"):
        Position.parse(text)


def test_the_time_of_a_token() -> None:
    assert token_time(EVENT) == token_time(IDLE) == TIME
    for other in ("", "8265", "FFFF" * 10, "not hexadecimal at all"):
        with pytest.raises(SourceRefused):
            token_time(other)


BARE, BEFORE, AFTER = Position(TIME), Position((TIME[0], 2)), Position((TIME[0] + 1, 1))
OPEN, NEXT = Position(TIME, EVENT, None, False), Position(TIME, LATER, None, False)
DONE, START = Position(TIME, LATER), Position.before({"_data": IDLE})


@pytest.mark.parametrize(
    ("position", "mark", "contained"),
    [
        (BARE, BEFORE, True),
        (BEFORE, BARE, False),
        (BARE, DONE, True),
        (BARE, OPEN, True),
        (DONE, BARE, True),
        (OPEN, BARE, False),
        (START, BARE, False),
        (BEFORE, START, True),
        (START, BEFORE, True),
        (NEXT, OPEN, True),
        (OPEN, NEXT, False),
        (OPEN, START, True),
        (START, OPEN, False),
        (OPEN, OPEN, True),
        (AFTER, DONE, True),
        (DONE, AFTER, False),
    ],
)
def test_contains(position: Position, mark: Position, contained: bool) -> None:
    assert position.contains(mark) is contained


def test_a_stream_begins_after_a_time_that_is_complete() -> None:
    assert BARE.next_time() == (TIME[0], 4)
    assert START.next_time() == OPEN.next_time() == TIME


def test_the_time_before_a_second_is_in_the_second_before() -> None:
    data = f"82{5:08X}{0:08X}2B0429296E1404"
    assert Position.before({"_data": data}).time == (4, 2**32 - 1)
