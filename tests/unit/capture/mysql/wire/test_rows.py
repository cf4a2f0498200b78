"""Rows of events: all columns, some columns, NULL, and images that lack columns."""

from __future__ import annotations

import pytest

from headwater.capture.mysql.wire import events
from headwater.capture.mysql.wire.rows import RowReader
from headwater.capture.source import UNCHANGED


def _byte(data: bytes, place: int) -> tuple[str | None, int]:
    return str(data[place]), place + 1


def _reader(count: int, places: list[int] | None = None) -> RowReader:
    return RowReader([_byte] * count, list(range(count)) if places is None else places)


def test_inserts() -> None:
    body = bytes([3, 0b111]) + bytes([0, 1, 2, 3]) + bytes([0b010, 4, 6])
    images = _reader(3).read(events.WRITE_1, body, 0)
    assert images == ([("1", "2", "3"), ("4", None, "6")], [], True)


def test_chosen_columns() -> None:
    body = bytes([3, 0b111]) + bytes([0, 1, 2, 3])
    assert _reader(3, [2, 0]).read(events.DELETE_1, body, 0).after == [("3", "1")]


def test_updates_with_extra_data() -> None:
    body = bytes([4, 0, 9, 9]) + bytes([2, 0b11, 0b11]) + bytes([0, 1, 2]) + bytes([0b10, 3])
    images = _reader(2).read(events.UPDATE_2, body, 0)
    assert images == ([("3", None)], [("1", "2")], True)


def test_nine_columns_have_two_bytes_of_nulls() -> None:
    body = bytes([9, 0xFF, 0x01]) + bytes([0, 1]) + bytes(range(8))
    assert _reader(9).read(events.WRITE_1, body, 0).after[0][8] is None


@pytest.mark.parametrize("type", [events.UPDATE_1])
def test_missing_columns(type: int) -> None:
    body = bytes([3, 0b001, 0b110]) + bytes([0, 7]) + bytes([0b01, 8])
    images = _reader(3).read(type, body, 0)
    assert images.complete is False
    assert images.before == [("7", UNCHANGED, UNCHANGED)]
    assert images.after == [(UNCHANGED, None, "8")]
